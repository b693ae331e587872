"""What the URL of a store in a folder may say: the engine, how it is built, and how searches use it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.errors import UserError
from sfumato.search.stores.faiss import STORE_ENGINES, FaissOptions, require_faiss
from sfumato.search.stores.store_url import options

LOCAL_OPTIONS = {
    "engine": f"{', '.join(STORE_ENGINES)}; flat if left out",
    "memory": "MB of vectors that searches keep in memory, 2000 if left out; further vectors are read at each search",
    "exact_below": "number of items below which all are compared instead of using the index, 8192 if left out",
    "m": "hnsw: links of a node",
    "ef_construction": "hnsw: candidates while building",
    "ef_search": "hnsw: candidates while searching",
    "n_lists": "ivf, ivf-pq: number of lists",
    "n_probe": "ivf, ivf-pq: lists that a search looks into",
    "seed": "ivf, ivf-pq: seed of the clustering",
    "code_size": "ivf-pq: bytes of a compressed vector",
    "overfetch": "ivf-pq: candidates for each wanted result, 10 if left out",
    "shard_size": "of version 0.1, has no effect",
}
"""What may follow the question mark of the URL, for messages and docs."""

_SEARCHING = ("memory", "exact_below", "ef_search", "n_probe", "overfetch")
"""Options that the URL of every opening may set; the others are settled when the store is created."""

_OF_ALL = ("memory", "exact_below")
_OF_ENGINE = {
    "flat": (),
    "hnsw": ("m", "ef_construction", "ef_search"),
    "ivf": ("n_lists", "n_probe", "seed"),
    "ivf-pq": ("n_lists", "n_probe", "seed", "code_size", "overfetch"),
}


@dataclass(frozen=True)
class LocalSettings:
    """What a store was created and opened with.

    Attributes:
        engine: one of STORE_ENGINES.
        memory: MB of vectors that searches keep in memory.
        exact_below: number of items below which all are compared.
        overfetch: candidates for each wanted result, for compressed vectors.
        faiss: numbers of the engine.
    """

    engine: str
    memory: int
    exact_below: int
    overfetch: int
    faiss: FaissOptions

    @staticmethod
    def of(url: str, given: Mapping[str, Any]) -> "LocalSettings":
        """Settings from options, with defaults for those that are left out.

        Args:
            url: of the store, for messages.
            given: by name; numbers as numbers.

        Returns:
            The settings.

        Raises:
            UserError: an option is unknown or wrong, or the engine needs FAISS and it is not installed.
        """
        rest = {name: value for name, value in given.items() if name != "shard_size"}
        engine = rest.pop("engine", "flat")
        if engine not in STORE_ENGINES:
            raise UserError(f"store {url}: unknown engine {engine!r}; known: {', '.join(STORE_ENGINES)}")
        if foreign := sorted(set(rest) - {*_OF_ENGINE[engine], *_OF_ALL}):
            known = ", ".join((*_OF_ALL, *_OF_ENGINE[engine]))
            raise UserError(f"store {url}: engine {engine} has no option {foreign[0]!r}; it has {known}")
        memory, exact_below = rest.pop("memory", 2000), rest.pop("exact_below", 8192)
        overfetch = rest.pop("overfetch", 10)
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
    """Refuse options of an opening that contradict those the store was created with.

    Args:
        url: of the store, for messages.
        given: options of the URL that opens.
        kept: options of the URL that created.

    Raises:
        UserError: they differ; the message names the option.
    """
    engine = kept.get("engine", "flat")
    for name, value in given.items():
        if name in _SEARCHING or name == "shard_size":
            continue
        was = engine if name == "engine" else kept.get(name)
        if was is None and name in _OF_ENGINE[engine]:
            raise UserError(f"store {url}: was created without {name}; leave the option out")
        if was is not None and was != value:
            raise UserError(f"store {url}: was created with {name}={was}, not {value}; leave the option out")


def parse_url(url: str) -> tuple[Path, dict[str, Any]]:
    """Folder and options of a URL, numbers as numbers.

    Args:
        url: PATH?OPTIONS or file:PATH?OPTIONS.

    Returns:
        The folder, and the options that are given.

    Raises:
        UserError: there is no path, or an option is unknown or no number.
    """
    path = url.removeprefix("file:").partition("?")[0]
    # A path may have a #, which would end the URL for `options`.
    given: dict[str, Any] = dict(options(url.replace("#", "%23"), LOCAL_OPTIONS))
    if not path:
        raise UserError(f"store {url}: names no folder; write PATH?engine=hnsw")
    for name in set(given) - {"engine"}:
        if not re.fullmatch(r"\d{1,12}", given[name]):
            raise UserError(f"store {url}: {name} must be a whole number, got {given[name]!r}")
        given[name] = int(given[name])
    return Path(path), given
