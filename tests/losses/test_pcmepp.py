"""PCME++ and the bottleneck against slow loops, pseudo-positives by hand, and what its parts must do."""

import pytest
import torch
from support import references
from support.batches import MATCH, batch

from sfumato import DISTANCES, GaussianEmbedding
from sfumato.losses.base import vib_loss
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions, pcmepp_loss, pseudo_positives
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
    options = PCMEPPOptions(distance=distance, alpha=0.3, beta=0.2)
    output = pcmepp_loss(image, text, MATCH, options, logit_scale=1.5, logit_bias=2.5)
    expected = {"pseudo_positive": 0.3 * (i2t + t2i), "vib": 0.2 * sum(vib)}
    expected["match"] = 2 * references.mean_cross_entropy(logits, labels)
    for name, value in expected.items():
        assert output.terms[name].item() == pytest.approx(value, rel=1e-12)
    assert output.total.item() == pytest.approx(sum(expected.values()), rel=1e-12)
    stats = PCMEPPLoss(PCMEPPOptions(distance=distance)).double()(image, text, MATCH).stats
    assert stats["pseudo_positives_t2i"] == sum(
        a > b for x, y in zip(columns, references.transpose(labels), strict=True) for a, b in zip(x, y, strict=True)
    )


def test_terms_left_out_pseudo_positives_by_hand_and_a_scale_that_never_turns():
    image, text = batch(dtype=torch.float32)
    full = PCMEPPLoss()(image, text, MATCH)
    assert set(full.terms) == {"match", "pseudo_positive", "vib"}
    assert full.stats["pseudo_positives_i2t"] > 0 and full.stats["pseudo_positives_t2i"] > 0
    points = GaussianEmbedding.point(image.mean), GaussianEmbedding.point(text.mean)
    bare = PCMEPPLoss(PCMEPPOptions(alpha=0, beta=0))(*points, MATCH)
    assert set(bare.terms) == {"match"} and torch.isfinite(bare.total)
    late = PCMEPPLoss(PCMEPPOptions(pseudo_positives_from=3))
    assert "pseudo_positive" not in late(image, text, MATCH, epoch=2).terms
    assert "pseudo_positive" in late(image, text, MATCH, epoch=3).terms
    assert "pseudo_positive" in late(image, text, MATCH).terms
    distance = torch.tensor([[3.0, 1.0, 3.0, 5.0], [2.0, 2.5, 0.5, 0.4]])
    match = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.7, 0.3, 0.0]])
    assert pseudo_positives(distance, 0 * match).eq(0).all(), "rows without a match"
    # Row 0: the truth lies at 3; column 1 is closer, column 2 ties. Row 1: the truth lies at 2.5; all are closer.
    assert pseudo_positives(distance, match).tolist() == [[1.0, 1.0, 1.0, 0.0], pytest.approx([0.7, 0.7, 0.7, 0.7])]
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


def test_vib_by_hand_its_guard_and_its_overflow():
    assert vib_loss(GaussianEmbedding(torch.ones(1, 4), torch.zeros(1, 4))).item() == pytest.approx(0.5)
    zeros = torch.zeros(3, 4)
    assert vib_loss(GaussianEmbedding(zeros, zeros)) == 0
    assert vib_loss(GaussianEmbedding(zeros, zeros + 1e-3)).item() == pytest.approx(1e-6 / 4, rel=2e-2)
    image, text = batch()
    assert vib_loss(image).item() == pytest.approx(references.vib(image.mean.tolist(), image.var.tolist()), rel=1e-12)
    wide = GaussianEmbedding(image.mean, torch.full_like(image.mean, 12.0))
    options = PCMEPPOptions(alpha=0, beta=1.0)
    output = PCMEPPLoss(options).double()(wide, text, MATCH)
    assert output.stats["vib_ignored"] == 1
    for same in (output, pcmepp_loss(wide, text, MATCH, options, logit_scale=1.0, logit_bias=1.0)):
        assert same.terms["vib"].item() == pytest.approx(vib_loss(text).item())
    log_var = torch.tensor([[89.0, 0.0]], requires_grad=True)  # exp(89) is more than float32 holds.
    image = GaussianEmbedding(torch.zeros(1, 2), log_var)
    text = GaussianEmbedding(torch.ones(1, 2), torch.zeros(1, 2))
    match = torch.ones(1, 1)
    output = PCMEPPLoss(PCMEPPOptions(distance="squared_l2", alpha=0, beta=1.0))(image, text, match)
    output.total.backward()
    assert output.stats["vib_ignored"] == 1 and torch.isfinite(output.total)
    assert log_var.grad.tolist() == [[0.0, 0.0]]
