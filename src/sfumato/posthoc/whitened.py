r"""The whitened norm of W-CLIP: the squared Mahalanobis distance of an embedding from the mean of its modality.

    w = S^(-1/2) V^T (f - m),    covariance = V S V^T    (divided by N - 1),    uncertainty = ||w||^2

The covariance is decomposed by ``eigh`` in float64. The released code uses a general complex decomposition, which gives
identical columns for nearly singular covariances.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, get_args

import torch
from torch import Tensor

from sfumato.posthoc.method import FrozenPairs, PosthocMethod, Side, check_embeddings, check_rows, check_side, taken

SHRINKAGE = 0.01
"""Default shrinkage: a nearly empty direction counts with a hundredth of the mean variance."""


@dataclass(frozen=True, eq=False)
class Whitening:
    """The Gaussian of one modality."""

    mean: Tensor  # (d,) float64
    vectors: Tensor  # (d, d) eigenvectors of the covariance in columns, float64
    values: Tensor  # (d,) eigenvalues after shrinkage, ascending, all positive

    @classmethod
    def fit(cls, x: Tensor, *, shrinkage: float = SHRINKAGE, who: str = "Whitening") -> "Whitening":
        """Mean and covariance of raw embeddings, (1 - shrinkage) covariance + shrinkage * its mean eigenvalue * I.

        x (n, d).
        """
        check_rows(x, who, "embeddings")
        if len(x) < 2:
            raise ValueError(f"{who}: needs at least two items, got {len(x)}")
        if not 0 <= shrinkage <= 1:
            raise ValueError(f"{who}: shrinkage must lie in [0, 1], got {shrinkage}")
        x = x.double()
        mean = x.mean(0)
        centred = x - mean
        values, vectors = torch.linalg.eigh(centred.T @ centred / (len(x) - 1))
        values = (1 - shrinkage) * values.clamp_min(0) + shrinkage * values.clamp_min(0).mean()
        if not values[0] > len(values) * torch.finfo(values.dtype).eps * values[-1]:
            raise ValueError(
                f"{who}: the covariance of {len(x)} items in {x.shape[1]} dimensions is singular; give more items, or"
                " a shrinkage above 0"
            )
        return cls(mean, vectors.contiguous(), values)

    def whitened(self, x: Tensor) -> Tensor:
        """Whitened embeddings. x (n, d) -> (n, d)."""
        return (x.double() - self.mean.to(x.device)) @ self.vectors.to(x.device) / self.values.to(x.device).sqrt()

    def log_likelihood(self, x: Tensor) -> Tensor:
        """Log density in the whitened space, -(d log 2 pi + ||w||^2) / 2; the embedding's own lacks -log det / 2.

        x (n, d) -> (n,).
        """
        return -(len(self.mean) * math.log(2 * math.pi) + self.whitened(x).square().sum(1)) / 2

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of the embeddings. x (n, d) -> (n,)."""
        return self.log_likelihood(x) - self.values.log().sum() / 2


class WhitenedNorm(PosthocMethod):
    """The squared Mahalanobis distance of an item from its modality: large for items unlike those of the fit.

    It is one number for an item and no variance of its embedding, so it must not enter a ranking.

    Paper: Betser et al., "Whitened CLIP as a likelihood surrogate of images and captions", ICML 2025 (W_CLIP).
    """

    name = "whitened_norm"
    summary = "squared Mahalanobis distance of the raw embedding from its modality, about d on the fit"

    def __init__(self, image: Whitening, text: Whitening) -> None:
        self.image, self.text = image, text

    @classmethod
    def fit(
        cls, pairs: FrozenPairs, *, seed: int = 0, shrinkage: float = SHRINKAGE, wclip_official: bool = False
    ) -> Self:
        """Means and covariances of the raw embeddings of each modality, each item once."""
        amount = 0.0 if wclip_official else shrinkage
        return cls(*(Whitening.fit(x, shrinkage=amount, who=cls.name) for x in (pairs.images, pairs.texts)))

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`."""
        check_side(side)
        own = self.image if side == "image" else self.text
        check_embeddings(queries, self.name, "queries", d=len(own.mean))
        return own.whitened(queries).square().sum(1)

    def state(self) -> dict[str, Tensor]:
        """See :meth:`PosthocMethod.state`."""
        sides: dict[str, Whitening] = {"image": self.image, "text": self.text}
        return {f"{side}.{key}": value for side, own in sides.items() for key, value in vars(own).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """See :meth:`PosthocMethod.from_state`."""
        keys = ("mean", "vectors", "values")
        return cls(*(Whitening(*(taken(state, f"{s}.{k}", cls.name) for k in keys)) for s in get_args(Side)))
