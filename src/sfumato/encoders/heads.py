"""The Gaussian head: token features in, mean and log variance out."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.encoders.features import TokenFeatures
from sfumato.encoders.pooling import POOLINGS, FirstToken, LastToken
from sfumato.gaussian import GaussianEmbedding


class _Branch(nn.Module):
    """Linear, optionally plus a two-layer network as in VSE-infinity, then pooling: (n, t, c) -> (n, d)."""

    def __init__(self, channels: int, dim: int, pooling: str, mlp: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, dim)
        self.mlp = nn.Sequential(nn.Linear(channels, dim), nn.GELU(), nn.Linear(dim, dim)) if mlp else None
        self.pool = POOLINGS[pooling]()

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        if isinstance(self.pool, FirstToken | LastToken):  # One token only: the others need no projection.
            features, mask = self.pool(features, mask).unsqueeze(1), None
        projected = self.linear(features)
        if self.mlp is not None:
            projected = projected + self.mlp(features)
        pooled: Tensor = self.pool(projected, mask)
        return pooled


class GaussianHead(nn.Module):
    r"""Two branches, each linear then pooling: one for the mean, one for the log variance.

    The log variance is neither normalised, squashed nor clamped. It starts at log(init_total_variance / d) everywhere, up to
    a hundredth of the usual random weights: the papers give no start, and with log variance 0 a total variance of d drowns
    every distance between unit means (docs/math.md has the measurements).

    Args:
        channels: c of the token features.
        dim: d of the embedding.
        pooling: name in POOLINGS, one pooling for each branch.
        mlp: add a two-layer network to the linear map of the mean.
        normalize: scale the means to unit length.
        variance: with False the head has one branch and returns points.
        variance_norm: a layer norm on the pooled log variance, its weight starting at 0.01 (an option of the released code
            that its configurations leave off).
        variance_mlp: add a two-layer network to the linear map of the log variance; it starts as small as that map.
        init_total_variance: sum of the variances at the start.

    Raises:
        ValueError: pooling is unknown, or a size or the initial variance is not positive.
    """

    def __init__(
        self,
        channels: int,
        dim: int,
        *,
        pooling: str = "gpo",
        mlp: bool = False,
        normalize: bool = True,
        variance: bool = True,
        variance_norm: bool = False,
        variance_mlp: bool = False,
        init_total_variance: float = 0.1,
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"GaussianHead: unknown pooling {pooling!r}; known: {', '.join(POOLINGS)}")
        if channels < 1 or dim < 1 or not init_total_variance > 0:
            raise ValueError(
                f"GaussianHead: channels, dim and init_total_variance must be positive, got {channels}, {dim}, {init_total_variance}"
            )
        self.normalize, self.dim = normalize, dim
        self.mean = _Branch(channels, dim, pooling, mlp)
        self.log_var = _Branch(channels, dim, pooling, variance_mlp) if variance else None
        self.log_var_norm = nn.LayerNorm(dim) if variance and variance_norm else nn.Identity()
        if self.log_var is not None:
            last = self.log_var_norm if isinstance(self.log_var_norm, nn.LayerNorm) else self.log_var.linear
            with torch.no_grad():
                last.weight.mul_(0.01)
                last.bias.fill_(math.log(init_total_variance / dim))
                if self.log_var.mlp is not None:
                    for parameter in self.log_var.mlp[-1].parameters():
                        parameter.mul_(0.01)

    def forward(self, tokens: TokenFeatures) -> GaussianEmbedding:
        """Token features -> n embeddings."""
        mean = self.mean(tokens.mean, tokens.mask)
        if self.normalize:
            mean = functional.normalize(mean, dim=-1)
        if self.log_var is None:
            return GaussianEmbedding.point(mean)
        return GaussianEmbedding(mean, self.log_variance(tokens))

    def log_variance(self, tokens: TokenFeatures) -> Tensor:
        """Token features -> (n, d) log variances, without the means.

        Raises:
            ValueError: this is a head of points.
        """
        if self.log_var is None:
            raise ValueError("GaussianHead: log_variance of a head of points (variance=False)")
        features = tokens.mean if tokens.log_var is None else tokens.log_var
        mask = tokens.mask if features.shape[1] == tokens.mean.shape[1] else None
        log_var: Tensor = self.log_var_norm(self.log_var(features, mask))
        return log_var
