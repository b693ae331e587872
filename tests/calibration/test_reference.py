"""Reference queries: their features against loops, what they change about the first hit, and their file."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.logits import (
    N_CLOSE,
    N_REFERENCE,
    ConditionalLogits,
    FirstHit,
    NearestItems,
    PairLogits,
    ReferenceQueries,
)
from sfumato.calibration.query_scores import QueryScores
from sfumato.distances import DISTANCES, csd_matrix
from sfumato.gaussian import GaussianEmbedding


def gaussians(n, seed, d=6):
    generator = torch.Generator().manual_seed(seed)
    return GaussianEmbedding(torch.randn(n, d, generator=generator), torch.randn(n, d, generator=generator) - 2)


def mean_of_smallest(row):
    return sum(sorted(row)[:N_CLOSE]) / N_CLOSE


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_features_are_those_of_a_loop_in_the_orientation_of_the_distance(direction):
    reference = ReferenceQueries.of(gaussians(40, 0), "kl", direction)
    queries, first = gaussians(3, 1), gaussians(3, 2)
    # KL is not symmetric; it takes the image first in either direction.
    kl = DISTANCES["kl"].matrix
    of = {"t2i": lambda asked, item: kl(item, asked).T, "i2t": kl}[direction]
    hub, isolation = of(reference.embeddings, first).T.tolist(), of(queries, reference.embeddings).tolist()
    expected = [[mean_of_smallest(h), mean_of_smallest(i)] for h, i in zip(hub, isolation, strict=True)]
    assert reference.features(queries, first).numpy() == pytest.approx(np.array(expected), rel=1e-5)


def test_a_sample_of_many_rounded_to_what_the_file_holds():
    many = gaussians(N_REFERENCE + 500, 3)
    reference = ReferenceQueries.of(many, "csd", "t2i", seed=1)
    assert reference.embeddings.n == N_REFERENCE
    assert torch.equal(reference.embeddings.mean, reference.embeddings.mean.half().float())
    assert not torch.equal(reference.embeddings.mean, ReferenceQueries.of(many, "csd", "t2i", seed=2).embeddings.mean)


@pytest.mark.parametrize(("n", "distance", "message"), [(9, "csd", "at least 10"), (20, "match_distance", "known")])
def test_mistakes_are_named(n, distance, message):
    raises(ValueError, message, ReferenceQueries.of, gaussians(n, 4), distance, "t2i")


def items(n=4000, seed=0, *, gallery=30):
    """First hits whose logit says nothing: they match if their hub feature is large, and the query is not isolated."""
    rng = np.random.default_rng(seed)
    reference = rng.normal(0, 1, (n, 2))
    z = np.sort(rng.normal(-2, 1, (n, 20)), axis=1)[:, ::-1].copy()
    match = np.zeros((n, 20))
    match[:, 0] = rng.random(n) < 1 / (1 + np.exp(-2 * (reference[:, 0] - reference[:, 1])))
    return NearestItems(torch.from_numpy(z), torch.from_numpy(match), gallery, torch.from_numpy(reference))


def test_the_first_hit_follows_them_and_the_others_stay_below_it():
    fit, new = ConditionalLogits.fit([items()], n_queries=4000), items(seed=1)
    assert fit.first is not None
    logit = fit.logit(new.logit, new.logit, new.n_gallery, new.reference)
    assert (logit[:, 1:] <= logit[:, :1]).all() and (logit.diff(dim=1) <= 0).all()
    # 2 (hub - isolation) in the simulation, on the average over the normal features of 4,000 queries
    slope = np.polyfit((new.reference[:, 0] - new.reference[:, 1]).numpy(), logit[:, 0].numpy(), 1)[0]
    assert slope == pytest.approx(2, abs=0.25)
    assert fit.first_hit_loss([new]) < replace(fit, first=None).first_hit_loss([new]) - 0.1
    plain = replace(fit, first=None).logit(new.logit, new.logit, new.n_gallery)
    low = plain < logit[:, :1] - 1e-9
    low[:, 0] = False
    assert low.any() and torch.equal(logit[low], plain[low])
    raises(ValueError, "reference", fit.logit, new.logit, new.logit, new.n_gallery)


def test_values_outside_of_the_fit_are_set_to_its_ends():
    first = FirstHit(1.0, 0.0, (1.0, -1.0), (0.0, 0.0), (1.0, 2.0))
    far = first.logit(torch.zeros(2, 1, dtype=torch.float64), torch.tensor([[9.0, -9.0], [-9.0, 9.0]]))
    assert far.flatten().tolist() == [1.0, -2.0]


def calibration(fit):
    reference = ReferenceQueries.of(gaussians(30, 5), "csd", "t2i")
    pairs = PairLogits(2.0, 1.0, 0.1)
    scores = QueryScores.fit(torch.rand(30, 3), torch.eye(3).repeat(10, 1))
    return Calibration(**vars(pairs), t2i=DirectionCalibration(pairs, scores, fit, None, reference))


def test_there_and_back(tmp_path):
    made = calibration(ConditionalLogits.fit([items(300)], n_queries=300))
    made.save(tmp_path / "calibration.json")
    found = Calibration.load(tmp_path / "calibration.json")
    assert found.t2i.conditional == made.t2i.conditional and found.to_json() == made.to_json()
    queries, first = gaussians(4, 6), gaussians(4, 7)
    features = made.t2i.reference.features(queries, first)
    assert torch.equal(found.t2i.reference.features(queries, first), features)
    distance = csd_matrix(queries, gaussians(12, 8)).sort(1).values
    ask = lambda each: each.t2i.hit_probability(distance, distance, n_gallery=30, reference=features)
    assert torch.equal(ask(found), ask(made))
    replace(made, t2i=replace(made.t2i, reference=None)).save(tmp_path / "calibration.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.json"]


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "calibration.json"
    calibration(ConditionalLogits.fit([items(300)], n_queries=300)).save(path)
    beside, whole = path.with_suffix(".safetensors"), path.read_text()
    path.write_text(whole.replace('"first": {"slope": ', '"first": {"slope": -'))
    raises(ValueError, r"calibration\.json", Calibration.load, path)
    path.write_text(whole)
    beside.write_bytes(beside.read_bytes()[:-7])
    raises(ValueError, r"calibration\.json", Calibration.load, path)
    beside.unlink()
    raises(ValueError, r"calibration\.json", Calibration.load, path)


def test_features_that_say_nothing_or_are_missing_leave_the_logits_as_they_are():
    assert ConditionalLogits.fit([replace(items(300), reference=None)], n_queries=300).first is None
    nan = replace(items(300), reference=torch.full((300, 2), math.nan))
    assert ConditionalLogits.fit([nan], n_queries=300).first is None
