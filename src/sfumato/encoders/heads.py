"""The Gaussian head: token features in, mean and log variance out."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.encoders.features import TokenFeatures
from sfumato.encoders.pooling import POOLINGS, FirstToken, LastToken
from sfumato.gaussian import GaussianEmbedding

Covariance = Literal["ellipsoidal", "spherical-average", "spherical-one"]


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


class _LocalAttention(nn.Module):
    """K weighted means of the tokens, each mapped, and squashed if so asked: (n, t, c) -> (n, K, d), in (0, 1) then."""

    def __init__(self, channels: int, dim: int, embeddings: int, *, squash: bool) -> None:
        super().__init__()
        self.squash = squash
        hidden = max(1, channels // 2)
        self.attention = nn.Sequential(
            nn.Linear(channels, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, embeddings, bias=False)
        )
        self.linear = nn.Linear(channels, dim)

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        scores = self.attention(features)  # (n, t, K)
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        local: Tensor = self.linear(scores.softmax(1).transpose(1, 2) @ features)
        return local.sigmoid() if self.squash else local


class _LogBounds:
    """Log variances pressed into the open interval between two logarithms; slope 1 in its middle."""

    def __init__(self, lowest: float, highest: float) -> None:
        if not 0 < lowest < highest:
            raise ValueError(f"GaussianHead: variance_bounds must be 0 < lowest < highest, got {lowest}, {highest}")
        self.lowest, self.highest = lowest, highest
        self.middle, self.half = math.log(lowest * highest) / 2, math.log(highest / lowest) / 2

    def __call__(self, x: Tensor) -> Tensor:
        return self.middle + self.half * ((x - self.middle) / self.half).tanh()

    def inverse(self, log_var: float) -> float:
        """What is pressed to log_var."""
        if not self.lowest < math.exp(log_var) < self.highest:
            raise ValueError(
                f"GaussianHead: init_total_variance makes a variance of {math.exp(log_var):.4g} a dimension, outside of"
                f" variance_bounds ({self.lowest:g}, {self.highest:g}); d times a variance between them fits"
            )
        return self.middle + self.half * math.atanh((log_var - self.middle) / self.half)


class GaussianHead(nn.Module):
    r"""Two branches, each linear then pooling, and local attention if wanted: one for the mean, one for the log variance.

    The log variance is neither normalised, squashed nor clamped, unless variance_bounds says so. It starts at log(init_total_variance / d) everywhere, up to
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
        covariance: "ellipsoidal", a variance for each dimension; or one of an embedding for all its dimensions, which is the
            average of those ("spherical-average") or the only output of the branch ("spherical-one").
        embeddings: K of d dimensions for each item, side by side in a mean of K d dimensions, for points only. Above 1, local
            attention as in PVSE adds to the pooled vector that all share, and a layer norm follows; see
            :func:`~sfumato.distances.nearest_matrix` for the distance.
        local_attention: the same for one embedding, as in PCME: mean = norm(pooled + sigmoid(linear(attended))), scaled to unit
            length with ``normalize``, and log variance = pooled + linear(attended), with an attention of its own, neither
            squashed nor normalised.
        local_channels: width of the features for local attention, where an encoder gives some of their own; c if None.
        variance_bounds: lowest and highest variance of a dimension, approached by a tanh of the log variance, whose gradient
            never is 0 as a clamp's would be; None for none.

    Raises:
        ValueError: pooling or covariance is unknown, a size or the initial variance is not positive, or the initial variance of a
            dimension does not lie between the bounds; or several embeddings are to have variances.

    Papers: Song and Soleymani, "Polysemous Visual-Semantic Embedding", CVPR 2019; Chun et al., "PCME", CVPR 2021, section 3.2.
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
        covariance: Covariance = "ellipsoidal",
        variance_bounds: tuple[float, float] | None = None,
        embeddings: int = 1,
        local_attention: bool = False,
        local_channels: int | None = None,
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"GaussianHead: unknown pooling {pooling!r}; known: {', '.join(POOLINGS)}")
        if channels < 1 or dim < 1 or not init_total_variance > 0:
            raise ValueError(
                f"GaussianHead: channels, dim and init_total_variance must be positive, got {channels}, {dim}, {init_total_variance}"
            )
        if covariance not in get_args(Covariance):
            raise ValueError(
                f"GaussianHead: unknown covariance {covariance!r}; known: {', '.join(get_args(Covariance))}"
            )
        if embeddings < 1 or (embeddings > 1 and variance):
            raise ValueError(
                f"GaussianHead: embeddings must be 1, or more with variance=False; got {embeddings}, {variance=}"
            )
        self.normalize, self.dim, self.covariance = normalize, dim, covariance
        attends, of_local = local_attention or embeddings > 1, local_channels or channels
        self.local = _LocalAttention(of_local, dim, embeddings, squash=True) if attends else None
        self.local_norm = nn.LayerNorm(dim) if attends else nn.Identity()
        self.bounds = None if variance_bounds is None else _LogBounds(*variance_bounds)
        self.mean = _Branch(channels, dim, pooling, mlp)
        outputs = 1 if covariance == "spherical-one" else dim
        self.log_var = _Branch(channels, outputs, pooling, variance_mlp) if variance else None
        self.log_var_local = _LocalAttention(of_local, outputs, 1, squash=False) if variance and attends else None
        self.log_var_norm = nn.LayerNorm(outputs) if variance and variance_norm else nn.Identity()
        if self.log_var is not None:
            last = self.log_var_norm if isinstance(self.log_var_norm, nn.LayerNorm) else self.log_var.linear
            start = math.log(init_total_variance / dim)
            with torch.no_grad():
                last.weight.mul_(0.01)
                last.bias.fill_(start if self.bounds is None else self.bounds.inverse(start))
                beside = [] if self.log_var.mlp is None else [self.log_var.mlp[-1]]
                beside += [] if self.log_var_local is None else [self.log_var_local.linear]
                for parameter in (p for module in beside for p in module.parameters()):
                    parameter.mul_(0.01)

    def forward(self, tokens: TokenFeatures) -> GaussianEmbedding:
        """Token features -> n embeddings."""
        mean = self.mean(tokens.mean, tokens.mask)
        if self.local is not None:
            mean = self.local_norm(mean.unsqueeze(1) + self.local(*_attended(tokens, tokens.mean, tokens.mask)))
        if self.normalize:
            mean = functional.normalize(mean, dim=-1)
        mean = mean.flatten(1)
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
        features, mask = tokens.for_log_var()
        log_var: Tensor = self.log_var(features, mask)
        if self.log_var_local is not None:
            log_var = log_var + self.log_var_local(*_attended(tokens, features, mask)).squeeze(1)
        log_var = self.log_var_norm(log_var)
        if self.bounds is not None:
            log_var = self.bounds(log_var)
        if self.covariance == "spherical-average":
            log_var = log_var.logsumexp(-1, keepdim=True) - math.log(self.dim)
        return log_var.expand(-1, self.dim)


def _attended(tokens: TokenFeatures, features: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What local attention looks at, and its mask: the features that are there for it, else these."""
    return (features, mask) if tokens.local is None else (tokens.local, tokens.local_mask)
