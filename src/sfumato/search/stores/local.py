"""LocalStore: records in a SQLite database in a folder, searched exactly by matrix products, or through FAISS.

    FOLDER/records.sqlite         all that is stored, and the settings
    FOLDER/index-*.ENGINE         FAISS's index, if there is one
    FOLDER/.lock                  held by the one process that writes, from its first write until it closes the store

SQLite is the database: an acknowledged write is a committed transaction, forced to
disk. A row never changes: a replaced item gets a new position. So vectors in memory are valid as long as their items
exist. Searches keep them in memory, up to a limit, in pages of 4,096 positions each. Items outside of the index are
compared with the queries directly. All candidates are ranked by distances from the full vectors. Words are in a
table of SQLite's FTS5, which a few builds of SQLite and stores of earlier versions lack: these find no words.

Engine flat needs no FAISS.
"""

import contextlib
import functools
import json
import os
import socket
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import Tensor

from sfumato.errors import UserError, first_line, refuse_newer
from sfumato.files import sync_folder
from sfumato.search.stores.engines import (
    Block,
    FaissOptions,
    FaissStore,
    Nearest,
    Positions,
    Vectors,
    is_in,
    require_faiss,
)
from sfumato.search.stores.protocol import WORDS, Filter, Option, Records, StoreBase, StoreInUseError, in_order, options

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
    vectors = np.ascontiguousarray(records.vectors.detach().numpy(), dtype="<f4")
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
    for name, texts in filter.where.items() if filter is not None else ():
        conditions.append(f"EXISTS (SELECT 1 FROM json_each(payload) WHERE key = ? AND atom IN {LIST})")
        values += [name, listed(texts)]
    for name, (least, below) in filter.ranges.items() if filter is not None else ():
        within = f"key = ? AND atom {'>=' if least else '>'} ?" + (" AND atom < ?" if below else "")
        conditions.append(f"EXISTS (SELECT 1 FROM json_each(payload) WHERE {within})")
        values += [name, least, below] if below else [name, least]
    return " AND ".join(conditions), values


@dataclass(frozen=True, eq=False)
class LocalIndex:
    """An index, mapped into memory."""

    file: Path  # its file
    faiss: FaissStore  # the index
    positions: Positions  # of its rows, ascending


_PAGE = 4096
"""Positions in a page."""

_QUERIES = 256
"""Queries that are answered at a time."""

_FEW_FRACTION = 0.05
"""Below this fraction of the index, a comparison with just these items is as fast as the index and exact."""

_STALE = 0.2
"""Fraction of items that the index lacks or has too many, and of free space, above which optimise acts."""


def create(url: str, dim: int, fingerprint: str) -> "LocalStore":
    """Make an empty store in a new or empty folder."""
    path, given = parse_url(url)
    if dim < 1:
        raise ValueError(f"store {url}: dim must be at least 1, got {dim}")
    LocalSettings.of(url, given)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if other := next((p.name for p in sorted(path.iterdir()) if not p.name.startswith(".creating")), None):
            raise UserError(f"store {url}: {path / other} is there already; open it, or give a new or empty folder")
        new_database(path, dim, fingerprint, given)
        sync_folder(path.parent)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"store {url}: cannot be created ({error}); give a folder that can be written to") from error
    return open(url)


def open(url: str) -> "LocalStore":
    """Open a store of :func:`create`; several processes may open it, and one at a time may write."""
    return LocalStore(url)


class LocalStore(StoreBase):
    """A :class:`~sfumato.search.stores.protocol.VectorStore` in a folder; see :func:`create` and :func:`open`.

    Each search, get, count and scan sees all writes that any process acknowledged before it began, and no partial
    write. A second process that writes gets a UserError from its first write.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.path, given = parse_url(url)
        self._database = self.path / DATABASE
        if not self._database.is_file():
            raise UserError(f"store {url}: there is no {self._database}; create the store first")
        self._pool: list[sqlite3.Connection] = []
        self._closed = False
        self._writer, self._memory = threading.RLock(), threading.Lock()
        self._lock = filelock.FileLock(self.path / ".lock", thread_local=False)
        self._pages: tuple[int, list[tuple[int, int, int]]] = (-1, [])
        self._blocks: dict[tuple[int, int, int], Block] = {}
        self._index: LocalIndex | None = None
        with self._transaction() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            refuse_newer(f"store {url}: {self._database}", version, FORMAT)
            if version != FORMAT:
                raise UserError(
                    f"store {url}: {self._database} has format {version}, this version of sfumato reads {FORMAT};"
                    " build it again"
                )
            about = dict(connection.execute("SELECT name, value FROM meta"))
        try:
            self.dim, self.fingerprint = int(about["dim"]), str(about["fingerprint"])
            kept = dict(json.loads(about["settings"]))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"store {url}: the settings in {self._database} are damaged ({first_line(error)}); build it again"
            ) from error
        check_against(url, given, kept)
        self._settings = LocalSettings.of(url, kept | given)

    def upsert(self, records: Records) -> None:
        """Store records; records with existing ids are replaced completely. If it raises, none are stored."""
        self.check_vectors(records)
        if len(records):
            with self._writing() as connection:
                remove(connection, records.ids)
                insert(connection, records)

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items."""
        with self._writing() as connection:
            return remove(connection, ids)

    def get(self, ids: Sequence[str]) -> Records:
        """Records by id."""
        with self._transaction() as connection:
            found = {row[0]: row for row in connection.execute(f"{RECORD} WHERE id IN {LIST}", (listed(ids),))}
            return self._records(in_order(ids, found))

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        """The nearest items of each query, by distances from the full vectors; ties in the order of storage.

        queries (n, e).
        """
        wanted = self.check_queries(queries, k)
        results: list[Records] = []
        with self._transaction() as connection:
            allowed = None
            if filter is not None:
                where, values = condition_of(filter)
                allowed = positions_of(connection, f"SELECT position FROM items WHERE {where}", values)
            for part in wanted.split(_QUERIES) if len(wanted) else ():
                nearest = Nearest(part, k, functools.partial(self._vectors, connection))
                after = self._add_from_index(connection, nearest, part, k, allowed)
                nearest.scan(functools.partial(self._read_blocks, connection, after, allowed))
                distinct = np.unique(np.concatenate(nearest.positions)).tolist()
                rows = connection.execute(f"{RECORD} WHERE position IN {LIST} ORDER BY position", (listed(distinct),))
                found = dict(zip(distinct, rows, strict=True))
                results += [self._records([found[p] for p in row.tolist()]) for row in nearest.positions]
        return results

    def match_words(self, stems: Sequence[str], n: int, filter: Filter | None = None) -> list[str]:
        """The ids of the items that have the most of some word stems, by BM25; nothing without a table of words."""
        where, values = condition_of(filter)
        select = "SELECT id FROM words JOIN items ON position = words.rowid WHERE words MATCH ?"
        quoted = " OR ".join('"{}"'.format(stem.replace('"', '""')) for stem in stems)
        with self._transaction() as connection:
            if not stems or not has_words(connection):
                return []
            rows = connection.execute(f"{select} AND {where} ORDER BY rank, position LIMIT ?", (quoted, *values, n))
            return [id for (id,) in rows]

    def count(self, filter: Filter | None = None) -> int:
        """Number of items."""
        where, values = condition_of(filter)
        with self._transaction() as connection:
            return int(connection.execute(f"SELECT count(*) FROM items WHERE {where}", values).fetchone()[0])

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items that pass the filter, each once, in the state at the request of the first batch."""
        where, values = condition_of(filter)
        with self._transaction() as connection:
            cursor = connection.execute(f"{RECORD} WHERE {where} ORDER BY position", values)
            while rows := cursor.fetchmany(batch):
                yield self._records(rows)

    def ids_after(self, after: str, n: int) -> list[str]:
        """The next ids in the order of their UTF-8 bytes."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT id FROM items WHERE id > ? ORDER BY id LIMIT ?", (after, n))
            return [id for (id,) in rows]

    def optimise(self) -> None:
        """Release free space, and build the index of an approximate engine if it is missing or outdated.

        Vectors are read and indexed in blocks. Searches continue; writes of other threads wait. If the
        process dies, no items are lost.
        """
        with self._writer:
            self.begin_writing()
            with self._transaction("") as connection:
                pages = connection.execute("PRAGMA page_count").fetchone()[0]
                if connection.execute("PRAGMA freelist_count").fetchone()[0] > _STALE * pages:
                    connection.execute("VACUUM")
            if self._settings.engine != "flat":
                self._build_index()
            self._remove_strangers()

    def begin_writing(self) -> None:
        """Acquire the write lock, as every write does, and hold it until close or until the process dies."""
        with self._writer:
            if not (self._lock.is_locked or self._closed):
                take(self._lock, self.url)
                self._remove_strangers()

    def close(self) -> None:
        """Release the files and the write lock."""
        with self._writer:
            self._closed = True
            while self._pool:
                self._pool.pop().close()
            keep_log_files(self.path)
            self._blocks, self._index = {}, None
            self._lock.release()

    @contextlib.contextmanager
    def _transaction(self, begin: str = "BEGIN") -> Iterator[sqlite3.Connection]:
        """A connection of its own in a transaction, committed unless the block raises."""
        if self._closed:
            raise UserError(f"store {self.url}: is closed; open it again")
        try:
            try:
                connection = self._pool.pop()
            except IndexError:
                connection = sqlite3.connect(self._database, timeout=60, isolation_level=None, check_same_thread=False)
                connection.execute("PRAGMA synchronous=FULL")
            try:
                connection.execute(begin)
                yield connection
                if connection.in_transaction:
                    connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._pool.append(connection)
                if self._closed:
                    self._pool.remove(connection)
                    connection.close()
        except sqlite3.OperationalError as error:
            raise UserError(
                f"store {self.url}: {self._database}: {error}; check free space, permissions and other programs"
                " that use it"
            ) from error
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"store {self.url}: {self._database} is damaged ({error}); put back a copy of the folder, or build it"
                " again"
            ) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes."""
        with self._writer:
            self.begin_writing()
            with self._transaction("BEGIN IMMEDIATE") as connection:
                yield connection
                connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'version'")

    def _read_blocks(self, connection: sqlite3.Connection, after: int, allowed: Positions | None) -> Iterator[Block]:
        """The allowed items at positions after a given one; a few of many items are read one by one."""
        if allowed is not None and len(allowed) < self._settings.exact_below:
            if len(allowed := allowed[allowed > after]):
                yield Block.of(allowed, self._vectors(connection, allowed))
            return
        version = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()[0]
        with self._memory:
            known, pages = self._pages
        if known != version:
            select = f"SELECT position / {_PAGE} AS page, count(*), max(position) FROM items GROUP BY page"
            pages = sorted(connection.execute(select))
            with self._memory:
                self._pages = version, pages
                self._blocks = {page: self._blocks[page] for page in pages if page in self._blocks}
        for page in pages:
            if page[2] > after:
                block = self._block(connection, page)
                if allowed is not None:
                    block = block.among(allowed)
                if block.n_allowed:
                    yield block

    def _block(self, connection: sqlite3.Connection, page: tuple[int, int, int]) -> Block:
        """The vectors of a page, from memory or from disk; they are kept in memory if there is room.

        A page is identified by its number, count and last position: new rows raise the last position, and deletions
        lower the count.
        """
        with self._memory:
            if page in self._blocks:
                return self._blocks[page]
            held = sum(block.centred.numel() for block in self._blocks.values())
        first = page[0] * _PAGE
        select = "SELECT position, vector FROM vectors WHERE position BETWEEN ? AND ? ORDER BY position"
        rows = connection.execute(select, (first, first + _PAGE - 1)).fetchall()
        positions = np.array([row[0] for row in rows], dtype=np.int64)
        block = Block.of(positions, self._matrix([row[1] for row in rows]))
        with self._memory:
            if 4 * (held + block.centred.numel()) <= self._settings.memory * 1e6:
                self._blocks[page] = block
        return block

    def _vectors(self, connection: sqlite3.Connection, positions: Positions) -> Vectors:
        """(m, e) vectors at ascending positions."""
        select = f"SELECT vector FROM vectors WHERE position IN {LIST} ORDER BY position"
        return self._matrix([row[0] for row in connection.execute(select, (listed(positions.tolist()),))])

    def _matrix(self, rows: Sequence[bytes]) -> Vectors:
        return np.frombuffer(b"".join(rows), dtype="<f4").astype(np.float32).reshape(len(rows), self.dim)

    def _records(self, rows: Sequence[tuple[str, float, str, bytes]]) -> Records:
        """The records of rows of RECORD."""
        return self.records(
            [(i, u, json.loads(text)) for i, u, text, _ in rows], self._matrix([row[3] for row in rows])
        )

    def _add_from_index(
        self, connection: sqlite3.Connection, nearest: Nearest, queries: Tensor, k: int, allowed: Positions | None
    ) -> int:
        """Add candidates from the index if it has enough; return the position after which all vectors are compared."""
        if (index := self._read_index(connection)) is None:
            return -1
        settings, among, n = self._settings, None, len(index.positions)
        if allowed is not None:
            among = torch.from_numpy(is_in(index.positions, allowed).nonzero()[0])
            n = len(among)
        if n < max(1, settings.exact_below, _FEW_FRACTION * len(index.positions)):
            return -1
        # More than k candidates: some are deleted, and rounding or compressed codes may have changed their order.
        c = min(n, max(2 * k + 8, k * settings.overfetch))
        found = index.faiss.search(queries, c, among)[1].numpy()
        positions = np.where(found >= 0, index.positions[found], -1)
        select = f"SELECT position FROM items WHERE position IN {LIST}"
        alive = positions_of(connection, select, (listed(np.unique(positions).tolist()),))
        positions[~is_in(positions, alive)] = -1
        if ((positions >= 0).sum(1) < k).any():
            return -1
        nearest.add(positions)
        return int(index.positions[-1])

    def _read_index(self, connection: sqlite3.Connection) -> LocalIndex | None:
        """The index that the database names."""
        row = connection.execute("SELECT file, bytes FROM indexes").fetchone()
        if row is None:
            return None
        file, known, settings = self.path / row[0], self._index, self._settings
        if known is not None and known.file == file:
            return known
        try:
            if (size := file.stat().st_size) != row[1]:
                raise ValueError(f"{size} bytes where {row[1]} were written")
            faiss = FaissStore.read(file, settings.engine, settings.faiss, mapped=True)
        except (FileNotFoundError, ValueError) as error:
            if not file.exists():
                return None
            raise UserError(
                f"store {self.url}: {file} is damaged ({error}); remove this file and optimise the store, which builds"
                " it anew"
            ) from error
        raw = connection.execute("SELECT positions FROM indexes").fetchone()[0]
        self._index = LocalIndex(file, faiss, np.frombuffer(raw, dtype="<i8").astype(np.int64))
        return self._index

    def _build_index(self) -> None:
        """Index all items, unless few of them are outside the index or there are too few for one."""
        with self._transaction() as connection:
            positions, index = positions_of(connection, "SELECT position FROM items"), self._read_index(connection)
            n = len(positions)
            moved = len(np.setxor1d(positions, index.positions)) if index else n
            if n < max(16, self._settings.exact_below) or moved <= _STALE * n:
                return
            numbers = self._settings.faiss
            if numbers.n_lists:
                numbers = replace(numbers, n_lists=min(numbers.n_lists, max(1, n // 39)))

            def vectors(rows: Positions) -> Vectors:
                pages = np.array_split(positions[rows], max(1, len(rows) // _PAGE))
                return np.concatenate([self._vectors(connection, page) for page in pages])

            built = FaissStore.build_from(vectors, n, self.dim, self._settings.engine, numbers)
        file = self.path / f"index-{positions[-1]}-{n}.{self._settings.engine}"
        try:
            built.write(file)
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
            sync_folder(self.path)
        except OSError as error:
            raise UserError(f"store {self.url}: {file} cannot be written ({error}); check free space") from error
        with self._writing() as connection:
            connection.execute("DELETE FROM indexes")
            row = (file.name, file.stat().st_size, positions.astype("<i8").tobytes())
            connection.execute("INSERT INTO indexes VALUES (?, ?, ?)", row)

    def _remove_strangers(self) -> None:
        """Remove the leftover files of killed writers and earlier indexes; who has one open can still read it."""
        with self._transaction() as connection:
            known = {self.path / name for (name,) in connection.execute("SELECT file FROM indexes")}
        for file in set(self.path.glob("index-*.*")) - known:
            file.unlink(missing_ok=True)
