"""The encoder of items that are features already: whitening and dropout, without trained parameters."""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from sfumato.encoders.encoder_protocol import (
    Encoder,
)
from sfumato.encoders.features import Inputs, RaggedStore, Store, TokenFeatures

_FITTED, _BLOCK = 50_000, 1024
"""Largest number of items that fit a whitening, and of those read at a time."""


_LARGEST_COPY = 2 * 2**30
"""Bytes."""


_SMALLEST = 1e-8
"""Variance below which a channel or component counts as constant."""


Whiten = Annotated[
    int | None,
    Field(
        ge=0,
        description="whitening of the features, fitted on the training split: number of principal components, each with"
        " unit variance; 0 keeps all channels, each with mean 0 and unit variance; none if left out",
    ),
]


class FeatureInput(Encoder):
    """The encoder after a frozen backbone: whitening and dropout of its features, without trained parameters."""

    centre: torch.Tensor
    projection: torch.Tensor

    def __init__(self, channels: int, dropout: float, *, whiten: int | None = None) -> None:
        super().__init__()
        if whiten is not None and whiten > channels:
            raise ValueError(f"whiten={whiten}: the features have {channels} channels; give at most as many, or 0")
        self.channels, self._received, self._whiten = whiten or channels, channels, whiten
        if whiten is not None:
            self.register_buffer("centre", torch.zeros(channels))
            self.register_buffer("projection", torch.ones(channels) if whiten == 0 else torch.eye(channels)[:, :whiten])
        self.dropout = nn.Dropout(dropout)

    @torch.no_grad()
    def fit(self, store: Store) -> None:
        """Fit the whitening, on at most 50,000 items."""
        if self._whiten is None:
            return
        chosen = np.unique(np.linspace(0, len(store) - 1, min(len(store), _FITTED)).astype(np.int64))
        count, total = 0, torch.zeros(self._received, dtype=torch.float64)
        products = torch.zeros((self._received,) * (2 if self._whiten else 1), dtype=torch.float64)
        for start in range(0, len(chosen), _BLOCK):
            inputs = store.batch(chosen[start : start + _BLOCK])
            tokens = inputs.values.flatten(0, 1) if inputs.mask is None else inputs.values[inputs.mask]
            tokens = tokens.double()
            count, total = count + len(tokens), total + tokens.sum(0)
            products += tokens.T @ tokens if self._whiten else tokens.square().sum(0)
        mean = total / count
        if self._whiten:
            values, vectors = torch.linalg.eigh(products / count - mean.outer(mean))
            floor = (values[-1] * 1e-6).clamp_min(_SMALLEST)
            projection = vectors[:, -self._whiten :] / values[-self._whiten :].maximum(floor).sqrt()
        else:
            variance = products / count - mean.square()
            projection = variance.maximum((variance.max() * 1e-6).clamp_min(_SMALLEST)).rsqrt()
        self.centre.copy_(mean)
        self.projection.copy_(projection)

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """The features of the backbone. inputs (n, t, c) -> (n, t, channels)."""
        values = inputs.values
        if self._whiten is not None and values.shape[-1] == self._received:
            values = self._whitened(values)
        return TokenFeatures(self.dropout(values), inputs.mask)

    def _whitened(self, values: Tensor) -> Tensor:
        centred = values - self.centre
        return centred @ self.projection if self._whiten else centred * self.projection

    @torch.no_grad()
    def prepared(self, store: Store) -> Store:
        """Whitened once instead of at every step."""
        if not self._whiten or self.channels == self._received or not isinstance(store, RaggedStore):
            return store
        lengths = store.lengths
        if int(lengths.sum()) * self.channels * 2 > _LARGEST_COPY:
            return store
        rows = np.empty((int(lengths.sum()), self.channels), np.float16)
        offsets = np.cumsum(lengths) - lengths
        device = self.centre.device
        for start in range(0, len(store), _BLOCK):
            index = np.arange(start, min(start + _BLOCK, len(store)))
            inputs = store.batch(index).to(device)
            whitened = self._whitened(inputs.values)
            part = whitened.flatten(0, 1) if inputs.mask is None else whitened[inputs.mask]
            rows[offsets[start] : offsets[start] + len(part)] = part.half().cpu().numpy()
        return RaggedStore(rows, offsets, lengths)
