"""Scores to rank by: the distances, and the two similarities that are not distances of Gaussians, cosine and the dot
product of the means.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sfumato.distances import DISTANCES, Distance, get_distance
from sfumato.evaluation.benchmarks import Embeddings, Scores, Source
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.matching import MATCH_PROBABILITY

Similarity = Literal["cosine", "dot"]

SCORES = (*DISTANCES, *get_args(Similarity))
"""Names of the scores to rank by: the distances, and two similarities of the means."""


@dataclass(frozen=True, eq=False)
class SimilarityMatrix:
    """The similarities of all images and texts: a ScoreMatrix that computes each block when it is read."""

    images: GaussianEmbedding  # (n, d) embeddings
    texts: GaussianEmbedding  # (m, d) embeddings
    kind: Similarity  # "dot", the product of the means, or "cosine", the product of means scaled to length 1

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.images.n, self.texts.n

    def __getitem__(self, index: Any) -> Tensor:
        """A block of rows, or of rows and columns, given by slices; in float32 or the higher precision of the means."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        dtype = torch.promote_types(*(accumulation_dtype(e.dtype) for e in (self.images, self.texts)))
        a, b = self.images.mean[rows].to(dtype), self.texts.mean[columns].to(dtype)
        if self.kind == "cosine":
            a, b = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1)
        return a @ b.T


def ranked_by(score: str | Distance, images: GaussianEmbedding, texts: GaussianEmbedding) -> Source:
    """The embeddings as a source that ranks by any score. images (n, d), texts (m, d)."""
    if (distance := distance_of_score(score)) is not None:
        return Embeddings(images, texts, distance)
    return Scores(SimilarityMatrix(images, texts, "cosine" if score == "cosine" else "dot"), "larger")


def distance_of_score(score: str | Distance) -> Distance | None:
    """The distance of a score."""
    if score in get_args(Similarity):
        return None
    if score == MATCH_PROBABILITY:
        raise ValueError(f"the score {score} needs match logits; give match_probability_distance(scale, bias)")
    try:
        return get_distance(score)
    except ValueError as error:
        raise ValueError(f"unknown score {score!r}; known: {', '.join(SCORES)}, nearest_of_K") from error
