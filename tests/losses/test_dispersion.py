"""The dispersion of matches against loops, its invariances, and the scoring rule against torch's own likelihood."""

import math

import pytest
import torch
from support import references
from torch.distributions import Independent, Normal

from sfumato.training.validation import dispersion_loss, match_dispersion

ITEM, PARTNER = torch.tensor([3, 0, 1, 0, 3, 1, 0, 3]), torch.tensor([6, 2, 0, 5, 1, 4, 0, 2])


def partners(n=7, d=5, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


def test_dispersion_is_the_loops_and_whitened_it_does_not_depend_on_axes_or_scales():
    x = partners()
    dispersion, count = match_dispersion(x, ITEM, PARTNER, 5, whiten=False)
    own = [[x[j].tolist() for i, j in zip(ITEM, PARTNER, strict=True) if i == k] for k in range(5)]
    expected = [*map(references.match_dispersion, own)]
    assert dispersion.tolist() == pytest.approx(expected, rel=1e-12) and count.tolist() == [3, 2, 0, 3, 0]
    assert dispersion[2] == dispersion[4] == 0
    x = partners(40)
    change = partners(5, 5, seed=1) @ torch.diag(torch.tensor([1.0, 20.0, 0.1, 3.0, 1.0], dtype=torch.float64))
    item, partner = torch.arange(40) // 5, torch.arange(40).flip(0)
    whitened, moved = (match_dispersion(y, item, partner, 8, shrinkage=1e-12)[0] for y in (x, x @ change + 2))
    torch.testing.assert_close(whitened, moved, rtol=1e-5, atol=1e-5)
    plain, moved = (match_dispersion(y, item, partner, 8, whiten=False)[0] for y in (x, x @ change + 2))
    assert (plain - moved).abs().max() > 0.1
    crowd = torch.eye(8, dtype=torch.float64) + 10
    item, partner = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    assert match_dispersion(crowd, item, partner, 1, whiten=False)[0] < 0.01
    assert match_dispersion(crowd, item, partner, 1)[0] > 1 - 1 / 4
    # Fewer partners than dimensions, in half precision.
    dispersion, _ = match_dispersion(partners(7, 20).half(), ITEM, PARTNER, 4)
    assert dispersion.dtype == torch.float32 and dispersion.isfinite().all() and (dispersion[[0, 1, 3]] > 0.1).all()


def test_the_loss_is_the_likelihood_of_the_matches_and_least_at_their_dispersion():
    x = torch.nn.functional.normalize(partners(), dim=1)
    dispersion, count = match_dispersion(x, ITEM, PARTNER, 4, whiten=False)
    kept = count > 0

    def loss(shift):
        log_var = ((dispersion + 0.1) / 5).log()[:, None].expand(-1, 5) + shift
        return dispersion_loss(log_var[kept], dispersion[kept], floor=0.1)

    def negative_log_likelihood(shift):
        values = []
        for k in torch.arange(4)[kept]:
            own = x[PARTNER[k == ITEM]]
            deviation = ((dispersion[k] + 0.1) / 5 * math.exp(shift)).sqrt().expand(5)
            per_match = -Independent(Normal(own.mean(0), deviation), 1).log_prob(own).mean()
            values.append((per_match - 5 * math.log(2 * math.pi) / 2) / 5 + 0.1 / 10 / deviation[0] ** 2)
        return torch.stack(values).mean()

    for shift in (-0.5, 0.0, 0.7):
        torch.testing.assert_close(loss(shift), negative_log_likelihood(shift))
    assert loss(0.0) < loss(0.02) and loss(0.0) < loss(-0.02)
    with pytest.raises(ValueError, match="floor must be positive, got 0"):
        dispersion_loss(torch.zeros(2, 5), torch.ones(2), floor=0)
