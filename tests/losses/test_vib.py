"""The bottleneck against loops, and the guard around it."""

import pytest
import torch
from support import references
from support.batches import MATCH, batch

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import vib_loss
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions, pcmepp_loss


def test_vib_by_hand_and_its_guard():
    assert vib_loss(GaussianEmbedding(torch.ones(1, 4), torch.zeros(1, 4))).item() == pytest.approx(0.5)
    image, text = batch()
    assert vib_loss(image).item() == pytest.approx(references.vib(image.mean.tolist(), image.var.tolist()), rel=1e-12)
    wide = GaussianEmbedding(image.mean, torch.full_like(image.mean, 12.0))
    options = PCMEPPOptions(alpha=0, beta=1.0)
    output = PCMEPPLoss(options).double()(wide, text, MATCH)
    assert output.stats["vib_ignored"] == 1
    for same in (output, pcmepp_loss(wide, text, MATCH, options, logit_scale=1.0, logit_bias=1.0)):
        assert same.terms["vib"].item() == pytest.approx(vib_loss(text).item())


def test_vib_is_least_at_the_standard_normal_and_precise_near_it():
    assert vib_loss(GaussianEmbedding(torch.zeros(3, 4), torch.zeros(3, 4))) == 0
    near = torch.full((3, 4), 1e-3)
    assert vib_loss(GaussianEmbedding(torch.zeros(3, 4), near)).item() == pytest.approx(1e-6 / 4, rel=2e-2)


def test_a_bottleneck_that_overflows_leaves_no_nan():
    log_var = torch.tensor([[89.0, 0.0]], requires_grad=True)  # exp(89) is more than float32 holds.
    image = GaussianEmbedding(torch.zeros(1, 2), log_var)
    text = GaussianEmbedding(torch.ones(1, 2), torch.zeros(1, 2))
    match = torch.ones(1, 1)
    output = PCMEPPLoss(PCMEPPOptions(distance="squared_l2", alpha=0, beta=1.0))(image, text, match)
    output.total.backward()
    assert output.stats["vib_ignored"] == 1 and torch.isfinite(output.total)
    assert log_var.grad.tolist() == [[0.0, 0.0]]
