"""What lies in the folder of a local store: the database with its tables, the write lock, and FAISS's graph.

FAISS needs the extra `faiss`. The distances of compressed vectors in the graph are approximate: the caller must fetch
several times the wanted number of candidates and rank them by the full vectors.
"""

import contextlib
import importlib
import json
import math
import os
import socket
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import numpy.typing as npt

from sfumato.arrays import n_threads
from sfumato.errors import UserError, need
from sfumato.files import sync_folder
from sfumato.search.stores.protocol import WORDS, Filter, Option, Records, StoreInUseError, check_choice, options

Positions = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Fetch = Callable[[Positions], Vectors]
"""From (m,) distinct positions, ascending, their (m, e) vectors."""

_WRITER = ".writer"
"""Name of the file that says which process holds the write lock, or held it last."""

DATABASE, FORMAT = "records.sqlite", 2
"""Name of the file, and the version of its tables."""

RECORD = "SELECT id, uncertainty, payload, vector FROM items JOIN vectors USING (position)"

LIST = "(SELECT value FROM json_each(?))"
"""A list of values given by :func:`listed`."""

_DISK_PAGE = 16_384
"""Bytes of a page: with SQLite's usual 4,096, vectors of 512 dimensions would fill half of each."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE items (position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, uncertainty REAL NOT NULL,
    payload TEXT NOT NULL);
CREATE TABLE vectors (position INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE indexes (file TEXT NOT NULL, bytes INTEGER NOT NULL, positions BLOB NOT NULL);
"""

_WORD_TABLE = "CREATE VIRTUAL TABLE words USING fts5(stems, tokenize='unicode61 remove_diacritics 0')"
"""The field WORDS of payloads, by position."""


def new_database(folder: Path, dim: int, fingerprint: str, settings: Mapping[str, Any]) -> None:
    """Make a new database in a transaction, and rename it into place."""
    new = folder / f".creating-{os.getpid()}.sqlite"
    new.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size={_DISK_PAGE}")
        connection.executescript(f"BEGIN;{_SCHEMA}")
        with contextlib.suppress(sqlite3.OperationalError):  # This SQLite was built without FTS5.
            connection.execute(_WORD_TABLE)
        about = {"dim": dim, "fingerprint": fingerprint, "settings": json.dumps(dict(settings)), "version": 0}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", about.items())
        connection.execute(f"PRAGMA user_version={FORMAT}")
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")
    os.replace(new, folder / DATABASE)
    keep_log_files(folder)
    sync_folder(folder)


def keep_log_files(folder: Path) -> None:
    """Make the files of SQLite's log, empty, after SQLite has removed them with the last connection.

    Without them, who may read the folder but not write to it could not open the database.
    """
    with contextlib.suppress(OSError):
        for ending in ("-wal", "-shm"):
            (folder / f"{DATABASE}{ending}").touch()


def take(lock: filelock.BaseFileLock, url: str) -> None:
    """Acquire the write lock."""
    note, own = Path(lock.lock_file).with_name(_WRITER), f"process {os.getpid()} on {socket.gethostname()}"
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        holder = "another process"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            holder = note.read_text(encoding="utf-8")[:200] or holder
        holder = "another opening in this process" if holder == own else holder
        raise StoreInUseError(f"store {url}: {holder} writes to it; wait until it closes the store") from error
    except OSError as error:
        raise UserError(f"store {url}: cannot be written ({error}); check the permissions") from error
    with contextlib.suppress(OSError):
        note.write_text(own, encoding="utf-8")


def insert(connection: sqlite3.Connection, records: Records) -> None:
    """Store records whose ids are not there, at new positions."""
    last = connection.execute("SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'items'").fetchone()[0]
    positions = range(last + 1, last + 1 + len(records))
    payloads = (json.dumps(dict(payload), ensure_ascii=False) for payload in records.payloads)
    words = [(p, payload[WORDS]) for p, payload in zip(positions, records.payloads, strict=True) if WORDS in payload]
    rows = zip(positions, records.ids, records.uncertainty.tolist(), payloads, strict=True)
    connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
    vectors = np.ascontiguousarray(records.vectors, dtype="<f4")
    connection.executemany("INSERT INTO vectors VALUES (?, ?)", zip(positions, map(bytes, vectors), strict=True))
    if words and has_words(connection):
        connection.executemany("INSERT INTO words (rowid, stems) VALUES (?, ?)", words)


def has_words(connection: sqlite3.Connection) -> bool:
    """Whether a database can search for words."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'words'").fetchone() is not None


def remove(connection: sqlite3.Connection, ids: Sequence[str]) -> int:
    """Remove items."""
    found = positions_of(connection, f"SELECT position FROM items WHERE id IN {LIST}", (listed(ids),)).tolist()
    for table in ("items", "vectors") if found else ():
        connection.execute(f"DELETE FROM {table} WHERE position IN {LIST}", (listed(found),))
    if found and has_words(connection):
        connection.execute(f"DELETE FROM words WHERE rowid IN {LIST}", (listed(found),))
    return len(found)


def positions_of(connection: sqlite3.Connection, select: str, values: Sequence[Any] = ()) -> Positions:
    """Positions that a query finds. Returns (m,)."""
    return np.sort(np.fromiter((row[0] for row in connection.execute(select, values)), dtype=np.int64))


def listed(values: Sequence[Any]) -> str:
    """Values for LIST."""
    return json.dumps(list(values), ensure_ascii=False)


def condition_of(filter: Filter | None) -> tuple[str, list[Any]]:
    """A filter in SQL."""
    conditions, values = ["1"], list[Any]()
    if filter is not None and filter.max_uncertainty is not None:
        conditions.append("uncertainty <= ?")
        values.append(filter.max_uncertainty)
    for name, texts, ranges in filter.conditions() if filter is not None else ():
        within = [f"atom IN {LIST}"]
        values += [name, listed(texts)]
        for least, below in ranges:
            within.append(f"atom {'>=' if least else '>'} ?" + (" AND atom < ?" if below else ""))
            values += [least, below] if below else [least]
        conditions.append(f"EXISTS (SELECT 1 FROM json_each(payload) WHERE key = ? AND ({' OR '.join(within)}))")
    return " AND ".join(conditions), values


_TRAINING, _BLOCK = 65_536, 65_536
"""Numbers of training vectors, and of vectors that are added at a time."""

_KEPT = 0.99
"""Fraction of the variance that is kept of compressed vectors."""


@dataclass(frozen=True)
class GraphOptions:
    """The options of FAISS's graph."""

    compress: str = "int8"  # int8 keeps the main components of the vectors, one byte each; none the vectors
    m: int = 32  # links of a node
    ef_construction: int = 64  # candidates while building
    ef_search: int = 1024  # candidates while searching; never fewer than the requested results


class Graph:
    """HNSW, a graph of FAISS over (m, e) float32 vectors, which finds most of the nearest by squared L2.

    Make one with :meth:`build` or :meth:`read`. The distances of compressed vectors are approximate.
    """

    def __init__(self, index: Any, options: GraphOptions) -> None:
        self._index, self._options = index, options

    @classmethod
    def build(cls, fetch: Fetch, m: int, options: GraphOptions) -> "Graph":
        """Index the vectors at positions 0 to m - 1, fetched in blocks."""
        faiss = require_faiss()
        sample = fetch(np.sort(np.random.default_rng(0).permutation(m)[:_TRAINING]))
        e = sample.shape[1]
        if options.compress == "none":
            graph = index = faiss.IndexHNSWFlat(e, options.m)
        else:
            components, centre = _main_components(sample)
            d = len(components)
            graph = faiss.IndexHNSWSQ(d, faiss.ScalarQuantizer.QT_8bit, options.m)
            turn = faiss.LinearTransform(e, d, True)
            faiss.copy_array_to_vector(components.ravel(), turn.A)
            faiss.copy_array_to_vector(-components @ centre, turn.b)
            turn.is_trained = True
            index = faiss.IndexPreTransform(turn, graph)
            index.referenced_objects = (turn, graph)  # Python must not free what C++ points to.
        graph.hnsw.efConstruction = options.ef_construction
        if not index.is_trained:
            index.train(sample)
        for start in range(0, m, _BLOCK):
            index.add(fetch(np.arange(start, min(m, start + _BLOCK))))
        return cls(index, options)

    def search(self, queries: np.ndarray, k: int, among: np.ndarray | None = None) -> Positions:
        """(n, k) positions, the nearest that it finds, -1 behind the last. queries (n, e), among (c,)."""
        faiss, n = require_faiss(), int(self._index.ntotal)
        effort, selector = 1.0, None
        if among is not None:
            allowed = np.zeros(n, dtype=bool)
            allowed[among] = True
            effort, selector = n / len(among), faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        ef_search = math.ceil(max(self._options.ef_search, k) * effort)
        parameters = faiss.SearchParametersHNSW(efSearch=min(n, ef_search), sel=selector)
        if isinstance(self._index, faiss.IndexPreTransform):
            parameters = faiss.SearchParametersPreTransform(index_params=parameters)
        wanted, threads = np.ascontiguousarray(queries), n_threads()
        try:  # For one query, threads cost more than they bring. The number is this thread's, and torch's as well.
            faiss.omp_set_num_threads(1 if len(wanted) == 1 else threads)
            positions: Positions = self._index.search(wanted, k, params=parameters)[1]
        finally:
            faiss.omp_set_num_threads(threads)
        return positions

    def write(self, path: Path) -> None:
        """Write FAISS's file, without forcing it to disk."""
        try:
            require_faiss().write_index(self._index, str(path))
        except RuntimeError as error:
            raise OSError(f"FAISS cannot write {path}: {str(error).strip()}") from error

    @classmethod
    def read(cls, path: Path, options: GraphOptions) -> "Graph":
        """Map a file of :meth:`write` into memory. Check its size first: FAISS trusts the content."""
        faiss = require_faiss()
        # FAISS without MMAP_IFC reads HNSW completely.
        flags = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP)
        try:
            return cls(faiss.read_index(str(path), flags), options)
        except RuntimeError as error:
            raise ValueError(f"{path}: FAISS cannot read this file ({error}); build the index again") from error


def _main_components(sample: Vectors) -> tuple[Vectors, Vectors]:
    """(d, e) the fewest orthonormal directions that keep most of the variance, and (e,) the mean. sample (n, e)."""
    centre = sample.mean(0, dtype=np.float64)
    values = sample - centre
    variance, directions = np.linalg.eigh(values.T @ values / len(values))
    kept = variance[::-1].cumsum() / max(variance.sum(), np.finfo(np.float64).tiny)
    d = min(len(variance), 1 + int((kept < _KEPT).sum()))
    return np.ascontiguousarray(directions[:, ::-1][:, :d].T, np.float32), centre.astype(np.float32)


def require_faiss() -> Any:
    """Import FAISS."""
    with need("faiss", "engine hnsw needs FAISS", ", or use engine flat"):
        return importlib.import_module("faiss")


LOCAL_OPTIONS = {
    "engine": Option("flat, exact; or hnsw; flat if left out"),
    "memory": Option("MB of vectors that searches keep in memory, 2000 if left out; more are read at each search", 0),
    "exact_below": Option("items below which all are compared instead of using the index, 8192 if left out", 0),
    "compress": Option("hnsw: int8, the main components of the vectors in a byte each, or none; int8 if left out"),
    "m": Option("hnsw: number of links of a node", 2),
    "ef_construction": Option("hnsw: number of candidates while building, 64 if left out", 1),
    "ef_search": Option("hnsw: number of candidates while searching, 1024 if left out", 1),
    "overfetch": Option("hnsw: number of candidates for each result, 4 if left out", 1),
}
"""What may follow the question mark of the URL, for messages and docs."""

_LISTS = {name: Option("of engines of earlier versions", 0) for name in ("n_lists", "n_probe", "seed", "code_size")}
_CHOICES = {"engine": ("flat", "hnsw"), "compress": ("none", "int8")}
"""Options whose values are no numbers."""

_OF_ALL, _OF_GRAPH = {"memory": 2000, "exact_below": 8192}, ("compress", "m", "ef_construction", "ef_search")
_SEARCHING = (*_OF_ALL, "ef_search", "overfetch")
"""Options that the URL of every opening may set; the others are settled when the store is created."""


@dataclass(frozen=True)
class LocalSettings:
    """The settings of a store, from its creation and its opening."""

    engine: str  # flat (exact) or hnsw
    memory: int  # MB of vectors that searches keep in memory
    exact_below: int  # number of items below which all are compared
    overfetch: int  # candidates for each wanted result
    graph: GraphOptions

    @staticmethod
    def of(url: str, given: Mapping[str, Any]) -> "LocalSettings":
        """Settings from options, with defaults for those that are left out."""
        engine, compress = given.get("engine", "flat"), given.get("compress", "int8")
        check_choice(f"store {url}", "engine", engine, _CHOICES["engine"])
        check_choice(f"store {url}", "compress", compress, _CHOICES["compress"])
        own = () if engine == "flat" else (*_OF_GRAPH, "overfetch")
        if foreign := sorted(set(given) - {"engine", *_OF_ALL, *own}):
            known = f"it has {', '.join((*_OF_ALL, *own))}"
            raise UserError(f"store {url}: engine {engine} has no option {foreign[0]!r}; {known}")
        if engine == "hnsw":
            require_faiss()
        common = {name: given.get(name, usual) for name, usual in _OF_ALL.items()}
        graph = GraphOptions(**{name: given[name] for name in _OF_GRAPH if name in given})
        return LocalSettings(engine, overfetch=given.get("overfetch", 4), graph=graph, **common)

    @staticmethod
    def opened(url: str, given: Mapping[str, Any], kept: Mapping[str, Any]) -> "LocalSettings":
        """Those of its creation, with the options at its opening, which must not contradict them.

        What an earlier version stored with lists of vectors (ivf, ivf-pq) is searched exactly.
        """
        given, kept = (
            {name: one[name] for name in _OF_ALL if name in one} if str(one.get("engine")).startswith("ivf") else one
            for one in (given, kept)
        )
        created = LocalSettings.of(url, kept)
        settled = {"engine": created.engine, **(vars(created.graph) if created.engine == "hnsw" else {})}
        for name, was in settled.items():
            if name not in _SEARCHING and given.get(name, was) != was:
                raise UserError(f"store {url}: was created with {name}={was}, not {given[name]}; leave the option out")
        return LocalSettings.of(url, {**kept, **given})


def parse_url(url: str) -> tuple[Path, dict[str, Any]]:
    """Folder and options of a URL, numbers as numbers."""
    path = url.removeprefix("file:").partition("?")[0]
    # A path may have a #, which would end the URL for `options`.
    given: dict[str, Any] = dict(options(url.replace("#", "%23"), {**LOCAL_OPTIONS, **_LISTS}))
    if not path:
        raise UserError(f"store {url}: names no folder; write PATH?engine=hnsw")
    return Path(path), {name: value if name in _CHOICES else int(value) for name, value in given.items()}
