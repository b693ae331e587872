"""Guarantees, logits and features: by hand, against loops, and counted over many random held-out sets."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato import DISTANCES, GaussianEmbedding, QueryScores
from sfumato.calibration import logits, query_scores
from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.logits import ConditionalLogits, PairLogits, fit_logits
from sfumato.metrics.reliability import betting_p_value, mean_loss_p_value

# Three queries, four items; the third query has two matches, and its closest item is none of them.
DISTANCE = torch.tensor([[0.2, 0.9, 0.8, 0.7], [0.6, 0.3, 0.5, 0.9], [0.8, 0.4, 0.5, 1.0]])
MATCH = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])
mean_of_smallest = lambda row: sum(sorted(row)[: logits.N_CLOSE]) / logits.N_CLOSE
PAIRS = PairLogits(4.0, 2.0, 0.01)
calibrated = lambda scores: DirectionCalibration(PAIRS, scores)


def scores_of(closest, *, other=math.inf, n_gallery=100, growth=0.0):
    closest = np.asarray(closest, np.float32)
    other, precision = np.broadcast_to(np.float32(other), closest.shape), (0.0,) * query_scores.N_STEPS
    lists = (tuple(values.tolist()) for values in (closest, closest + 1, other))
    return query_scores.QueryScores(n_gallery, 0, 1.0, growth, *lists, precision)


def scene(generator, n_queries, n_gallery, *, n_matches=1, shift=1.5):
    """Normal distances, matches shift deviations closer: log odds logit(fraction) + shift^2 / 2 - shift * d."""
    match = torch.zeros(n_queries, n_gallery)
    match[:, :n_matches] = 1
    return torch.randn(n_queries, n_gallery, generator=generator) + shift * (1 - match), match


def test_scores_by_hand():
    scores = query_scores.QueryScores.fit(DISTANCE, MATCH)
    np.testing.assert_allclose(scores.closest_match, [0.2, 0.3, 0.5])
    np.testing.assert_allclose(scores.farthest_match, [0.2, 0.3, 1.0])
    np.testing.assert_allclose(scores.closest_other, [0.7, 0.5, 0.4])
    np.testing.assert_allclose(scores.nearest, [0.2, 0.3, 0.4])
    assert (scores.n_gallery, scores.n_left_out, scores.matches_per_query) == (4, 0, pytest.approx(4 / 3))
    # Of 20 steps over 3 queries 6 end at the first of the closest distances, 7 at the second, 7 at the third.
    np.testing.assert_allclose(scores.limits, [*[0.2] * 6, *[0.3] * 7, *[0.4] * 7])
    # Strictly below: nothing; one right item; two right ones.
    np.testing.assert_allclose(scores.precision, [*[0] * 6, *[1] * 7, *[1] * 7])


def test_queries_without_a_match_are_left_out_blocks_are_the_whole_and_growth_by_hand():
    generator = torch.Generator().manual_seed(0)
    distance, match = torch.randn(57, 23, generator=generator), torch.rand(57, 23, generator=generator) < 0.06
    scores, kept = query_scores.QueryScores.fit(distance, match), match.any(1)
    assert scores.n_left_out == int((~kept).sum()) > 5
    assert scores == replace(query_scores.QueryScores.fit(distance[kept], match[kept]), n_left_out=scores.n_left_out)
    blocks = [(distance[i : i + 10], match[i : i + 10]) for i in range(0, 57, 10)]
    again = query_scores.QueryScores.from_blocks(lambda: iter(blocks))
    assert again.closest_match == scores.closest_match and again.growth == scores.growth
    assert again.precision == pytest.approx(scores.precision)
    # One match each: a gallery twice as large brings no more of them. Four items, all of them matches: two in a half.
    assert query_scores.growth_by_halving(np.ones(7), 100) == pytest.approx(0)
    assert query_scores.growth_by_halving(np.full(3, 4), 4) == pytest.approx(1)
    # Two matches among 4: a half holds one on average, none with 1/6 -> 1 / (5/6) of those with any; log2(2 / 1.2).
    assert query_scores.growth_by_halving(np.array([2]), 4) == pytest.approx(math.log2(2 / 1.2))
    assert query_scores.growth_by_halving(np.array([1]), 1) == 0


def test_platt_is_fit_logits_the_prior_shifts_by_hand():
    fitted = Calibration.fit(DISTANCE, MATCH)
    assert (fitted.logit_scale, fitted.logit_bias) == pytest.approx(fit_logits(DISTANCE, MATCH), rel=1e-12)
    assert fitted.match_fraction == pytest.approx(4 / 12)
    expected = 1 / (1 + torch.exp(fitted.logit_scale * DISTANCE - fitted.logit_bias))
    torch.testing.assert_close(fitted.probability(DISTANCE), expected)
    assert fitted.probability(DISTANCE.double()).dtype == torch.float64
    calibration = calibrated(scores_of([0.1], n_gallery=100))
    growing = calibrated(scores_of([0.1], n_gallery=400, growth=0.5))
    # One match among 100 becomes one among 300: odds 1/99 -> 1/299.
    assert calibration.prior_shift(300) == pytest.approx(math.log(99 / 299))
    assert calibration.prior_shift(100) == pytest.approx(0, abs=1e-12)
    # With growth 1/2 four times the gallery is half the fraction.
    assert growing.prior_shift(1600) == pytest.approx(math.log(0.005 / 0.995 * 99))
    assert calibration.prior_shift(1) == PAIRS.shift(0.5) == pytest.approx(math.log(99)), "never above one half"
    # sigmoid(2 - 4 * 0.5) is one half; 1/99 of its odds for a fraction of one in 9,802.
    assert float(PAIRS.probability(torch.tensor(0.5), match_fraction=1 / (99 * 99 + 1))) == pytest.approx(1 / 100)


def test_radius_by_hand_of_queries_and_of_groups():
    calibration = calibrated(scores_of([0.9, 0.1, 0.5, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6]))
    # Nine scores: the ceil(10 * 0.8) = 8th; the 9th for one in ten; for less the whole gallery.
    assert calibration.conformal_radius(0.2) == pytest.approx(0.8)
    assert calibration.conformal_radius(0.1) == pytest.approx(0.9) and calibration.conformal_radius(0.099) == math.inf
    assert calibration.conformal_radius(0.2, contains="all") == pytest.approx(1.8)
    assert calibrated(scores_of([0.5] * 9)).conformal_radius(0.6) == 0.5, "ties are inside"
    scores = replace(scores_of([0.1, 0.2, 0.3, 0.4]), group=(7, 7, 3, 5))
    # Three groups and the new one: weights .5 .5 1 1 of 4. Half of 4 is reached by the third, 3 of 4 by the last.
    assert query_scores.conformal_radius(scores, 0.5) == pytest.approx(0.3)
    assert query_scores.conformal_radius(scores, 0.25) == pytest.approx(0.4)
    assert query_scores.conformal_radius(scores, 0.2) == math.inf
    assert query_scores.conformal_radius(scores, 0.8) == pytest.approx(0.2)


def test_abstention_by_hand():
    # The 300 closest of 400 are right. 20 limits share an error rate of 0.1: none among 104 certifies a risk of 0.05.
    closest = np.arange(400) / 400
    scores = scores_of(np.where(np.arange(400) < 300, closest, 5.0), other=np.where(np.arange(400) < 300, 9.0, closest))
    calibration = calibrated(scores)
    # Limits are every 20th closest distance, itself left out: of 319 answered 19 are wrong, 6 %; of 299 none.
    assert calibration.abstain_below(0.05) == pytest.approx(float(PAIRS.probability(torch.tensor(299 / 400))), rel=1e-6)
    assert calibration.answered_fraction(0.05) == pytest.approx(299 / 400)
    assert calibration.abstains(torch.tensor([0.7, 299 / 400, 0.9]), 0.05).tolist() == [False, True, True]
    # A risk of one half is kept by answering whatever is as close as something held out was.
    assert calibration.answered_fraction(0.5) == pytest.approx(399 / 400)
    assert calibration.abstains(torch.tensor([0.99, 1e6]), 0.5).tolist() == [False, True]
    assert calibration.abstains(np.array([0.99, 1e6]), 0.5).tolist() == [False, True]
    message = "no limit has a risk of at most 0.01 with confidence 0.9 on 400 held-out queries"
    refused = raises(ValueError, message, calibration.abstain_below, 0.01)
    reachable = float(re.search(r"the smallest that works is (0\.\d\d);", str(refused.value))[1])
    assert calibration.abstain_below(reachable) > 0
    raises(ValueError, "the smallest that works", calibration.abstain_below, reachable - 0.01)
    # In a gallery a hundred times larger the same distance is worth less: ln(99 / 9999) / 4 nearer is as good.
    nearer = 299 / 400 - math.log(9999 / 99) / 4
    both = torch.tensor([nearer - 0.01, nearer + 0.01])
    assert calibration.abstains(both, 0.05, n_gallery=10_000).tolist() == [False, True]


def captions(random, n_images, correlation, slope=0.0):
    """Five captions an image, alike: ((5 n,) distance, right, image); 10.5 % wrong, with a slope the farther ones."""
    image = np.repeat(np.arange(n_images), 5)
    shared, own = random.standard_normal((2, n_images))[:, image], random.standard_normal((2, 5 * n_images))
    distance, luck = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return distance, luck < 1.255 * math.sqrt(1 + slope**2) - slope * distance, image


def broken(correlation, *, grouped, slope=0.0, risk=0.1, n_sets=200):
    """Of held-out sets of 150 images, the fraction whose limit allows more than the risk, and that is certified."""
    random = np.random.default_rng(int(100 * correlation))
    distance, right, _ = captions(random, 200_000, correlation, slope)
    order = distance.argsort()
    distance, n_wrong = distance[order], (~right[order]).cumsum()
    above = certified = 0
    for _ in range(n_sets):
        d, y, image = captions(random, 150, correlation, slope)
        closest, other = np.where(y, d, d + 9), np.where(y, d + 9, d)
        group = tuple(image.tolist()) if grouped else ()
        scores = query_scores.QueryScores(
            9, 0, 1.0, 0.0, tuple(closest), tuple(closest), tuple(other), (0.0,) * query_scores.N_STEPS, group
        )
        try:
            limit = query_scores.answer_limit(scores, risk)
        except ValueError:
            continue
        certified += 1
        n_below = distance.searchsorted(limit)
        above += n_wrong[n_below - 1] / n_below > risk
    return above / n_sets, certified / n_sets


# 90 % confidence: of 200 sets 20 are expected to break the risk at most. 34 of 200 have a probability of .001.
@pytest.mark.slow
@pytest.mark.parametrize("correlation, slope", [(0.0, 0.0), (0.5, 1.0), (0.8, 0.0)])
def test_the_risk_holds_with_five_captions_an_image(correlation, slope, monkeypatch):
    # It is slow, and only for the message.
    monkeypatch.setattr("sfumato.calibration.query_scores._strictest", lambda *_: None)
    above, certified = broken(correlation, grouped=True, slope=slope)
    assert above < 0.17 and (certified > 0.8 or (correlation, slope) != (0.5, 1.0))
    if correlation == 0.8 and not slope:
        assert broken(correlation, grouped=False)[0] > 0.1, "captions taken for independent break the risk"


def test_a_precision_of_groups_is_the_mean_of_their_means():
    distance, match = torch.tensor([[0.1, 5.0], [0.1, 0.2], [0.1, 0.2]]), torch.tensor([[1, 0], [1, 0], [1, 0]])
    alone = query_scores.QueryScores.fit(distance, match)
    together = query_scores.QueryScores.fit(distance + 0.0, match, group=np.array([4, 9, 9]))
    assert alone.groups.tolist() == [0, 1, 2] and together.groups.tolist() == [0, 1, 1]
    wide = query_scores._mean_of_groups(np.array([[1.0], [0.5], [0.5], [np.nan]]), np.array([0, 1, 1, 2]))
    assert wide.tolist() == [0.75]
    # The risk of groups: of the first, two of three queries are answered, one wrongly; of the second, one rightly.
    answered, wrong = (np.array(values, bool) for values in ([1, 1, 0, 1], [1, 0, 1, 0]))
    found = query_scores._risk_p_value(answered, wrong, 0.2, np.array([0, 0, 0, 1]))
    assert found == betting_p_value(np.array([(0.8 - 0.2) / 3 + 0.2, 0.0]), 0.2)
    assert query_scores.QueryScores.from_json(json.loads(json.dumps(together.to_json()))) == together
    raises(ValueError, "got 2 groups for 3 queries", query_scores.QueryScores.fit, distance, match, group=np.zeros(2))


def test_threshold_by_hand_and_absent_matches_make_it_more_careful():
    # 600 queries; the first half finds one right item at i/600, the second half a right and a wrong one.
    nearest = torch.arange(600) / 600
    distance = torch.stack([nearest, torch.where(torch.arange(600) < 300, 9.0, nearest)], dim=1)
    match = torch.tensor([[1, 0]]).expand(600, 2)
    calibration = DirectionCalibration(PairLogits(4.0, 2.0, 0.5), query_scores.QueryScores.fit(distance, match))
    # Below limit k/20 with k > 10 the mean precision is about (10 + (k - 10) / 2) / k, 0.8 at 16.7; certified is less.
    right = np.where(np.arange(600) < 300, 1, 0.5)
    p_value = lambda k: mean_loss_p_value(1 - float(right[: 30 * k - 1].mean()), 30 * k - 1, 0.2)
    limit = next(k / 20 for k in range(20, 0, -1) if p_value(k) <= 0.1 / 20)
    expected = float(calibration.pairs.probability(torch.tensor((600 * limit - 1) / 600)))
    assert calibration.threshold(0.8) == pytest.approx(expected, rel=1e-5)
    last = float(calibration.pairs.probability(torch.tensor(599 / 600)))
    assert calibration.threshold(0.4) == pytest.approx(last, rel=1e-5), "all that is as close as something held out was"
    message = "no limit has a precision of 0.999 with confidence 0.9 on 600"
    refused = raises(ValueError, message, calibration.threshold, 0.999)
    reachable = float(re.search(r"the largest that works is (0\.\d\d);", str(refused.value))[1])
    assert calibration.threshold(reachable) > 0
    raises(ValueError, "the largest that works", calibration.threshold, reachable + 0.01)
    distance, match = scene(torch.Generator().manual_seed(4), 1500, 30, shift=3.5)
    calibration = Calibration.fit(distance, match, t2i=query_scores.QueryScores.fit(distance, match)).of("t2i")
    present, absent = calibration.abstain_below(0.2), calibration.abstain_below(0.2, absent=0.5)
    assert present < absent and calibration.answered_fraction(0.2, absent=0.5) < calibration.answered_fraction(0.2)


def test_there_and_back(tmp_path):
    distance, match = scene(torch.Generator().manual_seed(6), 64, 11)
    match[:, 0] = 1
    every = query_scores.QueryScores.fit(distance[:, :1], match[:, :1])
    assert every.closest_other[0] == math.inf
    scores = query_scores.QueryScores.fit(distance, match)
    hits = ConditionalLogits(1.5, 0.25, (0.5,) * 7, (-1.0,) * 7, (2.0,) * 7, "planted", 64, (11, 22))
    pairs, about = PairLogits(1.25, -0.5, 0.1), {"split": "val"}
    t2i = DirectionCalibration(pairs, every, hits, scores)
    calibration = Calibration(**vars(pairs), i2t=DirectionCalibration(pairs, scores), t2i=t2i, metadata=about)
    calibration.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == calibration
    text = (tmp_path / "calibration.json").read_text()
    assert "Infinity" not in text and "NaN" not in text and len(text.splitlines()) == 12
    assert Calibration.from_json(json.loads(json.dumps(calibration.to_json()))) == calibration
    for wrong, message in (("t2t", "unknown direction 't2t'; known: i2t, t2i"), ("i2t", "no scores of .* for i2t")):
        raises(ValueError, message, replace(calibration, i2t=None).of, wrong)


def test_damaged_files_and_mistakes_are_named(tmp_path):
    whole = Calibration.fit(DISTANCE, MATCH).to_json()
    for text, message in (
        ("{", "Expecting"), ("[]", "not a calibration, or a damaged one"), ("{}", "damaged.*version.*calibrate again"),
        ({"logit_scale": None}, "damaged.*calibrate again"), ({"logit_scale": -1}, "logit_scale must be positive"),
        ({"t2i": {"n_gallery": 3}}, "damaged.*calibrate again"),
        ({"knots": [[0.5, 1.0]]}, "an isotonic fit of an earlier sfumato; calibrate the run again"),
        ({"version": 9}, "version 9 is of a later sfumato, this one reads 2; update sfumato"),
        ({"version": 1}, "version 1 is of an earlier sfumato, this one reads 2; calibrate the run again, and build"),
    ):  # fmt: skip
        (tmp_path / "calibration.json").write_text(text if isinstance(text, str) else json.dumps(whole | text))
        raises(ValueError, rf"calibration.json: .*{message}", Calibration.load, tmp_path / "calibration.json")
    c = calibrated(scores_of([0.1, 0.2]))
    two_galleries = lambda: [(DISTANCE, MATCH), (DISTANCE.T, MATCH.T)]
    of, of_blocks = query_scores.QueryScores.fit, query_scores.QueryScores.from_blocks
    for ask, message in (
        (lambda: c.conformal_radius(1.0), "alpha must be between 0 and 1, got 1.0"),
        (lambda: c.conformal_radius(0.1, contains="most"), "contains must be 'any' or 'all', got 'most'"),
        (lambda: c.threshold(90), "precision must be between 0 and 1, got 90"),
        (lambda: c.abstain_below(0.1, confidence=1.0), "confidence must be between 0 and 1, got 1.0"),
        (lambda: c.abstain_below(0.0), "risk must be between 0 and 1"),
        (lambda: c.abstain_below(0.1, absent=1.0), "absent must be at least 0 and below 1"),
        (lambda: c.prior_shift(0), "n_gallery must be at least 1, got 0"),
        (lambda: PAIRS.shift(1.5), "match_fraction must be between 0 and 1, got 1.5"),
        (lambda: of(DISTANCE, MATCH[:2]), r"both must be \(q, m\)"), (lambda: of_blocks(list), "got no queries"),
        (lambda: of(DISTANCE, MATCH * 0.5), "match must be 0 or 1"),
        (lambda: of(DISTANCE / 0, MATCH), "distances must be finite"),
        (lambda: of(DISTANCE, MATCH * 0), "no query has a match"),
        (lambda: of_blocks(two_galleries), r"galleries of \[3, 4\] items"),
    ):  # fmt: skip
        raises(ValueError, message, ask)


def rows(seed=0, n=400, f=3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, f))
    return x, (rng.random(n) < 1 / (1 + np.exp(0.7 - x @ np.linspace(-1, 2, f)))).astype(float)


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_that_of_scikit_learn(weighted):
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = rows()
    weight = np.random.default_rng(0).random(len(y)) + 0.1 if weighted else np.ones(len(y))
    ours, bias = logits.fit_logistic(x, y, weight=weight, penalty=0.02)
    c = 1 / (0.02 * float(weight.sum()))  # scikit-learn: ||w||^2 / 2 + C sum(weight * loss)
    theirs = linear_model.LogisticRegression(C=c, tol=1e-10, max_iter=1000).fit(x, y, sample_weight=weight)
    assert ours.tolist() == pytest.approx(theirs.coef_[0].tolist(), abs=1e-6)
    assert bias == pytest.approx(float(theirs.intercept_[0]), abs=1e-6)


def test_the_gradient_vanishes_features_are_those_of_a_loop_and_a_sample_is_rounded_as_its_file():
    x, y = rows(1)
    y = 0.8 * y + 0.1
    w, b = logits.fit_logistic(x, y)
    error = 1 / (1 + np.exp(-x @ w - b)) - y
    assert abs(error.mean()) < 1e-7 and np.abs(x.T @ error / len(y)).max() < 1e-7
    z = -np.sort(np.random.default_rng(0).random((5, 12))) * 6
    for row, features in zip(z.tolist(), logits.query_features(z, 200).tolist(), strict=True):
        slow = [SLOW[name](row) for name in logits.FEATURES[:4]]
        slow += [slow[3] ** 2, slow[0] ** 2, math.log(200)]
        assert features == pytest.approx(slow, rel=1e-12)
    many = gaussians(logits.N_REFERENCE + 500, 3)
    reference = logits.ReferenceQueries.of(many, "csd", "t2i", seed=1)
    assert reference.embeddings.n == logits.N_REFERENCE and reference.embeddings.dtype == np.float16
    other = logits.ReferenceQueries.of(many, "csd", "t2i", seed=2)
    assert not np.array_equal(reference.embeddings.mean, other.embeddings.mean)


SLOW = {
    "log sum": lambda z: math.log(sum(math.exp(x) for x in z)), "first": lambda z: z[0], "gap": lambda z: z[0] - z[1],
    "log expected": lambda z: math.log(sum(1 / (1 + math.exp(-x)) for x in z)),
}  # fmt: skip


def galleries(n_queries=3000, sizes=(40, 80), seed=0):
    """Queries of two kinds with the same first distance: one match well ahead of the rest, or many equally close."""
    rng, found = np.random.default_rng(seed), []
    for n in sizes:
        many, z = rng.random(n_queries) < 0.5, rng.normal(-3, 0.5, (n_queries, 30))
        z[:, 0] = rng.normal(0, 0.3, n_queries)
        z[many, :8] = rng.normal(0, 0.3, (int(many.sum()), 8))
        p = np.where(many[:, None], 1 / (1 + np.exp(-(z + 2))), 1 / (1 + np.exp(-(z - 1))))
        order, match = np.argsort(-z, axis=1), rng.random(p.shape) < p
        found.append(logits.NearestItems(*(np.take_along_axis(x, order, 1) for x in (z, match)), n))
    return found


@pytest.fixture(scope="module")
def fit():
    return logits.ConditionalLogits.fit(galleries(), n_queries=3000)


def test_the_logit_has_one_bias_for_each_query_and_features_outside_of_the_fit_change_only_for_the_size(fit):
    new, _ = galleries(seed=2)
    logit = fit.logit(new.logit, new.logit, 50)
    assert fit.slope > 0
    bias = logit - fit.slope * new.logit
    assert np.abs(bias - bias[:, :1]).max() < 1e-9
    assert fit.logit(new.logit[3], new.logit[3], 50).tolist() == pytest.approx(logit[3].tolist(), abs=1e-12)
    far, farther, z = np.full((1, 30), -50.0), np.full((1, 30), -5000.0), np.zeros((1, 1))
    assert np.array_equal(fit.logit(z, far, 50), fit.logit(z, farther, 50))
    assert not np.array_equal(fit.logit(z, far, 50), fit.logit(z, far, 50_000))
    assert np.isfinite(fit.logit(z, np.array([[1.0] + [-math.inf] * 49]), 1)).all()
    first = logits.FirstHit(1.0, 0.0, (1.0, -1.0), (0.0, 0.0), (1.0, 2.0))
    assert first.logit(np.zeros((2, 1)), np.array([[9.0, -9.0], [-9.0, 9.0]])).flatten().tolist() == [1.0, -2.0]


def test_logits_come_back_from_json_and_too_little_and_mistakes_are_refused(fit):
    zeros, of_queries, reference = np.zeros, logits.ConditionalLogits.fit, logits.ReferenceQueries.of
    few, some = galleries(n_queries=40), galleries(n_queries=60)
    none = [logits.NearestItems(g.logit, np.zeros_like(g.match), g.n_gallery) for g in some]
    wrong = [logits.NearestItems(g.logit, (g.logit < -3), g.n_gallery) for g in some]
    for message, function, *given in (
        *(("expected", logits.fit_logistic, zeros(x), zeros(y)) for x, y in ((3, 3), ((3, 2), 4))),
        ("add up to 0", lambda: logits.fit_logistic(zeros((3, 2)), zeros(3), weight=zeros(3))),
        ("needs 50 held-out queries, got 40", lambda: of_queries(few, n_queries=40)),
        ("only one kind", lambda: of_queries(none, n_queries=60)),
        ("slope of the match logit must be positive", lambda: of_queries(wrong, n_queries=60)),
        ("at least 10", reference, gaussians(9, 4), "csd", "t2i"),
        ("known", reference, gaussians(20, 4), "match_distance", "t2i"),
    ):  # fmt: skip
        raises(ValueError, message, function, *given)
    for change in ({"slope": -1.0}, {"weights": [1.0]}, {"population": "some"}, {"intercept": math.nan}):
        raises(ValueError, "damaged; calibrate again", logits.ConditionalLogits.from_json, fit.to_json() | change)


def gaussians(n, seed, d=6):
    generator = torch.Generator().manual_seed(seed)
    return GaussianEmbedding(torch.randn(n, d, generator=generator), torch.randn(n, d, generator=generator) - 2)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_features_are_those_of_a_loop_in_the_orientation_of_the_distance(direction):
    reference = logits.ReferenceQueries.of(gaussians(40, 0), "kl", direction)
    queries, first = gaussians(3, 1), gaussians(3, 2)
    kl = DISTANCES["kl"].matrix  # KL is not symmetric; it takes the image first in either direction.
    of = {"t2i": lambda asked, item: kl(item, asked).T, "i2t": kl}[direction]
    kept = reference.embeddings.to("float32")
    hub, isolation = of(kept, first).T.tolist(), of(queries, kept).tolist()
    expected = [[mean_of_smallest(h), mean_of_smallest(i)] for h, i in zip(hub, isolation, strict=True)]
    assert reference.features(queries, first).numpy() == pytest.approx(np.array(expected), rel=1e-5)


def items(n=4000, seed=0, *, gallery=30):
    """First hits whose logit says nothing: they match if their hub feature is large, and the query is not isolated."""
    rng = np.random.default_rng(seed)
    reference, z = rng.normal(0, 1, (n, 2)), np.sort(rng.normal(-2, 1, (n, 20)), axis=1)[:, ::-1].copy()
    match = np.zeros((n, 20))
    match[:, 0] = rng.random(n) < 1 / (1 + np.exp(-2 * (reference[:, 0] - reference[:, 1])))
    return logits.NearestItems(z, match, gallery, reference)


def test_the_first_hit_follows_its_features_and_those_that_say_nothing_leave_the_logits():
    fit, new = logits.ConditionalLogits.fit([items()], n_queries=4000), items(seed=1)
    assert fit.first is not None
    logit = fit.logit(new.logit, new.logit, new.n_gallery, new.reference)
    assert (logit[:, 1:] <= logit[:, :1]).all() and (np.diff(logit) <= 0).all()
    # 2 (hub - isolation) in the simulation, on the average over the normal features of 4,000 queries
    assert np.polyfit(new.reference[:, 0] - new.reference[:, 1], logit[:, 0], 1)[0] == pytest.approx(2, abs=0.25)
    assert fit.first_hit_loss([new]) < replace(fit, first=None).first_hit_loss([new]) - 0.1
    plain = replace(fit, first=None).logit(new.logit, new.logit, new.n_gallery)
    low = plain < logit[:, :1] - 1e-9
    low[:, 0] = False
    assert low.any() and np.array_equal(logit[low], plain[low])
    raises(ValueError, "reference", fit.logit, new.logit, new.logit, new.n_gallery)
    assert logits.ConditionalLogits.fit([replace(items(300), reference=None)], n_queries=300).first is None
    nan = replace(items(300), reference=np.full((300, 2), math.nan))
    assert logits.ConditionalLogits.fit([nan], n_queries=300).first is None


def calibration(fit):
    reference, pairs = logits.ReferenceQueries.of(gaussians(30, 5), "csd", "t2i"), logits.PairLogits(2.0, 1.0, 0.1)
    scores = QueryScores.fit(torch.rand(30, 3), torch.eye(3).repeat(10, 1))
    return Calibration(**vars(pairs), t2i=DirectionCalibration(pairs, scores, fit, None, reference))


def test_there_and_back_and_damaged_files_are_named(tmp_path):
    made, path = calibration(logits.ConditionalLogits.fit([items(300)], n_queries=300)), tmp_path / "calibration.json"
    made.save(path)
    found = Calibration.load(path)
    assert found.t2i.conditional == made.t2i.conditional and found.to_json() == made.to_json()
    queries, first = gaussians(4, 6), gaussians(4, 7)
    assert torch.equal(found.t2i.reference.features(queries, first), made.t2i.reference.features(queries, first))
    beside, whole = path.with_suffix(".safetensors"), path.read_text()
    path.write_text(whole.replace('"first": {"slope": ', '"first": {"slope": -'))
    raises(ValueError, r"calibration\.json", Calibration.load, path)
    path.write_text(whole)
    beside.write_bytes(beside.read_bytes()[:-7])
    raises(ValueError, r"calibration\.json", Calibration.load, path)
    beside.unlink()
    raises(ValueError, r"calibration\.json", Calibration.load, path)
    replace(made, t2i=replace(made.t2i, reference=None)).save(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.json"]
