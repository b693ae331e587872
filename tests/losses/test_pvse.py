"""PVSE: the nearest of K x K embeddings, discrepancy and diversity against loops."""

from dataclasses import replace

import pytest
import torch
from support import references
from support.batches import MATCH, batch

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.triplet import PVSELoss, PVSEOptions, pvse_loss
from sfumato.search.index import GaussianIndex


def numbers(e, k):
    return [[v.tolist() for v in x.chunk(k)] for x in e.mean]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("mining", ["hardest", "sum"])
def test_every_term_is_its_loop(k, mining):
    image, text = batch(d=6)
    options = PVSEOptions(distance=f"nearest_of_{k}", margin=0.7, mining=mining, mmd_weight=3, diversity_weight=5)
    output = pvse_loss(image, text, MATCH, options)
    distance = get_distance(f"nearest_of_{k}").matrix(image, text).tolist()
    hinges = references.triplet(distance, MATCH.tolist(), 0.7, mining)
    assert float(output.terms["i2t"] + output.terms["t2i"]) == pytest.approx(hinges, rel=1e-12)
    images, texts = numbers(image, k), numbers(text, k)
    if k == 1:  # As released: both terms are for several embeddings.
        assert set(output.terms) == {"i2t", "t2i"}
        return
    discrepancy = references.discrepancy([v for item in images for v in item], [v for item in texts for v in item])
    assert float(output.terms["mmd"]) == pytest.approx(3 * discrepancy, rel=1e-12)
    diversity = references.diversity(images) + references.diversity(texts)
    assert float(output.terms["diversity"]) == pytest.approx(5 * diversity, rel=1e-12)


@pytest.mark.parametrize("mining", ["hardest", "sum"])
@pytest.mark.parametrize("k", [1, 2])
def test_the_defaults_are_twice_the_released_loss_on_the_cosine(k, mining):
    """Mean hinges with margin 0.1 on the largest of K x K cosines; for K > 1 also 0.01 discrepancy, 0.1 diversity.

    Without hardest negatives the released mean is over all n^2 pairs and ours over n anchors: 2 n times.
    """
    n, d = 5, 3
    sides = []
    for seed in (0, 1):
        mean = torch.randn(n, k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        sides.append(torch.nn.functional.normalize(mean, dim=2).requires_grad_())
    cosine = torch.einsum("ikd,jld->ijkl", *sides).amax((2, 3))
    total = 0
    for similarity in (cosine, cosine.T):
        hinges = (0.1 + similarity - similarity.diagonal().unsqueeze(1)).clamp_min(0)
        hinges = hinges.masked_fill(torch.eye(n, dtype=torch.bool), 0)
        total = total + (hinges.amax(1) if mining == "hardest" else hinges).mean()
    if k > 1:
        a, b = (side.flatten(0, 1) for side in sides)
        kernel = lambda x, y: (-0.5 * (x.unsqueeze(1) - y).square().sum(2)).exp().mean()
        gram = [side @ side.transpose(1, 2) - torch.eye(k) for side in sides]
        total = total + 0.01 * (kernel(a, a) - 2 * kernel(a, b) + kernel(b, b))
        total = total + 0.1 * sum((g.square().sum((1, 2)).sqrt() / k**2).mean() for g in gram)
    released = torch.autograd.grad(total, sides)
    embeddings = [GaussianEmbedding.point(side.flatten(1)) for side in sides]
    options = PVSEOptions(distance=f"nearest_of_{k}", mining=mining)
    times = 2 if mining == "hardest" else 2 * n
    if mining == "sum":
        options = replace(options, mmd_weight=0.01 * times, diversity_weight=0.1 * times)
    ours = pvse_loss(*embeddings, torch.eye(n), options).total
    torch.testing.assert_close(ours, times * total, rtol=1e-9, atol=0)
    # The diversity scales embeddings to unit length; only the part of a gradient along the sphere is compared.
    for own, other, side in zip(torch.autograd.grad(ours, sides), released, sides, strict=True):
        along = lambda g, side=side: g - (g * side).sum(2, keepdim=True) * side
        assert (along(own) - times * along(other)).norm() < 1e-9 * times * other.norm()


@pytest.mark.parametrize("mean", [[[1.0, 0, 1, 0]] * 4, [[1.0, 0, 0, 1]] * 4])
def test_gradients_are_finite_where_distances_and_cosines_are_nought(mean):
    leaf = torch.tensor(mean).requires_grad_()
    e = GaussianEmbedding.point(leaf)
    PVSELoss(PVSEOptions(distance="nearest_of_2"))(e, e, torch.eye(4)).total.backward()
    assert torch.isfinite(leaf.grad).all()


def test_an_index_searches_with_several_embeddings_an_item():
    queries, gallery = batch(d=6, dtype=torch.float32)
    found, position = GaussianIndex.build(gallery, list("abcdef"), distance="nearest_of_2").nearest(queries, 3)
    distance = get_distance("nearest_of_2").matrix(queries, gallery)
    torch.testing.assert_close(found, distance.sort(1).values[:, :3])
    assert position.tolist() == distance.argsort(1)[:, :3].tolist()
