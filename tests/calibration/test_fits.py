"""The constants of target "fits", their functions, their corrections by verdicts; what a sentence means, by loops."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from support.raising import raises
from support.texts import said_of_text

from sfumato.arrays import sigmoid, some_rows
from sfumato.calibration import fits
from sfumato.calibration.fits import LENGTHS, Evidence, FitsCalibration, JudgedHits, fit_correction, list_features
from sfumato.encoders.package_weights import sentence_vectors

FITS = FitsCalibration.packaged()


def evidence(**values):
    """That of a query of three words and six items."""
    each = {"image": -8.0, "agreement": 0.3, "words": 0.0, "together": 0.0, "missing": 3.0, "few": 0.25}
    known = {name: np.full((1, 6), value) for name, value in each.items()}
    return Evidence(**(known | {"n_words": np.array([3.0]), "prior": np.array([-5.0])} | values))


def test_constants_survive_json_and_damaged_ones_are_refused():
    values = json.loads(json.dumps(FITS.to_json()))
    assert FitsCalibration.from_json(values) == FITS and len({id(FITS.of(n)) for n in LENGTHS}) == 3
    assert FITS.of(0) is FITS.of(1) and FITS.of(3) is FITS.of(40)
    for numbers in (earlier := json.loads(json.dumps(values)))["lengths"][0]["pair_with"].values():
        numbers.pop(4) if isinstance(numbers, list) else None
    read, now = (FitsCalibration.from_json(one).of(1).pair_with for one in (earlier, values))
    assert read.weights == (*now.weights[:4], 0, *now.weights[5:]) and read.slope == now.slope
    turned = json.loads(json.dumps(values))
    turned["lengths"][1]["hit_with"]["slope"] = -0.1
    for damaged in (turned, values | {"prior": [math.nan]}, values | {"lengths": values["lengths"][:2]}):
        raises(ValueError, 'the constants of target "fits" are damaged', FitsCalibration.from_json, damaged)


@pytest.mark.parametrize("n_words", LENGTHS)
def test_more_evidence_is_more_probable(n_words):
    of, steps = FITS.of(n_words), np.arange(6.0)[None]
    base = evidence(n_words=np.array([float(n_words)]))
    bare, nearer = replace(base, agreement=np.full((1, 6), np.nan)), {"image": -14 + 2 * steps}
    changes = (base, nearer), (base, {"agreement": steps / 7}), (bare, nearer), (bare, {"words": steps / 5})
    for before, change in changes:
        pair = of.of_pairs(replace(before, **change))[0]
        assert (np.diff(pair) > 0).all(), "a closer image, a closer text, a word of the name"
    gain = of.of_pairs(replace(bare, words=0 * steps + 1, together=0 * steps + 1)) - of.of_pairs(bare)
    assert (gain > (3 if n_words < 3 else 1)).all(), "two words of a folder's name say as much as one"
    every = replace(base, words=steps * 0 + 1, together=steps * 0 + 1, missing=steps * 0)
    assert (of.of_pairs(every) > of.of_pairs(base) + 1).all(), "all words, or none"


def test_what_a_list_says_and_what_a_probability_comes_from():
    near = np.array([[1.0, -1.0, -2.0], [0.5, 0.5, 0.5], [9.0, -9.0, -9.0]])
    found = list_features(near, np.array([1.0, 2.0, 4.0]), np.array([-5.0, -6.0, -7.0]))
    expected = [sum(1 / (1 + 2.718281828**-z) for z in row) for row in near.tolist()]
    assert found[:, 0].tolist() == [1, 0.5, 9] and found[:, 1].tolist() == [2, 0, 5], "the best, and the gap up to 5"
    assert np.exp(found[:, 2]).tolist() == pytest.approx(expected) and found[:, 3].tolist() == [1, 0.5, 0.25]
    assert list_features(near[:, :1], np.ones(3), np.zeros(3))[:, 1].tolist() == [5, 5, 5], "one item alone"
    texts, listed = np.array([[0.3, 0.3, 0.3, np.nan, np.nan, np.nan]]), np.array([[-3.0, 1.0, 0.5, 0.3, -5.0]])
    before, near = evidence(agreement=texts, prior=np.array([-9.0])), np.array([0.5])
    parts = FITS.of(3).why(before, listed, near)
    changes = {"image": {"image": before.image + 1}, "texts": {"words": before.words + 0.5}, "other results": {}}
    for name, change in (changes | {"query": {"prior": before.prior + 1}}).items():
        now = FITS.of(3).why(replace(before, **change), listed + np.array([0.5, 0.5, -0.5, 0, 0]) * (not change), near)
        assert {k for k in parts if not np.allclose(now[k], parts[k])} == {name}


def test_a_hit_of_a_better_list_and_nothing():
    of = FITS.of(3)
    listed = list_features(np.array([[3.0, 1.0], [-4.0, -4.1]]), np.full(2, 5.0), np.full(2, -6.0))
    nothing = sigmoid(of.of_nothing(listed))
    assert nothing[0] < 0.2 < nothing[1], "a list without a likely item"
    pair, has = np.array([[3.0, 1.0, 0.0]]), np.array([[True, True, False]])
    hit = of.of_hits(pair, has, listed[:1], None)
    weights = of.hit_with, of.hit_with, of.hit_without
    by_hand = [w.slope * float(z) + w.bias(listed[0], 5).item() for z, w in zip(pair[0], weights, strict=True)]
    assert hit[0].tolist() == pytest.approx(by_hand)
    bare, w = [of.of_hits(pair, has & False, listed[:1], np.array([near])) for near in (0.3, 0.6)], of.hit_bare
    read = np.append(listed[0], 0.6)
    assert bare[1][0].tolist() == pytest.approx([w.slope * z + w.bias(read, 6).item() for z in pair[0]])
    assert (bare[0] < bare[1]).all(), "a query far from the training"
    vectors, known = np.eye(384)[:3], np.load(Path(fits.__file__).parent / "captions.npy").astype(float)
    cosines = np.sort(known[:, :3] / np.linalg.norm(known, axis=1, keepdims=True), axis=0)[-5:]
    assert FITS.nearness(vectors).tolist() == pytest.approx(cosines.mean(0).tolist(), abs=1e-6)
    old = FITS.to_json()
    old["lengths"] = [{k: v for k, v in one.items() if k != "hit_bare"} for one in old["lengths"]]
    for one in FitsCalibration.from_json(old).lengths:  # An earlier version.
        of_both = [one.of_hits(pair, has & False, listed[:1], near)[0].tolist() for near in (None, np.array([0.3]))]
        assert of_both[0] == pytest.approx(of_both[1])


def judged(n_queries, each=6, *, shift=0.0, factor=1.0, by_words=0.0, has_texts=True, seed=0):
    """Verdicts that are drawn from changed logits."""
    rng, n = np.random.default_rng(seed), n_queries * each
    logit, n_words = rng.normal(0, 2, n), rng.integers(1, 9, n_queries).repeat(each).astype(float)
    truth = factor * logit + shift + by_words / n_words
    yes, weight = (rng.random(n) < sigmoid(truth)).astype(float), rng.integers(1, 4, n).astype(float)
    return JudgedHits(np.arange(n_queries).repeat(each), n_words, logit, np.full(n, has_texts), yes, weight), truth


corrected = lambda hits, found: found.factor * hits.logit + found.shift + found.by_words / hits.n_words


def test_many_verdicts_find_what_is_wrong():
    hits, truth = judged(500, shift=1.5, factor=0.6, by_words=-1.0)
    found = fit_correction(hits.logit, 1 / hits.n_words, hits)
    assert found.factor == pytest.approx(0.6, abs=0.06) and found.shift == pytest.approx(1.5, abs=0.2)
    assert found.by_words == pytest.approx(-1, abs=0.4)
    gap = np.abs(sigmoid(corrected(hits, found)) - sigmoid(truth)).mean()
    assert gap < 0.1 * np.abs(sigmoid(hits.logit) - sigmoid(truth)).mean()


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
    inverse = np.minimum([FITS.of(int(n)).hit_with.high[3] for n in hits.n_words], 1 / hits.n_words)
    found = fit_correction(hits.logit, inverse, hits)
    listed = list_features(np.array([[2.0, 1.0, -1.0]]), np.array([float(n_words)]), np.array([-5.0]))
    pair, has = np.array([[2.0, 1.0, -1.0]]), np.array([[True, True, False]])
    before, after = (one.of(n_words).of_hits(pair, has, listed, None)[0] for one in (FITS, new))
    np.testing.assert_allclose(after[:2], found.factor * before[:2] + found.shift + found.by_words / n_words, rtol=1e-7)
    assert after[2] == before[2], "no verdict was about an item without texts"
    assert FitsCalibration.from_json(new.to_json()) == new and new.prior == FITS.prior
    assert new.of(n_words).nothing == FITS.of(n_words).nothing


def test_items_without_texts_have_their_own():
    hits, _ = judged(200, shift=2.0, has_texts=False)
    new = FITS.refined(hits)
    assert new.of(3).hit_with == FITS.of(3).hit_with and new.of(3).hit_without != FITS.of(3).hit_without
    assert FITS.refined(some_rows(hits, np.zeros(len(hits.yes), bool))) == FITS, "no verdicts"
    change, pair = FITS.corrections(hits)["hit_without"], np.array([[2.0, 1.0]])
    listed = list_features(pair, np.array([4.0]), np.array([-8.0]))
    for near in (None, np.array([0.6])):
        before, after = (one.of(4).of_hits(pair, pair < 0, listed, near) for one in (FITS, new))
        np.testing.assert_allclose(after, change.factor * before + change.shift + change.by_words / 4, rtol=1e-7)


def test_it_is_the_formula_and_a_usual_sentence_means_more():
    texts = {"a man riding a wave on a surfboard": 8, "a purple giraffe plays chess with a robot": 8, "a red bus": 3}
    vectors, n_words = sentence_vectors(list(texts)), np.array([*texts.values()])
    found, precision = fits.images_and_precision(vectors, n_words)
    logs, raw = zip(*(said_of_text(*each) for each in zip(vectors, n_words.tolist(), strict=True)), strict=True)
    assert found == pytest.approx(np.exp(logs), rel=5e-3)
    assert precision == pytest.approx(np.clip(raw, 0, 1), abs=2e-3)
    assert found[0] > 100 > 5 > found[1] and precision[0] > 0.4 > 0.1 > precision[1] >= 0


def test_it_follows_the_number_of_images_that_people_found_and_the_precision_of_clip_and_blip2(shared):
    rows = [json.loads(line) for line in (shared / "data/pqpp/validation.jsonl").read_text("utf-8").splitlines()[:300]]
    n_words = np.array([len(row["caption"].split()) for row in rows])
    vectors = sentence_vectors([row["caption"] for row in rows])
    found, precision = fits.images_and_precision(vectors, n_words)
    assert spearmanr(found, [len(row["relevant"]) for row in rows]).statistic > 0.65  # .704; of all 2,000 .717.
    true = [(row["clip_p10"] + row["blip2_p10"]) / 2 for row in rows]
    assert pearsonr(precision, true).statistic > 0.5  # Of all 2,000 .565.
    assert abs(precision.mean() - np.mean(true)) < 0.03 and 0 <= precision.min() < precision.max() <= 1
