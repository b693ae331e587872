"""InfoNCE against slow loops and the loss of CLIP."""

import pytest
import torch
from support import references
from support.batches import MATCH, batch

from sfumato.distances import DISTANCES
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.contrastive import InfoNCELoss, InfoNCEOptions, infonce_loss


@pytest.mark.parametrize("distance", ["squared_l2", "csd", "bhattacharyya"])
def test_infonce_is_the_loops(distance):
    image, text = batch()
    pairs = DISTANCES[distance].matrix(image, text)
    for match in (MATCH, MATCH * torch.tensor([1.0, 0, 1, 1]).unsqueeze(1)):
        value = infonce_loss(image, text, match, InfoNCEOptions(distance=distance), logit_scale=1.7).total
        assert value.item() == pytest.approx(references.infonce(pairs.tolist(), match.tolist(), 1.7), rel=1e-12)


def test_infonce_of_one_hot_unit_means_is_that_of_clip():
    image, text = batch(5, 5)
    image, text = (GaussianEmbedding.point(torch.nn.functional.normalize(e.mean, dim=1)) for e in (image, text))
    logits = 2 * 3.0 * image.mean @ text.mean.T
    ground_truth = torch.arange(5)
    rows, columns = (torch.nn.functional.cross_entropy(x, ground_truth) for x in (logits, logits.T))
    found = infonce_loss(image, text, torch.eye(5), logit_scale=3.0).total
    torch.testing.assert_close(found, (rows + columns) / 2)


def test_infonce_learns_its_scale_and_has_no_bias():
    loss = InfoNCELoss(InfoNCEOptions(logit_scale=2.0))
    loss(*batch(dtype=torch.float32), MATCH).total.backward()
    assert loss.logits.log_logit_scale.grad.abs() > 0 and not loss.logits.logit_bias.requires_grad
    assert loss.logits.logit_scale.item() == pytest.approx(2.0)


@pytest.mark.parametrize("free", [True, False])
def test_only_a_free_scale_moves_as_the_released_temperature(free):
    """The released code learns tau in softmax(tau * cos); tau is twice our scale, so half its learning rate is ours."""
    image, other = (e.mean for e in batch(5, 5, dtype=torch.float32))
    pair = (image, image + other / 5)
    image, text = (GaussianEmbedding.point(torch.nn.functional.normalize(mean, dim=1)) for mean in pair)
    tau = torch.nn.Parameter(torch.ones(()))
    loss = InfoNCELoss(InfoNCEOptions(logit_scale=0.5, free_scale=free))
    theirs = torch.optim.Adam([tau], lr=0.1, eps=1e-12)
    ours = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], lr=0.05, eps=1e-12)
    ground_truth = torch.arange(5)
    for _ in range(20):
        logits = tau * image.mean @ text.mean.T
        rows, columns = (torch.nn.functional.cross_entropy(x, ground_truth) for x in (logits, logits.T))
        for optimiser, total in ((theirs, (rows + columns) / 2), (ours, loss(image, text, torch.eye(5)).total)):
            optimiser.zero_grad()
            total.backward()
            optimiser.step()
    assert abs(tau.item() - 1) > 0.5
    assert (2 * loss.logits.logit_scale.item() == pytest.approx(tau.item(), abs=1e-4)) == free
