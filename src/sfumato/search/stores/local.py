"""LocalStore: records in a SQLite database in a folder, searched exactly by matrix products, or through an index of FAISS.

    FOLDER/records.sqlite         all that is stored, and the settings
    FOLDER/index-*.ENGINE         FAISS's index of the items of one moment, if there is one
    FOLDER/.lock                  held by the one process that writes, from its first write until it closes the store

SQLite is the database: an acknowledged write is a committed transaction, forced to disk. A row never changes: a replaced item gets a
new position. So vectors that were read stay valid as long as their items are there; searches keep them in memory by page, which is
as many positions in a row, up to a limit. The index can be made again at any time. What is not in it is compared with the queries,
and whatever brings the candidates, they are ranked by distances from the full vectors.

Engine flat needs no FAISS. Folders of version 0.1 are converted when they are opened (search/stores/version_0_1.py).
"""

import contextlib
import functools
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import Tensor

from sfumato.errors import UserError
from sfumato.files import sync_folder
from sfumato.progress import progress_bar
from sfumato.search.stores import version_0_1
from sfumato.search.stores.faiss import FaissStore
from sfumato.search.stores.local_settings import LocalSettings, check_against, parse_url
from sfumato.search.stores.nearest import Block, Nearest, Positions, Vectors, is_in
from sfumato.search.stores.protocol import Filter, Records

_FORMAT, _DATABASE, _LOCK = 2, "records.sqlite", ".lock"
_PAGE = 4096
"""Positions in a page."""

_DATABASE_PAGE = 16_384
"""Bytes of a page of the database: with SQLite's 4,096, vectors of 512 dimensions would fill half of each."""

_QUERIES = 256
"""Queries that are answered at a time."""

_FEW_FRACTION = 0.05
"""Below this fraction of the index, a comparison with just these items is as fast as the index and exact."""

_STALE = 0.2
"""Fraction of items that the index lacks or has too many, and of free space, from which on optimise does something about it."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE items (position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, uncertainty REAL NOT NULL,
    payload TEXT NOT NULL);
CREATE TABLE vectors (position INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE indexes (file TEXT NOT NULL, bytes INTEGER NOT NULL, positions BLOB NOT NULL);
"""
_SELECT = "SELECT id, uncertainty, payload, vector FROM items JOIN vectors USING (position)"
_LIST = "(SELECT value FROM json_each(?))"


def create(url: str, dim: int, fingerprint: str) -> "LocalStore":
    """Make an empty store in a new or empty folder.

    Args:
        url: PATH?OPTIONS or file:PATH?OPTIONS, see LOCAL_OPTIONS of :mod:`~sfumato.search.stores.local_settings`.
        dim: e >= 1.
        fingerprint: kept.

    Raises:
        UserError: an option is wrong, something is there already, or the engine needs FAISS and it is not installed.
    """
    path, given = parse_url(url)
    if dim < 1:
        raise ValueError(f"store {url}: dim must be at least 1, got {dim}")
    if "shard_size" in given:
        raise UserError(f"store {url}: shard_size was an option of version 0.1 and has no effect; leave it out")
    LocalSettings.of(url, given)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if other := next((p.name for p in sorted(path.iterdir()) if not p.name.startswith(".creating")), None):
            raise UserError(f"store {url}: {path / other} is there already; open it, or give a new or empty folder")
        with _new_database(path, dim, fingerprint, given):
            pass
        sync_folder(path.parent)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"store {url}: cannot be created ({error}); give a folder that can be written to") from error
    return open(url)


def open(url: str) -> "LocalStore":
    """Open a store of :func:`create`; several processes may, of which one at a time writes.

    Args:
        url: as for create. Options that concern searching only are taken from here; others must be left out or fit.

    Raises:
        UserError: there is no store, it is damaged or of another version, an option contradicts it, or it needs FAISS.
    """
    path = parse_url(url)[0]
    if not (path / _DATABASE).is_file() and version_0_1.is_one(path):
        _convert(url, path)
    return LocalStore(url)


class LocalStore:
    """A :class:`~sfumato.search.stores.protocol.VectorStore` in a folder. Made by :func:`create`, opened by :func:`open`.

    Each search, get, count and scan sees everything that was acknowledged, by any process, before it began, and nothing half done.
    A second process that writes gets a UserError from its first write.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.path, given = parse_url(url)
        self._database = self.path / _DATABASE
        if not self._database.is_file():
            raise UserError(f"store {url}: there is no {self._database}; create the store first")
        self._pool: list[sqlite3.Connection] = []
        self._closed = False
        self._writer, self._memory = threading.RLock(), threading.Lock()
        self._lock = filelock.FileLock(self.path / _LOCK, thread_local=False)
        self._pages: tuple[int, list[tuple[int, int, int]]] = (-1, [])
        self._blocks: dict[tuple[int, int, int], Block] = {}
        self._index: _Index | None = None
        with self._transaction() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != _FORMAT:
                raise UserError(
                    f"store {url}: {self._database} has format {version}, this version of sfumato reads {_FORMAT}; build it again"
                )
            about = dict(connection.execute("SELECT name, value FROM meta"))
        self.dim: int = about["dim"]
        self.fingerprint: str = about["fingerprint"]
        kept = json.loads(about["settings"])
        check_against(url, given, kept)
        self._settings = LocalSettings.of(url, kept | given)

    def upsert(self, records: Records) -> None:
        """Store records; those whose ids are there already are replaced as a whole. All are stored or, if it raises, none.

        Raises:
            ValueError: vectors of another dimension.
            UserError: another process writes, or the disk is full.
        """
        if records.vectors.shape[1] != self.dim:
            raise ValueError(f"store {self.url}: vectors have {records.vectors.shape[1]} dimensions, not {self.dim}")
        if len(records):
            with self._writing() as connection:
                _remove(connection, records.ids)
                _insert(connection, records)

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items.

        Returns:
            How many of these ids were there.

        Raises:
            UserError: another process writes, or the disk is full.
        """
        with self._writing() as connection:
            return _remove(connection, ids)

    def get(self, ids: Sequence[str]) -> Records:
        """The records of those of these ids that are there, each once, in the order asked for."""
        with self._transaction() as connection:
            found = {row[0]: row for row in connection.execute(f"{_SELECT} WHERE id IN {_LIST}", (_listed(ids),))}
            return self._records([found[i] for i in dict.fromkeys(ids) if i in found])

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        """The nearest items of each query, by distances computed from the full vectors; equally near ones in the order stored.

        Args:
            queries: (n, e) float32.
            k: at least 1.
            filter: which items may be found; all if None. The payloads of all items are looked at.

        Returns:
            For each query k records, nearest first; fewer only if fewer fit the filter. With engine flat exactly the nearest.

        Raises:
            ValueError: k or the queries do not fit.
            UserError: a file of the store is damaged; the message names it.
        """
        wanted = check_queries(self.url, queries, k, self.dim)
        results: list[Records] = []
        with self._transaction() as connection:
            allowed = None
            if filter is not None:
                where, values = _condition(filter)
                allowed = _positions(connection, f"SELECT position FROM items WHERE {where}", values)
            for part in wanted.split(_QUERIES) if len(wanted) else ():
                nearest = Nearest(part, k, functools.partial(self._vectors, connection))
                after = self._add_from_index(connection, nearest, part, k, allowed)
                nearest.scan(functools.partial(self._read_blocks, connection, after, allowed))
                distinct = np.unique(np.concatenate(nearest.positions)).tolist()
                rows = connection.execute(
                    f"{_SELECT} WHERE position IN {_LIST} ORDER BY position", (_listed(distinct),)
                )
                found = dict(zip(distinct, rows, strict=True))
                results += [self._records([found[p] for p in row.tolist()]) for row in nearest.positions]
        return results

    def count(self, filter: Filter | None = None) -> int:
        """Number of items that fit."""
        where, values = _condition(filter)
        with self._transaction() as connection:
            return int(connection.execute(f"SELECT count(*) FROM items WHERE {where}", values).fetchone()[0])

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items that fit, in batches, each once, as they were when the first batch was asked for; in the order stored."""
        where, values = _condition(filter)
        with self._transaction() as connection:
            cursor = connection.execute(f"{_SELECT} WHERE {where} ORDER BY position", values)
            while rows := cursor.fetchmany(batch):
                yield self._records(rows)

    def optimise(self) -> None:
        """Give free space back, and build the index of an approximate engine if it is missing or old.

        Building an index takes as much memory as all vectors. Searches go on; writes of other threads wait. If it dies, nothing
        is lost.

        Raises:
            UserError: another process writes, or the disk is full.
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
        """Take the right to write, as every write does, and keep it until close; the system takes it from a process that dies.

        Raises:
            UserError: another process writes, or the folder cannot be written to.
        """
        with self._writer:
            if not (self._lock.is_locked or self._closed):
                _acquire(self.url, self._lock)
                self._remove_strangers()

    def close(self) -> None:
        """Let go of files and of the right to write."""
        with self._writer:
            self._closed = True
            while self._pool:
                self._pool.pop().close()
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
                f"store {self.url}: {self._database}: {error}; see to free space, permissions and what else uses it"
            ) from error
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"store {self.url}: {self._database} is damaged ({error}); put back a copy of the folder, or build it again"
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
        """What may be found at positions after one; a few of many items are read one by one."""
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
        """The vectors of a page, from memory if they are there, and kept there if there is room.

        Number, count and last position of a page say what is in it: new rows raise the last, and deaths lower the count.
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
        select = f"SELECT vector FROM vectors WHERE position IN {_LIST} ORDER BY position"
        return self._matrix([row[0] for row in connection.execute(select, (_listed(positions.tolist()),))])

    def _matrix(self, rows: Sequence[bytes]) -> Vectors:
        return np.frombuffer(b"".join(rows), dtype="<f4").astype(np.float32).reshape(len(rows), self.dim)

    def _records(self, rows: Sequence[tuple[str, float, str, bytes]]) -> Records:
        """The records of rows of _SELECT."""
        return Records(
            tuple(row[0] for row in rows),
            torch.from_numpy(self._matrix([row[3] for row in rows])),
            torch.tensor([row[1] for row in rows], dtype=torch.float32),
            tuple(json.loads(row[2]) for row in rows),
        )

    def _add_from_index(
        self, connection: sqlite3.Connection, nearest: Nearest, queries: Tensor, k: int, allowed: Positions | None
    ) -> int:
        """Add candidates from the index, if that brings enough; the position after which to compare with all vectors."""
        if (index := self._read_index(connection)) is None:
            return -1
        settings, among, n = self._settings, None, len(index.positions)
        if allowed is not None:
            among = torch.from_numpy(is_in(index.positions, allowed).nonzero()[0])
            n = len(among)
        if n < max(1, settings.exact_below, _FEW_FRACTION * len(index.positions)):
            return -1
        # More than k, because some are dead, and because rounding, and codes more so, may have put them in a wrong order.
        c = min(n, k * settings.overfetch if settings.engine == "ivf-pq" else 2 * k + 8)
        found = index.faiss.search(queries, c, among)[1].numpy()
        positions = np.where(found >= 0, index.positions[found], -1)
        select = f"SELECT position FROM items WHERE position IN {_LIST}"
        alive = _positions(connection, select, (_listed(np.unique(positions).tolist()),))
        positions[~is_in(positions, alive)] = -1
        if ((positions >= 0).sum(1) < k).any():
            return -1
        nearest.add(positions)
        return int(index.positions[-1])

    def _read_index(self, connection: sqlite3.Connection) -> "_Index | None":
        """FAISS's index, mapped into memory; None if there is none or its file is gone."""
        about = connection.execute("SELECT file, bytes FROM indexes").fetchone()
        if about is None:
            return None
        file = self.path / about[0]
        with self._memory:
            if self._index is not None and self._index.file == file:
                return self._index
        try:
            if (size := file.stat().st_size) != about[1]:
                raise ValueError(f"{size} bytes where {about[1]} were written")
            faiss = FaissStore.read(file, self._settings.engine, self._settings.faiss, mapped=True)
        except (FileNotFoundError, ValueError) as error:
            if not file.exists():
                return None
            raise UserError(
                f"store {self.url}: {file} is damaged ({error}); remove this file and optimise the store, which builds it anew"
            ) from error
        raw = connection.execute("SELECT positions FROM indexes").fetchone()[0]
        index = _Index(file, faiss, np.frombuffer(raw, dtype="<i8").astype(np.int64))
        with self._memory:
            self._index = index
        return index

    def _build_index(self) -> None:
        """Index all items, unless few of them are outside the index or there are too few for one."""
        settings = self._settings
        with self._transaction() as connection:
            positions, index = _positions(connection, "SELECT position FROM items"), self._read_index(connection)
            n = len(positions)
            moved = len(np.setxor1d(positions, index.positions)) if index else n
            if n < max(16, settings.exact_below) or moved <= _STALE * n:
                return
            vectors = torch.from_numpy(self._vectors(connection, positions))
        numbers = settings.faiss
        if numbers.n_lists:
            numbers = replace(numbers, n_lists=min(numbers.n_lists, max(1, n // 39)))
        file = self.path / f"index-{positions[-1]}-{n}.{settings.engine}"
        try:
            FaissStore.build(vectors, settings.engine, numbers).write(file)
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
            sync_folder(self.path)
        except OSError as error:
            raise UserError(f"store {self.url}: {file} cannot be written ({error}); see to free space") from error
        with self._writing() as connection:
            connection.execute("DELETE FROM indexes")
            row = (file.name, file.stat().st_size, positions.astype("<i8").tobytes())
            connection.execute("INSERT INTO indexes VALUES (?, ?, ?)", row)

    def _remove_strangers(self) -> None:
        """Remove what killed writers, earlier indexes and version 0.1 have left. Who has such a file open keeps it."""
        with self._transaction() as connection:
            known = {self.path / row[0] for row in connection.execute("SELECT file FROM indexes")}
        for file in set(self.path.glob("index-*.*")) - known:
            file.unlink(missing_ok=True)
        version_0_1.remove(self.path)


@dataclass(frozen=True, eq=False)
class _Index:
    """FAISS's index, mapped into memory, and the positions of its rows, ascending."""

    file: Path
    faiss: FaissStore
    positions: Positions


def check_queries(url: str, queries: Tensor, k: int, dim: int) -> Tensor:
    """(n, e) queries as float32 on the CPU.

    Args:
        url: of the store, for messages.
        queries: (n, e).
        k: number of results.
        dim: e of the store.

    Raises:
        ValueError: k < 1, another shape, or a number that is not finite.
    """
    if k < 1:
        raise ValueError(f"store {url}: k must be at least 1, got {k}")
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise ValueError(f"store {url}: queries must be (n, {dim}), got {tuple(queries.shape)}")
    wanted = queries.detach().to("cpu", torch.float32).contiguous()
    if not torch.isfinite(wanted).all():
        raise ValueError(f"store {url}: a query has a number that is not finite")
    return wanted


def _insert(connection: sqlite3.Connection, records: Records) -> None:
    """Store records whose ids are not there."""
    last = connection.execute("SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'items'").fetchone()[0]
    positions = range(last + 1, last + 1 + len(records))
    payloads = (json.dumps(dict(payload), ensure_ascii=False) for payload in records.payloads)
    rows = zip(positions, records.ids, records.uncertainty.tolist(), payloads, strict=True)
    connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
    vectors = np.ascontiguousarray(records.vectors.detach().numpy(), dtype="<f4")
    connection.executemany("INSERT INTO vectors VALUES (?, ?)", zip(positions, map(bytes, vectors), strict=True))


def _remove(connection: sqlite3.Connection, ids: Sequence[str]) -> int:
    """Remove the items with these ids; how many there were."""
    found = _positions(connection, f"SELECT position FROM items WHERE id IN {_LIST}", (_listed(ids),)).tolist()
    for table in ("items", "vectors") if found else ():
        connection.execute(f"DELETE FROM {table} WHERE position IN {_LIST}", (_listed(found),))
    return len(found)


def _listed(values: Sequence[Any]) -> str:
    """For _LIST."""
    return json.dumps(list(values), ensure_ascii=False)


def _positions(connection: sqlite3.Connection, select: str, values: Sequence[Any] = ()) -> Positions:
    """Positions that a query finds, ascending."""
    return np.sort(np.fromiter((row[0] for row in connection.execute(select, values)), dtype=np.int64))


def _condition(filter: Filter | None) -> tuple[str, list[Any]]:
    """A filter as a condition of SQL and its values."""
    conditions, values = ["1"], list[Any]()
    if filter is not None and filter.max_uncertainty is not None:
        conditions.append("uncertainty <= ?")
        values.append(filter.max_uncertainty)
    for name, texts in filter.where.items() if filter is not None else ():
        conditions.append(f"EXISTS (SELECT 1 FROM json_each(payload) WHERE key = ? AND atom IN {_LIST})")
        values += [name, _listed(texts)]
    return " AND ".join(conditions), values


def _acquire(url: str, lock: filelock.BaseFileLock) -> None:
    """Take the right to write."""
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise UserError(
            f"store {url}: another process, or another opening in this one, writes to it; wait until it closes the store"
        ) from error
    except OSError as error:
        raise UserError(f"store {url}: cannot be written ({error}); see to permissions") from error


@contextlib.contextmanager
def _new_database(path: Path, dim: int, fingerprint: str, settings: dict[str, Any]) -> Iterator[sqlite3.Connection]:
    """A new database in a transaction; it is in its place after the block, unless that raises."""
    new = path / f".creating-{os.getpid()}.sqlite"
    new.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size={_DATABASE_PAGE}")
        connection.executescript(_SCHEMA)
        about = {"dim": dim, "fingerprint": fingerprint, "settings": json.dumps(settings), "version": 0}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", about.items())
        connection.execute(f"PRAGMA user_version={_FORMAT}")
        connection.execute("BEGIN")
        yield connection
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")
    os.replace(new, path / _DATABASE)
    sync_folder(path)


def _convert(url: str, path: Path) -> None:
    """Make a store of one of version 0.1, in its place. If it dies, the old one is as it was."""
    lock = filelock.FileLock(path / _LOCK, thread_local=False)
    _acquire(url, lock)
    try:
        dim, fingerprint, settings = version_0_1.settings_of(path)
        with (
            progress_bar(f"converting {path} from version 0.1", version_0_1.count(path)) as advance,
            _new_database(path, dim, fingerprint, settings) as connection,
        ):
            for records in version_0_1.records(path, dim):
                _insert(connection, records)
                advance(len(records))
        version_0_1.remove(path)
    except (OSError, ValueError, sqlite3.Error) as error:
        raise UserError(
            f"store {url}: is of version 0.1 and could not be converted ({error}); see to free space and permissions and open it"
            " again, or put back a copy of the folder"
        ) from error
    finally:
        lock.release()
    with contextlib.closing(LocalStore(f"file:{path}")) as store:
        store.optimise()
