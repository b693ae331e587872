"""Logits of hits given the nearest items: against loops over single queries, and on queries of known probability."""

import json
import math

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato.calibration.logits import FEATURES, ConditionalLogits, NearestItems, query_features

SLOW = {
    "log sum": lambda z: math.log(sum(math.exp(x) for x in z)),
    "first": lambda z: z[0],
    "gap": lambda z: z[0] - z[1],
    "log expected": lambda z: math.log(sum(1 / (1 + math.exp(-x)) for x in z)),
}


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
        found.append(NearestItems(*(torch.from_numpy(np.take_along_axis(x, order, 1)) for x in (z, match)), n))
    return found


def fitted(**options):
    return ConditionalLogits.fit(galleries(**options), n_queries=3000)


def test_features_are_those_of_a_loop():
    z = -torch.rand(5, 12, dtype=torch.float64).sort(descending=False).values * 6
    for row, features in zip(z.tolist(), query_features(z, 200).tolist(), strict=True):
        slow = [SLOW[name](row) for name in FEATURES[:4]]
        slow += [slow[3] ** 2, slow[0] ** 2, math.log(200)]
        assert features == pytest.approx(slow, rel=1e-12)


def test_hits_of_new_queries_have_the_stated_probability():
    fit, (new,) = fitted(), galleries(sizes=(60,), seed=1)
    p = torch.sigmoid(fit.logit(new.logit, new.logit, new.n_gallery))[:, 0].numpy()
    right = new.match[:, 0].numpy()
    order = np.argsort(p)
    for part in np.array_split(order, 5):  # 600 queries: a standard error of .02 at most
        assert abs(p[part].mean() - right[part].mean()) < 0.08
    by_distance = np.corrcoef(new.logit[:, 0].numpy(), right)[0, 1]
    assert np.corrcoef(p, right)[0, 1] > by_distance + 0.1


def test_the_logit_is_linear_in_the_match_logit_with_one_bias_for_each_query():
    fit, (new, _) = fitted(), galleries(seed=2)
    logit = fit.logit(new.logit, new.logit, 50)
    assert fit.slope > 0
    bias = logit - fit.slope * new.logit
    assert float((bias - bias[:, :1]).abs().max()) < 1e-9
    one = fit.logit(new.logit[3], new.logit[3], 50)
    assert one.tolist() == pytest.approx(logit[3].tolist(), abs=1e-12)


def test_features_outside_of_the_fit_change_nothing_but_for_the_size():
    fit = fitted()
    far, farther = (torch.full((1, 30), x, dtype=torch.float64) for x in (-50.0, -5000.0))
    z = torch.zeros(1, 1, dtype=torch.float64)
    assert torch.equal(fit.logit(z, far, 50), fit.logit(z, farther, 50))
    assert not torch.equal(fit.logit(z, far, 50), fit.logit(z, far, 50_000))
    alone = torch.tensor([[1.0] + [-math.inf] * 49], dtype=torch.float64)
    assert torch.isfinite(fit.logit(z, alone, 1)).all()


def test_there_and_back():
    fit = fitted()
    assert ConditionalLogits.from_json(json.loads(json.dumps(fit.to_json()))) == fit
    for change in ({"slope": -1.0}, {"weights": [1.0]}, {"population": "some"}, {"intercept": math.nan}):
        raises(ValueError, "damaged; calibrate again", ConditionalLogits.from_json, fit.to_json() | change)


def test_too_little_is_refused():
    few = galleries(n_queries=40)
    raises(ValueError, "needs 50 held-out queries, got 40", ConditionalLogits.fit, few, n_queries=40)
    some = [NearestItems(g.logit, torch.zeros_like(g.match), g.n_gallery) for g in galleries(n_queries=60)]
    raises(ValueError, "only one kind", ConditionalLogits.fit, some, n_queries=60)
    wrong = [NearestItems(g.logit, (g.logit < -3), g.n_gallery) for g in galleries(n_queries=60)]
    raises(ValueError, "slope of the match logit must be positive", ConditionalLogits.fit, wrong, n_queries=60)
