"""An index of Gaussian embeddings: exact or FAISS engines over lifted vectors, results with probabilities and uncertainties.

An engine only proposes candidates; the distances of the results are computed from the stored embeddings, so that engines
differ in what they find and never in what they say about it.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sfumato.distances import get_distance
from sfumato.errors import UserError
from sfumato.files import sync_folder
from sfumato.gaussian import GaussianEmbedding, check_finite, load_embeddings, save_embeddings
from sfumato.matching import match_probability
from sfumato.search.lifting import lift_gallery, lift_queries
from sfumato.search.ranking import top_k
from sfumato.search.stores.faiss import FaissStore

Engine = Literal["exact", "flat", "hnsw", "ivf"]

_FORMAT = "sfumato-index-1"
_MANIFEST, _EMBEDDINGS, _FAISS = "manifest.json", "embeddings.safetensors", "vectors.faiss"


@dataclass(frozen=True)
class SearchHit:
    """One result.

    Attributes:
        id: of the indexed item.
        distance: of query and item, by the index's distance.
        match_probability: that they match.
        uncertainty: total variance of the item.
        payload: what was stored with it.
    """

    id: str
    distance: float
    match_probability: float
    uncertainty: float
    payload: dict[str, str]


class GaussianIndex:
    """Searchable embeddings. Make one with :meth:`build` or :meth:`load`.

    Attributes:
        embeddings: (m, d), float32 on the CPU.
        ids: m distinct strings.
        distance: name of the distance that results are ranked by.
        engine: what finds candidates.
        logit_scale, logit_bias: from distances to match probabilities.
        payload: name -> m strings, returned with results.
        about: notes of whoever built it (the run's folder, say).
    """

    def __init__(
        self,
        embeddings: GaussianEmbedding,
        ids: Sequence[str],
        *,
        distance: str,
        engine: Engine,
        logit_scale: float,
        logit_bias: float,
        payload: Mapping[str, Sequence[str]],
        about: Mapping[str, Any],
        store: FaissStore | None,
    ) -> None:
        self.embeddings, self.ids = embeddings, list(ids)
        self.distance, self.engine = distance, engine
        self.logit_scale, self.logit_bias = logit_scale, logit_bias
        self.payload = {name: list(values) for name, values in payload.items()}
        self.about = dict(about)
        self._store = store
        self._centre = embeddings.mean.mean(0)
        self._uncertainty = embeddings.total_variance.tolist()

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
        payload: Mapping[str, Sequence[str]] | None = None,
        about: Mapping[str, Any] | None = None,
        options: Mapping[str, int] | None = None,
    ) -> "GaussianIndex":
        """Index embeddings.

        Args:
            embeddings: (m, d), m >= 1.
            ids: m distinct strings.
            distance: name in DISTANCES; the FAISS engines need one of LIFTED.
            engine: "exact" (every distance, nothing to install), "flat" (FAISS, exact), "hnsw" or "ivf" (FAISS, approximate).
            logit_scale, logit_bias: from distances to match probabilities, best those of a run's calibration.
            payload: name -> m strings to return with the results.
            about: JSON-able notes.
            options: of the engine: :meth:`FaissStore.build`.

        Raises:
            ValueError: sizes do not fit, ids are not distinct, values are not finite, or an option is unknown.
            UserError: the engine's extra is not installed.
        """
        if engine not in get_args(Engine):
            raise ValueError(f"GaussianIndex: unknown engine {engine!r}; known: {', '.join(get_args(Engine))}")
        if embeddings.n == 0:
            raise ValueError("GaussianIndex: got no embeddings, nothing to index")
        if len(ids) != embeddings.n or len(set(ids)) != len(ids):
            raise ValueError(f"GaussianIndex: got {len(ids)} ids ({len(set(ids))} distinct) for {embeddings.n} embeddings; give one distinct id for each")
        for name, values in (payload or {}).items():
            if len(values) != embeddings.n:
                raise ValueError(f"GaussianIndex: payload {name!r} has {len(values)} values for {embeddings.n} embeddings")
        if not logit_scale > 0:
            raise ValueError(f"GaussianIndex: logit_scale must be positive, got {logit_scale}")
        check_finite(embeddings, "GaussianIndex")
        get_distance(distance)
        embeddings = embeddings.detach().to("cpu").to(torch.float32)
        store = None
        chosen: Engine = engine  # type: ignore[assignment]
        if chosen != "exact":
            vectors = lift_gallery(embeddings, distance, centre=embeddings.mean.mean(0))
            store = FaissStore.build(vectors.numpy(), chosen, dict(options or {}))
        elif options:
            raise ValueError(f"engine 'exact' has no options, got {sorted(options)}")
        return cls(
            embeddings, ids, distance=distance, engine=chosen, logit_scale=logit_scale, logit_bias=logit_bias,
            payload=payload or {}, about=about or {}, store=store,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.ids)

    def search(self, queries: GaussianEmbedding, k: int) -> list[list[SearchHit]]:
        """The closest items of each query, closest first; equal distances in the order of indexing.

        Args:
            queries: (n, d) embeddings.
            k: number of results; all there are if it is larger. An approximate engine may find fewer.

        Returns:
            n lists of hits.

        Raises:
            ValueError: d differs, k < 1, or a query is not finite.
        """
        if queries.d != self.embeddings.d:
            raise ValueError(f"search: queries have d = {queries.d}, the index d = {self.embeddings.d}; embed them with the index's own model")
        if k < 1:
            raise ValueError(f"search: k must be at least 1, got {k}")
        check_finite(queries, "search")
        queries = queries.detach().to("cpu").to(torch.float32)
        distances, positions = self.candidates(queries, min(k, len(self)))
        probabilities = match_probability(distances, self.logit_scale, self.logit_bias)
        rows = zip(distances.tolist(), positions.tolist(), probabilities.tolist(), strict=True)
        return [
            [
                SearchHit(self.ids[i], d, p, self._uncertainty[i], {name: values[i] for name, values in self.payload.items()})
                for d, i, p in zip(*row, strict=True)
                if i >= 0
            ]
            for row in rows
        ]

    def candidates(self, queries: GaussianEmbedding, k: int) -> tuple[Tensor, Tensor]:
        """((n, k) distances, (n, k) positions), closest first; position -1 at infinite distance where an engine found fewer."""
        if self._store is None:
            return top_k(queries, self.embeddings, k, self.distance)
        positions = torch.from_numpy(self._store.search(lift_queries(queries, self.distance, centre=self._centre).numpy(), k))
        k = positions.shape[1]
        found = self.embeddings[positions.clamp_min(0).flatten()]
        repeated = queries[torch.arange(queries.n).repeat_interleave(k)]
        distance = get_distance(self.distance).row(repeated, found).reshape(-1, k)
        distance = distance.masked_fill(positions < 0, torch.inf)
        order = positions.where(positions >= 0, len(self)).argsort(dim=1)
        distance, positions = distance.gather(1, order), positions.gather(1, order)
        order = distance.argsort(dim=1, stable=True)
        return distance.gather(1, order), positions.gather(1, order)

    def save(self, path: str | Path) -> None:
        """Write the index as one folder, under a temporary name that is then renamed: the old index or the new, never a part.

        Raises:
            UserError: the path exists and is not an index.
        """
        path = Path(path)
        if path.exists() and not (path / _MANIFEST).is_file():
            raise UserError(f"{path} exists and is not an index; give another path, or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
        try:
            self._write(temporary)
            if path.exists():
                # A folder cannot be renamed over another: the old one steps aside, and load() finds it there if we die between.
                aside = _aside(path)
                if aside.exists():
                    shutil.rmtree(aside)
                os.rename(path, aside)
                os.rename(temporary, path)
                shutil.rmtree(aside)
            else:
                os.rename(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(path.parent)

    @classmethod
    def load(cls, path: str | Path) -> "GaussianIndex":
        """Read an index, after checking every file against its checksum.

        Raises:
            UserError: there is no index, or a file of it is missing or damaged; or the engine's extra is not installed.
        """
        path = Path(path)
        if not path.exists() and (_aside(path) / _MANIFEST).is_file():
            path = _aside(path)  # The writer died between its two renames.
        if not (path / _MANIFEST).is_file():
            raise UserError(f"no index at {path}; build one with `sfumato index`")
        try:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
            checksums, engine = manifest["sha256"], manifest["engine"]
        except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
            raise UserError(f"{path / _MANIFEST}: damaged ({error}); build the index again") from error
        if manifest.get("format") != _FORMAT:
            raise UserError(f"{path}: index format {manifest.get('format')!r}, expected {_FORMAT!r}; build it again with this version")
        for name, expected in checksums.items():
            if not (path / name).is_file() or _sha256(path / name) != expected:
                raise UserError(f"{path / name}: missing or damaged (its checksum differs); build the index again")
        embeddings, ids = load_embeddings(path / _EMBEDDINGS)
        store = FaissStore.load(path / _FAISS, engine) if engine != "exact" else None
        options = {key: manifest[key] for key in ("distance", "logit_scale", "logit_bias", "payload", "about")}
        return cls(embeddings, ids, engine=engine, store=store, **options)

    def _write(self, folder: Path) -> None:
        save_embeddings(folder / _EMBEDDINGS, self.embeddings, self.ids)
        if self._store is not None:
            self._store.save(folder / _FAISS)
        manifest = {
            "format": _FORMAT,
            "distance": self.distance,
            "engine": self.engine,
            "logit_scale": self.logit_scale,
            "logit_bias": self.logit_bias,
            "n": len(self),
            "d": self.embeddings.d,
            "sha256": {file.name: _sha256(file) for file in sorted(folder.iterdir())},
            "about": self.about,
            "payload": self.payload,
        }
        (folder / _MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1), encoding="utf-8")
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        os.chmod(folder, 0o755)
        sync_folder(folder)




def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
