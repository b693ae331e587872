"""Set algebra of images: the change of the Gaussians when two images are mixed, or a part of an image is erased.

PCME (4.3, figure 8) reads a mixture as the intersection of its parts, and an erased image as a superset of the whole
image. This study measures both over many pairs, and draws a few of them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data.image_decoding import decode_image
from sfumato.data.images import ImageSource
from sfumato.data.transforms import MixPlan, encode_png, erase_squares
from sfumato.gaussian import GaussianEmbedding
from sfumato.inclusion import inclusion_test
from sfumato.metrics.bootstrap import Interval, Statistic, bootstrap, mean_statistic
from sfumato.studies.maps import fit_map

SIZE = 224
"""Side in pixels of the squares in which images are mixed; a model resizes them like any image."""

ERASED = 0.25
"""Fraction of an image that is erased."""

PARTS = ("first", "second")
MIXES = ("mixup", "cutmix")
MADE = (*PARTS, *MIXES, "erased_first", "erased_second")
"""The images that are made of a pair: both images, two mixtures of them, and both with a part erased."""

FIGURES: dict[str, str] = {
    "more_uncertain": "fraction of pairs in which its total variance is above that of both parts; by chance one third",
    "variance_ratio": "its total variance over the geometric mean of its parts', geometric mean over pairs",
    "between": "fraction of pairs in which its mean, projected onto the line through the parts, is between them",
    "off_line": "distance of its mean from that line, in units of the distance between the parts",
    "covers": "fraction of the parts whose mean is within two of its standard deviations, along that line",
    "includes": "fraction of the parts that are included in it by ProLIP's test, averaged over dimensions",
}
"""The figures of a mixture, and of an unrelated image in its place."""

ERASED_FIGURES: dict[str, str] = {
    "more_uncertain": "fraction of the images that have a larger total variance with a part erased; by chance one half",
    "variance_ratio": "total variance erased over whole, geometric mean over images",
    "moved": "distance of the means of erased and whole, in units of the distance between the pair's two images",
    "includes": "fraction of images that are included in their erased one by ProLIP's test, mean over dimensions",
}
"""The figures of erased images."""


@dataclass(frozen=True, eq=False)
class ImageSets:
    """Embeddings of pairs of images, and of the images made from them."""

    pairs: np.ndarray  # (p, 2) positions of the first and the second image
    embeddings: dict[str, GaussianEmbedding]  # (p, d) embeddings by name in MADE
    other: GaussianEmbedding

    def __repr__(self) -> str:
        return f"ImageSets({len(self.pairs)} pairs)"

    def __post_init__(self) -> None:
        sizes = {name: e.n for name, e in (self.embeddings | {"other": self.other}).items()}
        if set(self.embeddings) != set(MADE) or set(sizes.values()) != {len(self.pairs)}:
            raise ValueError(
                f"ImageSets: expected {len(self.pairs)} embeddings of {', '.join(MADE)} and other, got {sizes}"
            )


@dataclass(frozen=True)
class SetFigures:
    """The figures of many pairs."""

    n: int  # number of pairs; pairs with two equal means are left out
    mixes: dict[str, dict[str, Interval]]
    erased: dict[str, Interval]  # ERASED_FIGURES

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)


def choose_pairs(groups: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Choose pairs of images of different groups, each with a third image of another group; every image once.

    groups (m,) -> (p, 3).
    """
    order = np.random.default_rng([seed, 4]).permutation(len(groups)).tolist()
    found: list[list[int]] = []
    while len(found) < n:
        row: list[int] = []
        for position in order:
            if groups[position] not in groups[row]:
                row.append(position)
            if len(row) == 3:
                break
        else:
            break
        found.append(row)
        order = [position for position in order if position not in row]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def mix_images(first: bytes, second: bytes, seed: Sequence[int]) -> dict[str, bytes]:
    """Make the images of MADE.

    Mixup averages both images. CutMix replaces a random half of the first image, left, right, top or bottom, by that
    half of the second. Erasing removes a random quarter of an 8 x 8 grid from each image.
    """
    pixels = torch.from_numpy(np.stack([decode_image(data, SIZE) for data in (first, second)]))  # (2, 3, h, w)
    half = SIZE // 2
    halves = ((0, SIZE, 0, half), (0, SIZE, half, SIZE), (0, half, 0, SIZE), (half, SIZE, 0, SIZE))
    box = halves[np.random.default_rng(list(seed)).integers(4)]
    none, partner = (0, 0, 0, 0), torch.tensor([1, 1])
    weight = torch.tensor([0.5, 1.0])
    result = {name: encode_png(pixels[i].numpy()) for i, name in enumerate(PARTS)}
    for name, cut in (("mixup", none), ("cutmix", box)):
        mixed = MixPlan(partner, weight, torch.tensor([cut, none]), (SIZE, SIZE)).apply(pixels)[0]
        result[name] = encode_png((mixed * 255).round().to(torch.uint8).numpy())
    for i, name in enumerate(PARTS):
        result[f"erased_{name}"] = erase_squares(result[name], ERASED, [*seed, i])
    return result


def square_image(data: bytes) -> bytes:
    """Make an image square, as :func:`mix_images` does with images that it does not change."""
    return encode_png(decode_image(data, SIZE))


def measure_sets(sets: ImageSets, *, n_resamples: int = 1000, level: float = 0.95, seed: int = 0) -> SetFigures:
    """Measure positions and variances of mixtures and erased images."""
    if any(bool(torch.isneginf(e.log_var).any()) for e in sets.embeddings.values()):
        raise ValueError("measure_sets: some embeddings are points; set algebra needs variances")
    exact = {name: _double(e) for name, e in (sets.embeddings | {"other": sets.other}).items()}
    apart = (exact["second"].mean - exact["first"].mean).norm(dim=1)
    kept = (apart > 0).nonzero().squeeze(1)
    if not len(kept):
        raise ValueError("measure_sets: no pair has two different means; are all embeddings equal?")
    exact = {name: e[kept] for name, e in exact.items()}
    statistics: dict[str, Statistic] = {}
    for name in (*MIXES, "other"):
        for figure, values in _of_mixture(exact["first"], exact["second"], exact[name]).items():
            statistics[f"{name}/{figure}"] = _statistic(figure, values)
    both = [_of_erased(exact[name], exact[f"erased_{name}"], apart[kept]) for name in PARTS]
    for figure in ERASED_FIGURES:
        statistics[f"erased/{figure}"] = _statistic(figure, torch.stack([one[figure] for one in both]).mean(0))
    found = bootstrap(statistics, len(kept), n_resamples=n_resamples, level=level, seed=seed)
    return SetFigures(
        n=len(kept),
        mixes={name: {f: found[f"{name}/{f}"] for f in FIGURES} for name in (*MIXES, "other")},
        erased={f: found[f"erased/{f}"] for f in ERASED_FIGURES},
    )


def draw_pair(sets: ImageSets, row: int) -> dict[str, Any]:
    """Project one pair onto the first two principal components of the means of its six images."""
    six = GaussianEmbedding.cat([_double(sets.embeddings[name][row : row + 1]) for name in MADE])
    plane = fit_map(six)
    items = [
        {"name": name, **dict(zip(("x", "y", "a", "b", "angle"), ellipse, strict=True)), "total_variance": total}
        for name, ellipse, total in zip(MADE, plane.ellipses(six), six.total_variance.tolist(), strict=True)
    ]
    return {"explained": list(plane.explained), "items": items}


def read_mixed_images(images: Sequence[ImageSource], row: Sequence[int], seed: int) -> dict[str, bytes]:
    """Read two images of some data and mix them with :func:`mix_images`."""
    first, second = (images[int(i)].read_bytes() for i in row[:2])
    return mix_images(first, second, (seed, int(row[0]), int(row[1])))


def _of_mixture(first: GaussianEmbedding, second: GaussianEmbedding, mixed: GaussianEmbedding) -> dict[str, Tensor]:
    """(p,) values of FIGURES: 0, 1/2 or 1 for a fraction of the parts, and the logarithm of variance_ratio."""
    line = second.mean - first.mean
    apart = line.norm(dim=1, keepdim=True)
    unit = line / apart
    along = ((mixed.mean - first.mean) * unit).sum(1)  # The vector from the first part, in units of the space.
    off = (mixed.mean - first.mean - along[:, None] * unit).norm(dim=1)
    deviation = (mixed.var * unit.square()).sum(1).sqrt()  # Exact: the variance of a linear projection.
    reach = torch.stack([along.abs(), (apart.squeeze(1) - along).abs()])  # (2, p)
    u, parts = mixed.total_variance, torch.stack([first.total_variance, second.total_variance])
    included = torch.stack([inclusion_test(part, mixed).mean(1) for part in (first, second)])
    return {
        "more_uncertain": (u > parts.amax(0)).double(),
        "variance_ratio": u.log() - parts.log().mean(0),
        "between": ((along > 0) & (along < apart.squeeze(1))).double(),
        "off_line": off / apart.squeeze(1),
        "covers": (reach <= 2 * deviation).double().mean(0),
        "includes": (included > 0).double().mean(0),
    }


def _of_erased(whole: GaussianEmbedding, erased: GaussianEmbedding, apart: Tensor) -> dict[str, Tensor]:
    """(p,) values of ERASED_FIGURES, with the logarithm of variance_ratio."""
    return {
        "more_uncertain": (erased.total_variance > whole.total_variance).double(),
        "variance_ratio": erased.total_variance.log() - whole.total_variance.log(),
        "moved": (erased.mean - whole.mean).norm(dim=1) / apart,
        "includes": (inclusion_test(whole, erased).mean(1) > 0).double(),
    }


def _statistic(figure: str, values: Tensor) -> Statistic:
    mean = mean_statistic(values.numpy())
    return (lambda counts: np.exp(mean(counts))) if figure == "variance_ratio" else mean


def _double(embeddings: GaussianEmbedding) -> GaussianEmbedding:
    return embeddings.detach().to("cpu").to(torch.float64)
