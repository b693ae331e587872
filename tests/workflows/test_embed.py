"""Embedding collections: parts that do not depend on jobs, workers or crashes, compared with embedding all at once."""

import io
import itertools
import json
import math
import os
import random
import shlex
import signal
import subprocess
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.processes import Started
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from sfumato import files as files_module
from sfumato.data.listings import Entry, list_folder, list_manifest, list_shards, list_texts
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.feature_input import FeatureInput
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.processors import BilinearProcessor, ImageFileProcessor, PixelProcessor, TokenProcessor
from sfumato.encoders.scratch import SmallImageEncoder, SmallTextEncoder
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import embed_folder, embed_lines, model_digest
from sfumato.models.model import Model
from sfumato.search.parts import check_complete, claim, read_manifest, read_metadata, read_parts
from sfumato.workflows import embed as embed_module
from sfumato.workflows.embed import embed_collection, which_job

WORDS = ("[UNK]", "red", "green", "blue", "circle", "square")


def tiny_retrieval_model(seed=0, processor=None):
    """A model of a few thousand weights for pictures of 16 pixels and texts of a few words."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    image, text = SmallImageEncoder(4), SmallTextEncoder(len(WORDS), 8, 0.0)
    model = DualEncoder(
        Tower(processor or PixelProcessor(16), image, GaussianHead(image.channels, 7)),
        Tower(TokenProcessor(tokenizer, 5), text, GaussianHead(text.channels, 7)),
    )
    return Model(model=model.eval(), distance="csd", logit_scale=1.0, logit_bias=0.0)


def encoded(number, size=(21, 17), form="PNG"):
    """A picture that no other number gives."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def make_pictures(folder, n):
    """n pictures in subfolders whose order by path and by string differs."""
    for k in range(n):
        path = folder / ("a" if k % 3 else "a-b") / f"{k:03d}.{'png' if k % 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(k, form="PNG" if k % 2 else "JPEG"))
    return folder


def make_shard(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def files(folder, pattern="part-*"):
    """name -> content."""
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def together(folder):
    """(ids, embeddings, payloads) of all parts."""
    parts = list(read_parts(folder))
    ids, payloads = ([value for part in parts for value in part[k]] for k in (0, 2))
    return ids, GaussianEmbedding.cat([part[1] for part in parts]), payloads


def assert_close(a, b):
    """Another batch size moves an embedding by rounding."""
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.log_var, b.log_var, rtol=1e-5, atol=1e-6)


@pytest.fixture
def pictures(tmp_path):
    return make_pictures(tmp_path / "pictures", 23)


def test_parts_hold_what_embed_folder_gives(tmp_path, pictures):
    retrieval_model = replace(tiny_retrieval_model(), source=str(tmp_path))
    expected, ids, _ = embed_folder(retrieval_model, pictures)
    done = embed_collection(retrieval_model, list_folder(pictures, part_size=5), tmp_path / "out", batch_size=3)
    found_ids, found, payloads = together(tmp_path / "out")
    assert found_ids == ids and done.n == done.new == 23 and done.parts == 5 and done.per_second > 0
    assert_close(found, expected)
    assert [len(part[0]) for part in read_parts(tmp_path / "out")] == [5, 5, 5, 5, 3]
    assert payloads == [{"path": str(pictures / i)} for i in ids]
    assert (tmp_path / "out" / "problems.jsonl").read_text() == ""
    about = read_manifest(tmp_path / "out")
    assert (about.n, about.sections, about.model_source, about.distance) == (23, 5, str(tmp_path), "csd")


def test_any_number_of_jobs_and_workers_gives_the_same_bytes(tmp_path, pictures):
    (pictures / "a" / "broken.png").write_bytes(b"no picture")
    retrieval_model, listing = tiny_retrieval_model(), list_folder(pictures, part_size=4)
    embed_collection(retrieval_model, listing, tmp_path / "one", batch_size=3, workers=1)
    done = [
        embed_collection(retrieval_model, listing, tmp_path / "many", job=job, of=3, batch_size=3, workers=1 + job)
        for job in reversed(range(3))
    ]
    assert files(tmp_path / "one") == files(tmp_path / "many") and len(files(tmp_path / "one")) == 6
    assert sum(job.n for job in done) == 23 and sum(len(job.problems) for job in done) == 1
    # Another batch size may differ in the last bits, and in nothing else.
    embed_collection(retrieval_model, listing, tmp_path / "batch", batch_size=64)
    ids, found, payloads = together(tmp_path / "batch")
    expected = together(tmp_path / "one")
    assert (ids, payloads) == (expected[0], expected[2])
    assert_close(found, expected[1])


def test_a_missing_job_is_named_and_another_number_of_jobs_finishes(tmp_path, pictures):
    retrieval_model, listing, out = tiny_retrieval_model(), list_folder(pictures, part_size=4), tmp_path / "out"
    for job in (0, 2):
        embed_collection(retrieval_model, listing, out, job=job, of=3)
    with pytest.raises(UserError, match=r"2 of 6 parts .* part-000001 of job 1/3, part-000004 of job 1/3.*--shard 1/3"):
        read_parts(out)
    done = embed_collection(retrieval_model, listing, out)
    assert done.n == 23 and done.new == 8 and len(together(out)[0]) == 23
    (out / "part-000003.safetensors").unlink()
    with pytest.raises(UserError, match=r"1 of 6 parts .* part-000003; run the same `sfumato embed` again, to"):
        read_parts(out)


def embed_until(moment, folder, out, part_size):
    """Embeds a folder; at the moment it says so, and waits there for its end."""
    retrieval_model = tiny_retrieval_model()
    kind, _, count = moment.partition(":")
    left = int(count or 0)

    def wrapped(function):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                print("now", flush=True)
                threading.Event().wait()
            return function(*arguments, **options)

        return call

    if kind == "encode":
        retrieval_model.model.image.forward = wrapped(retrieval_model.model.image.forward)
    elif kind == "rename":  # the part lies there under its temporary name
        os.replace = wrapped(os.replace)
    elif kind == "written":
        files_module.sync_folder = wrapped(files_module.sync_folder)
    embed_collection(retrieval_model, list_folder(folder, part_size=part_size), out, batch_size=3)


@pytest.mark.parametrize("moment", ["encode:5", "rename:2", "written:3"])
def test_a_killed_job_goes_on_to_the_same_bytes(tmp_path, pictures, moment):
    (pictures / "a" / "broken.png").write_bytes(b"no picture")
    retrieval_model, listing, out = tiny_retrieval_model(), list_folder(pictures, part_size=4), tmp_path / "out"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    process = Started(embed_until, moment, str(pictures), str(out), 4, piped=True)
    assert process.stdout.readline() == "now\n"
    process.kill()
    assert process.finish()[0] == -signal.SIGKILL
    there = set(files(out))
    assert len(there) < 6 and len(list(out.glob(".part-*"))) == (moment == "rename:2")
    with pytest.raises(UserError, match="is not complete"):
        read_parts(out)
    stamps = {name: (out / name).stat().st_mtime_ns for name in there}
    done = embed_collection(retrieval_model, listing, out, batch_size=3)
    assert {name: (out / name).stat().st_mtime_ns for name in there} == stamps, "a whole part was made again"
    assert done.n == 23 and done.new == 23 - sum(
        read_metadata(out, n).n for n in check_complete(out) if n.file in there
    )
    whole = embed_collection(retrieval_model, listing, tmp_path / "whole", batch_size=3)
    torch.set_num_threads(threads)
    assert files(out) == files(tmp_path / "whole") and not list(out.glob(".part-*"))
    assert files(out, "problems*") == files(tmp_path / "whole", "problems*") and len(done.problems) == 1
    assert [p.location for p in done.problems.items] == [p.location for p in whole.problems.items]


def embed_shards(pattern, out, log):
    """Embeds shards as one of several workers, and notes in a file what it claims, embeds and gives back."""
    note = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(*words):
        os.write(note, (" ".join(map(str, (*words, os.getpid(), time.monotonic()))) + "\n").encode())

    def noted(folder, section):
        lock = claim(folder, section)
        if lock is not None:
            say("claim", section)
            release = lock.release
            lock.release = lambda: (say("release", section), release())
        return lock

    encoded_before = embed_module.encode_each

    def encoded_and_noted(encode, batch, report):
        time.sleep(0.01)  # So that a kill comes in the middle of a shard.
        for entry, _ in batch:
            say("item", entry.id)
        return encoded_before(encode, batch, report)

    embed_module.claim, embed_module.encode_each = noted, encoded_and_noted
    print("begin", flush=True)
    embed_collection(tiny_retrieval_model(), list_shards(pattern, part_size=6), out, batch_size=3, workers=2)


def under_kills(start, chance, workers, kills):
    """Keep this many workers at work, and kill one after the other. Returns, by process, when it was killed."""
    alive, dead = [start() for _ in range(workers)], {}
    while alive:
        time.sleep(chance.uniform(0.0, 0.12))
        for worker in [one for one in alive if not one.running]:
            status, errors = worker.finish()
            assert status == 0, errors
            alive.remove(worker)
        if alive and len(dead) < kills:
            worker = alive.pop(chance.randrange(len(alive)))
            moment = time.monotonic()  # Its locks are free as soon as it is dead, before this process hears of that.
            worker.kill()
            if worker.finish()[0] == -signal.SIGKILL:
                dead[worker.pid] = moment
                alive.append(start())
    return dead


@pytest.mark.parametrize("seed", [1, 2])
def test_workers_that_are_killed_and_replaced_embed_every_item_once(tmp_path, seed):
    (tmp_path / "shards").mkdir()
    sizes = [4 + 5 * k % 17 for k in range(14)]
    for k, n in enumerate(sizes):
        members = [(f"{i:03d}.png", encoded(1000 * k + i)) for i in range(n)]
        make_shard(tmp_path / "shards" / f"{k:03d}.tar", members + ([("bad.png", b"no")] if k == 5 else []))
    pattern, out, log = str(tmp_path / "shards"), tmp_path / "out", tmp_path / "log"
    dead = under_kills(
        lambda: Started(embed_shards, pattern, str(out), str(log)), random.Random(seed), workers=3, kills=6
    )
    assert len(dead) == 6

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = embed_collection(
        tiny_retrieval_model(), list_shards(pattern, part_size=6), tmp_path / "whole", batch_size=3, workers=2
    )
    torch.set_num_threads(threads)
    assert whole.n == sum(sizes) and len(whole.problems) == 1
    assert files(out) == files(tmp_path / "whole") and files(out, "problems*") == files(tmp_path / "whole", "problems*")
    ids = together(out)[0]
    assert len(ids) == len(set(ids)) == sum(sizes)
    assert not [path.name for path in out.iterdir() if path.name.startswith((".part", ".section"))]

    held, items = {}, {}
    for line in log.read_text().splitlines():
        kind, what, pid, moment = line.rsplit(" ", 3)
        if kind == "claim":
            held.setdefault(int(what), []).append([float(moment), dead.get(int(pid), math.inf), int(pid)])
        elif kind == "release":
            (own,) = [one for one in held[int(what)] if one[2] == int(pid) and one[1] in (dead.get(int(pid)), math.inf)]
            own[1] = float(moment)
        else:
            items[what] = items.get(what, 0) + 1
    for times in held.values():  # No two have a shard at the same time.
        times.sort()
        assert all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(times)), times
    assert sum(items.values()) - len(items) <= len(dead) * max(sizes), "more than a shard was lost with a worker"


def test_a_finished_shard_is_not_embedded_again_by_a_worker_that_began_before(tmp_path, pictures, monkeypatch):
    retrieval_model, listing, out = tiny_retrieval_model(), list_folder(pictures, part_size=4), tmp_path / "out"
    first = []

    def overtaken(folder, section):
        if not first:  # Another worker does all, but what a third one has, between the look and the claim.
            first.append(claim(folder, 2))
            done = embed_collection(retrieval_model, listing, out, batch_size=3)
            assert (done.elsewhere, done.new, done.parts) == (1, 19, 5)
        return claim(folder, section)

    first_claims = iter([True])
    monkeypatch.setattr(
        embed_module, "claim", lambda *two: overtaken(*two) if next(first_claims, None) else claim(*two)
    )
    done = embed_collection(retrieval_model, listing, out, batch_size=3)
    assert (done.elsewhere, done.new, done.n, done.to_json()["elsewhere"]) == (1, 0, 19, 1)
    with pytest.raises(UserError, match="1 of 6 parts or more are missing: part-000002"):
        read_parts(out)
    first[0].release()
    assert embed_collection(retrieval_model, listing, out, batch_size=3).new == 4
    assert len(together(out)[0]) == 23


def test_something_else_in_the_same_folder_is_refused(tmp_path, pictures):
    out = tmp_path / "out"
    embed_collection(tiny_retrieval_model(), list_folder(pictures, part_size=5), out)
    before = files(out, "*")
    with pytest.raises(UserError, match="embeddings with another model"):
        embed_collection(tiny_retrieval_model(seed=1), list_folder(pictures, part_size=5), out)
    with pytest.raises(UserError, match="embeddings with --part-size 5; give another --out"):
        embed_collection(tiny_retrieval_model(), list_folder(pictures, part_size=6), out)
    (pictures / "new.png").write_bytes(encoded(99))
    with pytest.raises(UserError, match="with other data, 23 items of the folder .*pictures"):
        embed_collection(tiny_retrieval_model(), list_folder(pictures, part_size=5), out)
    assert files(out, "*") == before
    # A part from another folder, copied by mistake.
    embed_collection(tiny_retrieval_model(seed=1), list_folder(pictures, part_size=5), tmp_path / "other")
    (pictures / "new.png").unlink()
    (out / "part-000001.safetensors").write_bytes((tmp_path / "other" / "part-000001.safetensors").read_bytes())
    for run in (
        lambda: read_parts(out),
        lambda: embed_collection(tiny_retrieval_model(), list_folder(pictures, part_size=5), out),
    ):
        with pytest.raises(UserError, match="part-000001.safetensors belongs to another collection"):
            run()


def test_a_damaged_part_is_made_again(tmp_path, pictures):
    retrieval_model, listing, out = tiny_retrieval_model(), list_folder(pictures, part_size=5), tmp_path / "out"
    embed_collection(retrieval_model, listing, out)
    before = files(out)
    (out / "part-000002.safetensors").write_bytes(before["part-000002.safetensors"][:-100])
    with pytest.raises(UserError, match="part-000002"):
        read_parts(out)
    assert embed_collection(retrieval_model, listing, out).new == 5
    assert files(out) == before


def test_the_digest_of_a_model_is_of_what_it_computes():
    retrieval_model = tiny_retrieval_model()
    digest = model_digest(retrieval_model.model)
    assert digest == model_digest(tiny_retrieval_model().model) == model_digest(retrieval_model.model.train())
    assert digest == model_digest(tiny_retrieval_model(processor=PixelProcessor(16)).model)
    assert digest != model_digest(tiny_retrieval_model(seed=1).model)
    assert digest != model_digest(tiny_retrieval_model(processor=PixelProcessor(17)).model)
    assert digest != model_digest(tiny_retrieval_model(processor=PixelProcessor(16, fit="crop")).model)
    retrieval_model.model.image.head.normalize = False
    assert digest != model_digest(retrieval_model.model)
    one, two = (tiny_retrieval_model(processor=ImageFileProcessor(16)) for _ in range(2))
    assert model_digest(one.model) == model_digest(two.model) != digest


def bomb():
    """A PNG of 30,000 x 30,000 pixels in a few hundred kilobytes."""
    buffer = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(buffer, "PNG")
    return buffer.getvalue()


def test_bad_pictures_are_reported_and_left_out(tmp_path, pictures):
    good = encoded(7, size=(200, 150), form="JPEG")
    for name, data in {"bomb.png": bomb(), "cut.jpg": good[: len(good) // 2], "empty.gif": b""}.items():
        (pictures / name).write_bytes(data)
    retrieval_model, listing, out = tiny_retrieval_model(), list_folder(pictures, part_size=6), tmp_path / "out"
    done = embed_collection(retrieval_model, listing, out)
    assert [os.path.basename(p.location) for p in done.problems.items] == ["bomb.png", "cut.jpg", "empty.gif"]
    assert "pixels" in done.problems.items[0].reason
    listed = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    assert [p["place"] for p in listed] == [str(pictures / n) for n in ("bomb.png", "cut.jpg", "empty.gif")]
    expected, ids, problems = embed_folder(retrieval_model, pictures)
    assert together(out)[0] == ids and [p.location for p in problems.items] == [p["place"] for p in listed]
    assert_close(together(out)[1], expected)
    again = embed_collection(retrieval_model, listing, out)
    assert again.new == 0 and again.problems.items == done.problems.items


def test_too_many_bad_pictures_stop_it_and_it_goes_on_once_mended(tmp_path, pictures):
    retrieval_model, out = tiny_retrieval_model(), tmp_path / "out"
    for k in range(4):
        (pictures / f"z{k}.png").write_bytes(b"no")
    listing = list_folder(pictures, part_size=9)
    with pytest.raises(UserError, match=r"4 of 27 items are unusable, more than --max-problem-fraction 0.1"):
        embed_collection(retrieval_model, listing, out, max_problem_fraction=0.1)
    assert set(files(out)) == {"part-000000.safetensors", "part-000001.safetensors"}
    assert len((out / "problems.jsonl").read_text().splitlines()) == 4
    for k in range(4):
        (pictures / f"z{k}.png").write_bytes(encoded(50 + k))
    assert embed_collection(retrieval_model, listing, out, max_problem_fraction=0.1).n == 27
    assert embed_collection(retrieval_model, listing, tmp_path / "lenient", max_problem_fraction=1).n == 27


def test_from_a_thousand_on_too_many_stop_it_at_once(tmp_path):
    """Not after the part: a wrong folder of millions must not be read to its end."""
    read = []

    def entries(section):
        def processor(k):
            def bad():
                read.append(k)
                raise OSError("gone")

            return bad

        return [Entry(str(k), str(k), {}, processor(k)) for k in range(5000)]

    listing = replace(list_texts_of(tmp_path, 1), n=5000, part_size=5000, entries=entries, modality="images")
    with pytest.raises(UserError, match="1000 of 1000 items are unusable"):
        embed_collection(tiny_retrieval_model(), listing, tmp_path / "out", batch_size=16)
    assert len(read) < 1100 and not files(tmp_path / "out")


def list_texts_of(folder, n):
    (folder / "lines.txt").write_text("red circle\n" * n)
    return list_texts(folder / "lines.txt", part_size=5)


def test_nothing_usable_is_an_error(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.png").write_bytes(b"no")
    with pytest.raises(UserError, match="none of 1 images can be used"):
        embed_collection(tiny_retrieval_model(), list_folder(tmp_path / "in", part_size=5), tmp_path / "out")
    assert not files(tmp_path / "out")


def test_a_picture_that_spoils_its_batch_or_has_no_embedding_is_left_out(tmp_path, pictures):
    retrieval_model = tiny_retrieval_model()
    forward, bad = retrieval_model.model.image.forward, {}
    pixels = retrieval_model.model.image.processor.read([lambda: (pictures / "a" / "001.png").read_bytes()])[0].pixels[
        0
    ]
    other = retrieval_model.model.image.processor.read([lambda: (pictures / "a" / "002.jpg").read_bytes()])[0].pixels[0]

    def spoilt(inputs):
        embedding = forward(inputs)
        for row, values in enumerate(inputs.values):
            if values.equal(pixels):
                bad["refused"] = bad.get("refused", 0) + 1
                raise ValueError("a strange shape")
            if values.equal(other):
                embedding.mean[row, 0] = torch.nan
        return embedding

    retrieval_model.model.image.forward = spoilt
    done = embed_collection(retrieval_model, list_folder(pictures, part_size=50), tmp_path / "out", batch_size=8)
    assert bad["refused"] == 2, "once in its batch and once alone"
    assert {(os.path.basename(p.location), p.reason) for p in done.problems.items} == {
        ("001.png", "a strange shape"),
        ("002.jpg", "its embedding holds NaN or infinity"),
    }
    expected, ids, _ = embed_folder(tiny_retrieval_model(), pictures)
    keep = [k for k, i in enumerate(ids) if i not in ("a/001.png", "a/002.jpg")]
    assert together(tmp_path / "out")[0] == [ids[k] for k in keep]
    assert_close(together(tmp_path / "out")[1], expected[torch.tensor(keep)])


def test_memory_is_bounded_whatever_the_size(tmp_path):
    """Count the pictures that are read and not yet embedded; and sections are listed one at a time."""
    lock, state = threading.Lock(), {"read": 0, "embedded": 0, "most": 0, "listed": []}
    data, batch, workers = encoded(1), 4, 3

    def read():
        with lock:
            state["read"] += 1
            state["most"] = max(state["most"], state["read"] - state["embedded"])
        return data

    def entries(section):
        state["listed"].append((section, state["embedded"]))
        return [Entry(f"{section}/{k}", f"{section}/{k}", {}, read) for k in range(25)]

    retrieval_model = tiny_retrieval_model()
    forward = retrieval_model.model.image.forward

    def slow(inputs):
        time.sleep(0.002)  # The workers could run far ahead.
        with lock:
            state["embedded"] += len(inputs)
        return forward(inputs)

    retrieval_model.model.image.forward = slow
    listing = replace(list_texts_of(tmp_path, 1), n=500, part_size=25, sections=20, entries=entries, modality="images")
    done = embed_collection(retrieval_model, listing, tmp_path / "out", batch_size=batch, workers=workers)
    assert done.n == 500 and batch < state["most"] <= 3 * batch
    assert [section for section, _ in state["listed"]] == list(range(20))
    assert all(25 * section - embedded <= 3 * batch for section, embedded in state["listed"])


def test_texts_are_those_of_embed_lines(tmp_path):
    path = tmp_path / "lines.txt"
    lines = ["red circle", "", "green square", "blue", " red  ", "circle square red green blue red", "é"]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\n")
    retrieval_model, out = tiny_retrieval_model(), tmp_path / "out"
    expected, ids, problems = embed_lines(retrieval_model, path)
    done = embed_collection(retrieval_model, list_texts(path, part_size=3), out)
    found_ids, found, payloads = together(out)
    assert found_ids == ids == ["1", "3", "4", "5", "6", "7"] and payloads[3] == {"text": "red"}
    assert done.problems.items == problems.items
    assert_close(found, expected)
    path.write_bytes(path.read_bytes().replace(b"blue\n", b"bl\xffe\n", 1))
    with pytest.raises(UserError, match="other data, 7 items of the texts"):
        embed_collection(retrieval_model, list_texts(path, part_size=3), out)
    done = embed_collection(retrieval_model, list_texts(path, part_size=3), tmp_path / "other")
    assert [(p.location, p.reason.split(":")[0]) for p in done.problems.items] == [
        (f"{path}:2", "empty line"),
        (f"{path}:4", "not UTF-8"),
    ]


def test_shards_in_parts_of_a_shard(tmp_path):
    """Captions or not; a shard with more pictures than a part has several parts; ids keep the shard."""
    (tmp_path / "s").mkdir()
    first = [(f"{k}.{ending}", data) for k in range(7) for ending, data in (("png", encoded(k)), ("txt", b"a text"))]
    make_shard(tmp_path / "s" / "a-0.tar", first)
    make_shard(tmp_path / "s" / "a-1.tar", [("x/9.jpg", encoded(9, form="JPEG")), ("y.txt", b"no picture")])
    make_shard(tmp_path / "s" / "a-2.tar", [("0.png", encoded(0)), ("0.json", b"{}"), ("5.png", b"broken")])
    (tmp_path / "s" / "a-3.tar").write_bytes(b"no tar")
    retrieval_model, out = tiny_retrieval_model(), tmp_path / "out"
    listing = list_shards(str(tmp_path / "s" / "a-{0..3}.tar"), part_size=3)
    done = embed_collection(retrieval_model, listing, out, max_problem_fraction=0.5)
    ids, found, payloads = together(out)
    assert ids == [*(f"a-0.tar!{k}" for k in range(7)), "a-1.tar!x/9", "a-2.tar!0"]
    assert payloads[7] == {"path": f"{tmp_path / 's' / 'a-1.tar'}!x/9.jpg"}
    expected = retrieval_model.model.embed_images(
        [encoded(k, form="JPEG" if k == 9 else "PNG") for k in (*range(7), 9, 0)]
    )
    assert_close(found, expected)
    assert set(files(out)) == {
        f"part-{n}.safetensors" for n in ("000000", "000000-0001", "000000-0002", "000001", "000002", "000003")
    }
    reasons = {os.path.basename(p.location): p.reason for p in done.problems.items}
    assert list(reasons) == ["a-1.tar!y", "a-2.tar!5", "a-3.tar"]
    assert reasons["a-1.tar!y"] == "no image: there is only .txt" and "not an uncompressed tar" in reasons["a-3.tar"]
    # By two jobs, the second part of the first shard lost in between.
    for job in range(2):
        embed_collection(retrieval_model, listing, tmp_path / "two", job=job, of=2, max_problem_fraction=0.5)
    assert files(tmp_path / "two") == files(out)
    (out / "part-000000-0001.safetensors").unlink()
    with pytest.raises(UserError, match="part-000000-0001"):
        read_parts(out)
    assert embed_collection(retrieval_model, listing, out, max_problem_fraction=0.5).new == 3
    assert files(out) == files(tmp_path / "two")
    # A shard that has grown since does not slip in half.
    (out / "part-000000-0001.safetensors").unlink()
    make_shard(tmp_path / "s" / "a-0.tar", [*first, ("7.png", encoded(7)), ("8.png", encoded(8)), ("9.png", b"")])
    with pytest.raises(UserError, match="section 0 of .* has changed: it had 3 parts, and now has 4"):
        embed_collection(retrieval_model, listing, out, max_problem_fraction=0.5)


@pytest.mark.parametrize("when", ["gone", "empty", "cut once listed"])
def test_a_shard_that_cannot_be_read_leaves_no_hole(tmp_path, when):
    """Not even where it would be one of three problems: its part is missing, said to be, and made by the next run."""
    for number in range(4):
        members = [(f"{k}.png", encoded(10 * number + k)) for k in range(6)]
        make_shard(tmp_path / f"a-{number}.tar", [("bad.png", b"no"), *members] if number in (1, 2) else members)
    listing, retrieval_model = list_shards(str(tmp_path / "a-{0..3}.tar"), part_size=4), tiny_retrieval_model()
    embed_collection(retrieval_model, listing, tmp_path / "whole", batch_size=3)
    path, out = tmp_path / "a-2.tar", tmp_path / "out"
    data = path.read_bytes()

    def spoil():
        if "gone" in when:
            path.unlink()
        else:
            path.write_bytes(data[: 0 if when == "empty" else data.index(b"4.png") + 600])

    def entries(section):
        found = listing.entries(section)
        if section == 2:
            spoil()
        return found

    if "listed" not in when:
        spoil()
    spoilt = replace(listing, entries=entries) if "listed" in when else listing
    with pytest.raises(
        UserError,
        match="(?s)1 of 4 shards could not be read.* run the same command again.*a-2.tar: (cut|cannot be|.*empty)",
    ):
        embed_collection(retrieval_model, spoilt, out, batch_size=3)
    expected = {
        name: bytes_ for name, bytes_ in files(tmp_path / "whole").items() if not name.startswith("part-000002")
    }
    made = files(out)
    # Of a shard that was listed whole, a part may have been read in time.
    first = {"part-000002.safetensors"} if when == "cut once listed" else set()
    assert set(made) == set(expected) | first
    assert len((out / "problems.jsonl").read_text().splitlines()) == 1 + len(first)
    with pytest.raises(UserError, match="is not complete"):
        read_parts(out)
    path.write_bytes(data)
    assert embed_collection(retrieval_model, listing, out, batch_size=3).n == 24
    assert files(out) == files(tmp_path / "whole")
    assert files(out, "problems*") == files(tmp_path / "whole", "problems*")


def test_a_picture_that_was_gone_is_tried_again_when_its_part_is_deleted(tmp_path, pictures):
    """By the command of docs/guides/ingest.md."""
    retrieval_model, listing, out = tiny_retrieval_model(), list_folder(pictures, part_size=5), tmp_path / "out"
    data = (pictures / "a" / "001.png").read_bytes()
    (pictures / "a" / "001.png").unlink()
    assert embed_collection(retrieval_model, listing, out).n == 22
    (pictures / "a" / "001.png").write_bytes(data)
    assert embed_collection(retrieval_model, listing, out).new == 0
    command = 'grep -lF --null "No such file" embedded/part-*.safetensors | xargs -0 rm'
    assert command in (Path(__file__).parents[2] / "docs" / "guides" / "ingest.md").read_text()
    subprocess.run(command.replace("embedded", shlex.quote(str(out))), shell=True, check=True)
    assert len(files(out)) == 4
    done = embed_collection(retrieval_model, listing, out)
    assert done.n == 23 and not done.problems.items


def test_manifests_with_or_without_captions(tmp_path, pictures):
    rows = [("a/001.png", "one"), ("a-b/000.jpg", "two"), ("a/gone.png", "three"), ("a/001.png", "one"), ("", "four")]
    rows.append(("a/002.jpg", "two"))
    path = pictures / "m.jsonl"
    lines = [json.dumps({"image": image, "id": identity}) for image, identity in rows]
    path.write_text("\n".join([*lines[:2], "{", *lines[2:]]) + "\n")
    retrieval_model, out = tiny_retrieval_model(), tmp_path / "out"
    done = embed_collection(retrieval_model, list_manifest(path, part_size=2), out, max_problem_fraction=0.8)
    ids, found, payloads = together(out)
    assert ids == ["one", "two"] and payloads[0] == {"path": str(pictures / "a" / "001.png")}
    assert_close(found, retrieval_model.model.embed_images([(pictures / rows[k][0]).read_bytes() for k in range(2)]))
    reasons = " | ".join(p.reason for p in done.problems.items)
    assert "No such file" in reasons and "no image: found ''" in reasons and "id 'two' occurred before" in reasons
    assert "not JSON" in reasons
    assert embed_collection(retrieval_model, list_manifest(path, part_size=2), out, max_problem_fraction=0.8).new == 0


@pytest.mark.parametrize("processor", [ImageFileProcessor(16, fit="crop"), BilinearProcessor(16)])
def test_other_readers_give_what_they_give_elsewhere(tmp_path, pictures, processor):
    retrieval_model = tiny_retrieval_model(processor=processor)
    expected, ids, _ = embed_folder(retrieval_model, pictures)
    embed_collection(retrieval_model, list_folder(pictures, part_size=9), tmp_path / "out")
    assert together(tmp_path / "out")[0] == ids
    assert_close(together(tmp_path / "out")[1], expected)


class Colours:
    """A frozen backbone: one token per ten pixels of width; without a cache no image is read twice."""

    channels, fingerprint = 3, "colours"

    def __call__(self, items):
        pictures = [np.asarray(Image.open(io.BytesIO(item)).convert("RGB"), np.float32) for item in items]
        return [p[:1, : p.shape[1] // 10].reshape(-1, 3).astype(np.float16) / 255 for p in pictures]


def test_frozen_backbones_are_asked_without_their_cache(tmp_path, pictures):
    torch.manual_seed(0)
    (pictures / "wide.png").write_bytes(encoded(77, size=(60, 20)))
    (pictures / "broken.png").write_bytes(b"no")
    tower = Tower(FrozenProcessor(Colours(), tmp_path / "cache"), FeatureInput(3, 0.0), GaussianHead(3, 7))
    retrieval_model = replace(
        tiny_retrieval_model(), model=DualEncoder(tower, tiny_retrieval_model().model.text).eval()
    )
    done = embed_collection(retrieval_model, list_folder(pictures, part_size=9), tmp_path / "out", batch_size=4)
    assert not (tmp_path / "cache").exists() and len(done.problems) == 1
    expected, ids, _ = embed_folder(retrieval_model, pictures)
    assert together(tmp_path / "out")[0] == ids
    assert_close(together(tmp_path / "out")[1], expected)


def test_names_that_are_no_unicode_and_links(tmp_path, pictures):
    retrieval_model = tiny_retrieval_model()
    (pictures / "link.png").symlink_to(pictures / "a" / "001.png")
    (pictures / "loop").symlink_to(pictures)
    (pictures / "nowhere.png").symlink_to(pictures / "gone.png")
    try:
        with open(os.fsencode(pictures) + b"/\xff.png", "wb") as file:
            file.write(encoded(3))
    except OSError:
        pytest.skip("this file system takes only Unicode")
    done = embed_collection(retrieval_model, list_folder(pictures, part_size=9), tmp_path / "out")
    assert [(p.location.rsplit("/")[-1], p.reason) for p in done.problems.items] == [
        ("\\udcff.png", "the name is not valid UTF-8")
    ]
    assert len(together(tmp_path / "out")[0]) == 24


def test_names_that_are_no_ids_are_left_out(tmp_path, pictures):
    (pictures / "two\nlines.png").write_bytes(encoded(3))
    (pictures / "tab\t.png").write_bytes(encoded(4))
    retrieval_model = tiny_retrieval_model()
    done = embed_collection(retrieval_model, list_folder(pictures, part_size=9), tmp_path / "out")
    said = {p.reason.partition(" holds ")[0] for p in done.problems.items}
    assert said == {r"the id 'two\nlines.png'", r"the id 'tab\t.png'"}
    _, ids, problems = embed_folder(retrieval_model, pictures)
    assert [p.reason for p in problems.items] == [p.reason for p in done.problems.items]
    assert together(tmp_path / "out")[0] == ids and len(ids) == 23


def test_which_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert which_job(None) == (0, 1) and which_job("0/8") == (0, 8) and which_job("7/8") == (7, 8)
    for wrong in ("8/8", "1", "-1/3", "1/0", "a/b", "1/3/5", "½/3", ""):
        with pytest.raises(UserError, match="expected I/N with I from 0 to N - 1"):
            which_job(wrong)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert which_job(None) == (3, 4) and which_job("1/2") == (1, 2)


def test_numbers_out_of_range(tmp_path, pictures):
    listing = list_folder(pictures, part_size=5)
    for options, message in (
        ({"job": 3, "of": 3}, r"job must be in \[0, of\), got 3 of 3"),
        ({"job": -1}, "got -1 of 1"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            embed_collection(tiny_retrieval_model(), listing, tmp_path / "out", **options)
    with pytest.raises(ValueError, match="part_size must be at least 1, got 0"):
        list_folder(pictures, part_size=0)
    assert not (tmp_path / "out").exists()
