"""Corrections of fitted logits by verdicts: they find what is wrong, leave what is right, and fold into the logits."""

import math

import pytest
import torch

from sfumato.calibration.fits import LENGTHS, FitsCalibration, JudgedHits, fit_correction, list_features

FITS = FitsCalibration.packaged()


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


def test_few_verdicts_change_little_and_right_logits_stay():
    few, _ = judged(5, 1, shift=1.5)
    found = fit_correction(few.logit, 1 / few.n_words, few)
    assert found is None or abs(corrected(few, found) - few.logit).max() < 3
    four, _ = judged(4, shift=3)
    assert fit_correction(four.logit, 1 / four.n_words, four) is None
    changes = []
    for seed in range(30):
        hits, _ = judged(30, seed=seed)
        found = fit_correction(hits.logit, 1 / hits.n_words, hits)
        changes.append(found)
    assert sum(found is None for found in changes) >= 18, "no change is the most careful of equally good ones"


def test_one_kind_of_verdicts_does_not_run_away():
    hits, _ = judged(20, shift=40.0)
    assert hits.yes.min() == 1
    found = fit_correction(hits.logit, 1 / hits.n_words, hits)
    assert math.isfinite(found.shift) and abs(found.shift) < 20 and found.factor > 0


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


def test_logits_that_verdicts_turn_round_stay():
    hits, _ = judged(200, factor=-1.0)
    assert FITS.refined(hits) == FITS


def test_items_without_texts_have_their_own():
    hits, _ = judged(200, shift=2.0, has_texts=False)
    new = FITS.refined(hits)
    assert new.of(3).hit_with == FITS.of(3).hit_with and new.of(3).hit_without != FITS.of(3).hit_without
    assert FITS.refined(hits.some(torch.zeros(len(hits.yes), dtype=torch.bool))) == FITS, "no verdicts"
