"""The settings of a local store: options of its URL, at its creation and at its opening."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.errors import UserError
from sfumato.search.stores.engines import (
    FaissOptions,
    require_faiss,
)
from sfumato.search.stores.open import Option, options

_OF_ENGINE = {
    "flat": (),
    "hnsw": ("compress", "m", "ef_construction", "ef_search", "overfetch"),
    "ivf": ("n_lists", "n_probe", "seed"),
    "ivf-pq": ("n_lists", "n_probe", "seed", "code_size", "overfetch"),
}


_OF_ALL = ("memory", "exact_below")


LOCAL_OPTIONS = {
    "engine": Option(f"{', '.join(_OF_ENGINE)}; flat if left out"),
    "memory": Option("MB of vectors that searches keep in memory, 2000 if left out; more are read at each search", 0),
    "exact_below": Option("items below which all are compared instead of using the index, 8192 if left out", 0),
    "compress": Option("hnsw: int8, the main components of the vectors in a byte each, or none; int8 if left out"),
    "m": Option("hnsw: number of links of a node", 0),
    "ef_construction": Option("hnsw: number of candidates while building, 64 if left out", 0),
    "ef_search": Option("hnsw: number of candidates while searching, 1024 if left out", 0),
    "n_lists": Option("ivf, ivf-pq: number of lists", 0),
    "n_probe": Option("ivf, ivf-pq: number of lists that a search reads", 0),
    "seed": Option("ivf, ivf-pq: seed of the clustering", 0),
    "code_size": Option("ivf-pq: number of bytes of a compressed vector", 0),
    "overfetch": Option("compressed vectors: number of candidates for each result; hnsw 4, ivf-pq 10 if left out", 0),
}


"""What may follow the question mark of the URL, for messages and docs."""


_HNSW = {"compress": "int8", "ef_construction": 64, "ef_search": 1024, "overfetch": 4}


"""Defaults by which a million items are found from both modalities (benchmarks/scale.py)."""


_NAMED = ("engine", "compress")


"""Options whose values are no numbers."""


_SEARCHING = ("memory", "exact_below", "ef_search", "n_probe", "overfetch")


"""Options that the URL of every opening may set; the others are settled when the store is created."""


@dataclass(frozen=True)
class LocalSettings:
    """The settings of a store, from its creation and its opening."""

    engine: str  # flat (exact) or one of FAISS
    memory: int  # MB of vectors that searches keep in memory
    exact_below: int  # number of items below which all are compared
    overfetch: int  # candidates for each wanted result, for compressed vectors
    faiss: FaissOptions  # numbers of the engine

    @staticmethod
    def of(url: str, given: Mapping[str, Any]) -> "LocalSettings":
        """Settings from options, with defaults for those that are left out."""
        rest = dict(given)
        engine = rest.pop("engine", "flat")
        if engine not in _OF_ENGINE:
            raise UserError(f"store {url}: unknown engine {engine!r}; known: {', '.join(_OF_ENGINE)}")
        if foreign := sorted(set(rest) - {*_OF_ENGINE[engine], *_OF_ALL}):
            known = ", ".join((*_OF_ALL, *_OF_ENGINE[engine]))
            others = " and ".join(other for other, names in _OF_ENGINE.items() if foreign[0] in names)
            raise UserError(
                f"store {url}: engine {engine} has no option {foreign[0]!r}, which is of {others}; it has {known}"
            )
        if engine == "hnsw":
            rest = _HNSW | rest
        memory, exact_below = rest.pop("memory", 2000), rest.pop("exact_below", 8192)
        overfetch = rest.pop("overfetch", 10 if engine == "ivf-pq" else 1)
        if overfetch < 1:
            raise UserError(f"store {url}: overfetch must be at least 1, got {overfetch}")
        try:
            settings = LocalSettings(engine, memory, exact_below, overfetch, FaissOptions(**rest))
        except ValueError as error:
            raise UserError(f"store {url}: {str(error).removeprefix('FaissOptions: ')}") from error
        if engine != "flat":
            require_faiss()
        return settings


def check_against(url: str, given: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Check that the options at opening do not contradict the options at creation."""
    engine = kept.get("engine", "flat")
    kept = (_HNSW | dict(kept)) if engine == "hnsw" else kept
    for name, value in given.items():
        if name in _SEARCHING:
            continue
        was = engine if name == "engine" else kept.get(name)
        if was is None and name in _OF_ENGINE[engine]:
            raise UserError(f"store {url}: was created without {name}; leave the option out")
        if was is not None and was != value:
            raise UserError(f"store {url}: was created with {name}={was}, not {value}; leave the option out")


def parse_url(url: str) -> tuple[Path, dict[str, Any]]:
    """Folder and options of a URL, numbers as numbers."""
    path = url.removeprefix("file:").partition("?")[0]
    # A path may have a #, which would end the URL for `options`.
    given: dict[str, Any] = dict(options(url.replace("#", "%23"), LOCAL_OPTIONS))
    if not path:
        raise UserError(f"store {url}: names no folder; write PATH?engine=hnsw")
    return Path(path), {name: value if name in _NAMED else int(value) for name, value in given.items()}
