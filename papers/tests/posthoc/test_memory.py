"""The memory of training items and the ratio of densities, against slow loops in float64."""

import math

import pytest
import torch
from support.raising import raises

from papers.posthoc import FrozenPairs
from papers.posthoc.closed_forms import BayesianBM25
from papers.posthoc.memory import MemoryContrast, MemoryDistance, MemoryEntropy
from papers.tests.posthoc.fixtures import items

OTHER = {"image": "text", "text": "image"}
MEMORY = (MemoryDistance, MemoryEntropy, MemoryContrast)


def some_pairs(n=9, m=14, d=5, scale=4.0):
    """Image 2 and texts 2, 12, 13 have no match, image 3 has three, text 1 has two; no vector has length 1."""
    matches = [(i, i) for i in range(n) if i != 2] + [(3, 9), (3, 10), (4, 1), (8, 11)]
    return FrozenPairs(items(n, d, 1), items(m, d, 2), torch.tensor(matches), logit_scale=scale)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(values):
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def units(rows):
    return [[v / math.sqrt(dot(row, row)) for v in row] for row in rows]


def contrast_by_loops(pairs, side, query, gallery, k):
    keys, values = (units(pairs.embeddings(one).tolist()) for one in (side, OTHER[side]))
    column = int(side == "text")
    matches = {}
    for pair in pairs.pairs.tolist():
        matches.setdefault(pair[column], []).append(values[pair[1 - column]])
    near = sorted(matches, key=lambda i: -dot(query, keys[i]))[:k]
    weights = softmax([pairs.logit_scale * dot(query, keys[i]) for i in near])
    means = [[sum(x) / len(matches[i]) for x in zip(*matches[i], strict=True)] for i in near]
    (proxy,) = units([[dot(weights, x) for x in zip(*means, strict=True)]])
    first = max(range(len(gallery)), key=lambda j: dot(query, gallery[j]))
    return -math.log(softmax([pairs.logit_scale * dot(proxy, g) for g in gallery])[first])


@pytest.mark.parametrize("side", OTHER)
def test_the_memory_is_that_of_loops(side):
    pairs, queries, gallery = some_pairs(), items(300, 5, 7), items(6, 5, 8)  # More queries than a block has.
    distance = MemoryDistance.fit(pairs, k=3).uncertainty(side, queries)
    entropy = MemoryEntropy.fit(pairs).uncertainty(side, queries)
    contrast = MemoryContrast.fit(pairs, k=4).uncertainty(side, queries, gallery)
    own, other, found = (units(x.tolist()) for x in (pairs.embeddings(side), pairs.embeddings(OTHER[side]), gallery))
    for row in (0, 5, 255, 256, 299):
        (q,) = units(queries[row : row + 1].tolist())
        assert float(distance[row]) == pytest.approx(1 - sorted(dot(q, x) for x in own)[-3], abs=1e-12)
        p = softmax([4 * dot(q, y) for y in other])
        assert float(entropy[row]) == pytest.approx(-sum(v * math.log(v) for v in p), abs=1e-12)
        assert float(contrast[row]) == pytest.approx(contrast_by_loops(pairs, side, q, found, 4), abs=1e-12)


def test_a_ratio_of_densities_by_hand():
    """Five items beyond a gap: their kernel density against the Gaussian of all distances, for even odds before."""
    pytest.importorskip("bayesian_bm25")
    angles = torch.cat([torch.linspace(0.20, 0.24, 5), torch.linspace(1.2, 1.9, 75)]).double()
    gallery = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.linspace(0.5, 4, 80).unsqueeze(1)
    d = sorted((1 - angles.cos()).tolist())
    near, mean = d[:5], sum(d) / 80
    variance = sum((x - mean) ** 2 for x in d) / 80
    centre = sum(near) / 5
    width = 2 * 1.06 * math.sqrt(sum((x - centre) ** 2 for x in near) / 5) * 5**-0.2
    normal = lambda x, m, s: math.exp(-(((x - m) / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi))
    odds = sum(normal(d[0], x, width) for x in near) / 5 / normal(d[0], mean, math.sqrt(variance))
    found = BayesianBM25().uncertainty("text", torch.tensor([[3.0, 0.0]]).double(), gallery.flip(0))
    assert float(found) == pytest.approx(-math.log(odds), rel=1e-6) and odds > 20
    # Only the hundred nearest are compared, but the background is that of all.
    more = torch.cat([gallery, gallery[5:].repeat(4, 1)])
    assert float(BayesianBM25().uncertainty("text", torch.tensor([[3.0, 0.0]]).double(), more)) != float(found)


@pytest.mark.parametrize("method", MEMORY)
def test_one_training_pair_is_a_memory(method):
    pairs = FrozenPairs(items(1, 5, 1), items(1, 5, 2), torch.zeros(1, 2, dtype=torch.long), logit_scale=3.0)
    for side in OTHER:
        u = method.fit(pairs).uncertainty(side, items(4, 5, 3), items(6, 5, 4) if method.needs_gallery else None)
        assert u.shape == (4,) and torch.isfinite(u).all()
        assert not u.any() or method is not MemoryEntropy
    none = FrozenPairs(items(1, 5, 1), items(1, 5, 2), torch.zeros(0, 2, dtype=torch.long), logit_scale=3.0)
    raises(ValueError, "at least 1 pair", method.fit, none)


def test_duplicates_and_a_gallery_of_one_item():
    pytest.importorskip("bayesian_bm25")
    pairs, queries = some_pairs(), items(3, 5, 7)
    same = FrozenPairs(pairs.images[:1].repeat(4, 1), pairs.texts[:1].repeat(4, 1), torch.arange(4).repeat(2, 1).T, 3.0)
    for side in OTHER:
        alone = items(1, 5, 8)
        assert not MemoryContrast.fit(pairs).uncertainty(side, queries, alone).abs().any()
        assert torch.isfinite(BayesianBM25().uncertainty(side, queries, alone)).all()
        many = alone.repeat(120, 1)
        contrast = MemoryContrast.fit(pairs).uncertainty(side, queries, many)
        torch.testing.assert_close(contrast, torch.full_like(contrast, math.log(120)))
        assert torch.isfinite(BayesianBM25().uncertainty(side, queries, many)).all()
        entropy = MemoryEntropy.fit(same).uncertainty(side, queries)
        torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(4)))
        distance = MemoryDistance.fit(same).uncertainty(side, same.embeddings(side) * 7)
        assert distance.abs().max() < 1e-12
