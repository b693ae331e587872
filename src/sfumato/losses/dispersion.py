"""The dispersion of an item's matches, and the scoring rule that fits a total variance to it."""

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.gaussian import accumulation_dtype


def match_dispersion(
    partners: Tensor, item: Tensor, partner: Tensor, n_items: int, *, whiten: bool = True, shrinkage: float = 0.01
) -> tuple[Tensor, Tensor]:
    r"""The dispersion of each item's matches: the mean of 1 - cosine over all pairs of its matches.

        w = W (partners - their mean), scaled to unit length
        dispersion = 1 - ||mean of w over an item's matches||^2

    The pairs include each match with itself. So a single match has a dispersion of 0, k orthogonal matches have 1 -
    1/k, and copies of one match do not increase it. Whitening, W = covariance^(-1/2), makes unrelated items orthogonal.
    Without whitening, many near-duplicates count as little more than one match.

    partners (n, d), item (p,), partner (p,) -> (m,).
    """
    if partners.ndim != 2 or item.shape != partner.shape or item.ndim != 1:
        raise ValueError(
            f"match_dispersion: partners must be (n, d), item and partner (p,); got {tuple(partners.shape)},"
            f" {tuple(item.shape)} and {tuple(partner.shape)}"
        )
    if shrinkage < 0:
        raise ValueError(f"match_dispersion: shrinkage must not be negative, got {shrinkage}")
    w = partners.detach().to(accumulation_dtype(partners.dtype))
    if whiten:
        w = w - w.mean(0)
        value, vector = torch.linalg.eigh(w.T @ w / len(w))
        value = value.clamp(min=0) + shrinkage * value.clamp(min=0).mean()
        w = w @ vector / value.clamp(min=torch.finfo(w.dtype).tiny).sqrt()
    w = functional.normalize(w, dim=1)
    count = torch.bincount(item, minlength=n_items)
    centre = w.new_zeros(n_items, w.shape[1]).index_add_(0, item, w[partner]) / count.clamp(min=1)[:, None]
    dispersion = (1 - centre.square().sum(1)).clamp(min=0)
    return torch.where(count > 0, dispersion, 0), count


def dispersion_loss(log_var: Tensor, dispersion: Tensor, *, floor: float = 0.02) -> Tensor:
    r"""A proper scoring rule of the total variance, minimal if every log_var is log((dispersion + floor) / d).

        mean over items and dimensions of [ (dispersion + floor) / (d var) + log_var ] / 2

    Apart from a constant it is the negative log-likelihood of an item's matches under a Gaussian around their own
    centre with the same variance in every dimension.

    log_var (n, d), dispersion (n,).
    """
    if log_var.ndim != 2 or dispersion.shape != log_var.shape[:1]:
        raise ValueError(
            "dispersion_loss: log_var must be (n, d) and dispersion (n,), got"
            f" {tuple(log_var.shape)} and {tuple(dispersion.shape)}"
        )
    if not floor > 0:
        raise ValueError(
            f"dispersion_loss: floor must be positive, got {floor}; the best variance of a single match would be 0"
        )
    wanted = (dispersion + floor)[:, None] / log_var.shape[1]
    return (wanted * (-log_var).exp() + log_var).mean() / 2
