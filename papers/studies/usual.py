"""What the studies measure of embeddings: words of certain items, set algebra of images, and a map of both.

PCME (4.3, figure 8) reads a mixture of two images as the intersection of its parts, and an erased image as a superset
of the whole image. Set algebra measures both over many pairs. On the map a Gaussian is an exact projection (PCA) or a
disc (t-SNE). Results are plain values.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from papers.uncertainty.damage import erase_squares
from sfumato.data.image_decoding import decode_image, encode_png
from sfumato.data.images import ImageSource
from sfumato.data.transforms import MixPlan
from sfumato.errors import need
from sfumato.evaluation.trust import words_of
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.contrastive import inclusion_test
from sfumato.metrics.bootstrap import Statistic, bootstrap, mean_statistic
from sfumato.metrics.relevance import Relevance
from sfumato.reports.tables import WORDS

WORDS |= {
    "more_uncertain": "more uncertain",
    "variance_ratio": "ratio of total variances",
    "between": "lies between its parts",
    "off_line": "distance off the line",
    "covers": "covers a part",
    "includes": "includes a part",
    "moved": "has moved by",
}

# ---------------------------------------------------------------- words
Corpus = Literal["bin", "split"]
"""The captions over which the inverse document frequency counts n_i and N."""

LEAST = 2
"""Words in fewer captions of a bin are left out."""


def tf_idf(n_with: int, n_holding: int, n_captions: int) -> float:
    r"""Weight of a word: (1 + ln n_with) ln(n_captions / n_holding).

    Paper: Chun et al., CVPR 2021, F.2, where n_with and n_holding are one number, n_i; this is the corpus "bin" of
    :func:`words_by_uncertainty`.
    """
    return (1 + math.log(n_with)) * math.log(n_captions / n_holding)


def words_by_uncertainty(
    uncertainty: np.ndarray, captions: Sequence[Sequence[str]], *, n_bins: int = 10, top: int = 12, corpus: str = "bin"
) -> list[dict[str, Any]]:
    """Sort items into bins of equal size by uncertainty (n,), and weight the words of each bin's captions by TF-IDF.

    A caption of two items counts twice.
    """
    parts = np.array_split(np.argsort(uncertainty, kind="stable"), n_bins)
    found = []
    for part in parts:
        own = [words_of(text) for i in part for text in captions[i]]
        found.append((own, Counter(word for words in own for word in set(words))))
    everywhere = sum((counts for _, counts in found), Counter[str]())
    n_everywhere = sum(len(own) for own, _ in found)
    bins = []
    for part, (own, counts) in zip(parts, found, strict=True):
        weights = (
            (word, n, tf_idf(n, n, len(own)) if corpus == "bin" else tf_idf(n, everywhere[word], n_everywhere))
            for word, n in counts.items()
        )
        best = sorted(
            (one for one in weights if one[1] >= LEAST and one[2] > 0), key=lambda one: (-one[2], -one[1], one[0])
        )[:top]
        values = np.asarray(uncertainty[part], float)
        bins.append({
            "n_items": len(part), "n_captions": len(own),
            "low": float(values.min()), "mean": float(values.mean()), "high": float(values.max()),
            "words_per_caption": sum(map(len, own)) / max(len(own), 1),
            "words": [{"word": word, "n": n, "weight": weight} for word, n, weight in best],
        })  # fmt: skip
    return bins


# ---------------------------------------------------------------- set algebra
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


Made = Mapping[str, GaussianEmbedding]
"""(p, d) embeddings by name: those of MADE, and "other", unrelated images."""


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


def measure_sets(made: Made, *, n_resamples: int = 1000, level: float = 0.95, seed: int = 0) -> dict[str, Any]:
    """Positions and variances of mixtures and erased images: FIGURES by mixture and ERASED_FIGURES, with intervals.

    Pairs with two equal means are left out.
    """
    exact = {name: _on_host(e) for name, e in made.items()}
    apart = (exact["second"].mean - exact["first"].mean).norm(dim=1)
    kept = (apart > 0).nonzero().squeeze(1)
    if not len(kept):
        raise ValueError("measure_sets: no pair has two different means; are all embeddings equal?")
    exact = {name: e[kept] for name, e in exact.items()}
    mixed = {name: _of_mixture(exact["first"], exact["second"], exact[name]) for name in (*MIXES, "other")}
    both = [_of_erased(exact[name], exact[f"erased_{name}"], apart[kept]) for name in PARTS]
    mixed["erased"] = {figure: torch.stack([one[figure] for one in both]).mean(0) for figure in ERASED_FIGURES}
    statistics = {f"{name}/{f}": _statistic(f, values) for name, of in mixed.items() for f, values in of.items()}
    found = bootstrap(statistics, len(kept), n_resamples=n_resamples, level=level, seed=seed)
    mixes = {name: {f: asdict(found[f"{name}/{f}"]) for f in of} for name, of in mixed.items()}
    return {"n": len(kept), "erased": mixes.pop("erased"), "mixes": mixes}


def draw_pair(made: Made, row: int) -> dict[str, Any]:
    """Project one pair onto the first two principal components of the means of its six images."""
    six = GaussianEmbedding.cat([_on_host(made[name][row : row + 1]) for name in MADE])
    plane = fit_map(six)
    return {
        "explained": list(plane.explained),
        "items": [{"name": name} | item for name, item in zip(MADE, plane.ellipses(six), strict=True)],
    }


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


# ---------------------------------------------------------------- the map
Method = Literal["pca", "tsne"]

FAMILIES = 5
"""Number of images that a map shows together with their texts, each family in its own colour."""

LEAST_ITEMS = 3
"""Least number of images and texts together, as fewer points define no plane."""

_DISC = 0.02
"""Radius of a t-SNE disc of mean total variance, as a fraction of the map's wider side."""

_ROUNDING = 1e-20
"""Least scatter of the means relative to their squared norms: above float64 rounding, below float32 differences."""


def map_items(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    relevance: Relevance,
    *,
    n: int = 200,
    method: str = "pca",
    seed: int = 0,
) -> dict[str, Any]:
    """Place images and texts of a split, at most n of each, in one plane.

    An item has a side, its position there, an ellipse, a total variance, and perhaps a family.
    """
    random = np.random.default_rng([seed, 3])
    drawn = random.permutation(images.n)[:n]
    shown_images = np.sort(drawn)
    families = np.unique(relevance.select_queries(drawn[:FAMILIES]).indices)
    matched = np.setdiff1d(relevance.select_queries(shown_images).indices, families)
    rest = np.setdiff1d(np.arange(texts.n), np.union1d(families, matched))
    shown_texts = np.sort(np.concatenate([random.permutation(some) for some in (families, matched, rest)])[:n])
    chosen = GaussianEmbedding.cat(
        [_on_host(e[torch.from_numpy(i).to(e.device)]) for e, i in ((images, shown_images), (texts, shown_texts))]
    )  # (k, d), images first
    explained: tuple[float, float] | None = None
    if method == "pca":
        plane = fit_map(chosen)
        explained, ellipses = plane.explained, plane.ellipses(chosen)
    else:
        ellipses = _discs(_tsne(chosen.mean, seed), chosen.total_variance.tolist())
    family = _families(relevance, drawn, shown_texts)
    sides = [("image", int(i)) for i in shown_images] + [("text", int(i)) for i in shown_texts]
    items = [
        {"side": key[0], "index": key[1], **ellipse, "family": family.get(key)}
        for key, ellipse in zip(sides, ellipses, strict=True)
    ]
    return {"method": method, "explained": explained and list(explained), "items": items}


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


def _on_host(embeddings: GaussianEmbedding) -> GaussianEmbedding:
    return embeddings.detach().to("cpu").to(torch.float64)


def _tsne(mean: Tensor, seed: int) -> np.ndarray:
    """(k, d) -> (k, 2) places."""
    with need("analysis", "t-SNE needs scikit-learn", ", or use --method pca"):
        from sklearn.manifold import TSNE
    perplexity = min(30.0, (len(mean) - 1) / 3)
    return np.asarray(TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(mean.numpy()))


def _discs(positions: np.ndarray, total_variance: Sequence[float]) -> list[dict[str, float]]:
    """Circles around positions with areas proportional to total variances."""
    average = sum(total_variance) / len(total_variance)
    unit = _DISC * float(np.ptp(positions, axis=0).max())
    radii = [unit * math.sqrt(v / average) if average else 0.0 for v in total_variance]
    return [
        {"x": float(x), "y": float(y), "a": r, "b": r, "angle": 0.0, "total_variance": v}
        for (x, y), r, v in zip(positions, radii, total_variance, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Projection:
    """A plane in the space of the embeddings."""

    centre: Tensor  # (d,) float64 mean of the means; it is at (0, 0)
    axes: Tensor  # (d, 2)
    explained: tuple[float, float]  # fractions of the variance of the means along the axes

    def ellipses(self, embeddings: GaussianEmbedding) -> list[dict[str, float]]:
        r"""Project diagonal Gaussians onto the plane: centre, half axes a >= b, the angle of a, and total variance.

        covariance = axes^T diag(var) axes,  a 2 x 2 matrix with eigenvalues a^2 >= b^2
        """
        e = _on_host(embeddings)
        position = (e.mean - self.centre) @ self.axes  # (n, 2)
        u, v = self.axes.unbind(1)
        xx, yy, xy = e.var @ u.square(), e.var @ v.square(), e.var @ (u * v)  # (n,) each: the covariance
        middle, radius = (xx + yy) / 2, torch.hypot((xx - yy) / 2, xy)  # eigenvalues are middle +- radius
        a, b = (middle + radius).sqrt(), (middle - radius).clamp(min=0).sqrt()
        angle = torch.atan2(2 * xy, xx - yy) / 2
        rows = torch.stack([*position.unbind(1), a, b, angle, e.total_variance], 1).tolist()
        return [dict(zip(("x", "y", "a", "b", "angle", "total_variance"), row, strict=True)) for row in rows]


def fit_map(embeddings: GaussianEmbedding) -> Projection:
    """Fit the plane of the first two principal components of the means. embeddings (n, d)."""
    mean = _on_host(embeddings).mean
    centre, d = mean.mean(0), mean.shape[1]
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
