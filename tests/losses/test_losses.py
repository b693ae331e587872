"""Losses: one battery for all of them, and each against slow loops."""

import math

import pytest
import references
import torch
from largest import LargestTensor

from sfumato.distances import DISTANCES, csd_matrix, squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import (
    LOSSES,
    PCMEPPLoss,
    TripletLoss,
    infonce_loss,
    pcmepp_loss,
    pseudo_positives,
    triplet_loss,
    vib_loss,
)
from sfumato.matching import match_logit


def batch(n=4, m=6, d=5, seed=0, dtype=torch.float64):
    """Different n, m and d; un-normalised means."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda k, scale: scale * torch.randn(k, d, generator=generator, dtype=dtype)
    return GaussianEmbedding(draw(n, 0.6), draw(n, 0.5) - 2), GaussianEmbedding(draw(m, 0.6), draw(m, 0.5) - 2)


MATCH = torch.tensor(
    [[1, 0, 0, 0, 0.9, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0.7], [0, 0, 0, 1, 0, 0.3]],
    dtype=torch.float64,
)


@pytest.fixture(params=LOSSES)
def loss(request):
    return LOSSES[request.param]().double()


def test_terms_sum_to_the_total(loss):
    output = loss(*batch(), MATCH)
    torch.testing.assert_close(sum(output.terms.values()), output.total)
    assert output.total.ndim == 0 and torch.isfinite(output.total)
    assert all(not value.requires_grad for value in output.stats.values())


def test_permuting_pairs_changes_nothing(loss):
    image, text = batch()
    rows, columns = torch.tensor([2, 0, 3, 1]), torch.tensor([5, 1, 4, 0, 2, 3])
    permuted = loss(image[rows], text[columns], MATCH[rows][:, columns])
    torch.testing.assert_close(permuted.total, loss(image, text, MATCH).total)


def test_swapping_sides_and_transposing_changes_nothing(loss):
    image, text = batch()
    torch.testing.assert_close(loss(text, image, MATCH.T).total, loss(image, text, MATCH).total)


def test_gradients_are_finite_at_identical_inputs(loss):
    image, _ = batch(4, dtype=torch.float32)
    mean, log_var = image.mean[:1].expand(4, -1).clone().requires_grad_(), image.log_var.clone().requires_grad_()
    e = GaussianEmbedding(mean, log_var)
    loss.float()(e, e, torch.eye(4)).total.backward()
    assert torch.isfinite(mean.grad).all()


def test_gradients_are_those_of_the_function(loss):
    image, text = batch(3, 3, 2)
    match = torch.eye(3, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (image.mean, image.log_var, text.mean, text.log_var)]
    function = lambda a, b, c, d: loss(GaussianEmbedding(a, b), GaussianEmbedding(c, d), match).total
    assert torch.autograd.gradcheck(function, inputs)


def test_half_precision_inputs(loss):
    image, text = batch(dtype=torch.float32)
    exact = loss.float()(image, text, MATCH).total
    half = loss(image.to(torch.bfloat16), text.to(torch.bfloat16), MATCH).total
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=0.05, atol=0.05)


def test_shapes_and_emptiness_are_checked(loss):
    image, text = batch()
    with pytest.raises(ValueError, match=r"match must have shape \(images, texts\) = \(4, 6\), got \(6, 4\)"):
        loss(image, text, MATCH.T)
    with pytest.raises(ValueError, match="empty batch of 0 images and 6 texts"):
        loss(image[:0], text, MATCH[:0])


@pytest.mark.parametrize("name", ["infonce", "triplet"])
def test_a_batch_without_a_match_is_refused(name):
    with pytest.raises(ValueError, match="no pair of the batch matches"):
        LOSSES[name]()(*batch(dtype=torch.float32), torch.zeros(4, 6))


@pytest.mark.parametrize("distance", [name for name, d in DISTANCES.items() if not d.sampled])
def test_pcmepp_is_the_loops_by_any_distance(distance):
    image, text = batch()
    logits = match_logit(DISTANCES[distance].matrix(image, text), 1.5, 2.5).tolist()
    labels = MATCH.tolist()
    i2t = references.mean_cross_entropy(logits, references.pseudo_positives(logits, labels))
    columns = references.pseudo_positives(references.transpose(logits), references.transpose(labels))
    t2i = references.mean_cross_entropy(references.transpose(logits), columns)
    vib = [references.vib(e.mean.tolist(), e.var.tolist()) for e in (image, text)]
    output = pcmepp_loss(image, text, MATCH, logit_scale=1.5, logit_bias=2.5, distance=distance, alpha=0.3, beta=0.2)
    expected = {
        "match": 2 * references.mean_cross_entropy(logits, labels),
        "pseudo_positive": 0.3 * (i2t + t2i),
        "vib": 0.2 * sum(vib),
    }
    for name, value in expected.items():
        assert output.terms[name].item() == pytest.approx(value, rel=1e-12)
    assert output.total.item() == pytest.approx(sum(expected.values()), rel=1e-12)
    assert output.stats["pseudo_positives_t2i"] == sum(
        a > b for x, y in zip(columns, references.transpose(labels), strict=True) for a, b in zip(x, y, strict=True)
    )


def test_gradient_of_the_match_loss_is_probability_less_label():
    image, text = batch()
    distance = csd_matrix(image, text)
    offset = torch.zeros_like(distance, requires_grad=True)
    logit = match_logit(distance, 2.0, 1.0) + offset
    torch.nn.functional.binary_cross_entropy_with_logits(logit, MATCH).backward()
    output = pcmepp_loss(image, text, MATCH, logit_scale=2.0, logit_bias=1.0, alpha=0, beta=0, match_weight=1)
    torch.testing.assert_close(output.total, torch.nn.functional.binary_cross_entropy_with_logits(logit, MATCH))
    torch.testing.assert_close(offset.grad, (logit.sigmoid() - MATCH) / MATCH.numel())


def test_pseudo_positives_by_hand():
    distance = torch.tensor([[3.0, 1.0, 3.0, 5.0], [2.0, 2.5, 0.5, 0.4]])
    match = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.7, 0.3, 0.0]])
    # Row 0: the truth lies at 3; column 1 is closer, column 2 ties. Row 1: the truth is column 1 at 2.5; everything is closer.
    assert pseudo_positives(distance, match).tolist() == [[1.0, 1.0, 1.0, 0.0], pytest.approx([0.7, 0.7, 0.7, 0.7])]
    # The slip of the printed pseudo-code, thresholds along the other axis, gives something else.
    along_columns = pseudo_positives(distance.T, match.T).T
    assert not torch.equal(along_columns, pseudo_positives(distance, match))


def test_pseudo_positives_of_a_row_without_a_match_change_nothing():
    distance = torch.rand(3, 4)
    match = torch.zeros(3, 4)
    assert pseudo_positives(distance, match).eq(0).all()


def test_pseudo_positives_start_when_they_are_told_to():
    loss = PCMEPPLoss(pseudo_positives_from=3)
    image, text = batch(dtype=torch.float32)
    match = MATCH.float()
    assert "pseudo_positive" not in loss(image, text, match, epoch=2).terms
    assert "pseudo_positive" in loss(image, text, match, epoch=3).terms
    assert "pseudo_positive" in loss(image, text, match).terms


def test_scale_never_turns_negative_whatever_the_optimiser_does():
    loss = PCMEPPLoss(logit_scale=0.01)
    optimiser = torch.optim.SGD(loss.parameters(), lr=1e3)
    image, text = batch(dtype=torch.float32)
    for _ in range(5):
        optimiser.zero_grad()
        loss(image, text, 1 - MATCH.float()).total.backward()
        optimiser.step()
        assert loss.logits.logit_scale >= 0  # It may underflow to 0, where the loss is constant, and never turns over.
    with pytest.raises(ValueError, match="logit_scale must be positive, got 0"):
        PCMEPPLoss(logit_scale=0)


def test_vib_by_hand_and_its_guard():
    assert vib_loss(GaussianEmbedding(torch.ones(1, 4), torch.zeros(1, 4))).item() == pytest.approx(0.5)
    image, text = batch()
    assert vib_loss(image).item() == pytest.approx(references.vib(image.mean.tolist(), image.var.tolist()), rel=1e-12)
    wide = GaussianEmbedding(image.mean, torch.full_like(image.mean, 12.0))
    output = pcmepp_loss(wide, text, MATCH, logit_scale=1.0, logit_bias=1.0, alpha=0, beta=1.0)
    assert output.stats["vib_ignored"] == 1
    assert output.terms["vib"].item() == pytest.approx(vib_loss(text).item())


@pytest.mark.parametrize("distance", ["squared_l2", "csd", "bhattacharyya"])
def test_infonce_is_the_loops(distance):
    image, text = batch()
    pairs = DISTANCES[distance].matrix(image, text)
    for match in (MATCH, MATCH * torch.tensor([1.0, 0, 1, 1]).unsqueeze(1)):
        value = infonce_loss(image, text, match, logit_scale=1.7, distance=distance).total
        assert value.item() == pytest.approx(references.infonce(pairs.tolist(), match.tolist(), 1.7), rel=1e-12)


def test_infonce_of_one_hot_unit_means_is_that_of_clip():
    image, text = batch(5, 5)
    image, text = (GaussianEmbedding.point(torch.nn.functional.normalize(e.mean, dim=1)) for e in (image, text))
    logits = 2 * 3.0 * image.mean @ text.mean.T
    truth = torch.arange(5)
    clip = (torch.nn.functional.cross_entropy(logits, truth) + torch.nn.functional.cross_entropy(logits.T, truth)) / 2
    torch.testing.assert_close(infonce_loss(image, text, torch.eye(5), logit_scale=3.0).total, clip)


@pytest.mark.parametrize("mining", ["hardest", "sum", "semi-hard"])
@pytest.mark.parametrize("margin", [0.2, 1.0, 3.0])
def test_triplet_is_the_loops(mining, margin):
    image, text = batch()
    distance = squared_l2_matrix(image, text).tolist()
    value = triplet_loss(image, text, MATCH, margin=margin, mining=mining).total
    assert value.item() == pytest.approx(references.triplet(distance, MATCH.tolist(), margin, mining), rel=1e-12)


def test_triplet_sums_first_and_mines_later():
    loss = TripletLoss(sum_epochs=1)
    image, text = batch(dtype=torch.float32)
    expected = [triplet_loss(image, text, MATCH, mining=m, margin=0.4).total for m in ("sum", "hardest")]
    torch.testing.assert_close(loss(image, text, MATCH, epoch=0).total, expected[0])
    torch.testing.assert_close(loss(image, text, MATCH, epoch=1).total, expected[1])
    with pytest.raises(ValueError, match="unknown mining 'hard'; known: hardest, sum, semi-hard"):
        triplet_loss(image, text, MATCH, mining="hard")


def test_triplet_of_a_collapsed_model_is_twice_the_margin():
    """The fixed point that users report: every loss at 2 * margin."""
    e = GaussianEmbedding.point(torch.ones(4, 3))
    output = triplet_loss(e, e, torch.eye(4), margin=0.4)
    assert output.total.item() == pytest.approx(0.8) and output.stats["active"] == 1


def test_match_loss_does_not_hold_a_cube():
    image, text = batch(64, 64, 256, dtype=torch.float32)
    mean = image.mean.requires_grad_()
    with LargestTensor() as largest:
        pcmepp_loss(
            GaussianEmbedding(mean, image.log_var), text, torch.eye(64), logit_scale=5.0, logit_bias=5.0
        ).total.backward()
    assert math.prod(mean.shape) <= largest.numel <= 64 * 256 * 2
