"""Calibrating a model on a split that it was not trained on, and describing the result."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from sfumato.arrays import as_numpy, sigmoid, smallest
from sfumato.calibration import logits
from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.query_scores import QueryScores, conformal_radius
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import TwoTowers
from sfumato.errors import UserError
from sfumato.files import CALIBRATION
from sfumato.gaussian import GaussianEmbedding, Sides
from sfumato.ids import Direction
from sfumato.metrics.bootstrap import auroc
from sfumato.metrics.reliability import Reliability
from sfumato.models.embed import embed_split, load_split, load_splits, prepare_split
from sfumato.models.run import TRAINING_CALIBRATION, Run, load_run
from sfumato.search.exact import distance_blocks

PRECISIONS, RISKS, COVERAGES = (0.5, 0.8, 0.9), (0.5, 0.3, 0.2, 0.1), (0.8, 0.9, 0.95)
"""Common levels of the guarantees."""

_FEWEST_REFERENCE = 200
"""Fewer reference queries than this say too little."""


@dataclass(frozen=True)
class _HeldOut:
    """q held-out queries of one direction."""

    blocks: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
    half: np.ndarray  # (q,) bool, the half that each query belongs to; queries of one group are in one half
    galleries: Sequence[tuple[np.ndarray, np.ndarray]]
    group: np.ndarray  # (q,) queries of images of one concept have one number
    isolation: np.ndarray | None = None
    hub: np.ndarray | None = None  # (m,) of the items, see :meth:`ReferenceQueries.hub`

    def reference(self, queries: np.ndarray, first: np.ndarray) -> np.ndarray | None:
        """(k, 2) features of reference queries, given (k,) queries and their first items."""
        if self.isolation is None or self.hub is None:
            return None
        return np.stack([self.hub[first], self.isolation[queries]], axis=1)

    def numbered(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(positions, distance, match) of a few queries at a time."""
        start = 0
        for distance, match in self.blocks():
            yield np.arange(start, start + len(distance)), distance, match
            start += len(distance)


@dataclass(frozen=True)
class _Split:
    """An embedded split, its pairs and its distance."""

    images: GaussianEmbedding
    texts: GaussianEmbedding
    data: PairData
    distance: str
    reference: Mapping[Direction, logits.ReferenceQueries]

    def of(self, direction: Direction, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(distance, match) of a few of the chosen queries at a time to all items."""
        queries, items = (self.images, self.texts) if direction == "i2t" else (self.texts, self.images)
        distance, every = get_distance(self.distance).for_direction(direction), np.arange(items.n)
        for start, block in distance_blocks(queries[chosen], items, distance):
            rows = chosen[start : start + len(block)]
            match = self.data.match(rows, every) if direction == "i2t" else self.data.match(every, rows).T
            yield as_numpy(block), match

    def queries(
        self, images: np.ndarray, texts: np.ndarray, population: logits.Population, seed: int
    ) -> dict[Direction, _HeldOut]:
        """The chosen images and texts as held-out queries, with galleries of several sizes.

        Galleries are all images, and the images dealt at random into 2, 4 and 8 parts, each with its texts. Independent
        queries need galleries without the images of some queries, so never all.
        """
        rng, every_image, every_text = np.random.default_rng(seed), np.arange(self.images.n), np.arange(self.texts.n)
        counts = (1, 2, 4, 8) if population == "planted" else (2, 4, 8)
        dealt = (part for n in counts for part in np.array_split(rng.permutation(every_image), n))
        deals = [part for part in dealt if len(part) > 1]
        group = np.unique(self.data.groups, return_inverse=True)[1]
        half = (rng.permutation(int(group.max()) + 1) % 2 == 0)[group]
        own_image = np.argmax(self.data.match(every_image, texts), axis=0)
        beside = [np.any(self.data.match(part, every_text), axis=0) for part in deals]
        of_texts = [(found, np.isin(images, part)) for found, part in zip(beside, deals, strict=True) if found.any()]
        of_images = [(np.isin(every_image, part), np.ones(len(texts), bool)) for part in deals]
        i2t = _HeldOut(lambda: self.of("i2t", images), half[images], of_texts, group[images])
        t2i = _HeldOut(lambda: self.of("t2i", texts), half[own_image], of_images, group[own_image])
        found: dict[Direction, _HeldOut] = {"i2t": i2t, "t2i": t2i}
        sides = {"i2t": (self.images[images], self.texts), "t2i": (self.texts[texts], self.images)}
        for direction, reference in self.reference.items():
            isolation, hub = reference.isolation(sides[direction][0]), reference.hub(sides[direction][1])
            found[direction] = replace(found[direction], isolation=isolation, hub=hub)
        return found


def calibrate_split(
    embedded: Sides,
    data: PairData,
    distance: str,
    *,
    split: str,
    max_pairs: int = 4_000_000,
    max_queries: int = 5_000,
    population: logits.Population = "planted",
    reference: Sides | None = None,
    of_images: np.ndarray | None = None,
    seed: int = 0,
) -> Calibration:
    """Fit match probabilities on the pairs of a split, and store the scores of its queries in both directions.

    A large split is sampled. The fit uses the pairs of random images with all texts. The scores use random queries of
    both sides, each with the whole other side as gallery. The logits of hits use the same queries with galleries of
    all images, a half, a quarter and an eighth of them, and the texts of these. The queries are halved by image, and
    the scores of each half are those of logits that were fitted on the other. The same galleries give the shift of
    the nearest distance with the size of the gallery.
    """
    seen_by = _reference_queries(reference, distance, seed)
    whole = _Split(embedded[0].numpy(), embedded[1].numpy(), data, distance, seen_by)
    images, texts = queries_of(data, of_images)
    pairs = whole.of("i2t", _sample(images, max(1, max_pairs // whole.texts.n), seed))
    d, match = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    base = logits.PairLogits.of_pairs(d, match)
    queries = whole.queries(_sample(images, max_queries, seed), _sample(texts, max_queries, seed), population, seed)
    growths = {"i2t": 0.0, "t2i": None}
    scores = {d: QueryScores.from_blocks(of.blocks, growth=growths[d], group=of.group) for d, of in queries.items()}
    found = {direction: DirectionCalibration(base, scores[direction]) for direction in queries}
    for direction, held_out in queries.items():
        with contextlib.suppress(ValueError):  # Too few queries: hits keep the probability of random pairs.
            of_hits, conditional = _hits(held_out, base.logit, population, scores[direction])
            reads = None if conditional.first is None else seen_by.get(direction)
            found[direction] = DirectionCalibration(base, scores[direction], conditional, of_hits, reads)
    about = {"split": split, "method": "platt", "distance": distance, "pairs": match.size, "queries": population}
    sizes = {d: _set_sizes(held_out, scores[d]) for d, held_out in queries.items()}
    return Calibration(**vars(base), i2t=found["i2t"], t2i=found["t2i"], metadata=about | {"set_sizes": sizes})


def queries_of(data: PairData, of_images: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The queries of some images of a split."""
    images, texts = np.arange(len(data.image_ids)), np.arange(len(data.text_ids))
    if of_images is None:
        return images, texts
    inside = np.isin(data.pairs[:, 0], of_images)
    here, everywhere = (np.bincount(found, minlength=len(texts)) for found in (data.pairs[inside, 1], data.pairs[:, 1]))
    return np.sort(of_images), texts[(here > 0) & (here == everywhere)]


def _reference_queries(reference: Sides | None, distance: str, seed: int) -> dict[Direction, logits.ReferenceQueries]:
    """By direction, if there are enough queries and the distance is not sampled."""
    found = dict[Direction, logits.ReferenceQueries]()
    sides: dict[Direction, GaussianEmbedding] = {} if reference is None else {"i2t": reference[0], "t2i": reference[1]}
    for direction, queries in sides.items():
        if queries.n >= _FEWEST_REFERENCE and not get_distance(distance).sampled:
            found[direction] = logits.ReferenceQueries.of(queries, distance, direction, seed=seed)
    return found


def _set_sizes(queries: _HeldOut, scores: QueryScores) -> dict[str, float]:
    """By coverage, the median number of items within the radius of a set, over the queries."""
    radii = np.array([conformal_radius(scores, 1 - c) for c in COVERAGES], np.float32)
    counts = [(distance[:, :, None] <= radii).sum(1) for distance, _ in queries.blocks()]
    medians = np.quantile(np.concatenate(counts), 0.5, axis=0)
    return {str(c): size for c, size in zip(COVERAGES, medians.tolist(), strict=True)}


def _hits(
    queries: _HeldOut, logit: Callable[[np.ndarray], np.ndarray], population: logits.Population, scores: QueryScores
) -> tuple[QueryScores, logits.ConditionalLogits]:
    """The logits of hits given the nearest items, and the scores by them of each half by the fit on the other."""
    halves = [_nearest_items(queries, half, logit, population) for half in (False, True)]
    sizes = [int((queries.half == half).sum()) for half in (False, True)]
    both = zip(halves, sizes, strict=True)
    of_false, of_true = (logits.ConditionalLogits.fit(items, n_queries=n, population=population) for items, n in both)
    fitted = logits.ConditionalLogits.fit([*halves[0], *halves[1]], n_queries=sum(sizes), population=population)
    pairs = ((of_false, halves[1]), (of_true, halves[0]))
    bare = [(replace(fit, first=None), other) for fit, other in pairs]
    with_first, without = (sum(fit.first_hit_loss(other) for fit, other in chosen) for chosen in (pairs, bare))
    if with_first >= without:  # What reference queries say does not carry over from one half to the other.
        of_false, of_true, fitted = (replace(fit, first=None) for fit in (of_false, of_true, fitted))

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for at, distance, match in queries.numbered():
            z = logit(distance)
            nearest, place = _nearest(z)
            seen = queries.reference(at, place[:, 0])
            by_false, by_true = (fit.logit(z, nearest, z.shape[1], seen) for fit in (of_false, of_true))
            yield -np.where(queries.half[at, None], by_false, by_true).astype(np.float32), match

    return QueryScores.from_blocks(blocks, growth=scores.growth, group=queries.group), fitted


def _nearest(logit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logits of the nearest items of each query, descending, and their places. logit (q, m) -> (q, k)."""
    nearest, place = smallest(-logit, logits.N_NEAREST)
    return -nearest, place


def _nearest_items(
    queries: _HeldOut, half: bool, logit: Callable[[np.ndarray], np.ndarray], population: logits.Population
) -> list[logits.NearestItems]:
    """The nearest items of the queries of one half in each of their galleries."""
    found: list[list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]] = [[] for _ in queries.galleries]
    for at, distance, match in queries.numbered():
        z, ours = logit(distance), queries.half[at] == half
        for parts, (items, asked) in zip(found, queries.galleries, strict=True):
            rows, columns = np.flatnonzero(asked[at] & ours), np.flatnonzero(items)
            if population == "planted":
                rows = rows[match[np.ix_(rows, columns)].any(1)]
            nearest, place = _nearest(z[np.ix_(rows, columns)])
            seen = queries.reference(at[0] + rows, columns[place[:, 0]])
            parts.append((nearest, match[rows[:, None], columns[place]], seen))
    made = []
    for parts, (items, _) in zip(found, queries.galleries, strict=True):
        values, matching, features = (list(each) for each in zip(*parts, strict=True))
        reference = None if queries.hub is None else np.concatenate(features)
        made.append(logits.NearestItems(np.concatenate(values), np.concatenate(matching), int(items.sum()), reference))
    return made


def some_positions(n: int, most: int, seed: int) -> np.ndarray:
    """A sorted random sample of positions."""
    return np.sort(np.random.default_rng(seed).permutation(n)[:most])


def _sample(positions: np.ndarray, most: int, seed: int) -> np.ndarray:
    """A random sample of given positions, in their order; see :func:`some_positions`."""
    return positions[some_positions(len(positions), most, seed)]


def calibrate_run(
    folder: str | Path, split: str = "val", *, population: str = "planted", device: Any = "cpu"
) -> Calibration:
    """Calibrate a run on a split of its data that it was not trained on, and write calibration.json into its folder.

    If the training left texts out, calibration-training.json, for galleries with the training images, is fitted again
    with it, on the split "wordings"; or alone, if this split is given. Where all images train, "val" is this split.
    """
    if split == "train":
        raise UserError("a run cannot be calibrated on the split that it was trained on; give another, such as val")
    if population not in get_args(logits.Population):
        raise UserError(f"unknown queries {population!r}; known: {', '.join(get_args(logits.Population))}")
    run, queries = load_run(folder, device=device), cast(logits.Population, population)
    if split == "val" and run.recipe.data.held_out_wordings and "val" not in load_splits(run.recipe.data, Problems()):
        split = WORDINGS  # All images train: their other texts validate.
    of_training = run.training_calibration is not None
    if of_training and split == WORDINGS:
        return _calibrate_run(run, split, queries, TRAINING_CALIBRATION)
    calibration = _calibrate_run(run, split, queries, CALIBRATION)
    if of_training and split == "val":
        _calibrate_run(run, WORDINGS, queries, TRAINING_CALIBRATION)
    return calibration


def _calibrate_run(run: Run, split: str, population: logits.Population, file: str) -> Calibration:
    """Calibrate a run on a split, and write the file into its folder."""
    prepared = load_split(run.model, run.recipe.data, split)
    calibration = calibrate_split(
        embed_split(run.model, prepared), prepared.data, run.distance, split=split, population=population,
        reference=None if file == TRAINING_CALIBRATION else embed_reference(run.model, run.recipe.data),
    )  # fmt: skip
    calibration.save(run.folder / file)
    return calibration


def embed_reference(model: TwoTowers, config: DataConfig, *, split: str = "train", seed: int = 0) -> Sides | None:
    """Embed some images and texts of the training, which become the reference queries of a calibration."""
    problems = Problems()
    if (data := load_splits(config, problems).get(split)) is None:
        return None
    some = data.keep_images(some_positions(len(data.image_ids), logits.N_REFERENCE, seed))
    prepared = prepare_split(model, some, problems, f"reference ({split})")
    texts = some_positions(len(prepared.data.text_ids), logits.N_REFERENCE, seed)
    return model.image.embed(prepared.images), model.text.embed(prepared.texts, texts)


def describe_calibration(calibration: Calibration) -> dict[str, Any]:
    """The thresholds of a calibration at common levels."""
    result: dict[str, Any] = dict(calibration.metadata)

    def at(guarantee: Callable[[float], float], level: float) -> float | None:
        try:
            value = guarantee(level)
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    for direction, fit in calibration.directions.items():
        scores = fit.scores
        sizes = calibration.metadata.get("set_sizes", {}).get(direction, {})
        limits = {r: (at(fit.abstain_below, r), at(fit.answered_fraction, r)) for r in RISKS}
        result[direction] = {
            "n_queries": len(scores.nearest),
            **{name: getattr(scores, name) for name in ("n_gallery", "matches_per_query", "growth")},
            "precision": {str(p): at(fit.threshold, p) for p in PRECISIONS},
            "risk": {str(r): {"abstain_below": limit, "answered": part} for r, (limit, part) in limits.items()},
            "coverage": {
                str(c): {"radius": at(fit.conformal_radius, 1 - c), "size": sizes.get(str(c))} for c in COVERAGES
            },
        }
        if fit.hits is not None:
            result[direction]["first_hit"] = _first_hit(fit.hits, scores)
    return result


def _first_hit(of_hits: QueryScores, of_distances: QueryScores) -> dict[str, float | None]:
    """The probability of the first hit of held-out queries against what it is."""
    p = sigmoid(-of_hits.nearest)
    right = np.array(of_hits.closest_match) < np.array(of_hits.closest_other)
    both = bool(right.any() and not right.all())
    found = vars(Reliability.of(p, right))
    return {name: found[name] for name in ("rate", "mean_probability", "ece", "ece_by_chance")} | {
        "auroc": auroc(p, right) if both else None,
        "auroc_of_distance": auroc(-of_distances.nearest, right) if both else None,
    }
