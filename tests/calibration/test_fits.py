"""The constants of target "fits": sound as shipped, and the functions they are of behave as a reader expects."""

import json
import math
from dataclasses import replace

import pytest
import torch

from sfumato.calibration.fits import LENGTHS, Evidence, FitsCalibration, list_features

FITS = FitsCalibration.packaged()


def evidence(**values):
    """That of a query of three words and six items."""
    known = {
        "image": torch.full((1, 6), -8.0),
        "agreement": torch.full((1, 6), 0.3),
        "words": torch.zeros(1, 6),
        "together": torch.zeros(1, 6),
        "missing": torch.full((1, 6), 3.0),
        "n_words": torch.tensor([3.0]),
        "prior": torch.tensor([-5.0]),
    }
    return Evidence(**(known | values))


def test_constants_survive_json_and_damaged_ones_are_refused():
    values = json.loads(json.dumps(FITS.to_json()))
    assert FitsCalibration.from_json(values) == FITS
    values["lengths"][1]["hit_with"]["slope"] = -0.1
    with pytest.raises(ValueError, match='the constants of target "fits" are damaged'):
        FitsCalibration.from_json(values)
    with pytest.raises(ValueError, match="damaged"):
        FitsCalibration.from_json(FITS.to_json() | {"prior": [math.nan]})
    with pytest.raises(ValueError, match="damaged"):
        FitsCalibration.from_json(FITS.to_json() | {"lengths": FITS.to_json()["lengths"][:2]})


@pytest.mark.parametrize("n_words", LENGTHS)
def test_more_evidence_is_more_probable(n_words):
    of, steps = FITS.of(n_words), torch.arange(6.0).unsqueeze(0)
    n = torch.tensor([float(n_words)])
    base = evidence(n_words=n)
    for changed in (
        replace(base, image=-14 + 2 * steps),
        replace(base, agreement=steps / 7),
        replace(base, agreement=torch.full((1, 6), torch.nan), image=-14 + 2 * steps),
        replace(base, agreement=torch.full((1, 6), torch.nan), words=steps / 5),
    ):
        pair = of.of_pairs(changed)[0]
        assert (pair.diff() > 0).all(), "a closer image, a closer text, a word of the name"
    every = replace(base, words=steps * 0 + 1, together=steps * 0 + 1, missing=steps * 0)
    assert (of.of_pairs(every) > of.of_pairs(base) + 1).all(), "all words, or none"


def test_what_a_list_says():
    near = torch.tensor([[1.0, -1.0, -2.0], [0.5, 0.5, 0.5], [9.0, -9.0, -9.0]])
    found = list_features(near, torch.tensor([1.0, 2.0, 4.0]), torch.tensor([-5.0, -6.0, -7.0]))
    expected = [sum(1 / (1 + 2.718281828**-z) for z in row) for row in near.tolist()]
    assert found[:, 0].tolist() == [1, 0.5, 9] and found[:, 1].tolist() == [2, 0, 5], "the best, and the gap up to 5"
    assert found[:, 2].exp().tolist() == pytest.approx(expected) and found[:, 3].tolist() == [1, 0.5, 0.25]
    assert list_features(near[:, :1], torch.ones(3), torch.zeros(3))[:, 1].tolist() == [5, 5, 5], "one item alone"


def test_a_hit_of_a_better_list_and_nothing():
    of = FITS.of(3)
    listed = list_features(torch.tensor([[3.0, 1.0], [-4.0, -4.1]]), torch.full((2,), 5.0), torch.full((2,), -6.0))
    nothing = of.of_nothing(listed).sigmoid()
    assert nothing[0] < 0.2 < nothing[1], "a list without a likely item"
    pair = torch.tensor([[3.0, 1.0, 0.0]]).double()
    has = torch.tensor([[True, True, False]])
    hit = of.of_hits(pair, has, listed[:1])
    by_hand = [
        w.slope * float(z) + float(w.bias(listed[0], 5))
        for z, w in zip(pair[0], [of.hit_with] * 2 + [of.hit_without], strict=True)
    ]
    assert hit[0].tolist() == pytest.approx(by_hand)


def test_lengths_have_their_own_constants():
    assert FITS.of(0) is FITS.of(1) and FITS.of(3) is FITS.of(40) and len({id(FITS.of(n)) for n in (1, 2, 3)}) == 3
