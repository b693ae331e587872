"""PCME++ against slow loops, its pseudo-positives by hand, and what its parts must do."""

import math

import pytest
import torch
from support import references
from support.batches import MATCH, batch
from support.largest import LargestTensor

from sfumato.distances import DISTANCES, csd_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import PCMEPPLoss, PCMEPPOptions, pcmepp_loss, pseudo_positives
from sfumato.matching import match_logit


@pytest.mark.parametrize("distance", [name for name, d in DISTANCES.items() if not d.sampled])
def test_pcmepp_is_the_loops_by_any_distance(distance):
    image, text = batch()
    logits = match_logit(DISTANCES[distance].matrix(image, text), 1.5, 2.5).tolist()
    labels = MATCH.tolist()
    i2t = references.mean_cross_entropy(logits, references.pseudo_positives(logits, labels))
    columns = references.pseudo_positives(references.transpose(logits), references.transpose(labels))
    t2i = references.mean_cross_entropy(references.transpose(logits), columns)
    vib = [references.vib(e.mean.tolist(), e.var.tolist()) for e in (image, text)]
    output = pcmepp_loss(
        image, text, MATCH, PCMEPPOptions(distance=distance, alpha=0.3, beta=0.2), logit_scale=1.5, logit_bias=2.5
    )
    expected = {
        "match": 2 * references.mean_cross_entropy(logits, labels),
        "pseudo_positive": 0.3 * (i2t + t2i),
        "vib": 0.2 * sum(vib),
    }
    for name, value in expected.items():
        assert output.terms[name].item() == pytest.approx(value, rel=1e-12)
    assert output.total.item() == pytest.approx(sum(expected.values()), rel=1e-12)
    stats = PCMEPPLoss(PCMEPPOptions(distance=distance)).double()(image, text, MATCH).stats
    assert stats["pseudo_positives_t2i"] == sum(
        a > b for x, y in zip(columns, references.transpose(labels), strict=True) for a, b in zip(x, y, strict=True)
    )


def test_gradient_of_the_match_loss_is_probability_less_label():
    """A bias for every pair has the gradient of the logits."""
    image, text = batch()
    bias = torch.full((4, 6), 1.0, dtype=torch.float64, requires_grad=True)
    output = pcmepp_loss(
        image, text, MATCH, PCMEPPOptions(alpha=0, beta=0, match_weight=1), logit_scale=2.0, logit_bias=bias
    )
    output.total.backward()
    probability = torch.sigmoid(1 - 2 * csd_matrix(image, text))
    torch.testing.assert_close(bias.grad, (probability - MATCH) / (4 * 6))


def test_labels_raised_carry_no_gradient():
    """The pseudo-positive gradient is that of a cross-entropy with constant labels; a variance is in a whole row."""
    image, text = batch()
    leaf = image.log_var.clone().requires_grad_()
    image = GaussianEmbedding(image.mean, leaf)
    pcmepp_loss(
        image, text, MATCH, PCMEPPOptions(alpha=0.3, beta=0, match_weight=0), logit_scale=2.0, logit_bias=1.0
    ).total.backward()
    distance = csd_matrix(image, text).detach()
    labels = pseudo_positives(distance, MATCH) + pseudo_positives(distance.T, MATCH.T).T
    by_logit = 0.3 * (2 * torch.sigmoid(1 - 2 * distance) - labels) / (4 * 6)
    torch.testing.assert_close(leaf.grad, -2 * leaf.detach().exp() * by_logit.sum(1, keepdim=True))


def test_at_scale_zero_the_match_loss_is_constant():
    values = [
        pcmepp_loss(*batch(seed=seed), MATCH, PCMEPPOptions(alpha=0, beta=0), logit_scale=0.0, logit_bias=0.7).total
        for seed in (0, 1)
    ]
    assert values[0] == values[1]


def test_weights_of_zero_leave_terms_out():
    image, text = batch()
    full = pcmepp_loss(image, text, MATCH, logit_scale=2.0, logit_bias=1.0)
    assert set(full.terms) == {"match", "pseudo_positive", "vib"}
    stats = PCMEPPLoss().double()(image, text, MATCH).stats
    assert stats["pseudo_positives_i2t"] > 0 and stats["pseudo_positives_t2i"] > 0
    points = GaussianEmbedding.point(image.mean), GaussianEmbedding.point(text.mean)
    bare = pcmepp_loss(*points, MATCH, PCMEPPOptions(alpha=0, beta=0), logit_scale=2.0, logit_bias=1.0)
    assert set(bare.terms) == {"match"} and torch.isfinite(bare.total)


def test_tempting_slips_give_something_else():
    """Sum for mean, one direction of pseudo-positives, halved directions, the paper's weight: none is the loss."""
    image, text = batch()
    distance = csd_matrix(image, text)
    logits, labels = (1 - 2 * distance).tolist(), MATCH.tolist()
    bce = references.mean_cross_entropy
    match = bce(logits, labels)
    i2t = bce(logits, references.pseudo_positives(logits, labels))
    columns = references.pseudo_positives(references.transpose(logits), references.transpose(labels))
    t2i = bce(references.transpose(logits), columns)
    right = pcmepp_loss(
        image, text, MATCH, PCMEPPOptions(alpha=0.1, beta=0), logit_scale=2.0, logit_bias=1.0
    ).total.item()
    assert right == pytest.approx(2 * match + 0.1 * (i2t + t2i), rel=1e-12)
    for wrong in (
        match + 0.1 * i2t,  # as printed in the paper
        2 * match + 0.1 * i2t,
        2 * match + 0.05 * (i2t + t2i),
        2 * 24 * match + 0.1 * (i2t + t2i),
        2 * match / 4 + 0.1 * (i2t + t2i),
    ):
        assert abs(wrong - right) > 1e-3


def test_pseudo_positives_by_hand():
    distance = torch.tensor([[3.0, 1.0, 3.0, 5.0], [2.0, 2.5, 0.5, 0.4]])
    match = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.7, 0.3, 0.0]])
    # Row 0: the truth lies at 3; column 1 is closer, column 2 ties. Row 1: the truth is column 1 at 2.5; everything is
    # closer.
    assert pseudo_positives(distance, match).tolist() == [[1.0, 1.0, 1.0, 0.0], pytest.approx([0.7, 0.7, 0.7, 0.7])]
    # The slip of the printed pseudo-code, thresholds along the other axis, gives something else.
    along_columns = pseudo_positives(distance.T, match.T).T
    assert not torch.equal(along_columns, pseudo_positives(distance, match))


def test_pseudo_positives_of_a_row_without_a_match_change_nothing():
    distance = torch.rand(3, 4)
    match = torch.zeros(3, 4)
    assert pseudo_positives(distance, match).eq(0).all()


def test_pseudo_positives_start_when_they_are_told_to():
    loss = PCMEPPLoss(PCMEPPOptions(pseudo_positives_from=3))
    image, text = batch(dtype=torch.float32)
    match = MATCH.float()
    assert "pseudo_positive" not in loss(image, text, match, epoch=2).terms
    assert "pseudo_positive" in loss(image, text, match, epoch=3).terms
    assert "pseudo_positive" in loss(image, text, match).terms


def test_scale_never_turns_negative_whatever_the_optimiser_does():
    loss = PCMEPPLoss(PCMEPPOptions(logit_scale=0.01))
    optimiser = torch.optim.SGD(loss.parameters(), lr=1e3)
    image, text = batch(dtype=torch.float32)
    for _ in range(5):
        optimiser.zero_grad()
        loss(image, text, 1 - MATCH.float()).total.backward()
        optimiser.step()
        assert loss.logits.logit_scale >= 0  # It may underflow to 0, where the loss is constant, and never turns over.
    with pytest.raises(ValueError, match="logit_scale must be above 0, got 0"):
        PCMEPPLoss(PCMEPPOptions(logit_scale=0))


def test_match_loss_does_not_hold_a_cube():
    image, text = batch(64, 64, 256, dtype=torch.float32)
    mean = image.mean.requires_grad_()
    with LargestTensor() as largest:
        pcmepp_loss(
            GaussianEmbedding(mean, image.log_var), text, torch.eye(64), logit_scale=5.0, logit_bias=5.0
        ).total.backward()
    assert math.prod(mean.shape) <= largest.numel <= 64 * 256 * 2
