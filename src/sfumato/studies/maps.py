"""A map of images and texts in one plane, where a Gaussian is an exact projection (PCA) or a disc (t-SNE).

The inputs are embeddings and their matches; the reports draw the maps.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import need
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance

Method = Literal["pca", "tsne"]

FAMILIES = 5
"""Number of images that a map shows together with their texts, each family in its own colour."""

LEAST_ITEMS = 3
"""Least number of images and texts together, as fewer points define no plane."""

_DISC = 0.02
"""Radius of a t-SNE disc of mean total variance, as a fraction of the map's wider side."""


@dataclass(frozen=True)
class MapItem:
    """An image or a text on the map."""

    side: str  # "image" or "text"
    index: int  # position among the images, or the texts
    x: float  # horizontal position of the mean, in units of the map
    y: float  # vertical position of the mean
    a: float
    b: float  # shorter half axis
    angle: float  # of the longer axis, in radians
    total_variance: float  # of the item
    family: int | None


@dataclass(frozen=True)
class GaussianMap:
    """A map of some images and texts."""

    method: str  # "pca" or "tsne"
    explained: tuple[float, float] | None
    items: tuple[MapItem, ...]  # images, then texts, each in the order of their positions

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self) | {"items": [asdict(item) for item in self.items]}


def map_items(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    relevance: Relevance,
    *,
    n: int = 200,
    method: str = "pca",
    seed: int = 0,
) -> GaussianMap:
    """Place images and texts of a split in one plane. images (n_images, d), texts (n_texts, d)."""
    if method not in get_args(Method):
        raise ValueError(f"map_items: method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if n < 1:
        raise ValueError(f"map_items: n must be at least 1, got {n}")
    if images.d != texts.d:
        raise ValueError(f"map_items: images have {images.d} dimensions, texts {texts.d}; embed both with one model")
    random = np.random.default_rng([seed, 3])
    drawn = random.permutation(images.n)[:n]
    shown_images = np.sort(drawn)
    families = np.unique(relevance.select_queries(drawn[:FAMILIES]).indices)
    matched = np.setdiff1d(relevance.select_queries(shown_images).indices, families)
    rest = np.setdiff1d(np.arange(texts.n), np.union1d(families, matched))
    shown_texts = np.sort(np.concatenate([random.permutation(some) for some in (families, matched, rest)])[:n])
    chosen = GaussianEmbedding.cat(
        [_on_host(images, shown_images), _on_host(texts, shown_texts)]
    )  # (k, d), images first
    if chosen.n < LEAST_ITEMS:
        raise ValueError(f"map_items: {chosen.n} items are too few for a map; it takes {LEAST_ITEMS} or more")
    if method == "pca":
        plane = fit_map(chosen)
        explained, ellipses = plane.explained, plane.ellipses(chosen)
    else:
        explained, ellipses = None, _discs(_tsne(chosen.mean, seed), chosen.total_variance)
    family = _families(relevance, drawn, shown_texts)
    sides = [("image", int(i)) for i in shown_images] + [("text", int(i)) for i in shown_texts]
    variance = chosen.total_variance.tolist()
    return GaussianMap(
        method,
        explained,
        tuple(
            MapItem(*key, *ellipse, total, family.get(key))
            for key, ellipse, total in zip(sides, ellipses, variance, strict=True)
        ),
    )


def _families(relevance: Relevance, images: np.ndarray, texts: np.ndarray) -> dict[tuple[str, int], int]:
    """The first images that have a shown text that matches no other of these images, and these texts."""
    shown = set(texts.tolist())
    part = relevance.select_queries(images)
    uses = np.bincount(part.indices, minlength=relevance.n_gallery)
    found: dict[tuple[str, int], int] = {}
    number = 0
    for row, image in enumerate(images.tolist()):
        own = part.indices[part.indptr[row] : part.indptr[row + 1]].tolist()
        own = [text for text in own if text in shown and uses[text] == 1]
        if own and number < FAMILIES:
            found |= {("image", image): number} | {("text", text): number for text in own}
            number += 1
    return found


def _on_host(embeddings: GaussianEmbedding, index: np.ndarray) -> GaussianEmbedding:
    return embeddings[torch.from_numpy(index).to(embeddings.device)].detach().to("cpu").to(torch.float64)


def _tsne(mean: Tensor, seed: int) -> np.ndarray:
    """(k, d) -> (k, 2) places."""
    with need("analysis", "t-SNE needs scikit-learn", ", or use --method pca"):
        from sklearn.manifold import TSNE
    perplexity = min(30.0, (len(mean) - 1) / 3)
    positions: np.ndarray = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(mean.numpy())
    return positions


def _discs(positions: np.ndarray, total_variance: Tensor) -> list[tuple[float, float, float, float, float]]:
    """(x, y, a, b, angle) of circles around positions with areas proportional to total variances."""
    average = float(total_variance.mean())
    unit = _DISC * float(np.ptp(positions, axis=0).max())
    radii = [unit * math.sqrt(v / average) if average else 0.0 for v in total_variance.tolist()]
    return [(float(x), float(y), r, r, 0.0) for (x, y), r in zip(positions, radii, strict=True)]


_ROUNDING = 1e-20
"""Least scatter of the means relative to their squared norms: above float64 rounding, below float32 differences."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A plane in the space of the embeddings."""

    centre: Tensor  # (d,) float64 mean of the means; it is at (0, 0)
    axes: Tensor
    explained: tuple[float, float]

    def ellipses(self, embeddings: GaussianEmbedding) -> list[tuple[float, float, float, float, float]]:
        r"""Project diagonal Gaussians onto the plane.

            covariance = axes^T diag(var) axes,  a 2 x 2 matrix with eigenvalues a^2 >= b^2

        embeddings (n, d).
        """
        if embeddings.d != self.centre.shape[0]:
            raise ValueError(
                f"ellipses: embeddings have {embeddings.d} dimensions, the map has {self.centre.shape[0]}; fit the map"
                " to embeddings of the same model"
            )
        var = embeddings.log_var.detach().to("cpu", torch.float64).exp()
        position = (embeddings.mean.detach().to("cpu", torch.float64) - self.centre) @ self.axes  # (n, 2)
        u, v = self.axes.unbind(1)
        xx, yy, xy = var @ u.square(), var @ v.square(), var @ (u * v)  # (n,) each: the covariance
        middle, radius = (xx + yy) / 2, torch.hypot((xx - yy) / 2, xy)  # eigenvalues are middle +- radius
        a, b = (middle + radius).sqrt(), (middle - radius).clamp(min=0).sqrt()
        angle = torch.atan2(2 * xy, xx - yy) / 2
        rows: list[list[float]] = torch.stack([*position.unbind(1), a, b, angle], 1).tolist()
        return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]


def fit_map(embeddings: GaussianEmbedding) -> Projection:
    """Fit the plane of the first two principal components of the means. embeddings (n, d)."""
    mean = embeddings.mean.detach().to("cpu", torch.float64)
    n, d = mean.shape
    if n == 0:
        raise ValueError("fit_map: got no embeddings, expected at least one")
    centre = mean.mean(0)
    offset = mean - centre
    variances, vectors = torch.linalg.eigh(offset.T @ offset)  # ascending
    axes = torch.zeros(d, 2, dtype=torch.float64)
    axes[:, : min(d, 2)] = vectors[:, -2:].flip(1)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    axes = torch.where(largest < 0, -axes, axes)
    total = float(offset.square().sum())
    if total <= _ROUNDING * float(mean.square().sum()):
        return Projection(centre, axes, (0.0, 0.0))
    first, second = [*variances.clamp(min=0).flip(0)[:2].tolist(), 0.0][:2]
    return Projection(centre, axes, (first / total, second / total))
