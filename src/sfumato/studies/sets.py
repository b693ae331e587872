r"""Set algebra of pictures: what mixing two of them, or erasing a part of one, does to their Gaussians.

PCME (4.3, figure 8) reads a mixture as something like the intersection of its parts, and an erased picture as something that
includes the whole one. Here both are measured over many pairs, and a few are drawn.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data.augment import MixPlan
from sfumato.data.corruptions import encode_png, erase_squares
from sfumato.data.images import ImageSource
from sfumato.data.transforms import decode_image
from sfumato.gaussian import GaussianEmbedding
from sfumato.inclusion import inclusion_test
from sfumato.metrics.bootstrap import Interval, Statistic, bootstrap, mean_statistic
from sfumato.studies.maps import fit_map

SIZE = 224
"""Side of the squares, in pixels, in which pictures are mixed; a model resizes them as it does any picture."""

ERASED = 0.25
"""Share of a picture that is erased."""

PARTS = ("first", "second")
MIXES = ("mixup", "cutmix")
MADE = (*PARTS, *MIXES, "erased_first", "erased_second")
"""The pictures of a pair: both, two mixtures of them, and both with a part erased."""

FIGURES: dict[str, str] = {
    "more_uncertain": "share of the pairs in which its total variance is above that of both parts; by chance one third",
    "variance_ratio": "its total variance over the geometric mean of its parts', geometric mean over pairs",
    "between": "share of the pairs in which its mean, projected onto the line through the means of the parts, lies between them",
    "off_line": "distance of its mean from that line, in units of the distance between the parts",
    "covers": "share of the parts whose mean lies within two of its standard deviations, both along that line",
    "includes": "share of the parts that are included in it by ProLIP's test, averaged over dimensions",
}
"""What is measured of a mixture, and of another picture in its place."""

ERASED_FIGURES: dict[str, str] = {
    "more_uncertain": "share of the pictures that have a larger total variance with a part erased; by chance one half",
    "variance_ratio": "total variance erased over whole, geometric mean over pictures",
    "moved": "distance of the means of erased and whole, in units of the distance between the pair's two pictures",
    "includes": "share of the pictures that are included in their erased one by ProLIP's test, averaged over dimensions",
}
"""What is measured of erased pictures."""


@dataclass(frozen=True, eq=False)
class PictureSets:
    """Pairs of pictures and what was made of them, embedded.

    Attributes:
        pairs: (p, 2) positions of the first and the second picture.
        embeddings: p of each of MADE.
        other: p of other pictures, to compare the mixtures with; made by :func:`square_picture`, so that all are embedded alike.
    """

    pairs: np.ndarray
    embeddings: dict[str, GaussianEmbedding]
    other: GaussianEmbedding

    def __post_init__(self) -> None:
        sizes = {name: e.n for name, e in (self.embeddings | {"other": self.other}).items()}
        if set(self.embeddings) != set(MADE) or set(sizes.values()) != {len(self.pairs)}:
            raise ValueError(
                f"PictureSets: expected {len(self.pairs)} embeddings of {', '.join(MADE)} and other, got {sizes}"
            )


@dataclass(frozen=True)
class SetFigures:
    """The figures of many pairs.

    Attributes:
        n: pairs; those with two equal means are left out.
        mixes: "mixup", "cutmix" and "other" (some other picture in the mixture's place), each with FIGURES.
        erased: ERASED_FIGURES.
    """

    n: int
    mixes: dict[str, dict[str, Interval]]
    erased: dict[str, Interval]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and dictionaries."""
        return asdict(self)


def choose_pairs(groups: np.ndarray, n: int, seed: int) -> np.ndarray:
    """(p, 3) positions of two pictures of different groups, and of a third of another group again; each picture once.

    Args:
        groups: (m,) pictures of one thing share a number.
        n: p at most.
        seed: of the choice.
    """
    order = np.random.default_rng([seed, 4]).permutation(len(groups)).tolist()
    found: list[list[int]] = []
    while len(found) < n:
        row: list[int] = []
        for place in order:
            if groups[place] not in groups[row]:
                row.append(place)
            if len(row) == 3:
                break
        else:
            break
        found.append(row)
        order = [place for place in order if place not in row]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def mix_pictures(first: bytes, second: bytes, seed: Sequence[int]) -> dict[str, bytes]:
    """The pictures of MADE: squares of SIZE pixels, as PNG files.

    Mixup takes half of either picture everywhere; CutMix replaces a random half of the first one, left, right, top or bottom, by that
    of the second; of each a random quarter of an 8 x 8 grid is erased.

    Args:
        first, second: encoded pictures.
        seed: of what is random.

    Raises:
        ValueError: a picture cannot be decoded.
    """
    pixels = torch.from_numpy(np.stack([decode_image(data, SIZE) for data in (first, second)]))  # (2, 3, h, w)
    half = SIZE // 2
    halves = ((0, SIZE, 0, half), (0, SIZE, half, SIZE), (0, half, 0, SIZE), (half, SIZE, 0, SIZE))
    box = halves[np.random.default_rng(list(seed)).integers(4)]
    none, partner = (0, 0, 0, 0), torch.tensor([1, 1])
    share = torch.tensor([0.5, 1.0])
    result = {name: encode_png(pixels[i].numpy()) for i, name in enumerate(PARTS)}
    for name, cut in (("mixup", none), ("cutmix", box)):
        mixed = MixPlan(partner, share, torch.tensor([cut, none]), (SIZE, SIZE)).apply(pixels)[0]
        result[name] = encode_png((mixed * 255).round().to(torch.uint8).numpy())
    for i, name in enumerate(PARTS):
        result[f"erased_{name}"] = erase_squares(result[name], ERASED, [*seed, i])
    return result


def square_picture(data: bytes) -> bytes:
    """A picture as :func:`mix_pictures` has those it leaves whole: a square of SIZE pixels, as a PNG file.

    Raises:
        ValueError: it cannot be decoded.
    """
    return encode_png(decode_image(data, SIZE))


def measure_sets(sets: PictureSets, *, n_resamples: int = 1000, level: float = 0.95, seed: int = 0) -> SetFigures:
    """Measure where mixtures and erased pictures lie, and how wide they are.

    Args:
        sets: embedded pairs; variances must be positive.
        n_resamples, level, seed: of the bootstrap intervals; pairs are resampled.

    Raises:
        ValueError: an embedding is a point, or no pair has two different means.
    """
    if any(bool(torch.isneginf(e.log_var).any()) for e in sets.embeddings.values()):
        raise ValueError(
            "measure_sets: some embeddings are points; without variances nothing covers or includes anything"
        )
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


def draw_pair(sets: PictureSets, row: int) -> dict[str, Any]:
    """One pair in the plane of the first two principal components of the means of its six pictures.

    Args:
        sets: embedded pairs.
        row: which of them.

    Returns:
        {"explained": shares of the variance of the six means along the axes, "items": [{"name": of MADE, "x", "y", "a", "b", "angle":
        the exact shadow, half axes of one standard deviation, "total_variance"}]}.
    """
    six = GaussianEmbedding.cat([_double(sets.embeddings[name][row : row + 1]) for name in MADE])
    plane = fit_map(six)
    items = [
        {"name": name, **dict(zip(("x", "y", "a", "b", "angle"), ellipse, strict=True)), "total_variance": total}
        for name, ellipse, total in zip(MADE, plane.ellipses(six), six.total_variance.tolist(), strict=True)
    ]
    return {"explained": list(plane.explained), "items": items}


def read_pictures(images: Sequence[ImageSource], row: Sequence[int], seed: int) -> dict[str, bytes]:
    """:func:`mix_pictures` of two pictures of some data, by their positions; the seed makes them the same each time."""
    first, second = (images[int(i)].read_bytes() for i in row[:2])
    return mix_pictures(first, second, (seed, int(row[0]), int(row[1])))


def _of_mixture(first: GaussianEmbedding, second: GaussianEmbedding, mixed: GaussianEmbedding) -> dict[str, Tensor]:
    """(p,) values of FIGURES of each pair; of shares of parts 0, 1/2 or 1, of variance_ratio its logarithm."""
    line = second.mean - first.mean
    apart = line.norm(dim=1, keepdim=True)
    unit = line / apart
    along = ((mixed.mean - first.mean) * unit).sum(1)  # From the first part, in units of the space.
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
    """(p,) values of ERASED_FIGURES; of variance_ratio its logarithm."""
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
