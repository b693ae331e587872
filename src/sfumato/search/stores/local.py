"""LocalStore: records in a SQLite database in a folder, searched exactly by matrix products, or through FAISS.

    FOLDER/records.sqlite         all that is stored, and the settings
    FOLDER/index-*.hnsw           FAISS's index, if there is one
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
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy as np

from sfumato import files
from sfumato.errors import UserError, first_line, refuse_newer
from sfumato.search.blocks import Block
from sfumato.search.screening import Comparison
from sfumato.search.stores import local_files
from sfumato.search.stores.protocol import Filter, Records, StoreBase, in_order


@dataclass(frozen=True, eq=False)
class LocalIndex:
    """An index, mapped into memory."""

    file: Path  # its file
    graph: local_files.Graph  # the index
    positions: local_files.Positions  # of its rows, ascending


_PAGE, _WIDE = 4096, 16_384
"""Positions in a page: in one of the last ones, which additions change, and in the others."""

_QUERIES = 256
"""Queries that are answered at a time."""

_PAIRS = 2**14
"""Pairs of a query and an item whose distances are computed at a time."""

_FEW_FRACTION = 0.05
"""Below this fraction of the index, a comparison with just these items is as fast as the index and exact."""

_STALE = 0.2
"""Fraction of items that the index lacks or has too many, and of free space, above which optimise acts."""


def create(url: str, dim: int, fingerprint: str) -> "LocalStore":
    """Make an empty store in a new or empty folder."""
    path, given = local_files.parse_url(url)
    if dim < 1:
        raise ValueError(f"store {url}: dim must be at least 1, got {dim}")
    local_files.LocalSettings.of(url, given)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if other := next((p.name for p in sorted(path.iterdir()) if not p.name.startswith(".creating")), None):
            raise UserError(f"store {url}: {path / other} is there already; open it, or give a new or empty folder")
        local_files.new_database(path, dim, fingerprint, given)
        files.sync_folder(path.parent)
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
        self.path, given = local_files.parse_url(url)
        self._database = self.path / local_files.DATABASE
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
            refuse_newer(f"store {url}: {self._database}", version, local_files.FORMAT)
            if version != local_files.FORMAT:
                ours = f"this version of sfumato reads {local_files.FORMAT}; build it again"
                raise UserError(f"store {url}: {self._database} has format {version}, {ours}")
            about = dict(connection.execute("SELECT name, value FROM meta"))
        try:
            self.dim, self.fingerprint = int(about["dim"]), str(about["fingerprint"])
            kept = dict(json.loads(about["settings"]))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            found = f"the settings in {self._database} are damaged ({first_line(error)})"
            raise UserError(f"store {url}: {found}; build it again") from error
        self._settings = local_files.LocalSettings.opened(url, given, kept)

    def upsert(self, records: Records) -> None:
        """Store records; records with existing ids are replaced completely. If it raises, none are stored."""
        self.check_vectors(records)
        if len(records):
            with self._writing() as connection:
                local_files.remove(connection, records.ids)
                local_files.insert(connection, records)

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items."""
        with self._writing() as connection:
            return local_files.remove(connection, ids)

    def get(self, ids: Sequence[str]) -> Records:
        """Records by id."""
        with self._transaction() as connection:
            sql = f"{local_files.RECORD} WHERE id IN {local_files.LIST}"
            found = {row[0]: row for row in connection.execute(sql, (local_files.listed(ids),))}
            return self._records(in_order(ids, found))

    def search(self, queries: np.ndarray, k: int, filter: Filter | None = None) -> list[Records]:
        """The nearest items of each query, by distances from the full vectors; ties in the order of storage.

        queries (n, e).
        """
        wanted = self.check_queries(queries, k)
        results: list[Records] = []
        with self._transaction() as connection:
            allowed = None
            if filter is not None:
                where, values = local_files.condition_of(filter)
                allowed = local_files.positions_of(connection, f"SELECT position FROM items WHERE {where}", values)
            for part in (wanted[i : i + _QUERIES] for i in range(0, len(wanted), _QUERIES)):
                nearest = self._nearest(connection, part, k, allowed)
                distinct = np.unique(np.concatenate(nearest)).tolist()
                sql = f"{local_files.RECORD} WHERE position IN {local_files.LIST} ORDER BY position"
                rows = connection.execute(sql, (local_files.listed(distinct),))
                found = dict(zip(distinct, rows, strict=True))
                results += [self._records([found[p] for p in row.tolist()]) for row in nearest]
        return results

    def match_words(self, stems: Sequence[str], n: int, filter: Filter | None = None) -> list[str]:
        """The ids of the items that have the most of some word stems, by BM25; nothing without a table of words."""
        where, values = local_files.condition_of(filter)
        select = "SELECT id FROM words JOIN items ON position = words.rowid WHERE words MATCH ?"
        quoted = " OR ".join('"{}"'.format(stem.replace('"', '""')) for stem in stems)
        with self._transaction() as connection:
            if not stems or not local_files.has_words(connection):
                return []
            rows = connection.execute(f"{select} AND {where} ORDER BY rank, position LIMIT ?", (quoted, *values, n))
            return [id for (id,) in rows]

    def count(self, filter: Filter | None = None) -> int:
        """Number of items."""
        where, values = local_files.condition_of(filter)
        with self._transaction() as connection:
            return int(connection.execute(f"SELECT count(*) FROM items WHERE {where}", values).fetchone()[0])

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items that pass the filter, each once, in the state at the request of the first batch."""
        where, values = local_files.condition_of(filter)
        with self._transaction() as connection:
            cursor = connection.execute(f"{local_files.RECORD} WHERE {where} ORDER BY position", values)
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
                local_files.take(self._lock, self.url)
                self._remove_strangers()

    def close(self) -> None:
        """Release the files and the write lock."""
        with self._writer:
            self._closed = True
            while self._pool:
                self._pool.pop().close()
            local_files.keep_log_files(self.path)
            self._blocks, self._index = {}, None
            self._lock.release()

    @contextlib.contextmanager
    def _transaction(self, begin: str = "BEGIN") -> Iterator[sqlite3.Connection]:
        """A connection of its own in a transaction, committed unless the block raises."""
        if self._closed:
            raise self.error("is closed; open it again")
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
            way = "check free space, permissions and other programs that use it"
            raise self.error(f"{self._database}: {error}; {way}") from error
        except sqlite3.DatabaseError as error:
            way = "put back a copy of the folder, or build it again"
            raise self.error(f"{self._database} is damaged ({error}); {way}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes."""
        with self._writer:
            self.begin_writing()
            with self._transaction("BEGIN IMMEDIATE") as connection:
                yield connection
                connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'version'")

    def _nearest(
        self, connection: sqlite3.Connection, queries: np.ndarray, k: int, allowed: local_files.Positions | None
    ) -> list[local_files.Positions]:
        """The positions of the k nearest items of each query, by distances from the full vectors."""

        def exact(query: np.ndarray, item: np.ndarray) -> np.ndarray:
            """(p,) squared distances of pairs, by differences in float64. query (p,), item (p,) positions."""
            found = np.empty(len(query))
            for start in range(0, len(query), _PAIRS):
                part = slice(start, start + _PAIRS)
                distinct, row = np.unique(item[part], return_inverse=True)
                vectors = self._vectors(connection, distinct)[row].astype(np.float64)
                found[part] = ((vectors - queries[query[part]]) ** 2).sum(1)
            return found

        after, indexed = self._find_in_index(connection, queries, k, allowed)
        blocks = functools.partial(self._read_blocks, connection, after, allowed)
        compared = Comparison(queries.astype(np.float64), np.zeros(len(queries)), blocks, exact)
        scanned = [item for _, item in compared.closest(k)]
        if indexed is None:
            return scanned
        both = [np.unique(np.concatenate([a[a >= 0], b])) for a, b in zip(indexed, scanned, strict=True)]
        query = np.repeat(np.arange(len(both)), [len(items) for items in both])
        return [item for _, item in compared.ranked(query, np.concatenate(both), k)]

    def _read_blocks(
        self, connection: sqlite3.Connection, after: int, allowed: local_files.Positions | None
    ) -> Iterator[Block]:
        """The allowed items at positions after a given one; a few of many items are read one by one."""
        if allowed is not None and len(allowed) < self._settings.exact_below:
            if len(allowed := allowed[allowed > after]):
                yield Block.of_vectors(allowed, self._vectors(connection, allowed))
            return
        version = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()[0]
        with self._memory:
            known, pages = self._pages
        if known != version:
            wide = connection.execute(f"SELECT max(position) / {_WIDE} * {_WIDE} FROM items").fetchone()
            select = "SELECT min(position), count(*), max(position) FROM items GROUP BY position"
            pages = sorted(connection.execute(f"{select} / iif(position < ?, {_WIDE}, {_PAGE})", wide))
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

        A page is identified by its first position, count and last position: new rows raise the last position, and
        deletions lower the count.
        """
        with self._memory:
            if page in self._blocks:
                return self._blocks[page]
            held = sum(block.coded.size for block in self._blocks.values())
        select = "SELECT position, vector FROM vectors WHERE position BETWEEN ? AND ? ORDER BY position"
        rows = connection.execute(select, (page[0], page[2])).fetchall()
        positions = np.array([row[0] for row in rows], dtype=np.int64)
        block = Block.of_vectors(positions, self._matrix([row[1] for row in rows]))
        with self._memory:
            if 4 * (held + block.coded.size) <= self._settings.memory * 1e6:
                self._blocks[page] = block
        return block

    def _vectors(self, connection: sqlite3.Connection, positions: local_files.Positions) -> local_files.Vectors:
        """(m, e) vectors at ascending positions."""
        select = f"SELECT vector FROM vectors WHERE position IN {local_files.LIST} ORDER BY position"
        return self._matrix([row[0] for row in connection.execute(select, (local_files.listed(positions.tolist()),))])

    def _matrix(self, rows: Sequence[bytes]) -> local_files.Vectors:
        return np.frombuffer(bytearray().join(rows), "<f4").astype(np.float32, copy=False).reshape(-1, self.dim)

    def _records(self, rows: Sequence[tuple[str, float, str, bytes]]) -> Records:
        """The records of rows of RECORD."""
        vectors = self._matrix([row[3] for row in rows])
        return self.records([(i, u, json.loads(text)) for i, u, text, _ in rows], vectors)

    def _find_in_index(
        self, connection: sqlite3.Connection, queries: np.ndarray, k: int, allowed: local_files.Positions | None
    ) -> tuple[int, np.ndarray | None]:
        """The position after which all vectors are compared, and (n, c) candidates of the index if it has enough."""
        if (index := self._read_index(connection)) is None:
            return -1, None
        settings, among, n = self._settings, None, len(index.positions)
        if allowed is not None:
            among = np.isin(index.positions, allowed).nonzero()[0]
            n = len(among)
        if n < max(1, settings.exact_below, _FEW_FRACTION * len(index.positions)):
            return -1, None
        # More than k candidates: some are deleted, and rounding or compressed codes may have changed their order.
        c = min(n, max(2 * k + 8, k * settings.overfetch))
        found = index.graph.search(queries, c, among)
        positions = np.where(found >= 0, index.positions[found], -1)
        select = f"SELECT position FROM items WHERE position IN {local_files.LIST}"
        alive = local_files.positions_of(connection, select, (local_files.listed(np.unique(positions).tolist()),))
        positions[~np.isin(positions, alive)] = -1
        if ((positions >= 0).sum(1) < k).any():
            return -1, None
        return int(index.positions[-1]), positions

    def _read_index(self, connection: sqlite3.Connection) -> LocalIndex | None:
        """The index that the database names."""
        row = connection.execute("SELECT file, bytes FROM indexes").fetchone()
        if row is None or self._settings.engine == "flat":
            return None
        file, known, settings = self.path / row[0], self._index, self._settings
        if known is not None and known.file == file:
            return known
        try:
            if (size := file.stat().st_size) != row[1]:
                raise ValueError(f"{size} bytes where {row[1]} were written")
            graph = local_files.Graph.read(file, settings.graph)
        except (FileNotFoundError, ValueError) as error:
            if not file.exists():
                return None
            way = "remove this file and optimise the store, which builds it anew"
            raise self.error(f"{file} is damaged ({error}); {way}") from error
        raw = connection.execute("SELECT positions FROM indexes").fetchone()[0]
        self._index = LocalIndex(file, graph, np.frombuffer(raw, dtype="<i8").astype(np.int64))
        return self._index

    def _build_index(self) -> None:
        """Index all items, unless few of them are outside the index or there are too few for one."""
        with self._transaction() as connection:
            positions = local_files.positions_of(connection, "SELECT position FROM items")
            index = self._read_index(connection)
            n = len(positions)
            moved = len(np.setxor1d(positions, index.positions)) if index else n
            if n < max(16, self._settings.exact_below) or moved <= _STALE * n:
                return

            def vectors(rows: local_files.Positions) -> local_files.Vectors:
                pages = np.array_split(positions[rows], max(1, len(rows) // _PAGE))
                return np.concatenate([self._vectors(connection, page) for page in pages])

            built = local_files.Graph.build(vectors, n, self._settings.graph)
        file = self.path / f"index-{positions[-1]}-{n}.{self._settings.engine}"
        try:
            built.write(file)
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
            files.sync_folder(self.path)
        except OSError as error:
            raise self.error(f"{file} cannot be written ({error}); check free space") from error
        with self._writing() as connection:
            connection.execute("DELETE FROM indexes")
            row = (file.name, file.stat().st_size, positions.astype("<i8").tobytes())
            connection.execute("INSERT INTO indexes VALUES (?, ?, ?)", row)

    def _remove_strangers(self) -> None:
        """Remove the leftover files of killed writers and earlier indexes; who has one open can still read it."""
        with self._transaction() as connection:
            named = connection.execute("SELECT file FROM indexes") if self._settings.engine != "flat" else []
            known = {self.path / name for (name,) in named}
        for file in set(self.path.glob("index-*.*")) - known:
            with contextlib.suppress(*files.IN_USE):  # Windows keeps what is open; a later writer removes it.
                file.unlink(missing_ok=True)
