"""The constants of the caption metric, and its numbers against loops by hand."""

import json
import math

import pytest
import torch
from support.raising import raises

from papers.captions.constants import CaptionEvidence, CaptionFits, grouped

FITS = CaptionFits.packaged()
NAN = math.nan


def evidence(**values):
    """That of three pairs: with texts, with an image, with both."""
    known = {
        "mean": [0.6, NAN, 0.2],
        "first": [0.8, NAN, 0.4],
        "content": [0.7, NAN, 0.1],
        "words": [0.5, 0.0, 0.9],
        "n_words": [4.0, 3.0, 7.0],
        "n_texts": [5.0, 0.0, 2.0],
        "image": [NAN, -7.0, -12.0],
        "read": [1.0, 1.0, 1.0],
    }
    return CaptionEvidence(**{name: torch.tensor(value) for name, value in (known | values).items()})


def by_hand(of, numbers):
    """A linear logit whose features are limited to the range of the fit."""
    slope, *others = numbers
    total = of.slope * slope + of.intercept
    for value, weight, low, high in zip(others, of.weights, of.low, of.high, strict=True):
        total += weight * min(max(value, low), high)
    return total


def test_mean_and_largest_of_each_pair_are_those_of_a_loop():
    cosine, pair = torch.tensor([0.1, -0.5, 0.9, -0.2, 0.3]), torch.tensor([2, 0, 2, 0, 2])
    mean, largest = grouped(cosine, pair, 4)
    for i in range(4):
        own = [c for c, p in zip(cosine.tolist(), pair.tolist(), strict=True) if p == i]
        if own:
            assert float(mean[i]) == pytest.approx(sum(own) / len(own)) and float(largest[i]) == pytest.approx(max(own))
        else:
            assert mean[i].isnan() and largest[i].isnan()


def test_each_kind_of_item_has_its_logit():
    found = FITS.logit(evidence()).tolist()
    assert found[0] == pytest.approx(by_hand(FITS.texts, [0.6, 0.8, 0.7, 0.5, 4, 1 / 5]), abs=1e-5)
    assert found[1] == pytest.approx(by_hand(FITS.image, [-7.0]), abs=1e-5)
    assert found[2] == pytest.approx(by_hand(FITS.both, [-12.0, 0.2, 0.4, 0.1, 0.9, 7, 1 / 2]), abs=1e-5)
    nothing = evidence(image=[NAN] * 3, mean=[NAN] * 3)
    assert FITS.logit(nothing).isnan().all()


def test_what_the_encoder_does_not_read_does_not_count():
    read = evidence(read=[0.0, 0.0, 0.325]).discounted(-10.0)
    assert read.mean.tolist()[0] == 0 and read.first.tolist()[0] == 0 and read.content.tolist()[0] == 0
    assert read.image.tolist()[1] == -10 and read.image.tolist()[2] == pytest.approx(-11)
    assert read.mean.tolist()[2] == pytest.approx(0.1), "half of the letters that suffice"
    whole = evidence(read=[0.7, 0.9, 1.0])
    assert torch.equal(FITS.logit(whole), FITS.logit(evidence())), "a rare word of a caption costs nothing"
    same = evidence(mean=[0.9] * 3, first=[1.0] * 3, content=[1.0] * 3, read=[0.0] * 3, words=[1.0] * 3)
    assert (FITS.logit(same).sigmoid() < 0.1).all(), "not even one text twice"


def test_content_is_a_linear_map_to_unit_length():
    vectors = torch.randn(3, 384, generator=torch.Generator().manual_seed(0))
    found = FITS.content(vectors)
    for i in range(3):
        row = [
            sum(float(v) * float(a) for v, a in zip(vectors[i], axis[:-1], strict=True)) + float(axis[-1])
            for axis in FITS.axes.T
        ]
        length = math.sqrt(sum(value * value for value in row))
        assert found[i].tolist() == pytest.approx([value / length for value in row], abs=1e-4)


def test_constants_survive_json_and_damaged_ones_are_refused():
    values = json.loads(json.dumps(FITS.to_json()))
    again = CaptionFits.from_json(values, FITS.axes)
    assert again.to_json() == FITS.to_json() and torch.equal(again.axes, FITS.axes)
    values["both"]["weights"].pop()
    raises(ValueError, "the constants of the caption metric are damaged", CaptionFits.from_json, values, FITS.axes)
    raises(ValueError, "damaged", CaptionFits.from_json, FITS.to_json(), FITS.axes * math.inf)
