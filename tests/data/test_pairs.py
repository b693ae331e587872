"""Pairs and batches: match matrices against loops over the listed pairs, draws against their stated frequencies.
Texts that training leaves out, noise that it gets, and grades of matches."""

import collections
import itertools
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import scipy
from support.pairs import captions, many_to_many
from support.pictures import write_tar
from support.raising import raises

from sfumato.data import splits as splitting
from sfumato.data.coco import TarArchive, find_image
from sfumato.data.images import FileImage, MemoryImage, Problem, Problems
from sfumato.data.pairs import Grades, PairData, PairSampler, make_pair_data, normal_wording
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS, apply_noise, hold_out_wordings, load_noise, save_noise, shuffle_pairs
from sfumato.errors import UserError
from sfumato.models.embed import load_splits, split_names


def test_match_equals_a_loop_over_the_pairs_and_keep_images_keeps_it():
    data = many_to_many()
    ground_truth = {(int(i), int(t)) for i, t in data.pairs}
    random = np.random.default_rng(1)
    images, texts = random.integers(0, 23, 11), random.integers(0, 17, 13)
    match = data.match(images, texts)
    assert data.pairs.tolist() == sorted(map(list, ground_truth)) and data.groups.tolist() == list(range(23))
    assert match.shape == (11, 13) and match.dtype == np.float32
    assert match.tolist() == [[float((i, t) in ground_truth) for t in texts.tolist()] for i in images.tolist()]
    assert 0 < match.mean() < 1
    assert np.array_equal(data.match(np.arange(23), np.arange(17)).astype(bool), data.relevance().to_dense())
    index = np.array([20, 3, 7, 4])
    kept = data.keep_images(index)
    assert kept.image_ids == ("i20", "i3", "i7", "i4") and kept.images[0].path == "20.png"
    assert kept.groups.tolist() == [20, 3, 7, 4]
    listed = {(data.image_ids[i], data.text_ids[t]) for i, t in data.pairs if i in index}
    assert {(kept.image_ids[i], kept.text_ids[t]) for i, t in kept.pairs} == listed
    assert set(kept.text_ids) == {t for _, t in listed}
    assert [data.texts[data.text_ids.index(t)] for t in kept.text_ids] == list(kept.texts)
    assert [data.text_kinds[data.text_ids.index(t)] for t in kept.text_ids] == list(kept.text_kinds)
    good = {
        **{"image_ids": ("a", "b"), "images": (FileImage("a"), FileImage("b")), "text_ids": ("x", "y")},
        **{"texts": ("x", "y"), "text_kinds": ("caption",) * 2, "pairs": [[0, 0], [1, 1]]},
    }
    PairData(**good)
    for change, message in (
        ({"image_ids": ("a", "a")}, "image id 'a' occurs more than once"), ({"images": ()}, "2 image ids for 0 images"),
        ({"text_ids": ("x", "x")}, "text id 'x' occurs more than once"), ({"texts": ("x",)}, "2 text ids for 1 texts"),
        ({"text_kinds": ("caption",) * 3}, "3 kinds"), ({"groups": np.zeros(3)}, "3 groups for 2 images"),
        ({"pairs": [[0, 2]]}, "a pair points outside of 2 images and 2 texts"),
        ({"pairs": [[-1, 0]]}, "points outside"),
    ):  # fmt: skip
        raises(ValueError, message, PairData, **good | change)


@pytest.mark.parametrize("epoch_over", ["images", "pairs"])
def test_an_epoch_shows_everything_once_and_only_true_pairs(epoch_over):
    data = many_to_many()
    sampler = PairSampler(data, 8, seed=5, epoch_over=epoch_over)
    batches = list(sampler.batches(0))
    assert len(batches) == len(sampler)
    images = np.concatenate([b.image_index for b in batches])
    texts = np.concatenate([b.text_index for b in batches])
    listed = {tuple(p) for p in data.pairs.tolist()}
    drawn = list(zip(images.tolist(), texts.tolist(), strict=True))
    assert set(drawn) <= listed
    if epoch_over == "images":
        assert sorted(images) == list(range(23))
    else:
        assert sorted(drawn) == sorted(listed)
    for b in batches:
        loop = [[float((i, t) in listed) for t in b.text_index.tolist()] for i in b.image_index.tolist()]
        assert b.match.tolist() == loop and (np.diag(b.match) == 1).all()


def test_batches_are_of_nearly_equal_sizes_and_bad_options_are_refused():
    for n, sizes in ((16, [8, 8]), (17, [6, 6, 5]), (18, [6, 6, 6]), (9, [5, 4]), (5, [5])):
        sampler = PairSampler(captions(n, 1), 8, seed=0)
        assert [len(b.image_index) for b in sampler.batches(0)] == sizes and len(sampler) == len(sizes)
    for options, message in (
        ({"data": captions(1, 1)}, "has 1 pairs"), ({"kind_weights": {"name": 0.0}}, "fewer than two images"),
        ({"kind_weights": {"nam": 1.0}}, r"names \['nam'\], but the texts are of the kinds \['group', 'name', 'tag'\]"),
        ({"kind_weights": {"name": 1.0}, "epoch_over": "pairs"}, "kind_weights have no effect"),
    ):  # fmt: skip
        raises(ValueError, message, PairSampler, **{"data": many_to_many(), "batch_size": 4, "seed": 0} | options)


def test_draws_depend_on_seed_and_epoch_alone_and_sampled_positives_are_those_drawn_for_the_group():
    data = many_to_many()

    def drawn(sampler, epoch):
        return [(b.image_index.tolist(), b.text_index.tolist()) for b in sampler.batches(epoch)]

    one, same, other = (PairSampler(data, 8, seed) for seed in (1, 1, 2))
    assert drawn(one, 0) == drawn(same, 0) != drawn(one, 1) != drawn(other, 1)
    assert drawn(one, 1) == drawn(PairSampler(data, 8, 1), 1), "earlier draws leave no state behind"
    data = replace(many_to_many(), groups=np.arange(23) // 2)
    fewer = 0
    for epoch in range(5):
        for b in PairSampler(data, 12, seed=epoch, positives="sampled").batches(epoch):
            groups, texts = data.groups[b.image_index].tolist(), b.text_index.tolist()
            drawn = set(zip(groups, texts, strict=True))
            assert b.match.tolist() == [[float((g, t) in drawn) for t in texts] for g in groups]
            fewer += int((data.match(b.image_index, b.text_index) > b.match).sum())
    assert fewer > 0


def test_kinds_are_drawn_by_weight_and_uniformly_within():
    # a has a name, three tags and a group; b a name and a tag; c only the group.
    pairs = [[0, 0], [0, 2], [0, 3], [0, 4], [0, 5], [1, 1], [1, 2], [2, 5]]
    ids, kinds = tuple("nmtuvg"), ("name", "name", "tag", "tag", "tag", "group")
    data = PairData(("a", "b", "c"), (FileImage("a"),) * 3, ids, ids, kinds, pairs)
    counts: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    sampler = PairSampler(data, 4, seed=7, kind_weights={"name": 0.5, "tag": 1.5})
    epochs = 4000
    for epoch in range(epochs):
        for b in sampler.batches(epoch):
            for i, t in zip(b.image_index.tolist(), b.text_index.tolist(), strict=True):
                counts[i][data.text_ids[t]] += 1
    assert set(counts) == {0, 1}  # c has no text of a kind with a weight.
    assert set(counts[0]) == set("ntuv") and set(counts[1]) == set("mt")
    share = {(i, t): c / epochs for i, own in counts.items() for t, c in own.items()}
    # Four standard deviations of a share p over 4,000 draws are at most 0.032.
    expected = {(0, "n"): 0.25, (0, "t"): 0.25, (0, "u"): 0.25, (0, "v"): 0.25, (1, "m"): 0.25, (1, "t"): 0.75}
    assert share == pytest.approx(expected, abs=0.032)


def test_tar_members_are_read_by_position_from_many_threads(tmp_path):
    members = {f"./some/folder/{'x' * (k % 150)}{k}.bin": bytes([k % 256]) * (k * 37 % 5000) for k in range(300)}
    write_tar(tmp_path / "a.tar", members)
    archive = TarArchive(tmp_path / "a.tar")
    names = [name.removeprefix("./") for name in members]
    assert all(name in archive for name in names) and "some" not in archive
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(archive.read, names * 3)) == list(members.values()) * 3
    image = find_image(tmp_path, archive, "some/folder", "0.bin")
    assert (image.location, image.read_bytes()) == (f"{tmp_path / 'a.tar'}!some/folder/0.bin", b"")
    write_tar(tmp_path / "a.tar.gz", {"a": b"123"}, "w:gz")
    (tmp_path / "no.tar").write_bytes(b"not a tar file" * 100)
    (tmp_path / "empty.tar").write_bytes(b"")
    for name in ("a.tar.gz", "no.tar", "empty.tar"):
        raises(ValueError, f"{name}: not an uncompressed tar file", TarArchive, tmp_path / name)
    raises(FileNotFoundError, None, TarArchive, tmp_path / "absent.tar")
    write_tar(tmp_path / "a.tar", {"a": b"1" * 3000, "b": b"2" * 3000})
    archive = TarArchive(tmp_path / "a.tar")
    os.truncate(tmp_path / "a.tar", 5000)
    assert archive.read("a") == b"1" * 3000
    raises(OSError, r"a\.tar ends within b", archive.read, "b")


def test_problems_are_listed_counted_and_fatal_beyond_their_share(tmp_path):
    problems = Problems()
    problems.write(tmp_path / "none.jsonl")
    assert (tmp_path / "none.jsonl").read_text() == "" and len(problems) == 0
    problems.check(0, 0.0)
    for k in range(12):
        problems.add(tmp_path / f"{k}.png", f"bad · {k}")
    problems.check(1188, 0.01)  # 12 of 1,200 are just 1 %.
    error = raises(UserError, "12 of 1199 items are unusable", problems.check, 1187, 0.01)
    told = str(error.value)
    assert "9.png: bad · 9" in told and "10.png" not in told and "and 2 more" in told
    problems.write(tmp_path / "p.jsonl")
    lines = (tmp_path / "p.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 12 and lines[3] == f'{{"place": "{tmp_path}/3.png", "reason": "bad · 3"}}'
    problems.add("caf\udce9\n.png", "looks \x1b[31mred")
    problems.write(tmp_path / "p.jsonl")
    assert problems.items[-1] == Problem("caf\\udce9\\n.png", "looks \\x1b[31mred")


def test_equally_worded_texts_become_one_that_matches_all_their_images():
    texts = [["A red Dog", "one"], ["two", " a  red dog", "two"], ["a red dog.", "ONE"]]
    data = make_pair_data("abc", [FileImage(x) for x in "abc"], texts)
    merged = splitting.merge_equal_texts(data)
    assert merged.texts == ("A red Dog", "one", "two", "a red dog.")
    assert merged.text_ids == ("a#0", "a#1", "b#0", "c#0") and len(merged.text_kinds) == 4
    found = {image: {merged.texts[t] for i, t in merged.pairs if i == k} for k, image in enumerate(merged.image_ids)}
    assert found == {"a": {"A red Dog", "one"}, "b": {"two", "A red Dog"}, "c": {"a red dog.", "one"}}
    assert splitting.merge_equal_texts(merged) is merged
    assert merged.image_ids == data.image_ids and merged.groups.tolist() == data.groups.tolist()


def photographs(numbers, captions):
    ids = [f"photo-{n}" for n in numbers]
    return make_pair_data(ids, [MemoryImage(i, b"") for i in ids], [captions(n) for n in numbers])


five = lambda n: [f"caption {k} of photo {n}" for k in range(5)]


def splits(captions=five):
    numbers = {"train": range(40), "val": range(40, 50), "test": range(50, 60)}
    return {name: photographs(own, captions) for name, own in numbers.items()}


def test_each_image_has_one_caption_of_five_left_out_and_the_parts_are_all_captions_each_once():
    found = hold_out_wordings(splits(), 0, 5)
    train, wordings = found["train"], found[WORDINGS]
    assert train.image_ids == splits()["train"].image_ids
    assert wordings.image_ids == train.image_ids + splits()["val"].image_ids
    assert np.bincount(train.pairs[:, 0]).tolist() == [4] * 40
    assert np.bincount(wordings.pairs[:, 0]).tolist() == [1] * 50
    assert not set(train.texts) & set(wordings.texts)
    assert found["val"].texts == splits()["val"].texts and found["test"].texts == splits()["test"].texts
    for data in (train, wordings):
        for image, text in data.pairs:
            assert data.texts[text].endswith(f"of {data.image_ids[image].replace('-', ' ')}")
    parts = [hold_out_wordings(splits(), part, 5)[WORDINGS].texts for part in range(5)]
    assert sorted(itertools.chain.from_iterable(parts)) == sorted(splits()["train"].texts + splits()["val"].texts)
    assert len({text.split()[1] for text in parts[0]}) > 1
    more = splits()
    more["train"] = photographs([*range(100, 107), *range(20), *range(30, 40)], five)
    before, after = (hold_out_wordings(data, 0, 5)[WORDINGS] for data in (splits(), more))
    of = [{data.image_ids[i]: data.texts[t] for i, t in data.pairs} for data in (before, after)]
    common = of[0].keys() & of[1].keys()
    assert len(common) == 40 and all(of[0][i] == of[1][i] for i in common)


def test_texts_of_several_images_or_an_only_caption():
    data = splits(lambda n: [*five(n), "A dog", "an  animal", "a photo"])
    for part in range(5):
        found = hold_out_wordings(data, part, 5)
        assert {"A dog", "an  animal", "a photo"} <= set(found["train"].texts)
        assert np.bincount(found[WORDINGS].pairs[:, 0]).tolist() == [1] * 50
    data = splits(lambda n: [f"the only caption of {n}"])
    assert hold_out_wordings(data, 0, 5) == data
    found = hold_out_wordings(splits(lambda n: five(n)[: 1 + n % 2]), 0, 2)
    assert np.bincount(found["train"].pairs[:, 0]).tolist() == [1] * 40
    assert all(found[WORDINGS].image_ids[i].endswith(tuple("13579")) for i in found[WORDINGS].pairs[:, 0])
    data = splits(lambda n: [*five(n), f"A  dog {n % 3}"])
    for part in range(3):
        found = hold_out_wordings(data, part, 3, merged=False)
        trained = {normal_wording(text) for text in found["train"].texts}
        assert not trained & {normal_wording(text) for text in found[WORDINGS].texts}
    data = splits(lambda n: [f"tag {(n + k) % 10}" for k in range(5)] + ([f"only of {n}"] if n % 3 == 0 else []))
    dealt = [hold_out_wordings(data, part, 5) for part in range(5)]
    with_tag = [found for found in dealt if "tag 7" in found[WORDINGS].texts]
    assert len(with_tag) == 1
    (found,) = with_tag
    tag = found[WORDINGS].texts.index("tag 7")
    assert (found[WORDINGS].pairs[:, 1] == tag).sum() == 25, "it matches half of the images of train and of val"
    assert "tag 7" not in found["train"].texts


def manifest(tmp_path, **settings):
    lines = (f'{{"image": "{n}.png", "captions": ["one {n}", "two {n}", "three {n}"]}}' for n in range(60))
    for n in range(60):
        (tmp_path / f"{n}.png").write_bytes(b"")
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return DataConfig(source="manifest", path=str(tmp_path / "data.jsonl"), **settings)


def test_a_recipe_has_the_split_and_wrong_settings_are_refused(tmp_path):
    found = load_splits(manifest(tmp_path, held_out_wordings="0/3"), Problems())
    assert set(found) == {"train", "val", "test", WORDINGS}
    assert set(split_names(found, "all")) == {"train", "val", "test"}
    assert WORDINGS not in load_splits(manifest(tmp_path), Problems())
    alone = load_splits(manifest(tmp_path, held_out_wordings="0/3", val_fraction=0, test_fraction=0), Problems())
    assert len(alone[WORDINGS].image_ids) == len(alone["train"].image_ids) == 60
    raises(ValueError, "expected a part I/K", manifest, tmp_path, held_out_wordings="5/5")
    with pytest.raises(ValueError, match=r"data\.held_out_wordings needs all pairs in memory"):
        DataConfig(source="shards", path="x", held_out_wordings="0/5")
    twice = DataConfig(options={"held_out_wordings": "0/5"}, held_out_wordings="0/5")
    raises(UserError, "have a split 'wordings' already", load_splits, twice, Problems())
    first, second = (replace(data, groups=np.arange(len(data.image_ids)) // 2) for data in list(splits().values())[:2])
    assert splitting.joined(first, second).groups.tolist() == [*np.arange(40) // 2, *20 + np.arange(10) // 2]


in_text_order = lambda data: sorted(((int(i), int(t)) for i, t in data.pairs), key=lambda pair: pair[::-1])


def noisy_pairs(data, image_of_pair):
    clean = in_text_order(data)
    return np.array([(i, t) not in clean for i, (_, t) in zip(image_of_pair.tolist(), clean, strict=True)])


@pytest.mark.parametrize(
    "data", [captions(20, 5), captions(3, 5), captions(41, 1), many_to_many()],
    ids=lambda d: d.text_kinds[0] + str(len(d.pairs)),
)  # fmt: skip
@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_the_stated_number_of_pairs_is_truly_wrong(data, rate):
    clean = in_text_order(data)
    for seed in range(5):
        noisy, image_of_pair = shuffle_pairs(data, rate, seed)
        new = [(i, t) for i, (_, t) in zip(image_of_pair.tolist(), clean, strict=True)]
        moved = [a != b for a, b in zip(new, clean, strict=True)]
        wrong = [pair not in set(clean) for pair in new]
        assert sum(moved) == sum(wrong) == round(rate * len(clean)) and moved == wrong
        assert len(set(new)) == len(clean) and sorted(new) == [tuple(pair) for pair in noisy.pairs.tolist()]
        assert sorted(i for i, _ in new) == sorted(i for i, _ in clean), "images keep their number of pairs"
        assert noisy.image_ids == data.image_ids and noisy.texts == data.texts and len(data.pairs) == len(clean)
        assert np.array_equal(apply_noise(data, image_of_pair).pairs, noisy.pairs)


def test_images_that_lose_or_lack_their_texts_stay_and_equal_captions_are_just_below_a_match():
    data = captions(4, 5)
    assert {int(noisy_pairs(data, shuffle_pairs(data, 1.0, seed)[1]).sum()) for seed in range(50)} == {20}
    data = captions(5, 1)
    noisy = apply_noise(data, np.array([1, 1, 2, 3, 3]))
    assert noisy.image_ids == data.image_ids and noisy.relevance().n_queries == 5
    for batches in (PairSampler(noisy, 2, seed=0), PairSampler(noisy, 2, seed=0, epoch_over="pairs")):
        assert {int(i) for batch in batches.batches(0) for i in batch.image_index} <= {1, 2, 3}
    data = PairData(("a", "b"), (FileImage("a"),) * 2, ("x",), ("some words",), ("caption",), [[0, 0]])
    assert Grades(data)(np.array([0, 1]), np.array([0])).tolist() == [[pytest.approx(1)], [0]]
    assert Grades(data)(np.array([], int), np.array([0])).shape == (0, 1)
    data = make_pair_data("abcdefgh", [FileImage("x")] * 8, [[f"word{i // 2} and more"] for i in range(8)])
    batch = next(iter(PairSampler(data, 8, 0, grades=Grades(data)).batches(0)))
    twins = (batch.image_index[:, None] // 2 == batch.text_index // 2) & ~np.eye(8, dtype=bool)
    assert ((batch.match >= 0.5) == np.eye(8, dtype=bool)).all()
    assert twins.sum() == 8 and (batch.match[twins] > 0.4999).all()


def test_every_pair_and_wrong_image_is_as_likely_and_what_cannot_be_shuffled_is_refused():
    uneven = make_pair_data(["a", "b"], [FileImage("x")] * 2, [["1", "2", "3"], ["4"]])
    for data, rate, message in (
        (captions(5, 2), -0.1, r"rate must lie in \[0, 1\], got -0.1"), (captions(5, 2), float("nan"), "rate must lie"),
        (captions(5, 2), 0.1, "a rate of 0.1 of 10 pairs is 1; at least 2"),
        (captions(1, 5), 1.0, "no way to give 5 of 5 pairs a wrong image; .* the 1 images: lower the rate"),
        (uneven, 1.0, "no way to give 4 of 4 pairs"),
    ):  # fmt: skip
        raises(ValueError, message, shuffle_pairs, data, rate, 0)
    assert shuffle_pairs(captions(2, 5), 1.0, 0)[1].tolist() == [1] * 5 + [0] * 5
    names, pairs = ("a", "b", "c"), [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [0, 2]]
    ring = PairData(names, (FileImage("x"),) * 3, names, names, ("tag",) * 3, pairs)
    raises(ValueError, "no way", shuffle_pairs, ring, 1.0, 0)
    assert noisy_pairs(ring, shuffle_pairs(ring, 1 / 3, 0)[1]).sum() == 2
    data = captions(6, 2)
    indices = np.stack([shuffle_pairs(data, 0.5, seed)[1] for seed in range(600)])
    noisy = indices != np.arange(12) // 2
    assert scipy.stats.chisquare(noisy.sum(0)).pvalue > 1e-4
    assert scipy.stats.chisquare(np.bincount(indices[noisy[:, 0], 0], minlength=6)[1:]).pvalue > 1e-4
    assert shuffle_pairs(captions(4, 3), 0.5, 3)[1].tolist() == [3, 2, 3, 1, 1, 1, 2, 0, 2, 3, 0, 0]
    assert not np.array_equal(shuffle_pairs(captions(20, 5), 0.5, 3)[1], shuffle_pairs(captions(20, 5), 0.5, 4)[1])


def test_files_come_back_whole_or_say_what_is_wrong(tmp_path):
    data, path = captions(20, 5), tmp_path / "noise.npy"
    noisy, image_of_pair = shuffle_pairs(data, 0.4, seed=1)
    save_noise(path, image_of_pair)
    assert np.array_equal(load_noise(path, data), image_of_pair)
    assert np.array_equal(apply_noise(data, load_noise(path, data)).pairs, noisy.pairs)
    for array, message in (
        (np.arange(9), r"noise.npy: expected 100 integers, .* got shape \(9,\) of int64; the file of another split\?"),
        (np.zeros(100), "of float64"), (np.full(100, 20), "got images 20 to 20, but the data's are 0 to 19"),
        (np.full(100, -1), "got images -1 to -1"),
        (np.array([None] * 100), "noise.npy: not the index of noisy pairs .*Object arrays"),
    ):  # fmt: skip
        np.save(path, array, allow_pickle=True)
        raises(ValueError, message, load_noise, path, data)
    path.write_bytes(b"")
    raises(ValueError, "noise.npy: not the index of noisy pairs that the run wrote", load_noise, path, data)


CAPTIONS = [
    ["A dog runs on the grass.", "The brown dog, running; a DOG!"],
    ["Two men play chess", "chess players in a park", "x"], ["A dog and two men in the park"], ["?!"],
]  # fmt: skip
captioned = lambda: make_pair_data("abcd", [FileImage(name) for name in "abcd"], CAPTIONS)


def vectors(texts):
    words = [re.findall(r"\w\w+", text.lower()) for text in texts]
    holding = lambda word: sum(word in w for w in words)
    rows = []
    for own in words:
        row = {word: own.count(word) * (math.log((1 + len(texts)) / (1 + holding(word))) + 1) for word in own}
        length = math.sqrt(sum(v * v for v in row.values()))
        rows.append({word: v / length for word, v in row.items()})
    return rows


@pytest.mark.parametrize("data", [captioned(), many_to_many()], ids=["captions", "many to many"])
def test_grades_are_the_loop(data):
    rows = vectors(data.texts)
    images, texts = np.array([2, 0, 2, 3, 1]), np.array([5, 0, 3, 1, 6, 2, 0])
    grades = Grades(data)(images, texts)
    assert grades.shape == (5, 7) and grades.dtype == np.float32
    for i, image in enumerate(images):
        own = [t for j, t in data.pairs if j == image]
        for k, text in enumerate(texts):
            cosines = [sum(v * rows[text].get(word, 0) for word, v in rows[t].items()) for t in own]
            assert grades[i, k] == pytest.approx(sum(cosines) / max(len(own), 1), abs=1e-6)
    assert grades.max() > 0.3


@pytest.mark.parametrize("positives", ["listed", "sampled"])
def test_a_batch_keeps_its_matches_and_grades_the_rest_below_a_half(positives):
    data = captioned()
    samplers = [PairSampler(data, 4, 3, positives=positives, grades=grades) for grades in (None, Grades(data))]
    plain, graded = (next(iter(sampler.batches(0))) for sampler in samplers)
    assert np.array_equal(plain.image_index, graded.image_index)
    assert np.array_equal(graded.match >= 0.5, plain.match == 1)
    rest = graded.match[plain.match == 0]
    expected = Grades(data)(plain.image_index, plain.text_index)[plain.match == 0] / 2
    np.testing.assert_array_equal(rest, expected)
    assert 0 < rest.max() < 0.5
    rows, columns = np.array([2, 0]), np.array([3, 1, 2])
    np.testing.assert_array_equal(graded.labels(rows, columns), graded.match[rows][:, columns])
