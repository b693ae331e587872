"""Noisy pairs against sets and loops over the clean ones; index files by what they refuse."""

import numpy as np
import pytest
import scipy
from support.pairs import captions, many_to_many
from support.raising import raises

from sfumato.data.images import FileImage
from sfumato.data.pairs import PairData, PairSampler, make_pair_data
from sfumato.data.splits import apply_noise, load_noise, save_noise, shuffle_pairs

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


def test_the_code_of_ncr_leaves_true_pairs_and_an_image_that_loses_its_texts_stays():
    data = captions(4, 5)
    clean = np.arange(20) // 5
    random = np.random.default_rng(0)
    plain = [noisy_pairs(data, random.permutation(clean)).sum() for _ in range(200)]
    assert 14 < np.mean(plain) < 16
    assert {int(noisy_pairs(data, shuffle_pairs(data, 1.0, seed)[1]).sum()) for seed in range(50)} == {20}
    data = captions(5, 1)
    noisy = apply_noise(data, np.array([1, 1, 2, 3, 3]))
    assert noisy.image_ids == data.image_ids and noisy.relevance().n_queries == 5
    for batches in (PairSampler(noisy, 2, seed=0), PairSampler(noisy, 2, seed=0, epoch_over="pairs")):
        seen = {int(i) for batch in batches.batches(0) for i in batch.image_index}
        assert seen <= {1, 2, 3}


def test_every_pair_and_wrong_image_is_as_likely_and_every_process_draws_the_same():
    """Chi-squared tests at 1e-4 over 600 seeds: a false alarm in about 1 of 5,000 sets of seeds."""
    data = captions(6, 2)
    indices = np.stack([shuffle_pairs(data, 0.5, seed)[1] for seed in range(600)])
    noisy = indices != np.arange(12) // 2
    assert scipy.stats.chisquare(noisy.sum(0)).pvalue > 1e-4
    first = indices[noisy[:, 0], 0]
    assert scipy.stats.chisquare(np.bincount(first, minlength=6)[1:]).pvalue > 1e-4
    assert shuffle_pairs(captions(4, 3), 0.5, 3)[1].tolist() == [3, 2, 3, 1, 1, 1, 2, 0, 2, 3, 0, 0]
    assert not np.array_equal(shuffle_pairs(captions(20, 5), 0.5, 3)[1], shuffle_pairs(captions(20, 5), 0.5, 4)[1])


def test_what_cannot_be_shuffled_is_refused_and_tight_data_find_their_only_way():
    uneven = make_pair_data(["a", "b"], [FileImage("x")] * 2, [["1", "2", "3"], ["4"]])
    for data, rate, message in (
        (captions(5, 2), -0.1, r"rate must lie in \[0, 1\], got -0.1"),
        (captions(5, 2), float("nan"), "rate must lie"),
        (captions(5, 2), 0.1, "a rate of 0.1 of 10 pairs is 1; at least 2"),
        (captions(1, 5), 1.0, "no way to give 5 of 5 pairs a wrong image; .* the 1 images: lower the rate"),
        (uneven, 1.0, "no way to give 4 of 4 pairs"),
    ):
        raises(ValueError, message, shuffle_pairs, data, rate, 0)
    assert shuffle_pairs(captions(2, 5), 1.0, 0)[1].tolist() == [1] * 5 + [0] * 5
    names, pairs = ("a", "b", "c"), [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [0, 2]]
    ring = PairData(names, (FileImage("x"),) * 3, names, names, ("tag",) * 3, pairs)
    raises(ValueError, "no way", shuffle_pairs, ring, 1.0, 0)
    assert noisy_pairs(ring, shuffle_pairs(ring, 1 / 3, 0)[1]).sum() == 2


def test_files_come_back_whole_or_say_what_is_wrong(tmp_path):
    data, path = captions(20, 5), tmp_path / "noise.npy"
    noisy, image_of_pair = shuffle_pairs(data, 0.4, seed=1)
    save_noise(path, image_of_pair)
    assert np.array_equal(load_noise(path, data), image_of_pair)
    assert np.array_equal(apply_noise(data, load_noise(path, data)).pairs, noisy.pairs)
    for array, message in (
        (np.arange(9), r"noise.npy: expected 100 integers, .* got shape \(9,\) of int64; the file of another split\?"),
        (np.zeros(100), "of float64"),
        (np.full(100, 20), "got images 20 to 20, but the data's are 0 to 19"),
        (np.full(100, -1), "got images -1 to -1"),
        (np.array([None] * 100), "noise.npy: not the index of noisy pairs .*Object arrays"),
    ):
        np.save(path, array, allow_pickle=True)
        raises(ValueError, message, load_noise, path, data)
    path.write_bytes(b"")
    raises(ValueError, "noise.npy: not the index of noisy pairs that the run wrote", load_noise, path, data)
