"""From token features to one vector: generalised pooling, average, maximum, and one chosen token."""

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


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
