"""The triplet losses, PVSE and DAA against slow loops and the released losses, and where they collapse."""

from dataclasses import replace

import pytest
import torch
from support import references
from support.batches import MATCH, batch
from support.raising import raises

from sfumato import GaussianEmbedding, PVSELoss, TripletLoss, daa_loss, get_distance, pvse_loss, triplet_loss
from sfumato.distances import squared_l2_matrix
from sfumato.losses.triplet import DAAOptions, PVSEOptions, TripletOptions


@pytest.mark.parametrize("mining", ["hardest", "sum", "semi-hard"])
@pytest.mark.parametrize("margin", [0.2, 1.0, 3.0])
def test_triplet_is_the_loops(mining, margin):
    image, text = batch()
    distance = squared_l2_matrix(image, text).tolist()
    value = triplet_loss(image, text, MATCH, TripletOptions(margin=margin, mining=mining)).total
    assert value.item() == pytest.approx(references.triplet(distance, MATCH.tolist(), margin, mining), rel=1e-12)


def test_a_collapsed_model_has_twice_the_margin_and_a_triplet_without_a_negative_no_loss_and_no_gradient():
    e = GaussianEmbedding.point(torch.ones(4, 3))
    output = triplet_loss(e, e, torch.eye(4), TripletOptions(margin=0.4))
    assert output.total.item() == pytest.approx(0.8) and output.stats["active"] == 1
    image, text = batch(2, 2)
    mean = image.mean.requires_grad_()
    for mining in ("hardest", "sum", "semi-hard"):
        options = TripletOptions(margin=5.0, mining=mining)
        output = triplet_loss(GaussianEmbedding(mean, image.log_var), text, torch.ones(2, 2), options)
        output.total.backward()
        assert output.total == 0 and mean.grad.eq(0).all()
    image, text = batch(dtype=torch.float32)
    loss = TripletLoss(TripletOptions(sum_epochs=1))
    for epoch, mining in enumerate(("sum", "hardest")):
        expected = triplet_loss(image, text, MATCH, TripletOptions(mining=mining, margin=0.4)).total
        torch.testing.assert_close(loss(image, text, MATCH, epoch=epoch).total, expected)
    raises(ValueError, "mining must be one of hardest, sum, semi-hard, got 'hard'", TripletOptions, mining="hard")


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("mining", ["hardest", "sum"])
def test_every_term_of_pvse_is_its_loop(k, mining):
    numbers = lambda e, k: [[v.tolist() for v in x.chunk(k)] for x in e.mean]
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
    """Of all negatives, the released mean is over n^2 pairs and ours over n anchors: 2 n times."""
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


GRADED = [[1, 0.1, 0.2, 0, 0.9, 0.2], [0.1, 1, 0, 0.3, 0, 0], [0.4, 0, 1, 0, 0, 0.7], [0, 0.2, 0.1, 1, 0, 0.3]]
GRADED = torch.tensor(GRADED, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.02, 0.5, 7.0])
@pytest.mark.parametrize("distance", ["squared_l2", "csd"])
@pytest.mark.parametrize("match", [MATCH, GRADED], ids=["ties", "graded"])
def test_every_term_of_daa_is_its_loop(temperature, distance, match, monkeypatch):
    monkeypatch.setattr("sfumato.losses.triplet.TEMPERATURE", temperature)
    image, text = batch()
    output = daa_loss(image, text, match, DAAOptions(margin=0.7, distance=distance, asp_weight=3))
    d, y = get_distance(distance).matrix(image, text), match
    right = sum(references.rank_disagreement(a.tolist(), b.tolist(), temperature) for a, b in ((d, y), (d.T, y.T)))
    assert float(output.terms["asp"]) == pytest.approx(3 * right, rel=1e-12)
    hinges = triplet_loss(image, text, match, TripletOptions(margin=0.7, distance=distance)).total
    torch.testing.assert_close(output.terms["i2t"] + output.terms["t2i"], hinges)


@pytest.mark.parametrize("released, n, weight", [(25, 5, 10.0), (10, 5, 4.0)])
def test_a_weight_beside_summed_hinges_on_the_cosine_is_2_over_n_of_it_here(released, n, weight):
    generator = torch.Generator().manual_seed(0)
    draws = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    sides = [torch.nn.functional.normalize(mean, dim=1).requires_grad_() for mean in draws]
    match = torch.where(torch.eye(n, dtype=torch.bool), 1.0, 0.45 * torch.rand(n, n, dtype=torch.float64))
    cosine, total = sides[0] @ sides[1].T, 0
    for similarity, label in ((cosine, match), (cosine.T, match.T)):
        hinges = (0.2 + similarity - similarity.diagonal().unsqueeze(1)).clamp_min(0)
        total = total + hinges.masked_fill(torch.eye(n, dtype=torch.bool), 0).amax(1).sum()
        before = ((similarity.unsqueeze(1) - similarity.unsqueeze(2)) / 0.01).sigmoid()  # (q, i, j): j is more similar
        rank = 1 + before.sum(2) - 0.5
        wanted = 1 + (label.unsqueeze(1) > label.unsqueeze(2)).sum(2)
        asp = torch.minimum(rank, wanted) / torch.maximum(rank, wanted)
        total = total + released * (1 - asp.sum() / n**2)
    released_gradients = torch.autograd.grad(total, sides)
    assert weight == released * 2 / n
    options = DAAOptions(margin=0.4, asp_weight=weight)
    ours = daa_loss(*(GaussianEmbedding.point(side) for side in sides), match, options).total
    torch.testing.assert_close(ours, 2 / n * total, rtol=1e-9, atol=0)
    for own, other, side in zip(torch.autograd.grad(ours, sides), released_gradients, sides, strict=True):
        along = lambda g, side=side: g - (g * side).sum(1, keepdim=True) * side  # Squared distances: of unit means.
        assert (along(own) - 2 / n * along(other)).norm() < 1e-9 * other.norm()


def test_rows_of_a_block_are_the_whole(monkeypatch):
    image, text = batch()
    leaf = image.mean.clone().requires_grad_()
    found = []
    for limit in (2**22, 40):
        monkeypatch.setattr("sfumato.losses.triplet.MAX_PAIRS", limit)
        total = daa_loss(GaussianEmbedding(leaf, image.log_var), text, GRADED, DAAOptions(asp_weight=2)).total
        found.append((total, *torch.autograd.grad(total, leaf)))
    torch.testing.assert_close(*found)
