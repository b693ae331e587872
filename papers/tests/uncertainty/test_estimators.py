"""The eight estimators against slow loops, and what they must and must not see."""

import math

import numpy as np
import pytest
import torch
from support.batches import MATCHING, D, N, scene

from papers.uncertainty import estimators as module
from papers.uncertainty.estimators import ESTIMATORS, MORE
from sfumato.evaluation.estimators import BUILT_IN, NEAREST, Matching, estimate_uncertainty, usable_estimators
from sfumato.gaussian import GaussianEmbedding


def by_loops(query, gallery, noise, scale=1.3, bias=2.0, left_out=()):
    """One query's numbers, in float64, from the definitions."""
    mean, var = query.mean[0].double().tolist(), query.var[0].double().tolist()
    items = [
        (g.mean[0].double().tolist(), g.var[0].double().tolist())
        for j in range(gallery.n)
        if j not in left_out
        for g in [gallery[j : j + 1]]
    ]
    d = len(mean)
    means = [sum((a - b) ** 2 for a, b in zip(mean, m, strict=True)) for m, _ in items]
    csd = [gap + sum(var) + sum(v) for gap, (_, v) in zip(means, items, strict=True)]
    logit = [bias - scale * x for x in csd]
    sigmoid = lambda x: 1 / (1 + math.exp(-x))

    def entropy(logits):
        total = sum(math.exp(x) for x in logits)
        return -sum(math.exp(x) / total * math.log(math.exp(x) / total) for x in logits)

    def log_inclusion(x, y):
        """Integral of p_x^2 p_y by its closed form, averaged over dimensions."""
        terms = []
        for mx, vx, my, vy in zip(*x, *y, strict=True):
            v = vx + 2 * vy
            terms.append(-math.log(2 * math.pi) - math.log(vx) / 2 - math.log(v) / 2 - (mx - my) ** 2 / v)
        return sum(terms) / d

    order = sorted(range(len(items)), key=lambda j: csd[j])
    near = [items[j] for j in order[:NEAREST]]
    own = (mean, var)
    draws = [[m + math.sqrt(v) * e for m, v, e in zip(mean, var, row, strict=True)] for row in noise.tolist()]
    spread = [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for i, x in enumerate(draws) for y in draws[:i]]
    average = lambda values: sum(values) / len(values)
    return {
        "log_det": sum(math.log(v) for v in var),
        "geometric_std": math.prod(math.sqrt(v) for v in var) ** (1 / d),
        "sample_spread": average([math.sqrt(x) for x in spread]),
        "self_mismatch": average([1 - sigmoid(bias - scale * x) for x in spread]),
        "match_entropy_top10": entropy([logit[j] for j in order[:NEAREST]]),
        "knn_distance": average([csd[j] for j in order[:NEAREST]]),
        "inclusion": average([log_inclusion(item, own) - log_inclusion(own, item) for item in near]),
        "not_included": -average([log_inclusion(own, item) for item in near]),
    }


def noise_of(d):
    return torch.randn(module.N_SAMPLES, d, generator=torch.Generator().manual_seed(0))


def test_every_estimator_is_its_loop():
    queries, gallery = scene()
    found = estimate_uncertainty(queries, gallery, MATCHING)
    assert len(BUILT_IN) == 9 and len(MORE) == 8 and set(ESTIMATORS) >= BUILT_IN | set(MORE)
    for i in range(N):
        loops = by_loops(queries[i : i + 1], gallery, noise_of(D))
        assert set(loops) == set(MORE)
        for name, value in loops.items():
            assert found[name][i] == pytest.approx(value, rel=2e-4, abs=2e-5), name


def test_samples_depend_on_the_seed_and_on_nothing_else():
    queries, gallery = scene(11)
    first, again, other = (estimate_uncertainty(queries, gallery, MATCHING, seed=s) for s in (0, 0, 1))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert (first[name] == other[name]).all() == (name not in ("sample_spread", "self_mismatch")), name
    np.testing.assert_allclose(other["sample_spread"], first["sample_spread"], rtol=1)


def test_samples_of_a_root_distance_take_the_root():
    queries, gallery = scene(5)
    chosen = {"self_mismatch": ESTIMATORS["self_mismatch"]}
    root = estimate_uncertainty(queries, gallery, Matching("average_l2", 1.3, 2.0), estimators=chosen)["self_mismatch"]
    for i in range(3):
        z = queries.mean[i] + queries.var[i].sqrt() * noise_of(D)
        pairs = torch.nn.functional.pdist(z)
        assert root[i] == pytest.approx(float(torch.sigmoid(1.3 * pairs - 2).mean()), rel=1e-4)


def test_points():
    queries, gallery = (GaussianEmbedding.point(x.mean) for x in scene(7))
    assert set(ESTIMATORS) - set(usable_estimators(queries, gallery, texts=[""] * N)) == {"inclusion", "not_included"}
    found = estimate_uncertainty(queries, gallery, MATCHING)
    assert np.isneginf(found["log_det"]).all() and all(not np.isnan(values).any() for values in found.values())
