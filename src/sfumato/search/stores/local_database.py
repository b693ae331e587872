"""The local store's options and its SQLite database of records and vectors."""

import contextlib
import json
import os
import socket
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch

from sfumato.errors import UserError
from sfumato.files import sync_folder
from sfumato.search.stores.faiss import FaissOptions, FaissStore, require_faiss
from sfumato.search.stores.nearest import Positions, Vectors
from sfumato.search.stores.protocol import Filter, Records, StoreInUseError
from sfumato.search.stores.store_url import check_numbers, options

_OF_ENGINE = {
    "flat": (),
    "hnsw": ("m", "ef_construction", "ef_search"),
    "ivf": ("n_lists", "n_probe", "seed"),
    "ivf-pq": ("n_lists", "n_probe", "seed", "code_size", "overfetch"),
}
_OF_ALL = ("memory", "exact_below")

LOCAL_OPTIONS = {
    "engine": f"{', '.join(_OF_ENGINE)}; flat if left out",
    "memory": "MB of vectors that searches keep in memory, 2000 if left out; further vectors are read at each search",
    "exact_below": "number of items below which all are compared instead of using the index, 8192 if left out",
    "m": "hnsw: number of links of a node",
    "ef_construction": "hnsw: number of candidates while building",
    "ef_search": "hnsw: number of candidates while searching",
    "n_lists": "ivf, ivf-pq: number of lists",
    "n_probe": "ivf, ivf-pq: number of lists that a search reads",
    "seed": "ivf, ivf-pq: seed of the clustering",
    "code_size": "ivf-pq: number of bytes of a compressed vector",
    "overfetch": "ivf-pq: number of candidates for each wanted result, 10 if left out",
}
"""What may follow the question mark of the URL, for messages and docs."""

_SEARCHING = ("memory", "exact_below", "ef_search", "n_probe", "overfetch")
"""Options that the URL of every opening may set; the others are settled when the store is created."""


@dataclass(frozen=True)
class LocalSettings:
    """The settings of a store, from its creation and its opening.

    Attributes:
        engine: flat (exact) or one of FAISS.
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
        """Settings from options, with defaults for those that are left out."""
        rest = dict(given)
        engine = rest.pop("engine", "flat")
        if engine not in _OF_ENGINE:
            raise UserError(f"store {url}: unknown engine {engine!r}; known: {', '.join(_OF_ENGINE)}")
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
    """Check that the options at opening do not contradict the options at creation."""
    engine = kept.get("engine", "flat")
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
    check_numbers(f"store {url}", given, dict.fromkeys(LOCAL_OPTIONS.keys() - {"engine"}, 0))
    return Path(path), {name: value if name == "engine" else int(value) for name, value in given.items()}


_WRITER = ".writer"
"""Name of the file that says which process holds the write lock, or held it last."""

DATABASE, FORMAT = "records.sqlite", 2
"""Name of the file, and the version of its tables."""

RECORD = "SELECT id, uncertainty, payload, vector FROM items JOIN vectors USING (position)"

LIST = "(SELECT value FROM json_each(?))"
"""A list of values given by :func:`listed`."""

_PAGE = 16_384
"""Bytes of a page: with SQLite's usual 4,096, vectors of 512 dimensions would fill half of each."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE items (position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, uncertainty REAL NOT NULL,
    payload TEXT NOT NULL);
CREATE TABLE vectors (position INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE indexes (file TEXT NOT NULL, bytes INTEGER NOT NULL, positions BLOB NOT NULL);
"""


@contextlib.contextmanager
def new_database(folder: Path, dim: int, fingerprint: str, settings: Mapping[str, Any]) -> Iterator[sqlite3.Connection]:
    """Make a new database in a transaction; it is renamed into place after the block, unless the block raises."""
    new = folder / f".creating-{os.getpid()}.sqlite"
    new.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size={_PAGE}")
        connection.executescript(f"BEGIN;{_SCHEMA}")
        about = {"dim": dim, "fingerprint": fingerprint, "settings": json.dumps(dict(settings)), "version": 0}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", about.items())
        connection.execute(f"PRAGMA user_version={FORMAT}")
        yield connection
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


def lock_of(folder: Path) -> filelock.BaseFileLock:
    """The write lock of a store, which one process at a time can hold."""
    return filelock.FileLock(folder / ".lock", thread_local=False)


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
    rows = zip(positions, records.ids, records.uncertainty.tolist(), payloads, strict=True)
    connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
    vectors = np.ascontiguousarray(records.vectors.detach().numpy(), dtype="<f4")
    connection.executemany("INSERT INTO vectors VALUES (?, ?)", zip(positions, map(bytes, vectors), strict=True))


def remove(connection: sqlite3.Connection, ids: Sequence[str]) -> int:
    """Remove items."""
    found = positions_of(connection, f"SELECT position FROM items WHERE id IN {LIST}", (listed(ids),)).tolist()
    for table in ("items", "vectors") if found else ():
        connection.execute(f"DELETE FROM {table} WHERE position IN {LIST}", (listed(found),))
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
    for name, texts in filter.where.items() if filter is not None else ():
        conditions.append(f"EXISTS (SELECT 1 FROM json_each(payload) WHERE key = ? AND atom IN {LIST})")
        values += [name, listed(texts)]
    return " AND ".join(conditions), values


@dataclass(frozen=True, eq=False)
class LocalIndex:
    """An index, mapped into memory."""

    file: Path  # its file
    faiss: FaissStore  # the index
    positions: Positions  # of its rows, ascending


def read_index(
    url: str, folder: Path, connection: sqlite3.Connection, settings: LocalSettings, known: LocalIndex | None
) -> LocalIndex | None:
    """Read the index that the database names."""
    about = connection.execute("SELECT file, bytes FROM indexes").fetchone()
    if about is None:
        return None
    file = folder / about[0]
    if known is not None and known.file == file:
        return known
    try:
        if (size := file.stat().st_size) != about[1]:
            raise ValueError(f"{size} bytes where {about[1]} were written")
        faiss = FaissStore.read(file, settings.engine, settings.faiss, mapped=True)
    except (FileNotFoundError, ValueError) as error:
        if not file.exists():
            return None
        raise UserError(
            f"store {url}: {file} is damaged ({error}); remove this file and optimise the store, which builds it anew"
        ) from error
    raw = connection.execute("SELECT positions FROM indexes").fetchone()[0]
    return LocalIndex(file, faiss, np.frombuffer(raw, dtype="<i8").astype(np.int64))


def write_index(url: str, folder: Path, positions: Positions, vectors: Vectors, settings: LocalSettings) -> Path:
    """Build an index and force it to disk. positions (n,), vectors (n, e)."""
    n, numbers = len(positions), settings.faiss
    if numbers.n_lists:
        numbers = replace(numbers, n_lists=min(numbers.n_lists, max(1, n // 39)))
    file = folder / f"index-{positions[-1]}-{n}.{settings.engine}"
    try:
        FaissStore.build(torch.from_numpy(vectors), settings.engine, numbers).write(file)
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
        sync_folder(folder)
    except OSError as error:
        raise UserError(f"store {url}: {file} cannot be written ({error}); check free space") from error
    return file


def name_index(connection: sqlite3.Connection, file: Path, positions: Positions) -> None:
    """Record a written index in the database. positions (n,)."""
    connection.execute("DELETE FROM indexes")
    row = (file.name, file.stat().st_size, positions.astype("<i8").tobytes())
    connection.execute("INSERT INTO indexes VALUES (?, ?, ?)", row)


def remove_others(folder: Path, connection: sqlite3.Connection) -> None:
    """Remove index files that the database does not name; processes that have one open can still read it."""
    known: Iterable[tuple[str]] = connection.execute("SELECT file FROM indexes")
    for file in set(folder.glob("index-*.*")) - {folder / row[0] for row in known}:
        file.unlink(missing_ok=True)
