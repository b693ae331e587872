"""Gaussian heads: pooling of token features to one vector, and the branches of mean and log variance."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sfumato.gaussian import GaussianEmbedding


@dataclass(frozen=True)
class TokenFeatures:
    """The token features of a batch: the output of an encoder and the input of a Gaussian head."""

    mean: Tensor  # (n, t, c) token features for the mean
    mask: Tensor | None = None  # (n, t) bool, True where there is a token; None for all
    log_var: Tensor | None = None
    local: Tensor | None = None
    local_mask: Tensor | None = None  # (n, s) bool, True where there is a feature; None for all

    def float(self) -> "TokenFeatures":
        """The same features in float32, or in float64 if they are in float64."""
        parts = {"mean": self.mean, "log_var": self.log_var, "local": self.local}
        float32 = {k: v.to(torch.promote_types(v.dtype, torch.float32)) for k, v in parts.items() if v is not None}
        return replace(self, **float32)

    def for_log_var(self) -> tuple[Tensor, Tensor | None]:
        """The features for the log variance. Returns (n, t, c)."""
        features = self.mean if self.log_var is None else self.log_var
        return features, self.mask if features.shape[1] == self.mean.shape[1] else None


def padded(rows: Tensor, mask: Tensor) -> Tensor:
    """Put the rows of present tokens at their places. rows (k, c), mask (n, t) -> (n, t, c)."""
    return rows.new_zeros(*mask.shape, rows.shape[-1]).index_put((mask,), rows)


class Pooling(nn.Module, ABC):
    """(n, t, c) token features and their (n, t) mask -> (n, c); masked tokens have no influence."""

    @abstractmethod
    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool the tokens of each item. features (n, t, c), mask (n, t) -> (n, c)."""


class AveragePool(Pooling):
    """The mean over an item's tokens (the released PCME++ code has a sum under this name)."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return features.mean(1)
        weights = mask.to(features.dtype).unsqueeze(-1)
        return (features * weights).sum(1) / weights.sum(1)


class MaxPool(Pooling):
    """The largest value of each channel over an item's tokens."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            features = features.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return features.amax(1)


class FirstToken(Pooling):
    """The first token: a ViT's or BERT's class token."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return features[:, 0]


class LastToken(Pooling):
    """An item's last token: the end-of-text token of CLIP's text transformer."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return features[:, -1]
        last = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1).amax(1)
        return features[torch.arange(features.shape[0], device=features.device), last]


class GPO(Pooling):
    r"""Generalised pooling operator: a learned weight for the k-th largest value of each channel.

        pooled_c = sum_k weight_k * (k-th largest of channel c over the tokens)

    The weights come from a bidirectional GRU over sinusoidal codes of the positions 0..t-1, averaged over its two
    directions, a linear layer, and a softmax with temperature 0.1. They depend only on the number of tokens, so the GRU
    runs once for each number that occurs in the batch. Average and maximum pooling are special cases.

    Paper: Chen et al., "Learning the Best Pooling Strategy for Visual Semantic Embedding", CVPR 2021. Parameter names
    are those of the released code.
    """

    def __init__(self, d_pe: int = 32, d_hidden: int = 32, temperature: float = 0.1) -> None:
        super().__init__()
        self.d_pe, self.temperature = d_pe, temperature
        self.gru = nn.GRU(d_pe, d_hidden, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(d_hidden, 1, bias=False)

    def weights(self, lengths: Tensor) -> Tensor:
        """The weights of the sorted values. lengths (u,) -> (u, max)."""
        codes = _position_codes(int(lengths.max()), self.d_pe).to(self.linear.weight)
        inputs, sizes = codes.expand(len(lengths), -1, -1), lengths.cpu()
        packed = pack_padded_sequence(inputs, sizes, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        scores = self.linear(hidden.unflatten(-1, (2, -1)).mean(-2)).squeeze(-1)
        beyond = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(1)
        return (scores / self.temperature).masked_fill(beyond, -torch.inf).softmax(1)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        n, t, _ = features.shape
        if t == 1 and mask is None:  # The only weight is 1.
            return features[:, 0]
        channels_first = features.transpose(1, 2).contiguous()
        if mask is None:
            weights = self.weights(torch.tensor([t], device=features.device)).expand(n, -1)
        else:
            counts = mask.sum(1)
            if not counts.all():
                item = int((counts == 0).nonzero()[0])
                raise ValueError(f"GPO: item {item} has no token; every row of the mask needs one True")
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
    # On a CPU, numpy sorts six times faster than torch.
    return values.gather(-1, torch.from_numpy(np.argsort(values.detach().neg().numpy(), axis=-1)))


def _position_codes(length: int, width: int) -> Tensor:
    """(length, width) sinusoidal codes: sine in the even channels, cosine in the odd ones."""
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angle = torch.arange(length).unsqueeze(1) * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


POOLINGS: dict[str, type[Pooling]] = {
    "gpo": GPO, "average": AveragePool, "max": MaxPool, "first": FirstToken, "last": LastToken,
}  # fmt: skip
"""Every pooling by its name in recipes. "first" is the class token of images, "last" the end token of CLIP's texts."""

Covariance = Literal["ellipsoidal", "spherical-average", "spherical-one"]


class _Branch(nn.Module):
    """Linear, optionally plus a two-layer network as in VSE-infinity, then pooling: (n, t, c) -> (n, d)."""

    def __init__(self, channels: int, dim: int, pooling: str, mlp: bool, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, dim)
        self.mlp = nn.Sequential(nn.Linear(channels, width), nn.GELU(), nn.Linear(width, dim)) if mlp else None
        self.pool = POOLINGS[pooling]()

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        if isinstance(self.pool, FirstToken | LastToken):  # One token only: the others need no projection.
            features, mask = self.pool(features, mask).unsqueeze(1), None
        present = features if mask is None else features[mask]
        # The bias is added in float32: log variances differ by less than bfloat16 resolves at their common value.
        projected = functional.linear(present, self.linear.weight).to(present.dtype) + self.linear.bias
        if self.mlp is not None:
            projected = projected + self.mlp(present)
        with torch.autocast(features.device.type, enabled=False):
            pooled: Tensor = self.pool(projected if mask is None else padded(projected, mask), mask)
        return pooled


class _LocalAttention(nn.Module):
    """K attended means of the tokens through a linear map: (n, t, c) -> (n, K, d), in (0, 1) with ``squash``."""

    def __init__(self, channels: int, dim: int, embeddings: int, *, squash: bool) -> None:
        super().__init__()
        self.squash = squash
        hidden = max(1, channels // 2)
        first, second = nn.Linear(channels, hidden, bias=False), nn.Linear(hidden, embeddings, bias=False)
        self.attention = nn.Sequential(first, nn.Tanh(), second)
        self.linear = nn.Linear(channels, dim)

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        scores = self.attention(features)  # (n, t, K)
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        local: Tensor = self.linear(scores.softmax(1).transpose(1, 2) @ features).to(features.dtype)
        return local.sigmoid() if self.squash else local


class _LogBounds:
    """Squashes log variances into the open interval between two logarithms, with slope 1 in its middle."""

    def __init__(self, lowest: float, highest: float) -> None:
        self.lowest, self.highest = lowest, highest
        self.middle, self.half = math.log(lowest * highest) / 2, math.log(highest / lowest) / 2

    def __call__(self, x: Tensor) -> Tensor:
        return self.middle + self.half * ((x - self.middle) / self.half).tanh()

    def inverse(self, log_var: float) -> float:
        """The value that is squashed to log_var."""
        if not self.lowest < math.exp(log_var) < self.highest:
            bounds = f"({self.lowest:g}, {self.highest:g})"
            raise ValueError(f"GaussianHead: a variance of {math.exp(log_var):.4g} is outside of {bounds}")
        return self.middle + self.half * math.atanh((log_var - self.middle) / self.half)


@dataclass(frozen=True)
class HeadOptions:
    """The options of a Gaussian head, by the keys of section ``model`` of a recipe, where each is described.

    For ``embeddings`` > 1 local attention as in PVSE is added to the pooled vector, which is common to all of them, and
    a layer norm follows; the mean has K d dimensions. With ``local_attention``, as in PCME, mean = norm(pooled +
    sigmoid(linear(attended))), and log variance = pooled + linear(attended), with separate attention, neither squashed
    nor normalised. A new ``variance_norm``, ``variance_mlp`` or ``variance_hidden`` starts with small weights.

    Papers: Song and Soleymani, "Polysemous Visual-Semantic Embedding", CVPR 2019; Chun et al., "PCME", CVPR 2021,
    section 3.2.
    """

    pooling: str = "gpo"
    identity: bool = False
    mlp: bool = False
    mlp_width: int = 0
    hidden: int = 0
    hidden_dropout: float = 0.5
    normalize: bool = True
    variance: bool = True
    variance_norm: bool = False
    variance_mlp: bool = False
    variance_hidden: int = 0
    item_offset: bool = False
    init_total_variance: float = 0.1
    covariance: Covariance = "ellipsoidal"
    variance_bounds: tuple[float, float] | None = None
    embeddings: int = 1
    local_attention: bool = False
    local_attention_of: Literal["both", "mean", "variance"] = "both"
    variance_sigmoid: bool = False

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"GaussianHead: unknown pooling {self.pooling!r}; known: {', '.join(POOLINGS)}")
        if self.embeddings > 1 and self.variance:
            raise ValueError(f"GaussianHead: {self.embeddings} embeddings of an item are points; set variance=False")


class GaussianHead(nn.Module):
    r"""Token features -> Gaussian embeddings, with one branch for the mean and one for the log variance.

    The log variance is neither normalised nor squashed, and clamped only by ``variance_bounds``. It starts at
    log(init_total_variance / d) in every dimension, plus the effect of random weights scaled to a hundredth of their
    usual size. Each branch is a linear map followed by pooling. The papers state no initial value; with log variance 0
    a total variance of d exceeds every distance between unit means (docs/concepts/encoders.md has the measurements).

    Under autocast the linear maps compute in its format; what they give, pooling and the embeddings have float32.

    With ``item_offset`` the embeddings have d + 2 dimensions. The mean of an image is (m, sqrt(c), 0), that of a text
    (m, 0, sqrt(c)), so that their squared distance is ||m_image - m_text||^2 + c_image + c_text: csd with the offsets
    c > 0 as total variances. Stores and searches need to know nothing of it.

    Args:
        channels: c of the token features.
        dim: d of the embedding.
        options: see :class:`HeadOptions`.
        side: whose head this is: the offsets of images and of texts have a dimension each.
        local_channels: width of the features for local attention, if an encoder has separate features for it; c if
            None.

    Raises:
        ValueError: channels or dim is not positive, or the initial variance of a dimension does not lie between the
            bounds.
    """

    def __init__(
        self,
        channels: int,
        dim: int,
        options: HeadOptions | None = None,
        *,
        side: Literal["image", "text"] = "image",
        local_channels: int | None = None,
    ) -> None:
        super().__init__()
        options = options or HeadOptions()
        if channels < 1 or dim < 1:
            raise ValueError(f"GaussianHead: channels and dim must be positive, got {channels}, {dim}")
        if options.identity and channels != dim:
            raise ValueError(f"GaussianHead: identity needs dim = channels, got dim {dim} and {channels} channels")
        self.normalize, self.covariance, self._side = options.normalize, options.covariance, side
        self.dim = dim + 2 * options.item_offset
        variance, attended = options.variance, local_channels or channels
        of_mean = options.embeddings > 1 or (options.local_attention and options.local_attention_of != "variance")
        of_variance = variance and options.local_attention and options.local_attention_of != "mean"
        self.local = _LocalAttention(attended, dim, options.embeddings, squash=True) if of_mean else None
        self.local_norm = nn.LayerNorm(dim) if of_mean else nn.Identity()
        self.bounds = None if options.variance_bounds is None else _LogBounds(*options.variance_bounds)
        self.mean: nn.Module = (
            AveragePool()
            if options.identity
            else _Branch(channels, dim, options.pooling, options.mlp, options.mlp_width or dim)
        )
        self.hidden = hidden_network(channels, dim, options.hidden, options.hidden_dropout)
        self.offset = _Branch(channels, 1, options.pooling, False, 1) if options.item_offset else None
        if self.offset is not None:
            _start_near(self.offset.linear, math.log(options.init_total_variance))
        outputs = 1 if options.covariance == "spherical-one" else self.dim
        width = options.mlp_width or outputs
        self.log_var = _Branch(channels, outputs, options.pooling, options.variance_mlp, width) if variance else None
        of_hidden = options.variance_hidden if variance else 0
        self.log_var_hidden = hidden_network(channels, outputs, of_hidden, options.hidden_dropout)
        squash = options.variance_sigmoid
        self.log_var_local = _LocalAttention(attended, outputs, 1, squash=squash) if of_variance else None
        self.log_var_norm = nn.LayerNorm(outputs) if variance and options.variance_norm else nn.Identity()
        if self.log_var is not None:
            self._start(self.log_var, math.log(options.init_total_variance / self.dim))

    @torch.no_grad()
    def _start(self, log_var: _Branch, start: float) -> None:
        """Initialise the log variances near one value."""
        last = self.log_var_norm if isinstance(self.log_var_norm, nn.LayerNorm) else log_var.linear
        _start_near(last, start if self.bounds is None else self.bounds.inverse(start))
        if last is log_var.linear and self.log_var_local is not None and self.log_var_local.squash:
            last.bias.sub_(0.5)  # The sigmoid of nearly 0, which is added.
        beside = [] if log_var.mlp is None else [log_var.mlp[-1]]
        beside += [] if self.log_var_local is None else [self.log_var_local.linear]
        beside += [] if self.log_var_hidden is None else [self.log_var_hidden[-1]]
        for parameter in (p for module in beside for p in module.parameters()):
            parameter.mul_(0.01)

    def forward(self, tokens: TokenFeatures) -> GaussianEmbedding:
        """Embed token features.

        Args:
            tokens: of n items.

        Returns:
            (n, d) embeddings, (n, d + 2) with ``item_offset``; points without ``variance``.
        """
        mean = self.mean(tokens.mean, tokens.mask)
        if self.hidden is not None:
            mean = mean + self.hidden(AveragePool()(tokens.mean, tokens.mask)).to(mean.dtype)
        if self.local is not None:
            mean = self.local_norm(mean.unsqueeze(1) + self.local(*_attended(tokens, tokens.mean, tokens.mask)))
        if self.normalize:
            mean = functional.normalize(mean, dim=-1)
        mean = mean.flatten(1)
        if self.offset is not None:
            root, none = (self.offset(tokens.mean, tokens.mask) / 2).exp(), mean.new_zeros(mean.shape[0], 1)
            mean = torch.cat([mean, *((root, none) if self._side == "image" else (none, root))], dim=1)
        if self.log_var is None:
            return GaussianEmbedding.point(mean)
        return GaussianEmbedding(mean, self.log_variance(tokens))

    def log_variance(self, tokens: TokenFeatures) -> Tensor:
        """Log variances without the means.

        Args:
            tokens: of n items.

        Returns:
            (n, d) log variances.

        Raises:
            ValueError: this is a head of points.
        """
        if self.log_var is None:
            raise ValueError("GaussianHead: log_variance needs variances, but the head was built with variance=False")
        features, mask = tokens.for_log_var()
        log_var: Tensor = self.log_var(features, mask)
        if self.log_var_hidden is not None:
            log_var = log_var + self.log_var_hidden(AveragePool()(features, mask)).to(log_var.dtype)
        if self.log_var_local is not None:
            log_var = log_var + self.log_var_local(*_attended(tokens, features, mask)).squeeze(1)
        log_var = self.log_var_norm(log_var)
        if self.bounds is not None:
            log_var = self.bounds(log_var)
        if self.covariance == "spherical-average":
            log_var = log_var.logsumexp(-1, keepdim=True) - math.log(self.dim)
        return log_var.expand(-1, self.dim)


def hidden_network(channels: int, dim: int, width: int, dropout: float) -> nn.Sequential | None:
    """The network of an item's average token; None of width 0."""
    if not width:
        return None
    layers = nn.Linear(channels, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout)
    return nn.Sequential(*layers, nn.Linear(width, dim))


@torch.no_grad()
def _start_near(layer: nn.Linear | nn.LayerNorm, value: float) -> None:
    """Make a layer give nearly one value, with weights of a hundredth of their usual size."""
    layer.weight.mul_(0.01)
    layer.bias.fill_(value)


def _attended(tokens: TokenFeatures, features: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The features for local attention and their mask: the encoder's local features, else the given ones."""
    return (features, mask) if tokens.local is None else (tokens.local, tokens.local_mask)
