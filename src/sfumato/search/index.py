"""GaussianIndex: search a gallery in memory by Gaussian queries, with probabilities and uncertainties.

It is never saved: :func:`copy_gallery` makes a collection of it, or of another collection.

It ranks exactly by any distance. The distances of the results are recomputed row by row in float64, and equal
distances keep the order of the items; for distances that lift, the answer is that of float64 over all items
(search/screening.py). Approximate engines are of collections. With a calibration an index can also abstain, and return
sets that hold a match with a requested probability.
"""

import contextlib
import functools
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.arrays import Array, as_numpy, like
from sfumato.calibration.calibrator import Calibration, Scorer
from sfumato.calibration.fits import KNOWN_TEXTS
from sfumato.distances import get_distance
from sfumato.distances.distance import Distance
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.ids import Direction, check_ids
from sfumato.search import exact
from sfumato.search.candidates import Candidates, GalleryRecords, SampledItems, with_margin
from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection
from sfumato.search.gallery import N_WHOLE, Gallery
from sfumato.search.screening import Screen
from sfumato.search.stores.protocol import Filter, Records, beside, closed_if_it_fails, is_among
from sfumato.search.texts import TextStore, item_texts

_SAMPLE = 2048
"""Number of sampled items for estimates of sums over large galleries."""


@dataclass(frozen=True, eq=False)
class GaussianIndex(Gallery):
    """A gallery of Gaussian embeddings to search in. Make one with :meth:`build`.

    Attributes:
        embeddings: (m, d) gallery, float32 on the CPU.
        ids: m distinct ids.
        distance: name in DISTANCES.
        logit_scale: a of the match logit b - a * distance; with a calibration, that of its Platt part.
        logit_bias: b of the match logit; with a calibration, that of its Platt part in a gallery of this size.
        payload: by field name, a text for each item.
        metadata: JSON values that the builder keeps with the index.
        centre: (d,) point that lifted vectors are relative to.
        calibration: source of probabilities, abstention and conformal sets; None if there is none.
        direction: "t2i" if the queries are texts and the items images; selects the part of the calibration.
    """

    embeddings: GaussianEmbedding
    ids: tuple[str, ...]
    distance: str
    logit_scale: float
    logit_bias: float
    payload: dict[str, tuple[str, ...]]
    metadata: dict[str, Any]
    centre: np.ndarray
    calibration: Calibration | None = None
    direction: Direction = "t2i"
    n_exact = 64

    @classmethod
    def build(
        cls,
        embeddings: GaussianEmbedding,
        ids: Sequence[str],
        *,
        distance: str = "csd",
        logit_scale: float = 5.0,
        logit_bias: float = 5.0,
        payload: Mapping[str, Sequence[str]] | None = None,
        metadata: Mapping[str, Any] | None = None,
        calibration: Calibration | None = None,
        direction: Direction = "t2i",
    ) -> "GaussianIndex":
        """Index a gallery.

        Args:
            embeddings: (m, d) gallery, m >= 1; kept in float32.
            ids: m distinct strings.
            distance: name in DISTANCES.
            logit_scale: a of the match logit b - a * distance; take the value of the calibrated model. The default is
                the value at the start of training (Chun 2024), which is good for ranking only.
            logit_bias: b of the match logit.
            payload: by field name, m texts that searches return with the items.
            metadata: JSON values to keep with the index.
            calibration: calibration of the model for the same distance; replaces logit_scale and logit_bias.
            direction: "t2i" for texts that search among images, "i2t" for images that search among texts.

        Returns:
            The index.

        Raises:
            ValueError: an argument does not fit; the message names it and what was expected.
        """
        ids, texts = tuple(ids), {name: tuple(values) for name, values in (payload or {}).items()}
        _check_gallery(embeddings, ids, texts)
        if calibration is not None:
            logit_scale = calibration.logit_scale
            scorer = Scorer(logit_scale, calibration.logit_bias, calibration, direction)
            logit_bias = calibration.logit_bias + scorer.prior_shift(len(ids))
        if get_distance(distance).sampled:
            raise ValueError(f"GaussianIndex: {distance} is sampled at random, so two searches would differ; use csd")
        if not (logit_scale > 0 and math.isfinite(logit_scale) and math.isfinite(logit_bias)):
            expected = "logit_scale must be positive and finite and logit_bias finite"
            raise ValueError(f"GaussianIndex: {expected}, got {logit_scale} and {logit_bias}")
        if get_distance(distance).needs_variance and (embeddings.log_var == -math.inf).any():
            way = "use csd, squared_l2 or wasserstein2"
            raise ValueError(f"GaussianIndex: {distance} needs positive variances, got points; {way}")
        notes = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
        embeddings = embeddings.numpy().to(np.float32)
        return cls(
            embeddings, ids, distance, float(logit_scale), float(logit_bias), texts, notes,
            exact.gallery_centre(embeddings), calibration, direction,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"GaussianIndex({self.contents})"

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def oriented_distance(self) -> Distance:
        """The distance of (queries, items)."""
        return get_distance(self.distance).for_direction(self.direction)

    @property
    def scorer(self) -> Scorer:
        """Computes probabilities and guarantees from distances."""
        bias = self.logit_bias if self.calibration is None else self.calibration.logit_bias
        return Scorer(self.logit_scale, bias, self.calibration, self.direction)

    def closest(self, queries: GaussianEmbedding, k: int, filter: Filter | None = None) -> list[Candidates]:
        """See :meth:`Gallery.closest`."""
        found = self._nearest(queries, k, None if filter is None else self._fitting(filter))
        return [self._found(d, p) for d, p in zip(*found, strict=True)]

    def count(self, filter: Filter) -> int:
        """See :meth:`Gallery.count`."""
        return len(self._fitting(filter))

    def within(self, queries: GaussianEmbedding, radius: float, *, most: int | None = None) -> list[Candidates]:
        """See :meth:`Gallery.within`."""
        if self._lifts:
            return [self._found(d[:most].astype(np.float32), p[:most]) for d, p in self._screen.within(queries, radius)]
        found = []
        for start, block in exact.distance_blocks(queries, self.embeddings, self.oriented_distance):
            # Products of matrices round by about 1e-6 of the largest distance.
            near = block <= radius + 1e-5 * np.abs(block).max(1, keepdims=True)
            for i, row in enumerate(near, start):
                candidates, query = np.flatnonzero(row)[None], queries[i : i + 1]
                distance, position = exact.closest_candidates(
                    query, self.embeddings, candidates, self.oriented_distance
                )
                inside = distance[0] <= radius
                found.append(self._found(distance[0][inside][:most], position[0][inside][:most]))
        return found

    def get(self, ids: Sequence[str]) -> GalleryRecords:
        """See :meth:`Gallery.get`."""
        return self._gallery_records(np.array([self._position[i] for i in ids if i in self._position], np.int64))

    def sample(self, n: int, *, seed: int = 0) -> GalleryRecords:
        """See :meth:`Gallery.sample`; in the order of the gallery."""
        return self._gallery_records(np.sort(np.random.default_rng(seed).permutation(len(self))[:n]))

    def nearest(self, queries: GaussianEmbedding, k: int = 10) -> tuple[Array, Array]:
        """The results of :meth:`search` as arrays, or tensors for queries that are tensors.

        Args:
            queries: (n, d) embeddings; any floating dtype and device.
            k: number of results; all items if the gallery is smaller.

        Returns:
            ((n, k) float32 distances ascending, (n, k) positions in `ids`).
        """
        distance, position = self._nearest(self.checked(queries, k), k, None)
        return like(distance, queries.mean), like(position, queries.mean)

    @exact.quiet
    def _nearest(self, queries: GaussianEmbedding, k: int, chosen: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`nearest` among all items, or exactly among those at some ascending positions."""
        k = min(k, len(self) if chosen is None else len(chosen))
        if self._lifts:
            screen = self._screen if chosen is None else self._screen.among(chosen)
            distance, found = screen.closest(queries, k)
        else:
            part = self.embeddings if chosen is None else self.embeddings[chosen]
            found = exact.top_k(queries, part, with_margin(k), self.oriented_distance)[1]
            found = found if chosen is None else chosen[found]
            distance, found = exact.closest_candidates(queries, self.embeddings, found, self.oriented_distance)
        return distance[:, :k].astype(np.float32), found[:, :k]

    def ids_after(self, after: str, n: int) -> list[str]:
        """See :meth:`Gallery.ids_after`."""
        start = bisect_right(self._sorted_ids, after)
        return self._sorted_ids[start : start + n]

    @cached_property
    def _position(self) -> dict[str, int]:
        """Position of each id."""
        return {i: j for j, i in enumerate(self.ids)}

    @cached_property
    def _sorted_ids(self) -> list[str]:
        return sorted(self.ids)

    @cached_property
    def _uncertainty(self) -> np.ndarray:
        """(m,) total variances, computed once."""
        return as_numpy(self.embeddings.total_variance)

    def _found(self, distance: np.ndarray, position: np.ndarray) -> Candidates:
        """(c,) distances and positions of items as candidates."""
        positions = position.tolist()
        ids = tuple(self.ids[j] for j in positions)
        payloads = tuple({name: values[j] for name, values in self.payload.items()} for j in positions)
        closest = self.embeddings[position[:1]] if positions and self.scorer.reference is not None else None
        return Candidates(ids, distance, self._uncertainty[position], payloads, closest)

    def _gallery_records(self, positions: np.ndarray) -> GalleryRecords:
        found = self._found(np.empty(0), positions)
        return GalleryRecords(found.ids, self.embeddings[positions], found.payloads)

    def _fitting(self, filter: Filter) -> np.ndarray:
        """Positions of the items that a filter accepts, ascending."""
        fits = np.ones(len(self), bool)
        if filter.max_uncertainty is not None:
            fits &= self._uncertainty.astype(np.float64) <= filter.max_uncertainty
        for name, values, ranges in filter.conditions():
            column = self.payload.get(name, ())
            wanted = {value for value in {*column} if is_among(value, values, ranges)}
            fits &= np.array([value in wanted for value in column]) if column else False
        return np.flatnonzero(fits)

    @property
    def _lifts(self) -> bool:
        return self.oriented_distance.lift is not None

    @cached_property
    def _screen(self) -> Screen:
        """The gallery prepared for exact search, at the first: a quarter to half of the memory of the embeddings."""
        return Screen.of(self.embeddings, self.oriented_distance)

    @cached_property
    def _sample(self) -> SampledItems:
        """:meth:`_sampled` of all items."""
        return self._sample_of(np.arange(len(self)))

    def _sampled(self, n: int, filter: Filter | None) -> SampledItems:
        return self._sample if filter is None else self._sample_of(self._fitting(filter))

    def _sample_of(self, positions: np.ndarray) -> SampledItems:
        """All the ascending positions or a sample of them, drawn with seed 0, prepared for distances by products."""
        chosen, n = positions, len(positions)
        if n > N_WHOLE:
            chosen = np.sort(np.random.default_rng(0).permutation(positions)[:_SAMPLE])
        part = self.embeddings[chosen]
        ids = tuple(self.ids[j] for j in chosen.tolist())
        if self._lifts:
            vectors = exact.lift_gallery(part, self.distance, centre=self.centre)
            lifted = exact.LiftedGallery.of(vectors, self.distance, self.centre)
            return SampledItems(ids, part.__getitem__, lifted.distance_blocks, len(chosen) == n)
        blocks = functools.partial(exact.distance_blocks, gallery=part, distance=self.oriented_distance)
        return SampledItems(ids, part.__getitem__, blocks, len(chosen) == n)


@exact.quiet
def _check_gallery(embeddings: GaussianEmbedding, ids: tuple[str, ...], payload: dict[str, tuple[str, ...]]) -> None:
    if embeddings.n == 0:
        raise ValueError("GaussianIndex: got no embeddings; an index needs at least one item")
    if len(ids) != embeddings.n:
        raise ValueError(f"GaussianIndex: got {len(ids)} ids for {embeddings.n} embeddings; give one id for each")
    wrong = next((i for i in ids if not isinstance(i, str)), None)
    if wrong is not None:
        raise TypeError(f"GaussianIndex: ids must be strings, got {wrong!r}; use str(id)")
    check_ids(ids, "GaussianIndex")
    twice, times = Counter(ids).most_common(1)[0]
    if times > 1:
        raise ValueError(f"GaussianIndex: id {twice!r} occurs {times} times; ids must be distinct")
    for name, values in payload.items():
        if len(values) != len(ids) or not all(isinstance(v, str) for v in values):
            expected = f"payload {name!r} must be {len(ids)} strings, one for each item"
            raise ValueError(f"GaussianIndex: {expected}, got {len(values)} values")
    check_finite(embeddings, "GaussianIndex")
    if not np.isfinite(embeddings.numpy().total_variance.astype(np.float32)).all():
        raise ValueError("GaussianIndex: a total variance overflows float32; the model may have diverged")


def copy_gallery(
    source: GaussianIndex | GaussianCollection,
    folder: str | Path,
    store: str = "store",
    *,
    batch: int = 2048,
    progress: Callable[[int], None] | None = None,
) -> GaussianCollection:
    """Copy all items of a gallery into a new collection, with the images that were uploaded to it."""
    same: dict[str, Any] = {name: getattr(source, name) for name in ("d", "distance", "centre", "metadata")}
    same |= {name: getattr(source.scorer, name) for name in ("logit_scale", "logit_bias", "calibration", "direction")}
    texts = source.texts is not None and beside(store) is not None
    copy = GaussianCollection.create(folder, store, **same, texts=texts)
    way_out = f"a copy was interrupted; remove it (and {copy.store.url}) and copy again"
    with closed_if_it_fails(copy), copy.filling(way_out):
        if isinstance(source, GaussianCollection):
            _copy_uploads(source.folder, copy.folder)
            for records in source.store.scan(batch):  # As they were when the scan began, also while others write.
                if copy.texts is not None:
                    _copy_texts(source.texts, copy.texts, records)
                copy.store.upsert(records)
                if progress:
                    progress(len(records))
            _copy_uploads(source.folder, copy.folder)  # Again: items may have come before the scan began.
        else:
            copy.upsert(source.embeddings, source.ids, source.payload, batch=batch, progress=progress)
        copy.optimise()
    return copy


def _copy_texts(source: TextStore | None, copy: TextStore, records: Records) -> None:
    """Store the vectors of the texts of some records."""
    own = [i for i, payload in enumerate(records.payloads) if item_texts(payload)]
    ids, payloads = [records.ids[i] for i in own], [records.payloads[i] for i in own]
    if source is None:
        copy.upsert(ids, payloads)
    elif own:
        copy.write(ids, *source.vectors_for(ids, payloads), payloads)


def _copy_uploads(folder: Path, copy: Path) -> None:
    """Copy the uploaded images that are not in the copy yet, each with the name of its content, and the known texts."""
    for image in [*sorted((folder / UPLOADED_IMAGES).rglob("*")), folder / KNOWN_TEXTS]:
        new = copy / image.relative_to(folder)
        with contextlib.suppress(FileNotFoundError):  # It was removed meanwhile.
            if image.is_file() and image.suffix != ".tmp" and not new.exists():
                content = image.read_bytes()
                new.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(new, content)
