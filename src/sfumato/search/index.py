"""GaussianIndex: find, for Gaussian queries, the closest items of a gallery, with match probabilities and both uncertainties.

Engine "exact" ranks by any distance; "flat", "hnsw" and "ivf" are FAISS over lifted vectors (search/lifting.py). Engines differ only
in which candidates they bring: the distances of the hits are always computed anew, row by row in float32, from the stored
embeddings, and equal distances are ordered as the items were given. With a calibration an index can also decline to answer, and
give sets that hold a match as often as was asked for.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sfumato.calibration import Calibration, Direction
from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.matching import match_probability
from sfumato.search.folders import load_folder, save_folder
from sfumato.search.lifting import gallery_centre, lift_gallery, lift_queries
from sfumato.search.ranking import closest_candidates, distance_blocks, top_k
from sfumato.search.stores.faiss import FAISS_ENGINES, FaissOptions, FaissStore

ENGINES = ("exact", *FAISS_ENGINES)
"""Engines of :class:`GaussianIndex`."""

_KIND = "sfumato-index-1"
_TENSORS, _ITEMS, _FAISS, _CALIBRATION = "embeddings.safetensors", "items.json", "faiss.index", "calibration.json"


@dataclass(frozen=True)
class SearchHit:
    """One item that a search found.

    Attributes:
        id: of the item.
        rank: 1 is the closest.
        distance: between query and item, smaller is closer.
        match_probability: in [0, 1], by the calibration of the index, or its logits.
        uncertainty: total variance of the item.
        payload: what was stored beside the item, e.g. {"path": ...}.
    """

    id: str
    rank: int
    distance: float
    match_probability: float
    uncertainty: float
    payload: dict[str, str]


@dataclass(frozen=True)
class SearchResult:
    """What a search found for one query, closest first; iterates over its hits.

    Attributes:
        uncertainty: total variance of the query.
        hits: as many as were asked for, or the whole gallery if it is smaller; with min_probability fewer, perhaps none.
        abstained: whether the closest item is too unlikely a match to be an answer at the risk asked for; None if none was.
        conformal_set: all items within the radius of the coverage asked for, closest first; None if none was.
    """

    uncertainty: float
    hits: tuple[SearchHit, ...]
    abstained: bool | None = None
    conformal_set: tuple[SearchHit, ...] | None = None

    def __iter__(self) -> Iterator[SearchHit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, index: int) -> SearchHit:
        return self.hits[index]


@dataclass(frozen=True, eq=False)
class GaussianIndex:
    """A gallery of Gaussian embeddings to search in. Make one with :meth:`build` or :meth:`load`.

    Attributes:
        embeddings: (m, d) gallery, float32 on the CPU.
        ids: m distinct ids.
        distance: name in DISTANCES.
        engine: one of ENGINES.
        logit_scale, logit_bias: of the match probabilities; of a calibration, those of its Platt part in a gallery of this size.
        queries_first: distance(query, item); with False distance(item, query), which matters for kl alone.
        payload: by name, a text for each item.
        about: JSON values of whoever built the index.
        centre: (d,) that FAISS's vectors are relative to.
        store: FAISS's part; None for "exact".
        calibration: what probabilities, abstention and conformal sets come from; None if there is none.
        direction: "t2i" if the queries are texts and the items images, which calibration they need.
    """

    embeddings: GaussianEmbedding
    ids: tuple[str, ...]
    distance: str
    engine: str
    logit_scale: float
    logit_bias: float
    queries_first: bool
    payload: dict[str, tuple[str, ...]]
    about: dict[str, Any]
    centre: Tensor
    store: FaissStore | None
    calibration: Calibration | None = None
    direction: Direction = "t2i"

    @classmethod
    def build(
        cls,
        embeddings: GaussianEmbedding,
        ids: Sequence[str],
        *,
        distance: str = "csd",
        engine: str = "exact",
        logit_scale: float = 5.0,
        logit_bias: float = 5.0,
        queries_first: bool = True,
        payload: Mapping[str, Sequence[str]] | None = None,
        about: Mapping[str, Any] | None = None,
        options: FaissOptions | None = None,
        calibration: Calibration | None = None,
        direction: Direction = "t2i",
    ) -> "GaussianIndex":
        """Index a gallery.

        Args:
            embeddings: (m, d) gallery, m >= 1; kept in float32.
            ids: m distinct strings.
            distance: name in DISTANCES; FAISS engines take csd, wasserstein2 or squared_l2.
            engine: "exact", or with the extra `faiss` "flat" (all items, exact), "hnsw" or "ivf" (approximate).
            logit_scale, logit_bias: of the match probabilities; take the model's, calibrated. The default is where Chun 2024
                starts training, good for nothing but ranking.
            queries_first: False for kl from images as items to texts as queries.
            payload: by name, m texts to hand out with the hits.
            about: JSON values to keep with the index.
            options: of the FAISS engines.
            calibration: of the model, by the same distance; takes the place of logit_scale and logit_bias.
            direction: of the queries, "t2i" for texts that search among images.

        Raises:
            ValueError: an argument does not fit; the message says which and how.
            UserError: a FAISS engine without FAISS.
        """
        ids, texts = tuple(ids), {name: tuple(values) for name, values in (payload or {}).items()}
        _check_gallery(embeddings, ids, texts)
        if calibration is not None:
            logit_scale = calibration.logit_scale
            logit_bias = calibration.logit_bias + _prior_shift(calibration, direction, len(ids))
        check_settings(distance, engine, logit_scale, logit_bias)
        if get_distance(distance).needs_variance and torch.isneginf(embeddings.log_var).any():
            raise ValueError(
                f"GaussianIndex: {distance} needs positive variances, got points; use csd, squared_l2 or wasserstein2"
            )
        notes = json.loads(json.dumps(dict(about or {}), allow_nan=False))
        embeddings = embeddings.detach().to("cpu").to(torch.float32)
        centre, store = gallery_centre(embeddings), None
        if engine == "exact" and options:
            raise ValueError("GaussianIndex: engine exact has no options; leave them out, or choose flat, hnsw or ivf")
        if engine != "exact":
            store = FaissStore.build(lift_gallery(embeddings, distance, centre=centre), engine, options)
        return cls(
            embeddings, ids, distance, engine, float(logit_scale), float(logit_bias), queries_first, texts, notes, centre, store,
            calibration, direction,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.ids)

    def search(
        self,
        queries: GaussianEmbedding,
        k: int = 10,
        *,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
    ) -> list[SearchResult]:
        """The k closest items of each query.

        Args:
            queries: (n, d) embeddings; any floating dtype and device.
            k: number of hits; all items if the gallery is smaller.
            min_probability: leave out hits that are less likely matches. For a wanted precision take that of
                :meth:`Calibration.threshold`.
            coverage: give also the set of all items, however many, that holds a match of the query with at least this
                probability: :meth:`Calibration.conformal_radius`. Found by a scan whatever the engine.
            max_risk: say of each query whether it is better not answered, so that at most this share of the answers is wrong:
                :meth:`Calibration.abstain_below`. Hits and set are given all the same.

        Returns:
            n results in the order of the queries.

        Raises:
            ValueError: k < 1, another d, NaN in a query, a share outside of (0, 1), or coverage or max_risk without a calibration
                that can vouch for it.
        """
        if min_probability is not None and not 0 <= min_probability <= 1:
            raise ValueError(f"search: min_probability must be between 0 and 1, got {min_probability}")
        radius = None
        if coverage is not None:
            if not 0 < coverage < 1:
                raise ValueError(f"search: coverage must be between 0 and 1, got {coverage}")
            radius = self._calibration("coverage").conformal_radius(1 - coverage, direction=self.direction)
        calibration = None if max_risk is None else self._calibration("max_risk")
        distance, position = self.nearest(queries, k)
        probability = self.match_probability(distance)
        abstained: list[bool | None] = [None] * queries.n
        if calibration is not None and max_risk is not None:
            n = len(self) if calibration.share is not None else None
            abstained = calibration.abstains(distance[:, 0], max_risk, n_gallery=n, direction=self.direction).tolist()
        sets = [None] * queries.n if radius is None else self._within(queries, radius)
        results = []
        for i, total_variance in enumerate(queries.total_variance.tolist()):
            hits = self._hits(distance[i], position[i], probability[i])
            if min_probability is not None:
                hits = tuple(hit for hit in hits if hit.match_probability >= min_probability)
            results.append(SearchResult(total_variance, hits, abstained[i], sets[i]))
        return results

    def match_probability(self, distance: Tensor) -> Tensor:
        """Probability that an item of this index at this distance from a query matches it.

        Args:
            distance: any shape, by the distance of the index.

        Returns:
            (...) probabilities of the same shape: of the calibration, at the size of this gallery; without one, of the logits.
        """
        if self.calibration is None or self.calibration.knots is None:
            return match_probability(distance, self.logit_scale, self.logit_bias)
        shift = self.logit_bias - self.calibration.logit_bias
        return torch.sigmoid(self.calibration.logit(distance) + shift).to(distance.dtype)

    @torch.no_grad()
    def nearest(self, queries: GaussianEmbedding, k: int = 10) -> tuple[Tensor, Tensor]:
        """What :meth:`search` finds, as tensors.

        Returns:
            ((n, k) float32 distances ascending, (n, k) positions in `ids`).
        """
        if k < 1:
            raise ValueError(f"search: k must be at least 1, got {k}")
        if queries.d != self.embeddings.d:
            raise ValueError(
                f"search: queries have {queries.d} dimensions, the index has {self.embeddings.d}; embed both with one model"
            )
        check_finite(queries, "search")
        queries = queries.detach().to("cpu").to(torch.float32)
        k = min(k, len(self))
        # A few more than asked: rounding may have put near ties in the wrong order, the exact distances mend it.
        candidates = self._candidates(queries, min(len(self), k + max(8, k // 4)))
        distance, found = closest_candidates(
            queries, self.embeddings, candidates, self.distance, queries_first=self.queries_first
        )
        return distance[:, :k], found[:, :k]

    def save(self, path: str | Path) -> None:
        """Write the index into a folder; an index already there is replaced in one step, or kept if this process dies.

        Raises:
            ValueError: path is a file, or a folder with something else in it.
            BlockingIOError: another process is saving there.
        """
        about = {
            "n": len(self),
            "d": self.embeddings.d,
            "distance": self.distance,
            "engine": self.engine,
            "logit_scale": self.logit_scale,
            "logit_bias": self.logit_bias,
            "queries_first": self.queries_first,
            "options": asdict(self.store.options) if self.store else None,
            "calibration": self.calibration is not None,
            "direction": self.direction,
            "about": self.about,
        }
        save_folder(path, _KIND, about, self._write)

    @classmethod
    def load(cls, path: str | Path) -> "GaussianIndex":
        """Read a saved index after checking every file against its checksum.

        Raises:
            FileNotFoundError: there is no folder, or no complete index in it.
            ValueError: a file is missing, cut short or changed, or it is not an index.
            UserError: a FAISS engine without FAISS.
        """
        return load_folder(path, _KIND, cls._read)

    @cached_property
    def _uncertainty(self) -> Tensor:
        """(m,) total variances, computed once."""
        return self.embeddings.total_variance

    def _write(self, folder: Path) -> None:
        tensors = {"mean": self.embeddings.mean, "log_var": self.embeddings.log_var, "centre": self.centre}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _TENSORS)
        items = {"ids": self.ids, "payload": self.payload}
        (folder / _ITEMS).write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
        if self.store:
            self.store.write(folder / _FAISS)
        if self.calibration:
            self.calibration.save(folder / _CALIBRATION)

    @classmethod
    def _read(cls, folder: Path, about: dict[str, Any]) -> "GaussianIndex":
        tensors = load_file(folder / _TENSORS)
        items = json.loads((folder / _ITEMS).read_text(encoding="utf-8"))
        store = None
        if about["engine"] != "exact":
            store = FaissStore.read(folder / _FAISS, about["engine"], FaissOptions(**about["options"]))
        return cls(
            embeddings=GaussianEmbedding(tensors["mean"], tensors["log_var"]),
            ids=tuple(items["ids"]),
            distance=about["distance"],
            engine=about["engine"],
            logit_scale=about["logit_scale"],
            logit_bias=about["logit_bias"],
            queries_first=about["queries_first"],
            payload={name: tuple(values) for name, values in items["payload"].items()},
            about=about["about"],
            centre=tensors["centre"],
            store=store,
            # Indices of before had neither.
            calibration=Calibration.load(folder / _CALIBRATION) if about.get("calibration") else None,
            direction=about.get("direction", "t2i"),
        )

    def _hits(self, distance: Tensor, position: Tensor, probability: Tensor) -> tuple[SearchHit, ...]:
        """The items at (c,) positions, in their order."""
        columns = (position, distance, probability, self._uncertainty[position])
        return tuple(
            SearchHit(self.ids[j], rank, d, p, u, {name: values[j] for name, values in self.payload.items()})
            for rank, (j, d, p, u) in enumerate(zip(*(c.tolist() for c in columns), strict=True), 1)
        )

    @torch.no_grad()
    def _within(self, queries: GaussianEmbedding, radius: float) -> list[tuple[SearchHit, ...]]:
        """For each query all items at most as far as the radius, by distances as exact as those of the hits."""
        queries = queries.detach().to("cpu").to(torch.float32)
        sets = []
        for start, block in distance_blocks(queries, self.embeddings, self.distance, queries_first=self.queries_first):
            # Products of matrices round by about 1e-6 of the largest distance.
            near = block <= radius + 1e-5 * block.abs().amax(1, keepdim=True)
            for i, row in enumerate(near, start):
                candidates = row.nonzero().T
                distance, position = closest_candidates(
                    queries[i : i + 1], self.embeddings, candidates, self.distance, queries_first=self.queries_first
                )
                inside = distance[0] <= radius
                distance, position = distance[0][inside], position[0][inside]
                sets.append(self._hits(distance, position, self.match_probability(distance)))
        return sets

    def _calibration(self, asked: str) -> Calibration:
        if self.calibration is None:
            raise ValueError(
                f"search: {asked} needs a calibration, and this index has none; calibrate the model on held-out pairs (sfumato calibrate"
                " RUN) and build the index again"
            )
        return self.calibration

    def _candidates(self, queries: GaussianEmbedding, c: int) -> Tensor:
        """(n, c) distinct positions; queries for which an approximate engine finds fewer than c are answered exactly."""
        if self.store is None:
            return top_k(queries, self.embeddings, c, self.distance, queries_first=self.queries_first)[1]
        _, found = self.store.search(lift_queries(queries, self.distance, centre=self.centre), c)
        short = (found < 0).any(dim=1).nonzero().squeeze(1)
        if len(short):
            found[short] = top_k(queries[short], self.embeddings, c, self.distance, queries_first=self.queries_first)[1]
        return found


def _check_gallery(embeddings: GaussianEmbedding, ids: tuple[str, ...], payload: dict[str, tuple[str, ...]]) -> None:
    if embeddings.n == 0:
        raise ValueError("GaussianIndex: got no embeddings; an index needs at least one item")
    if len(ids) != embeddings.n:
        raise ValueError(f"GaussianIndex: got {len(ids)} ids for {embeddings.n} embeddings; give one id for each")
    wrong = next((i for i in ids if not isinstance(i, str)), None)
    if wrong is not None:
        raise TypeError(f"GaussianIndex: ids must be strings, got {wrong!r}; use str(id)")
    twice, times = Counter(ids).most_common(1)[0]
    if times > 1:
        raise ValueError(f"GaussianIndex: id {twice!r} occurs {times} times; ids must be distinct")
    for name, values in payload.items():
        if len(values) != len(ids) or not all(isinstance(v, str) for v in values):
            raise ValueError(
                f"GaussianIndex: payload {name!r} must be {len(ids)} strings, one for each item; got {len(values)} values"
            )
    check_finite(embeddings, "GaussianIndex")
    if not torch.isfinite(embeddings.total_variance.float()).all():
        raise ValueError("GaussianIndex: a total variance overflows float32; a diverged model?")


def _prior_shift(calibration: Calibration, direction: Direction, n_gallery: int) -> float:
    """What the size of the gallery adds to the logits; nothing if the calibration, of an older version, does not know its own."""
    if calibration.share is None or getattr(calibration, direction) is None:
        return 0.0
    return calibration.prior_shift(n_gallery=n_gallery, direction=direction)


def check_settings(distance: str, engine: str, logit_scale: float = 1.0, logit_bias: float = 0.0) -> None:
    """Refuse what no index can be built with, before anything is embedded for it."""
    if get_distance(distance).sampled:
        raise ValueError(f"GaussianIndex: {distance} is random, so that two searches would differ; use csd")
    if engine not in ENGINES:
        raise ValueError(f"GaussianIndex: unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    if not (logit_scale > 0 and math.isfinite(logit_scale) and math.isfinite(logit_bias)):
        raise ValueError(
            f"GaussianIndex: logit_scale must be positive and both finite, got {logit_scale} and {logit_bias}"
        )
