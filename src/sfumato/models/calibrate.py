"""Calibrating a model on a split that it was not trained on, and describing the result."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration.abstention import conformal_radius
from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.conditional import N_NEAREST, ConditionalLogits, NearestItems, Population
from sfumato.calibration.query_scores import QueryScores
from sfumato.data.pairs import PairData
from sfumato.direction import Direction
from sfumato.distances import get_distance
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.reliability import calibration_error_by_chance, expected_calibration_error
from sfumato.metrics.selective import auroc
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import CALIBRATION, load_run
from sfumato.search.exact import distance_blocks

PRECISIONS, RISKS, COVERAGES = (0.5, 0.8, 0.9), (0.5, 0.3, 0.2, 0.1), (0.8, 0.9, 0.95)
"""Common levels of the guarantees."""


@dataclass(frozen=True)
class _HeldOut:
    """q held-out queries of one direction.

    Attributes:
        blocks: gives (distance, match) of a few queries at a time to all m items.
        half: (q,) bool, the half that each query belongs to; queries of one group are in one half.
        galleries: (m,) which items are in a gallery, and (q,) which queries it is asked.
        group: (q,) queries of images of one concept have one number.
    """

    blocks: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    half: np.ndarray
    galleries: Sequence[tuple[np.ndarray, np.ndarray]]
    group: np.ndarray

    def with_half(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(half, distance, match) of a few queries at a time."""
        start = 0
        for distance, match in self.blocks():
            yield torch.from_numpy(self.half[start : start + len(distance)]), distance, match
            start += len(distance)


@dataclass(frozen=True)
class _Split:
    """An embedded split, its pairs and its distance."""

    images: GaussianEmbedding
    texts: GaussianEmbedding
    data: PairData
    distance: str

    def of_images(self, chosen: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """(distance, match) of a few of the chosen images at a time to all texts."""
        every_text = np.arange(self.texts.n)
        for start, block in distance_blocks(self.images[torch.from_numpy(chosen)], self.texts, self.distance):
            rows = chosen[start : start + len(block)]
            yield block, torch.from_numpy(self.data.match(rows, every_text))

    def of_texts(self, chosen: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """(distance, match) of a few of the chosen texts at a time to all images."""
        every_image, distance = np.arange(self.images.n), get_distance(self.distance).for_direction("t2i")
        for start, block in distance_blocks(self.texts[torch.from_numpy(chosen)], self.images, distance):
            rows = chosen[start : start + len(block)]
            yield block, torch.from_numpy(self.data.match(every_image, rows)).T

    def queries(
        self, images: np.ndarray, texts: np.ndarray, population: Population, seed: int
    ) -> dict[Direction, _HeldOut]:
        """The chosen images and texts as held-out queries, with galleries of several sizes.

        Galleries are all images, and the images dealt at random into 2, 4 and 8 parts, each with its texts. Independent
        queries need galleries without the images of some queries, so never all.
        """
        rng, every_image, every_text = np.random.default_rng(seed), np.arange(self.images.n), np.arange(self.texts.n)
        deals = [
            part
            for n_parts in ((1, 2, 4, 8) if population == "planted" else (2, 4, 8))
            for part in np.array_split(rng.permutation(every_image), n_parts)
            if len(part) > 1
        ]
        group = np.unique(self.data.groups, return_inverse=True)[1]
        half = (rng.permutation(int(group.max()) + 1) % 2 == 0)[group]
        own_image = np.argmax(self.data.match(every_image, texts), axis=0)
        beside = [np.any(self.data.match(part, every_text), axis=0) for part in deals]
        asked = [np.isin(images, part) for part in deals]
        return {
            "i2t": _HeldOut(
                lambda: self.of_images(images), half[images], list(zip(beside, asked, strict=True)), group[images]
            ),
            "t2i": _HeldOut(
                lambda: self.of_texts(texts),
                half[own_image],
                [(np.isin(every_image, part), np.ones(len(texts), bool)) for part in deals],
                group[own_image],
            ),
        }


def calibrate_split(
    embedded: tuple[GaussianEmbedding, GaussianEmbedding],
    data: PairData,
    distance: str,
    *,
    split: str,
    method: str = "platt",
    max_pairs: int = 4_000_000,
    max_queries: int = 5_000,
    population: Population = "planted",
    seed: int = 0,
) -> Calibration:
    """Fit match probabilities on the pairs of a split, and store the scores of its queries in both directions.

    A large split is sampled. The fit uses the pairs of random images with all texts. The scores use random queries of
    both sides, each with the whole other side as gallery. The logits of hits use the same queries with galleries of
    all images, a half, a quarter and an eighth of them, and the texts of these. The queries are halved by image, and
    the scores of each half are those of logits that were fitted on the other. The same galleries give the shift of
    the nearest distance with the size of the gallery.

    Args:
        embedded: (images, texts) of the split.
        data: pairs of the split, n images and m texts.
        distance: name in DISTANCES.
        split: name of the split, kept with the calibration.
        method: see :meth:`Calibration.fit`.
        max_pairs: largest number of pairs in the fit.
        max_queries: largest number of queries of either side whose scores are kept.
        population: the queries that probabilities of hits are for. "planted": those with a match in their gallery.
            "independent": all queries, also those whose matches are not in the gallery.
        seed: seed of the random choice of images, queries and galleries.

    Returns:
        The calibration. In its `metadata`, "set_sizes" has by direction and coverage the median number of items within
        the radius of held-out queries. For i2t the growth is 0, because a larger gallery of texts has more images and
        not more texts for an image; for t2i it is measured.

    Raises:
        ValueError: nothing can be fitted; see :func:`~sfumato.calibration.platt.fit_logits`.
    """
    whole = _Split(embedded[0].to("cpu"), embedded[1].to("cpu"), data, distance)
    n, m = whole.images.n, whole.texts.n
    pairs = whole.of_images(_some(n, max(1, max_pairs // m), seed))
    d, match = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    base = Calibration.fit(d, match, method=method)
    queries = whole.queries(_some(n, max_queries, seed), _some(m, max_queries, seed), population, seed)
    scores = {
        direction: QueryScores.from_blocks(
            held_out.blocks, growth=0.0 if direction == "i2t" else None, group=held_out.group
        )
        for direction, held_out in queries.items()
    }
    scores = {direction: _with_smaller(held_out, scores[direction]) for direction, held_out in queries.items()}
    of_hits, conditional = dict[Direction, QueryScores](), dict[Direction, ConditionalLogits]()
    for direction, held_out in queries.items():
        with contextlib.suppress(ValueError):  # Too few queries: hits keep the probability of random pairs.
            of_hits[direction], conditional[direction] = _hits(held_out, base.logit, population, scores[direction])
    calibration = replace(base, i2t=scores["i2t"], t2i=scores["t2i"], conditional=conditional, hits=of_hits)
    about = {"split": split, "method": method, "distance": distance, "pairs": match.numel(), "queries": population}
    sizes = {d: _set_sizes(held_out, scores[d]) for d, held_out in queries.items()}
    calibration.metadata.update(about | {"set_sizes": sizes})
    return calibration


def _set_sizes(queries: _HeldOut, scores: QueryScores) -> dict[str, float]:
    """By coverage, the median number of items within the radius of a set, over the queries."""
    radii = torch.tensor([conformal_radius(scores, 1 - c) for c in COVERAGES])
    counts = [(distance.unsqueeze(2) <= radii).sum(1) for distance, _ in queries.blocks()]
    medians = torch.cat(counts).double().quantile(0.5, dim=0)
    return {str(c): size for c, size in zip(COVERAGES, medians.tolist(), strict=True)}


def _with_smaller(queries: _HeldOut, scores: QueryScores) -> QueryScores:
    """The scores with the shift of the nearest distance, from the queries with a match in each smaller gallery."""
    found: list[list[Tensor]] = [[] for _ in queries.galleries]
    start = 0
    for distance, match in queries.blocks():
        for parts, (items, asked) in zip(found, queries.galleries, strict=True):
            rows = torch.from_numpy(asked[start : start + len(distance)])
            columns = torch.from_numpy(items)
            has = match[rows][:, columns].bool().any(1)
            parts.append(distance[rows][has][:, columns].amin(1))
        start += len(distance)
    return scores.with_smaller(
        (int(items.sum()), torch.cat(parts).double().numpy())
        for parts, (items, _) in zip(found, queries.galleries, strict=True)
    )


def _hits(
    queries: _HeldOut, logit: Callable[[Tensor], Tensor], population: Population, of_distances: QueryScores
) -> tuple[QueryScores, ConditionalLogits]:
    """The logits of hits given the nearest items, and the scores by them of each half by the fit on the other."""
    halves = [_nearest_items(queries, half, logit, population) for half in (False, True)]
    sizes = [int((queries.half == half).sum()) for half in (False, True)]
    of_false, of_true = (
        ConditionalLogits.fit(items, n_queries=n, population=population) for items, n in zip(halves, sizes, strict=True)
    )
    fitted = ConditionalLogits.fit([*halves[0], *halves[1]], n_queries=sum(sizes), population=population)

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        for half, distance, match in queries.with_half():
            z = logit(distance)
            nearest = z.topk(min(N_NEAREST, z.shape[1]), dim=1).values
            by_false, by_true = (fit.logit(z, nearest, z.shape[1]) for fit in (of_false, of_true))
            yield -torch.where(half.unsqueeze(1), by_false, by_true).float(), match

    return QueryScores.from_blocks(blocks, growth=of_distances.growth, group=queries.group), fitted


def _nearest_items(
    queries: _HeldOut, half: bool, logit: Callable[[Tensor], Tensor], population: Population
) -> list[NearestItems]:
    """The nearest items of the queries of one half in each of their galleries."""
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in queries.galleries]
    start = 0
    for of_half, distance, match in queries.with_half():
        z, ours = logit(distance), (of_half == half).numpy()
        for parts, (items, asked) in zip(found, queries.galleries, strict=True):
            rows, columns = torch.from_numpy(asked[start : start + len(z)] & ours), torch.from_numpy(items)
            own, true = z[rows][:, columns], match[rows][:, columns]
            if population == "planted":
                has = true.bool().any(1)
                own, true = own[has], true[has]
            nearest, place = own.topk(min(N_NEAREST, own.shape[1]), dim=1)
            parts.append((nearest, true.gather(1, place)))
        start += len(z)
    return [
        NearestItems(torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts]), int(items.sum()))
        for parts, (items, _) in zip(found, queries.galleries, strict=True)
    ]


def _some(n: int, most: int, seed: int) -> np.ndarray:
    """A sorted random sample of n positions, of at most the given size."""
    return np.sort(np.random.default_rng(seed).permutation(n)[:most])


def calibrate_run(
    folder: str | Path,
    split: str = "val",
    *,
    method: str = "platt",
    population: str = "planted",
    device: torch.device | str = "cpu",
) -> Calibration:
    """Calibrate a run on a split of its data that it was not trained on, and write calibration.json into its folder.

    Args:
        folder: folder of the run.
        split: name of the split.
        method: see :meth:`Calibration.fit`.
        population: see :func:`calibrate_split`.
        device: device that embeds.

    Returns:
        The calibration.

    Raises:
        UserError: it is not a run, the data have no such split, or there is no such population.
        ValueError: nothing can be fitted; see :func:`~sfumato.calibration.platt.fit_logits`.
    """
    if split == "train":
        raise UserError(
            "a run cannot be calibrated on the split that it was trained on; give another split, such as val"
        )
    if population not in get_args(Population):
        raise UserError(f"unknown queries {population!r}; known: {', '.join(get_args(Population))}")
    run = load_run(folder, device=device)
    prepared = load_split(run.model, run.recipe.data, split)
    embedded = embed_split(run.model, prepared)
    calibration = calibrate_split(
        embedded,
        prepared.data,
        run.distance,
        split=split,
        method=method,
        population=cast(Population, population),
    )
    calibration.save(run.folder / CALIBRATION)
    return calibration


def describe_calibration(calibration: Calibration) -> dict[str, Any]:
    """The thresholds of a calibration at common levels.

    Args:
        calibration: fitted.

    Returns:
        Its `metadata`, and for "t2i" and "i2t" {"n_queries", "n_gallery", "matches_per_query", "growth", "precision":
        {level: threshold}, "risk": {level: {"abstain_below", "answered"}}, "coverage": {level: {"radius", "size"}}} at
        the levels PRECISIONS, RISKS and COVERAGES; null if the held-out queries do not support a guarantee. With logits
        of hits also "first_hit": {"rate", "mean_probability", "ece", "ece_by_chance", "auroc", "auroc_of_distance"} of
        held-out queries, each half by the fit on the other.
    """
    result: dict[str, Any] = dict(calibration.metadata)
    for direction in get_args(Direction):
        if getattr(calibration, direction) is None:
            continue
        scores = calibration.scores(direction)

        def at(guarantee: Callable[..., float], level: float, direction: Direction = direction) -> float | None:
            try:
                value = guarantee(level, direction=direction)
            except ValueError:
                return None
            return value if math.isfinite(value) else None

        result[direction] = {
            "n_queries": len(scores.nearest),
            "n_gallery": scores.n_gallery,
            "matches_per_query": scores.matches_per_query,
            "growth": scores.growth,
            "precision": {str(p): at(calibration.threshold, p) for p in PRECISIONS},
            "risk": {
                str(r): {
                    "abstain_below": at(calibration.abstain_below, r),
                    "answered": at(calibration.answered_fraction, r),
                }
                for r in RISKS
            },
            "coverage": {
                str(c): {
                    "radius": at(calibration.conformal_radius, 1 - c),
                    "size": calibration.metadata.get("set_sizes", {}).get(direction, {}).get(str(c)),
                }
                for c in COVERAGES
            },
        }
        if direction in calibration.hits:
            result[direction]["first_hit"] = _first_hit(calibration.hits[direction], scores)
    return result


def _first_hit(of_hits: QueryScores, of_distances: QueryScores) -> dict[str, float | None]:
    """The probability of the first hit of held-out queries against what it is."""
    p = torch.sigmoid(-torch.from_numpy(of_hits.nearest).double())
    right = np.array(of_hits.closest_match) < np.array(of_hits.closest_other)
    y, both = torch.from_numpy(right).double(), bool(right.any() and not right.all())
    return {
        "rate": float(y.mean()),
        "mean_probability": float(p.mean()),
        "ece": expected_calibration_error(p, y, binning="count"),
        "ece_by_chance": calibration_error_by_chance(p),
        "auroc": auroc(p.numpy(), right) if both else None,
        "auroc_of_distance": auroc(-of_distances.nearest, right) if both else None,
    }
