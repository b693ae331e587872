"""The triplet losses against slow loops, and where they collapse."""

import pytest
import torch
from support import references
from support.batches import MATCH, batch

from sfumato.distances import squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.triplet import TripletLoss, TripletOptions, triplet_loss


@pytest.mark.parametrize("mining", ["hardest", "sum", "semi-hard"])
@pytest.mark.parametrize("margin", [0.2, 1.0, 3.0])
def test_triplet_is_the_loops(mining, margin):
    image, text = batch()
    distance = squared_l2_matrix(image, text).tolist()
    value = triplet_loss(image, text, MATCH, TripletOptions(margin=margin, mining=mining)).total
    assert value.item() == pytest.approx(references.triplet(distance, MATCH.tolist(), margin, mining), rel=1e-12)


def test_triplet_sums_first_and_mines_later():
    loss = TripletLoss(TripletOptions(sum_epochs=1))
    image, text = batch(dtype=torch.float32)
    expected = [
        triplet_loss(image, text, MATCH, TripletOptions(mining=m, margin=0.4)).total for m in ("sum", "hardest")
    ]
    torch.testing.assert_close(loss(image, text, MATCH, epoch=0).total, expected[0])
    torch.testing.assert_close(loss(image, text, MATCH, epoch=1).total, expected[1])
    with pytest.raises(ValueError, match="mining must be one of hardest, sum, semi-hard, got 'hard'"):
        triplet_loss(image, text, MATCH, TripletOptions(mining="hard"))


def test_triplet_of_a_collapsed_model_is_twice_the_margin():
    """The fixed point that users report: every loss at 2 * margin."""
    e = GaussianEmbedding.point(torch.ones(4, 3))
    output = triplet_loss(e, e, torch.eye(4), TripletOptions(margin=0.4))
    assert output.total.item() == pytest.approx(0.8) and output.stats["active"] == 1


def test_a_triplet_without_a_negative_has_no_loss_and_no_gradient():
    image, text = batch(2, 2)
    mean = image.mean.requires_grad_()
    for mining in ("hardest", "sum", "semi-hard"):
        output = triplet_loss(
            GaussianEmbedding(mean, image.log_var), text, torch.ones(2, 2), TripletOptions(margin=5.0, mining=mining)
        )
        output.total.backward()
        assert output.total == 0 and mean.grad.eq(0).all()
