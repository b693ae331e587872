"""Queries by vector: which vectors a model can be searched by, and the checks of those that come.

A model that reads embeddings takes a vector through its own tower, as `sfumato search INDEX vector.npy` does. For other
models a vector is an embedding in the space of the gallery, which needs a model of points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch

from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.feature_rows import EmbeddingProcessor
from sfumato.gaussian import GaussianEmbedding
from sfumato.serve.schemas import Modality

_SHORTEST, _LONGEST = 1e-12, 1e18
"""Euclidean lengths within which float32 can scale a vector to unit length."""


@dataclass(frozen=True)
class VectorSide:
    """The vectors of one modality."""

    modality: Modality  # what they are embeddings of
    channels: int | None  # c numbers of a vector; None if the model cannot be searched by one
    reads: bool = False
    normalize: bool = False  # whether means are scaled to unit length, as the model does
    reason: str = ""  # why the model cannot be searched by one; "" if it can

    def error(self, vector: np.ndarray) -> str:
        """What is wrong with a vector. vector (k,)."""
        if len(vector) != self.channels:
            what = "an image" if self.modality == "image" else "a text"
            return f"has {len(vector)} numbers, expected the {self.channels} of an embedding of {what}"
        if len(bad := np.flatnonzero(~np.isfinite(vector))):
            return f"number {bad[0]} (from 0) is {vector[bad[0]]} in float32, expected finite numbers"
        if not vector.any():
            return "holds zeros alone, which have no direction; expected a number other than 0"
        length = float(np.linalg.norm(vector.astype(np.float64)))
        if not _SHORTEST <= length <= _LONGEST:
            return f"has the Euclidean length {length:.3g}, expected {_SHORTEST:g} to {_LONGEST:g}"
        return ""

    def points(self, vectors: Sequence[np.ndarray]) -> GaussianEmbedding:
        """Vectors as embeddings in the space of the gallery. Returns (n, d)."""
        mean = torch.from_numpy(np.stack(vectors))
        return GaussianEmbedding.point(torch.nn.functional.normalize(mean, dim=1) if self.normalize else mean)


def vector_sides(model: DualEncoder, d: int) -> dict[Modality, VectorSide]:
    """The vectors that a model can be searched by."""
    towers = zip(get_args(Modality), (model.text, model.image), strict=True)
    return {name: _side(tower, name, d) for name, tower in towers}


def _side(tower: Tower, modality: Modality, d: int) -> VectorSide:
    head = tower.head
    if isinstance(tower.processor, EmbeddingProcessor):
        return VectorSide(modality, tower.processor.channels, reads=True)
    if head.log_var is None and head.offset is None and head.dim == d:
        return VectorSide(modality, d, normalize=head.normalize)
    more = "with a variance, which a vector has not" if head.log_var is not None else "as more than one vector"
    reason = f"this model embeds each {modality} {more}; search by the {modality} itself, or by an item"
    return VectorSide(modality, None, reason=reason)
