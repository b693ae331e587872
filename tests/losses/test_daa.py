"""DAA: the agreement of ranks against loops, in blocks, and whether it teaches an order."""

import pytest
import torch
from support import references
from support.batches import MATCH, batch

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.triplet import DAAOptions, TripletOptions, daa_loss, triplet_loss

GRADED = torch.tensor(
    [[1, 0.1, 0.2, 0, 0.9, 0.2], [0.1, 1, 0, 0.3, 0, 0], [0.4, 0, 1, 0, 0, 0.7], [0, 0.2, 0.1, 1, 0, 0.3]],
    dtype=torch.float64,
)


@pytest.mark.parametrize("temperature", [0.02, 0.5, 7.0])
@pytest.mark.parametrize("distance", ["squared_l2", "csd"])
@pytest.mark.parametrize("match", [MATCH, GRADED], ids=["ties", "graded"])
def test_every_term_is_its_loop(temperature, distance, match, monkeypatch):
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
    """Hinges with margin 0.2 on cosines, summed over the batch, and the disagreement of ranks by similarity."""
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
    """That blocks of a batch are the whole is tested with every other loss."""
    image, text = batch()
    leaf = image.mean.clone().requires_grad_()
    found = []
    for limit in (2**22, 40):
        monkeypatch.setattr("sfumato.losses.triplet.MAX_PAIRS", limit)
        total = daa_loss(GaussianEmbedding(leaf, image.log_var), text, GRADED, DAAOptions(asp_weight=2)).total
        found.append((total, *torch.autograd.grad(total, leaf)))
    torch.testing.assert_close(*found)
