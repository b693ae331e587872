"""The constants of target "fits", the functions that they are of, and their corrections by verdicts."""

import json
import math
from dataclasses import replace

import pytest
import torch
from support.raising import raises

from sfumato.calibration.fits import LENGTHS, Evidence, FitsCalibration, JudgedHits, fit_correction, list_features

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
    turned = json.loads(json.dumps(values))
    turned["lengths"][1]["hit_with"]["slope"] = -0.1
    for damaged in (turned, values | {"prior": [math.nan]}, values | {"lengths": values["lengths"][:2]}):
        raises(ValueError, 'the constants of target "fits" are damaged', FitsCalibration.from_json, damaged)


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


def judged(n_queries, each=6, *, shift=0.0, factor=1.0, by_words=0.0, has_texts=True, seed=0):
    """Verdicts that are drawn from changed logits."""
    generator = torch.Generator().manual_seed(seed)
    n = n_queries * each
    logit = 2 * torch.randn(n, generator=generator).double()
    n_words = torch.randint(1, 9, (n_queries,), generator=generator).repeat_interleave(each).double()
    truth = factor * logit + shift + by_words / n_words
    yes = torch.bernoulli(truth.sigmoid(), generator=generator)
    weight = torch.randint(1, 4, (n,), generator=generator).double()
    texts = torch.full((n,), has_texts)
    return JudgedHits(torch.arange(n_queries).repeat_interleave(each), n_words, logit, texts, yes, weight), truth


def corrected(hits, found):
    return found.factor * hits.logit + found.shift + found.by_words / hits.n_words


def test_many_verdicts_find_what_is_wrong():
    hits, truth = judged(500, shift=1.5, factor=0.6, by_words=-1.0)
    found = fit_correction(hits.logit, 1 / hits.n_words, hits)
    assert found.factor == pytest.approx(0.6, abs=0.06) and found.shift == pytest.approx(1.5, abs=0.2)
    assert found.by_words == pytest.approx(-1, abs=0.4)
    gap = (corrected(hits, found).sigmoid() - truth.sigmoid()).abs().mean()
    assert gap < 0.1 * (hits.logit.sigmoid() - truth.sigmoid()).abs().mean()


def test_few_verdicts_change_little_those_of_one_kind_do_not_run_away_and_right_logits_stay():
    of_hits = lambda hits: fit_correction(hits.logit, 1 / hits.n_words, hits)
    few, four, one_kind = judged(5, 1, shift=1.5)[0], judged(4, shift=3)[0], judged(20, shift=40.0)[0]
    found = of_hits(few)
    assert found is None or abs(corrected(few, found) - few.logit).max() < 3
    assert of_hits(four) is None
    found = of_hits(one_kind)
    assert one_kind.yes.min() == 1 and math.isfinite(found.shift) and abs(found.shift) < 20 and found.factor > 0
    changes = [of_hits(judged(30, seed=seed)[0]) for seed in range(30)]
    assert changes.count(None) >= 18, "no change is the most careful of equally good ones"
    assert FITS.refined(judged(200, factor=-1.0)[0]) == FITS, "logits that verdicts turn round"


@pytest.mark.parametrize("n_words", LENGTHS)
def test_the_refined_logits_are_the_corrected_ones(n_words):
    hits, _ = judged(300, shift=-1.0, factor=0.7, by_words=0.5)
    new = FITS.refined(hits)
    inverse = torch.tensor([FITS.of(int(n)).hit_with.high[3] for n in hits.n_words]).minimum(1 / hits.n_words)
    found = fit_correction(hits.logit, inverse, hits)
    listed = list_features(torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([float(n_words)]), torch.tensor([-5.0]))
    pair, has = torch.tensor([[2.0, 1.0, -1.0]]).double(), torch.tensor([[True, True, False]])
    before, after = (one.of(n_words).of_hits(pair, has, listed)[0] for one in (FITS, new))
    expected = found.factor * before[:2] + found.shift + found.by_words / n_words
    torch.testing.assert_close(after[:2], expected)
    assert after[2] == before[2], "no verdict was about an item without texts"
    assert FitsCalibration.from_json(new.to_json()) == new and new.prior == FITS.prior
    assert new.of(n_words).nothing == FITS.of(n_words).nothing


def test_items_without_texts_have_their_own():
    hits, _ = judged(200, shift=2.0, has_texts=False)
    new = FITS.refined(hits)
    assert new.of(3).hit_with == FITS.of(3).hit_with and new.of(3).hit_without != FITS.of(3).hit_without
    assert FITS.refined(hits.some(torch.zeros(len(hits.yes), dtype=torch.bool))) == FITS, "no verdicts"
