"""Texts that training leaves out, noise that it gets, and grades of matches."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy
from support.pairs import captions, many_to_many
from support.raising import raises

from sfumato.data.images import FileImage, MemoryImage, Problems
from sfumato.data.pairs import Grades, PairData, PairSampler, make_pair_data, normal_wording
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS, apply_noise, hold_out_wordings, joined, load_noise, save_noise, shuffle_pairs
from sfumato.errors import UserError
from sfumato.models.embed import load_splits, split_names


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
    everything = sorted(itertools.chain.from_iterable(parts))
    assert everything == sorted(splits()["train"].texts + splits()["val"].texts)
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
    mixed = splits(lambda n: five(n)[: 1 + n % 2])
    found = hold_out_wordings(mixed, 0, 2)
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
    both = joined(first, second)
    assert both.groups.tolist() == [*np.arange(40) // 2, *20 + np.arange(10) // 2]


in_text_order = lambda data: sorted(((int(i), int(t)) for i, t in data.pairs), key=lambda pair: pair[::-1])


def noisy_pairs(data, image_of_pair):
    clean = in_text_order(data)
    return np.array([(i, t) not in clean for i, (_, t) in zip(image_of_pair.tolist(), clean, strict=True)])


@pytest.mark.parametrize(
    "data",
    [captions(20, 5), captions(3, 5), captions(41, 1), many_to_many()],
    ids=lambda d: d.text_kinds[0] + str(len(d.pairs)),
)
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
        seen = {int(i) for batch in batches.batches(0) for i in batch.image_index}
        assert seen <= {1, 2, 3}
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
    first = indices[noisy[:, 0], 0]
    assert scipy.stats.chisquare(np.bincount(first, minlength=6)[1:]).pvalue > 1e-4
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
