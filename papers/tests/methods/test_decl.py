"""DECL against numbers worked by hand, torch's Dirichlet distribution, and loops."""

import math

import pytest
import torch
from support.raising import raises
from torch.distributions import Dirichlet, kl_divergence

from papers.methods.decl import DECLLoss, DECLOptions, dynamic_hinge, evidence, evidential, flat_divergence, uncertainty
from papers.tests.methods.test_ncr import batch
from sfumato.gaussian import GaussianEmbedding


def test_evidence_and_uncertainty_of_numbers_worked_by_hand():
    found = evidence(torch.tensor([[0.0, 0.1, -9.0]]), 0.1)
    assert found[0].tolist() == pytest.approx([1, math.exp(math.tanh(1)), math.exp(-1)])
    assert float(uncertainty(found)) == pytest.approx(3 / (3 + float(found.sum())))
    assert float((found / (found + 1).sum()).sum() + uncertainty(found)) == pytest.approx(1), "belief and uncertainty"


def test_the_expected_error_is_that_of_samples():
    """sum of (y - p)^2 over draws p of the Dirichlet distribution, whose mean has no noise beyond three errors."""
    found, label = torch.tensor([[2.0, 0.5, 1.0, 0.2]], dtype=torch.float64), torch.tensor([[1.0, 0, 0, 0]])
    torch.manual_seed(0)
    draws = Dirichlet(found[0] + 1).sample((20_000,))
    errors = (label - draws).square().sum(1)
    exact = float(evidential(found, label.double(), 0.0))
    assert abs(exact - errors.mean()) < 3 * errors.std() / math.sqrt(len(errors))
    assert abs(exact - float((label - (found + 1) / (found + 1).sum()).square().sum())) > 0.05, "not of the mean alone"


def test_the_divergence_is_torchs_and_spares_the_true_items():
    alpha = torch.tensor([[1.5, 2.0, 1.1], [1.0, 1.0, 1.0]], dtype=torch.float64)
    flat = Dirichlet(torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(flat_divergence(alpha), kl_divergence(Dirichlet(alpha), flat))
    found, label = alpha[:1] - 1, torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    beside = evidential(found, label, 1.0) - evidential(found, label, 0.0)
    spared = torch.tensor([[1.5, 1.0, 1.1]], dtype=torch.float64)
    torch.testing.assert_close(beside, flat_divergence(spared) / 3)


@pytest.mark.parametrize("hardness, k", [(0.0, 6), (0.5, 3), (1.0, 1)])
def test_the_hinge_turns_from_all_negatives_to_the_hardest(hardness, k):
    image, text, match = batch()
    s = image.mean @ text.mean.T
    expected = []
    for i, t in match.nonzero().tolist():
        hinges = sorted(max(0.0, 0.2 - float(s[i, t] - s[i, j])) for j in range(7) if match[i, j] == 0)
        hinges = [0.0] * (6 - len(hinges)) + hinges  # Another true text is no negative.
        expected.append(sum(hinges[-k:]) / k)
    assert dynamic_hinge(s, match, 0.2, hardness).tolist() == pytest.approx(expected)


def test_the_loss_is_the_sum_of_both_directions_and_goes_by_the_epoch():
    image, text, match = batch()
    options = DECLOptions(annealing_epochs=4, hard_epochs=2, hinge_weight=0.7)
    s = 1 - torch.cdist(image.mean, text.mean).square() / 2
    torch.testing.assert_close(s, image.mean @ text.mean.T)
    rows = match.T.sum(1) > 0  # The last text has no image and does not count.
    assert rows.tolist() == [True] * 6 + [False]
    for epoch, annealing, hardness in ((0, 0.0, 0.0), (1, 0.25, 0.5), (9, 1.0, 1.0), (None, 1.0, 1.0)):
        found = DECLLoss(options)(image, text, match, epoch=epoch)
        sides = (s, match), (s.T[rows], match.T[rows])
        for name, (x, y) in zip(("i2t", "t2i"), sides, strict=True):
            torch.testing.assert_close(
                found.terms[f"evidential_{name}"], evidential(evidence(x, 0.1), y, annealing).mean() / 2
            )
            torch.testing.assert_close(
                found.terms[f"hinge_{name}"], 0.7 * dynamic_hinge(x, y, 0.2, hardness).mean() / 2
            )
        torch.testing.assert_close(found.total, torch.stack(list(found.terms.values())).sum())
    raises(ValueError, "no pair of the batch", DECLLoss(), image, text, match * 0)


def test_gradients_are_those_of_differences():
    image, text, match = batch()

    def total(x, y):
        return DECLLoss()(GaussianEmbedding.point(x), GaussianEmbedding.point(y), match, epoch=3).total

    x, y = image.mean.clone().requires_grad_(), text.mean.clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (x, y), atol=1e-4)
