"""Logits of pairs and of hits, and reference queries: against loops, scikit-learn, and queries of known probability."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato import DISTANCES, GaussianEmbedding, QueryScores, csd_matrix
from sfumato.calibration import logits
from sfumato.calibration.calibrator import Calibration, DirectionCalibration


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
    # scikit-learn: ||w||^2 / 2 + C sum(weight * loss)
    c = 1 / (0.02 * float(weight.sum()))
    theirs = linear_model.LogisticRegression(C=c, tol=1e-10, max_iter=1000).fit(x, y, sample_weight=weight)
    assert ours.tolist() == pytest.approx(theirs.coef_[0].tolist(), abs=1e-6)
    assert bias == pytest.approx(float(theirs.intercept_[0]), abs=1e-6)


def test_the_gradient_vanishes_with_soft_labels():
    x, y = rows(1)
    y = 0.8 * y + 0.1
    w, b = logits.fit_logistic(x, y)
    error = 1 / (1 + np.exp(-x @ w - b)) - y
    assert abs(error.mean()) < 1e-7 and np.abs(x.T @ error / len(y)).max() < 1e-7


SLOW = {
    "log sum": lambda z: math.log(sum(math.exp(x) for x in z)), "first": lambda z: z[0], "gap": lambda z: z[0] - z[1],
    "log expected": lambda z: math.log(sum(1 / (1 + math.exp(-x)) for x in z)),
}  # fmt: skip


def galleries(n_queries=3000, sizes=(40, 80), seed=0):
    """Queries of two kinds: one match well ahead of the rest, or many matches that are equally close.

    The match logit alone does not tell them apart: both kinds have their first item at the same distance.
    """
    rng, found = np.random.default_rng(seed), []
    for n in sizes:
        many = rng.random(n_queries) < 0.5
        z = rng.normal(-3, 0.5, (n_queries, 30))
        z[:, 0] = rng.normal(0, 0.3, n_queries)
        z[many, :8] = rng.normal(0, 0.3, (int(many.sum()), 8))
        p = np.where(many[:, None], 1 / (1 + np.exp(-(z + 2))), 1 / (1 + np.exp(-(z - 1))))
        order = np.argsort(-z, axis=1)
        match = rng.random(p.shape) < p
        found.append(logits.NearestItems(*(np.take_along_axis(x, order, 1) for x in (z, match)), n))
    return found


@pytest.fixture(scope="module")
def fit():
    return logits.ConditionalLogits.fit(galleries(), n_queries=3000)


def test_features_are_those_of_a_loop():
    z = -np.sort(np.random.default_rng(0).random((5, 12))) * 6
    for row, features in zip(z.tolist(), logits.query_features(z, 200).tolist(), strict=True):
        slow = [SLOW[name](row) for name in logits.FEATURES[:4]]
        slow += [slow[3] ** 2, slow[0] ** 2, math.log(200)]
        assert features == pytest.approx(slow, rel=1e-12)


def test_the_logit_has_one_bias_for_each_query_and_features_outside_of_the_fit_change_only_for_the_size(fit):
    new, _ = galleries(seed=2)
    logit = fit.logit(new.logit, new.logit, 50)
    assert fit.slope > 0
    bias = logit - fit.slope * new.logit
    assert np.abs(bias - bias[:, :1]).max() < 1e-9
    one = fit.logit(new.logit[3], new.logit[3], 50)
    assert one.tolist() == pytest.approx(logit[3].tolist(), abs=1e-12)
    far, farther, z = np.full((1, 30), -50.0), np.full((1, 30), -5000.0), np.zeros((1, 1))
    assert np.array_equal(fit.logit(z, far, 50), fit.logit(z, farther, 50))
    assert not np.array_equal(fit.logit(z, far, 50), fit.logit(z, far, 50_000))
    alone = np.array([[1.0] + [-math.inf] * 49])
    assert np.isfinite(fit.logit(z, alone, 1)).all()
    first = logits.FirstHit(1.0, 0.0, (1.0, -1.0), (0.0, 0.0), (1.0, 2.0))
    ends = first.logit(np.zeros((2, 1)), np.array([[9.0, -9.0], [-9.0, 9.0]]))
    assert ends.flatten().tolist() == [1.0, -2.0]


def test_logits_come_back_from_json_and_too_little_and_mistakes_are_refused(fit):
    zeros, of_queries = np.zeros, logits.ConditionalLogits.fit
    few, some = galleries(n_queries=40), galleries(n_queries=60)
    none = [logits.NearestItems(g.logit, np.zeros_like(g.match), g.n_gallery) for g in some]
    wrong = [logits.NearestItems(g.logit, (g.logit < -3), g.n_gallery) for g in some]
    for message, function, *given in (
        ("expected", logits.fit_logistic, zeros(3), zeros(3)),
        ("expected", logits.fit_logistic, zeros((3, 2)), zeros(4)),
        ("add up to 0", lambda: logits.fit_logistic(zeros((3, 2)), zeros(3), weight=zeros(3))),
        ("needs 50 held-out queries, got 40", lambda: of_queries(few, n_queries=40)),
        ("only one kind", lambda: of_queries(none, n_queries=60)),
        ("slope of the match logit must be positive", lambda: of_queries(wrong, n_queries=60)),
        ("at least 10", logits.ReferenceQueries.of, gaussians(9, 4), "csd", "t2i"),
        ("known", logits.ReferenceQueries.of, gaussians(20, 4), "match_distance", "t2i"),
    ):
        raises(ValueError, message, function, *given)
    assert logits.ConditionalLogits.from_json(json.loads(json.dumps(fit.to_json()))) == fit
    for change in ({"slope": -1.0}, {"weights": [1.0]}, {"population": "some"}, {"intercept": math.nan}):
        raises(ValueError, "damaged; calibrate again", logits.ConditionalLogits.from_json, fit.to_json() | change)


def gaussians(n, seed, d=6):
    generator = torch.Generator().manual_seed(seed)
    return GaussianEmbedding(torch.randn(n, d, generator=generator), torch.randn(n, d, generator=generator) - 2)


def mean_of_smallest(row):
    return sum(sorted(row)[: logits.N_CLOSE]) / logits.N_CLOSE


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_features_are_those_of_a_loop_in_the_orientation_of_the_distance(direction):
    reference = logits.ReferenceQueries.of(gaussians(40, 0), "kl", direction)
    queries, first = gaussians(3, 1), gaussians(3, 2)
    # KL is not symmetric; it takes the image first in either direction.
    kl = DISTANCES["kl"].matrix
    of = {"t2i": lambda asked, item: kl(item, asked).T, "i2t": kl}[direction]
    kept = reference.embeddings.to("float32")
    hub, isolation = of(kept, first).T.tolist(), of(queries, kept).tolist()
    expected = [[mean_of_smallest(h), mean_of_smallest(i)] for h, i in zip(hub, isolation, strict=True)]
    assert reference.features(queries, first).numpy() == pytest.approx(np.array(expected), rel=1e-5)


def test_a_sample_of_many_rounded_to_what_the_file_holds():
    many = gaussians(logits.N_REFERENCE + 500, 3)
    reference = logits.ReferenceQueries.of(many, "csd", "t2i", seed=1)
    assert reference.embeddings.n == logits.N_REFERENCE
    assert reference.embeddings.dtype == np.float16
    assert not np.array_equal(
        reference.embeddings.mean, logits.ReferenceQueries.of(many, "csd", "t2i", seed=2).embeddings.mean
    )


def items(n=4000, seed=0, *, gallery=30):
    """First hits whose logit says nothing: they match if their hub feature is large, and the query is not isolated."""
    rng = np.random.default_rng(seed)
    reference = rng.normal(0, 1, (n, 2))
    z = np.sort(rng.normal(-2, 1, (n, 20)), axis=1)[:, ::-1].copy()
    match = np.zeros((n, 20))
    match[:, 0] = rng.random(n) < 1 / (1 + np.exp(-2 * (reference[:, 0] - reference[:, 1])))
    return logits.NearestItems(z, match, gallery, reference)


def test_the_first_hit_follows_them_and_the_others_stay_below_it():
    fit, new = logits.ConditionalLogits.fit([items()], n_queries=4000), items(seed=1)
    assert fit.first is not None
    logit = fit.logit(new.logit, new.logit, new.n_gallery, new.reference)
    assert (logit[:, 1:] <= logit[:, :1]).all() and (np.diff(logit) <= 0).all()
    # 2 (hub - isolation) in the simulation, on the average over the normal features of 4,000 queries
    slope = np.polyfit(new.reference[:, 0] - new.reference[:, 1], logit[:, 0], 1)[0]
    assert slope == pytest.approx(2, abs=0.25)
    assert fit.first_hit_loss([new]) < replace(fit, first=None).first_hit_loss([new]) - 0.1
    plain = replace(fit, first=None).logit(new.logit, new.logit, new.n_gallery)
    low = plain < logit[:, :1] - 1e-9
    low[:, 0] = False
    assert low.any() and np.array_equal(logit[low], plain[low])
    raises(ValueError, "reference", fit.logit, new.logit, new.logit, new.n_gallery)


def calibration(fit):
    reference = logits.ReferenceQueries.of(gaussians(30, 5), "csd", "t2i")
    pairs = logits.PairLogits(2.0, 1.0, 0.1)
    scores = QueryScores.fit(torch.rand(30, 3), torch.eye(3).repeat(10, 1))
    return Calibration(**vars(pairs), t2i=DirectionCalibration(pairs, scores, fit, None, reference))


def test_there_and_back_and_damaged_files_are_named(tmp_path):
    made, path = calibration(logits.ConditionalLogits.fit([items(300)], n_queries=300)), tmp_path / "calibration.json"
    made.save(path)
    found = Calibration.load(path)
    assert found.t2i.conditional == made.t2i.conditional and found.to_json() == made.to_json()
    queries, first = gaussians(4, 6), gaussians(4, 7)
    features = made.t2i.reference.features(queries, first)
    assert torch.equal(found.t2i.reference.features(queries, first), features)
    distance = csd_matrix(queries, gaussians(12, 8)).sort(1).values
    ask = lambda each: each.t2i.hit_probability(distance, distance, n_gallery=30, reference=features)
    assert torch.equal(ask(found), ask(made))
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


def test_features_that_say_nothing_or_are_missing_leave_the_logits_as_they_are():
    assert logits.ConditionalLogits.fit([replace(items(300), reference=None)], n_queries=300).first is None
    nan = replace(items(300), reference=np.full((300, 2), math.nan))
    assert logits.ConditionalLogits.fit([nan], n_queries=300).first is None
