"""Shards: what webdataset reads, divided among processes without overlap, and whole through every kind of damage."""

import itertools
import json
import random
import tarfile
from collections import Counter

import numpy as np
import pytest
from support.pictures import write_tar
from support.raising import raises

from sfumato.data.images import Problems
from sfumato.data.shards import ShardStream, expand_shards, read_shards
from sfumato.errors import UserError
from sfumato.workflows.own_items import list_items, named_source

JPEG = b"\xff\xd8\xff and so on "
pack = lambda path, members, form=tarfile.USTAR_FORMAT: write_tar(path, members, format=form)
sample = lambda i, size=700: [(f"{i:06d}.jpg", JPEG + b"%d " % i * size), (f"{i:06d}.txt", b"caption %d" % i)]


def make_shards(folder, sizes):
    folder.mkdir(exist_ok=True)
    first = itertools.accumulate(sizes, initial=0)
    members = lambda a, n: itertools.chain.from_iterable(sample(i, 3) for i in range(a, a + n))
    return [pack(folder / f"{k:03d}.tar", members(*part)) for k, part in enumerate(zip(first, sizes, strict=False))]


def stream(shards, **options):
    usual = {"batch_size": 4, "seed": 0, "samples_per_epoch": 8, "max_problem_fraction": 1}
    return ShardStream(shards, **usual | options)


def one_pass(shards, **options):
    problems = Problems()
    source, found = stream(shards, problems=problems, shuffle_buffer=1, **options).samples(0), {}
    for one in source:
        if one.key in found:
            return {key.partition("!")[2]: value for key, value in found.items()}, problems.items
        found[one.key] = one


numbers = lambda batches: [int(one.text.removeprefix("caption ")) for batch in batches for one in batch]


def test_samples_are_what_the_webdataset_library_reads(tmp_path):
    import webdataset

    odd = [("folder/a.b.jpg", b"x"), ("README", b"x"), ("__index__", b"x"), ("._000001.jpg", b"x"), ("z/1.JPG", JPEG)]
    odd += [("z/1.cls", b"7"), ("z/1.TXT", "\ufeff für dich \n".encode())]
    odd += [("2.webp", b"w"), ("2.json", b'{"text": "two"}')]
    long = [(f"{'ö' * 60}/{'y' * 120}.png", b"p"), (f"{'ö' * 60}/{'y' * 120}.json", b'{"caption": "c", "text": "t"}')]
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        members = sample(1) + odd + (long if form != tarfile.USTAR_FORMAT else []) + sample(3)
        path = pack(tmp_path / f"{form}.tar", members, form)
        expected = {}
        for one in webdataset.WebDataset(path, shardshuffle=False):
            picture = next((one[e] for e in ("jpg", "jpeg", "png", "webp") if e in one), None)
            if picture is not None:
                values = json.loads(one.get("json", b"{}"))
                text = one["txt"].decode("utf-8-sig") if "txt" in one else values.get("caption", values.get("text"))
                expected[one["__key__"]] = (picture, text.strip())
        found, noted = one_pass([path])
        assert {key: (s.image, s.text) for key, s in found.items()} == expected and len(expected) >= 4
        assert [p.location for p in noted] == [f"{path}!folder/a"]


def test_an_epoch_is_the_same_for_the_same_seed_epoch_and_process(tmp_path):
    shards = make_shards(tmp_path, [7, 9, 5, 8, 6])
    drawn = {}
    for seed, epoch, rank in itertools.product((0, 1), (0, 1), (0, 1)):
        options = {"seed": seed, "rank": rank, "n_processes": 2, "samples_per_epoch": 16, "shuffle_buffer": 5}
        drawn[seed, epoch, rank] = numbers(stream(shards, **options).batches(epoch))
        again = stream(shards, **options)
        assert [numbers(again.batches(other)) for other in (0, 1, epoch)][-1] == drawn[seed, epoch, rank]
    assert len({tuple(d) for d in drawn.values()}) == 8
    for sizes, several in (([6] * 6, 3), ([36], 1)):  # Every epoch deals the samples out anew.
        source = stream(make_shards(tmp_path / str(several), sizes), n_processes=2)
        assert len({frozenset(s.key for s in itertools.islice(source.samples(e), 18)) for e in range(8)}) > several


@pytest.mark.parametrize(("sizes", "n_processes", "shuffle_buffer"), [
    ([7, 9, 5, 8, 6], 1, 4), ([7, 9, 5, 8, 6], 3, 1), ([7, 9, 5], 3, 1000), ([20, 21], 5, 4), ([2, 2, 2], 4, 1),
])  # fmt: skip
def test_processes_share_the_data_out_and_a_pass_has_each_sample_once(tmp_path, sizes, n_processes, shuffle_buffer):
    shards = make_shards(tmp_path, sizes)
    options = {"n_processes": n_processes, "samples_per_epoch": 4 * n_processes, "shuffle_buffer": shuffle_buffer}
    for epoch in (0, 1):
        parts = []
        for rank in range(n_processes):
            keys = [s.key for s in itertools.islice(stream(shards, rank=rank, **options).samples(epoch), 160)]
            own = len(set(keys))
            # Pass after pass: each has every sample of this process once, in another order.
            passes = [keys[i : i + own] for i in range(0, len(keys) - own + 1, own)]
            assert len(passes) > 3 and all(set(p) == set(keys) for p in passes)
            # One sample has one order only, and so has one shard that is not mixed.
            assert len({tuple(p) for p in passes}) > 1 or own == 1 or (shuffle_buffer == 1 and n_processes > 1)
            parts.append(set(keys))
        assert sum(map(len, parts)) == len(set().union(*parts)) == sum(sizes)
        assert min(map(len, parts)) >= (5 if sum(sizes) > 6 else 1)


@pytest.mark.parametrize("n_processes", [1, 2, 5])
def test_every_process_has_the_same_number_of_full_batches(tmp_path, n_processes):
    shards = make_shards(tmp_path, [3, 30, 1, 7])
    for samples_per_epoch in (4 * n_processes, 75):
        expected = samples_per_epoch // (4 * n_processes)
        for rank in range(n_processes):
            source = stream(shards, rank=rank, n_processes=n_processes, samples_per_epoch=samples_per_epoch)
            batches = list(source.batches(3))
            assert len(batches) == len(source) == expected
            assert all(len(batch) == 4 for batch in batches)
            for one in itertools.chain(*batches):
                number = int(one.text.removeprefix("caption "))
                assert one.key.endswith(f".tar!{number:06d}") and one.image == sample(number, 3)[0][1]


def test_the_buffer_mixes_and_its_size_is_kept(tmp_path, monkeypatch):
    shards = make_shards(tmp_path, [400])
    order = lambda size: numbers(stream(shards, shuffle_buffer=size, samples_per_epoch=400, batch_size=400).batches(0))
    assert order(1) == list(range(400))
    mixed = order(50)
    assert sorted(mixed) == list(range(400))
    # A sample cannot come before it was read: the one at place i is among the first i + 50.
    assert all(number < place + 50 for place, number in enumerate(mixed))
    assert abs(np.corrcoef(order(1000), range(400))[0, 1]) < 0.2
    opened, original = [], open  # Left early, it closes its file.
    monkeypatch.setattr("builtins.open", lambda *a, **k: opened.append(original(*a, **k)) or opened[-1])
    batches = stream(shards, shuffle_buffer=2).batches(0)
    next(batches)
    assert not opened[-1].closed
    batches.close()
    assert opened[-1].closed


def test_bad_samples_are_noted_once_and_passed_over(tmp_path):
    for reason, members in {
        "no image: there is only .txt, .cls": {"txt": b"a", "cls": b"a"},
        "the caption is not UTF-8": {"png": b"p", "txt": b"\xff\xfe"},
        "the .json cannot be read": {"png": b"p", "json": b"{"},
        'no string "caption" or': {"png": b"p", "json": b"[1]"},
        "the .json cannot be read: maximum": {"png": b"p", "json": b"[" * 100_000},
        'no string "caption" or "text"': {"png": b"p", "json": b'{"caption": 3}'},
        "the caption is not valid Unicode": {"png": b"p", "json": b'{"caption": "\\ud800"}'},
        ".jpg occurs twice": {"jpg": b"p", "JPG": b"p", "txt": b"a"},
    }.items():  # fmt: skip
        bad = [(f"000900.{ending}", content) for ending, content in members.items()]
        path = pack(tmp_path / "a.tar", sample(1) + bad + sample(2) + sample(3))
        problems = Problems()
        assert set(numbers(stream([path], problems=problems, samples_per_epoch=40).batches(0))) == {1, 2, 3}
        assert [p.location for p in problems.items] == [f"{path}!000900"] and reason in problems.items[0].reason
        assert len(read_shards([path], whole := Problems()).image_ids) == 3
        assert [*whole.bare] == [f"{path}!000900"] * ("no image" not in reason and "twice" not in reason)


def test_samples_without_captions_are_kept_for_an_index_and_leave_a_training_alone(tmp_path, capsys):
    bare = [("5.jpg", JPEG), ("6.png", b"p"), ("6.txt", b" \n"), ("7.png", b"q"), ("7.json", b"{}")]
    path, problems = pack(tmp_path / "a.tar", sample(1) + bare + sample(2)), Problems()
    assert set(numbers(stream([path], problems=problems, samples_per_epoch=40).batches(0))) == {1, 2}
    assert [p.location for p in problems.notes] == [f"{path}!{k}" for k in (5, 6, 7)] and not problems
    assert capsys.readouterr().err.count("a.tar!5 has no caption; samples without one are not used") == 1
    assert read_shards([path], whole := Problems()).texts == ("caption 1", "caption 2") and not whole.remarks
    assert f"{path}!5 and 2 more: no caption; 2 of 5 images have one and are used" in whole.summary()
    items = list_items(named_source(str(path)), frozenset(), found := Problems())
    assert [item.id.rpartition("!")[2] for item in items] == ["000001", "000002", "5", "6", "7"] and found.is_empty


def test_a_damaged_header_or_size_costs_its_sample_and_not_the_rest(tmp_path):
    pack(tmp_path / "a.tar", [member for i in range(6) for member in sample(i)])
    whole = (tmp_path / "a.tar").read_bytes()
    for name, number in (("000000.jpg", 0), ("000002.txt", 2), ("000005.jpg", 5)):
        damaged = bytearray(whole)
        place = damaged.index(name.encode())
        damaged[place : place + 3] = b"xxx"
        (tmp_path / "a.tar").write_bytes(damaged)
        found, noted = one_pass([tmp_path / "a.tar"])
        assert [int(key) for key in found] == [i for i in range(6) if i != number]
        assert noted[0].reason == f"damaged at byte {place}; the samples there are lost"
        lost = [] if name.endswith("txt") else [f"{tmp_path / 'a.tar'}!00000{number}"]
        assert [p.location for p in noted] == [str(tmp_path / "a.tar"), *lost]
    data = bytearray(whole)
    header = data.index(b"000002.jpg")
    data[header + 124 : header + 136] = (-1000).to_bytes(12, "big", signed=True)
    data[header + 148 : header + 156] = b" " * 8
    data[header + 148 : header + 156] = b"%06o\0 " % sum(data[header : header + 512])
    (tmp_path / "a.tar").write_bytes(data)
    found, noted = one_pass([tmp_path / "a.tar"])
    assert [int(key) for key in found] == [0, 1] and f"damaged after byte {header}: a neg" in noted[0].reason
    for more, message in ((0, "the end mark is missing"), (100, "damaged at byte"), (700, "ends within 000003.jpg")):
        (tmp_path / "a.tar").write_bytes(whole[: whole.index(b"000003.jpg") + more])
        found, noted = one_pass([tmp_path / "a.tar"])
        assert [int(key) for key in found] == [0, 1, 2] and len(noted) == 1 and message in noted[0].reason
    # Two blocks of zeros are all that the end needs.
    (tmp_path / "a.tar").write_bytes(whole.rstrip(b"\0") + b"\0" * (-len(whole.rstrip(b"\0")) % 512 + 1024))
    assert one_pass([tmp_path / "a.tar"])[1] == []


@pytest.mark.parametrize("content", [b"", b"\0" * 10240, b"<html>404</html>" * 99, b"\x1f\x8b\x08\0" + b"1" * 3000])
def test_what_is_no_shard_at_all_does_not_end_the_run(tmp_path, content):
    good = pack(tmp_path / "good.tar", sample(1) + sample(2))
    (tmp_path / "bad.tar").write_bytes(content)
    found, noted = one_pass([tmp_path / "bad.tar", good, tmp_path / "missing.tar"])
    assert set(found) == {"000001", "000002"}
    reasons = {p.location: p.reason for p in noted}
    assert "not an uncompressed tar file" in reasons[str(tmp_path / "bad.tar")]
    assert reasons[str(tmp_path / "missing.tar")] == "cannot be read: No such file or directory"


@pytest.mark.parametrize("mended", [False, True])
def test_whatever_bytes_of_headers_change_the_rest_is_read(tmp_path, mended):
    path, whole = tmp_path / "a.tar", []
    forms = {tarfile.USTAR_FORMAT: "", tarfile.GNU_FORMAT: "long/" * 30, tarfile.PAX_FORMAT: "lång/" * 30}
    for form, folder in forms.items():
        pack(path, [(f"{folder}{name}", content) for i in range(4) for name, content in sample(i)], form)
        whole.append(path.read_bytes())
    source, counts = random.Random(0), Counter()
    for k in range(150):
        data = bytearray(whole[k % 3])
        for _ in range(source.choice((1, 3, 20))):
            block = 512 * source.randrange(len(data) // 512)
            data[block + source.randrange(512)] = source.choice((0, 128, 255, *b"xgLS57", source.randrange(256)))
            if mended and data[block + 257 : block + 262] == b"ustar":
                # With a checksum that fits again, so that the nonsense is believed.
                data[block + 148 : block + 156] = b" " * 8
                data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
        path.write_bytes(data[: source.randrange(len(data))] if source.random() < 0.2 else data)
        try:
            found, noted = one_pass([path])
        except UserError as error:
            found, noted = {}, [str(error)]
        counts[len(found)] += 1
        if not mended:
            # Every sample is what was packed (but for changed bytes of the picture, which nothing guards), or noted.
            assert len(found) == 4 or noted
            assert all(len(one.image) == len(sample(int(key[-6:]))[0][1]) for key, one in found.items())
    assert counts[0] + counts[1] > 4 and counts[3] > 8 and counts[4] > 8


def test_a_stream_without_a_usable_sample_or_with_too_many_bad_ones_stops(tmp_path):
    empty = pack(tmp_path / "a.tar", [("1.cls", b"3"), ("README", b"")])
    told = r"process 0 of 1 found no usable sample in 1 shards(.|\n)*no image: there is only \.cls"
    raises(UserError, told, next, stream([empty]).batches(0))
    one = pack(tmp_path / "b.tar", sample(1))
    outcomes = []
    for rank in range(3):
        try:
            next(stream([one], rank=rank, n_processes=3, samples_per_epoch=12).batches(0))
            outcomes.append("found")
        except UserError as error:
            outcomes.append(str(error).partition(" in ")[0])
    assert outcomes == ["found"] + [f"process {rank} of 3 found no usable sample" for rank in (1, 2)]
    bad = [(f"x{k}.txt", b"no image") for k in range(4)]
    few = pack(tmp_path / "few.tar", bad + [m for i in range(16) for m in sample(i)])
    assert len(list(stream([few], samples_per_epoch=40, max_problem_fraction=0.2).batches(0))) == 10
    with pytest.raises(UserError, match=r"4 of 20 items are unusable(.|\n)*few\.tar!x0: no image"):
        list(stream([few], samples_per_epoch=40, max_problem_fraction=0.19).batches(0))
    three = pack(tmp_path / "three.tar", bad[:3] + [m for i in range(16) for m in sample(i)])
    assert len(list(stream([three], samples_per_epoch=40, max_problem_fraction=0.01).batches(0))) == 10
    # A long shard is given up within its first pass.
    many = pack(tmp_path / "many.tar", [m for i in range(3000) for m in (sample(i, 1) if i % 2 else sample(i, 1)[1:])])
    source, seen = stream([many], max_problem_fraction=0.2).samples(0), 0
    with pytest.raises(UserError, match="501 of 1001 items are unusable"):
        for _ in source:
            seen += 1
    assert seen == 0


def test_skip_notes_a_sample_once_and_leaves_the_stream_as_it_is(tmp_path):
    shards = make_shards(tmp_path, [7])
    problems = Problems()
    source = stream(shards, problems=problems, samples_per_epoch=28)
    before = numbers(source.batches(0))
    for one in itertools.chain(*source.batches(0)):
        if one.key.endswith("!000003"):
            source.skip(one.key, "cannot be decoded")
    assert [(p.location, p.reason) for p in problems.items] == [(f"{shards[0]}!000003", "cannot be decoded")]
    assert numbers(source.batches(0)) == before
    strict = stream(shards, max_problem_fraction=0.001, samples_per_epoch=2800)
    with pytest.raises(UserError, match="items are unusable"):
        for one in itertools.chain(*strict.batches(0)):
            strict.skip(one.key, "cannot be decoded")


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_shards_of_a_folder_a_glob_or_a_file_in_natural_order(tmp_path):
    touch(tmp_path, "a-10.tar", "a-9.tar", "a-09.tar", "a-1.parquet", "b-1.tar", "deep/c-1.tar", "odd[1]{2}.tar")
    names = lambda spec: [path.removeprefix(f"{tmp_path}/") for path in expand_shards(f"{tmp_path}/{spec}")]
    for spec, expected in (
        ("", ["a-09.tar", "a-9.tar", "a-10.tar", "b-1.tar", "odd[1]{2}.tar"]),
        ("a-*", ["a-09.tar", "a-9.tar", "a-10.tar"]),
        ("**/*.tar", ["a-09.tar", "a-9.tar", "a-10.tar", "b-1.tar", "deep/c-1.tar", "odd[1]{2}.tar"]),
        ("a-9.tar", ["a-9.tar"]), ("odd[1]{2}.tar", ["odd[1]{2}.tar"]),
        ("{a,b}-{1,9}*.tar", ["a-9.tar", "a-10.tar", "b-1.tar"]), ("a-{9..10}.tar", ["a-9.tar", "a-10.tar"]),
    ):  # fmt: skip
        assert names(spec) == expected
    braceexpand = pytest.importorskip("braceexpand").braceexpand
    for braces in ("x-{00..12}.tar", "{a,b}/{8..11}-{0..1}.tar", "{008..011}.tar", "{1..003}", "{7..7}", "{c,}d"):
        touch(tmp_path, *braceexpand(braces))
        assert sorted(names(braces)) == sorted(braceexpand(braces))


def test_shards_that_cannot_be_had(tmp_path):
    touch(tmp_path, "a-0.tar", "a-2.tar")
    for spec in ("pipe:cat a.tar", "https://host/a-{0..3}.tar", "s3://bucket/a.tar", "hf://x/a.tar", "FILE:///a.tar"):
        raises(UserError, "addresses and commands are not opened; download", expand_shards, spec)
    with pytest.raises(UserError, match=r"2 of 4 do not exist, the first .*a-1\.tar; .* use a glob"):
        expand_shards(f"{tmp_path}/a-{{0..3}}.tar")
    (tmp_path / "empty").mkdir()
    for spec in ("empty", "b-*.tar", "a-{0,2}.*.tar", "*\0.tar", "*\ud800.tar"):
        raises(UserError, "found no .tar file; give a folder, a glob", expand_shards, f"{tmp_path}/{spec}")
    for spec, message in (
        ("{3..1}", "must count upwards"), ("{1..9999999}", "at most 300000"),
        ("{0..99999}{0..9}", "stands for more than 300000 names"), ("{0..9}" * 12, "stands for more than 300000 names"),
        ("{0.." + "9" * 5000 + "}", "cannot read {0..9"), ("{x}", "cannot read {x}"),
    ):  # fmt: skip
        raises(UserError, message, expand_shards, f"{tmp_path}/a-{spec}.tar")
