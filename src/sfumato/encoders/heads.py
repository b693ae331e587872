"""From token features to one vector: generalised pooling, average, maximum, and one chosen token."""

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sfumato.encoders.features import TokenFeatures
from sfumato.gaussian import GaussianEmbedding


class Pooling(nn.Module, ABC):
    """(n, t, c) token features and their (n, t) mask -> (n, c); masked tokens have no influence."""

    @abstractmethod
    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool the tokens of each item.

        Args:
            features: (n, t, c).
            mask: (n, t) bool, True where there is a token; every item needs one. None means all.

        Returns:
            (n, c) pooled features.
        """


class AveragePool(Pooling):
    """The mean over an item's tokens (the released PCME++ code has a sum under this name)."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :class:`Pooling`."""
        if mask is None:
            return features.mean(1)
        weights = mask.to(features.dtype).unsqueeze(-1)
        return (features * weights).sum(1) / weights.sum(1)


class MaxPool(Pooling):
    """The largest value of each channel over an item's tokens."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :class:`Pooling`."""
        if mask is not None:
            features = features.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return features.amax(1)


class FirstToken(Pooling):
    """The first token: a ViT's or BERT's class token."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :class:`Pooling`."""
        return features[:, 0]


class LastToken(Pooling):
    """An item's last token: the end-of-text token of CLIP's text transformer."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :class:`Pooling`."""
        if mask is None:
            return features[:, -1]
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, positions, -1).amax(1)
        return features[torch.arange(len(features), device=features.device), last]


class GPO(Pooling):
    r"""Generalised pooling operator: a learned weight for the k-th largest value of each channel.

        pooled_c = sum_k weight_k * (k-th largest of channel c over the tokens)

    The weights come from a bidirectional GRU over sinusoidal codes of the positions 0..t-1, averaged over its two
    directions, a linear layer, and a softmax with temperature 0.1. They depend on the number of tokens only, so the GRU runs
    once for each number that occurs in the batch. Average and maximum pooling are special cases.

    Args:
        d_pe: width of the position codes.
        d_hidden: width of the GRU.
        temperature: of the softmax over positions.

    Paper: Chen et al., "Learning the Best Pooling Strategy for Visual Semantic Embedding", CVPR 2021. Parameter names are
    those of the released code.
    """

    def __init__(self, d_pe: int = 32, d_hidden: int = 32, temperature: float = 0.1) -> None:
        super().__init__()
        self.d_pe, self.temperature = d_pe, temperature
        self.gru = nn.GRU(d_pe, d_hidden, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(d_hidden, 1, bias=False)

    def weights(self, lengths: Tensor) -> Tensor:
        """(u,) numbers of tokens >= 1 -> (u, max) weights that sum to 1, 0 beyond each number."""
        codes = _position_codes(int(lengths.max()), self.d_pe).to(self.linear.weight)
        packed = pack_padded_sequence(
            codes.expand(len(lengths), -1, -1), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        scores = self.linear(hidden.unflatten(-1, (2, -1)).mean(-2)).squeeze(-1)
        beyond = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(1)
        weights: Tensor = (scores / self.temperature).masked_fill(beyond, -torch.inf).softmax(1)
        return weights

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :class:`Pooling`."""
        n, t, _ = features.shape
        channels_first = features.transpose(1, 2).contiguous()
        if mask is None:
            weights = self.weights(torch.tensor([t], device=features.device)).expand(n, -1)
        else:
            counts = mask.sum(1)
            if not counts.all():
                raise ValueError(
                    f"GPO: item {int((counts == 0).nonzero()[0])} has no token; every row of the mask needs one True"
                )
            lengths, which = counts.unique(return_inverse=True)
            weights = self.weights(lengths)[which]
            channels_first = channels_first.masked_fill(~mask.unsqueeze(1), -torch.inf)
        largest = _descending(channels_first)[..., : weights.shape[1]]
        largest = largest.masked_fill((weights == 0).unsqueeze(1) & largest.isneginf(), 0)
        return (largest @ weights.unsqueeze(-1)).squeeze(-1)


def _descending(values: Tensor) -> Tensor:
    """Sorted along the last axis, largest first."""
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        return values.sort(dim=-1, descending=True).values
    # On a CPU, numpy finds the order six times faster.
    order = np.argsort(values.detach().neg().numpy(), axis=-1)
    return values.gather(-1, torch.from_numpy(order))


def _position_codes(length: int, width: int) -> Tensor:
    """(length, width) sinusoidal codes: sine in the even channels, cosine in the odd ones."""
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angle = torch.arange(length).unsqueeze(1) * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


POOLINGS: dict[str, type[Pooling]] = {
    "gpo": GPO,
    "average": AveragePool,
    "max": MaxPool,
    "first": FirstToken,
    "last": LastToken,
}
"""Every pooling by the name that recipes use; "first" and "last" are the class token of images and of CLIP's texts."""

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
    every distance between unit means (docs/concepts/encoders.md has the measurements).

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
