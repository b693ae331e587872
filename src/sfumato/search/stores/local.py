"""LocalStore: records in a folder, searched without being read into memory; larger than memory is fine.

    FOLDER/store.sqlite              ids, payloads, uncertainties, where each vector lies, and the settings
    FOLDER/shard-N.vectors           raw float32 rows, appended to and mapped into memory
    FOLDER/shard-N.ROWS.ENGINE       FAISS's index of the first ROWS rows of a shard, if there is one
    FOLDER/.lock                     held by the one process that writes, from its first write until it closes the store

A write appends its vectors, forces them to disk, and commits one SQLite transaction: with that it is acknowledged. Bytes that no
transaction knows are the rest of a killed writer; the next one writes over them. Replaced and deleted rows are dead, hidden from
searches, and go when :meth:`LocalStore.optimise` rewrites their shard. Rows without an index are scanned, and whatever engine
brings the candidates, they are ranked by distances computed from the full vectors. Engine flat needs no FAISS.
"""

import contextlib
import json
import os
import re
import sqlite3
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import UserError
from sfumato.files import sync_folder
from sfumato.search.stores.faiss import STORE_ENGINES, FaissOptions, FaissStore, require_faiss
from sfumato.search.stores.protocol import Filter, Records
from sfumato.search.stores.segments import (
    BLOCK,
    LIST,
    NO_ROWS,
    ROW_BITS,
    SELECT,
    Rows,
    Shard,
    Vectors,
    View,
    condition_of,
    listed,
    scan,
    squared_l2,
)
from sfumato.search.stores.store_url import options

if sys.platform != "win32":
    import fcntl

LOCAL_OPTIONS = {
    "engine": f"{', '.join(STORE_ENGINES)}; flat if left out",
    "shard_size": "vectors in a file, 250000 if left out; an index is built with so many in memory",
    "m": "hnsw: links of a node",
    "ef_construction": "hnsw: candidates while building",
    "ef_search": "hnsw: candidates while searching",
    "n_lists": "ivf, ivf-pq: lists of a shard",
    "n_probe": "ivf, ivf-pq: lists that a search looks into",
    "seed": "ivf, ivf-pq: of what is learnt",
    "code_size": "ivf-pq: bytes of a compressed vector",
    "overfetch": "ivf-pq: candidates for each wanted result, 10 if left out",
}
"""What may follow the question mark of the URL. All but ef_search, n_probe and overfetch are settled when the store is created."""

_OF_ENGINE = {
    "flat": (),
    "hnsw": ("m", "ef_construction", "ef_search"),
    "ivf": ("n_lists", "n_probe", "seed"),
    "ivf-pq": ("n_lists", "n_probe", "seed", "code_size", "overfetch"),
}
_OF_SEARCHES = ("ef_search", "n_probe", "overfetch")
_FORMAT, _DATABASE, _LOCK = 1, "store.sqlite", ".lock"
_OURS = re.compile(r"\.?shard-\d+\.(vectors|[\d.a-z-]+)(\.tmp)?")
_FEW, _FEW_SHARE = 8192, 0.05
"""Below so many rows, or this share of the index, a scan of just these is as fast as the index and exact."""

_SPARSE = 0.2
"""Share of dead rows from which on a shard is rewritten."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE items (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, uncertainty REAL NOT NULL, payload TEXT NOT NULL);
CREATE TABLE dead (seq INTEGER PRIMARY KEY AUTOINCREMENT, position INTEGER NOT NULL UNIQUE);
CREATE TABLE shards (number INTEGER PRIMARY KEY AUTOINCREMENT, rows INTEGER NOT NULL, indexed INTEGER NOT NULL DEFAULT 0,
    index_bytes INTEGER NOT NULL DEFAULT 0);
"""


def create(url: str, dim: int, fingerprint: str) -> "LocalStore":
    """Make an empty store in a new or empty folder.

    Args:
        url: PATH?OPTIONS or file:PATH?OPTIONS, see LOCAL_OPTIONS.
        dim: e >= 1.
        fingerprint: kept.

    Raises:
        UserError: an option is wrong, something is there already, or the engine needs FAISS and it is not installed.
    """
    path, given = _parse(url)
    if dim < 1:
        raise ValueError(f"store {url}: dim must be at least 1, got {dim}")
    settings = {"engine": "flat", "shard_size": 250_000} | given
    _Settings.of(url, settings)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if stranger := next((p.name for p in sorted(path.iterdir()) if not p.name.startswith(".creating")), None):
            raise UserError(f"store {url}: {path / stranger} is there already; open it, or give a new or empty folder")
        new = path / f".creating-{os.getpid()}.sqlite"
        new.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(_SCHEMA)
            about = {"dim": dim, "fingerprint": fingerprint, "settings": json.dumps(settings), "version": 0}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", about.items())
            connection.execute(f"PRAGMA user_version={_FORMAT}")
        os.replace(new, path / _DATABASE)
        sync_folder(path)
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
    return LocalStore(url)


class LocalStore:
    """A :class:`~sfumato.search.stores.protocol.VectorStore` in a folder. Made by :func:`create`, opened by :func:`open`.

    Each search, get, count and scan sees everything that was acknowledged, by any process, before it began, and nothing half done.
    A second process that writes gets a UserError from its first write.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.path, given = _parse(url)
        self._database = self.path / _DATABASE
        if not self._database.is_file():
            raise UserError(f"store {url}: there is no {self._database}; create the store first")
        self._pool: list[sqlite3.Connection] = []
        self._closed = False
        self._view_lock, self._writer = threading.Lock(), threading.RLock()
        self._lock: BinaryIO | None = None
        self._indexes: dict[Path, FaissStore] = {}
        self._latest = View(-1, 0, {})
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
        for name, value in given.items():
            if name not in _OF_SEARCHES and kept.get(name, value) != value:
                raise UserError(f"store {url}: was created with {name}={kept[name]}, not {value}; leave the option out")
            if name not in _OF_SEARCHES and name not in kept and name in _OF_ENGINE[kept["engine"]]:
                raise UserError(f"store {url}: was created without {name}; leave the option out")
        self._settings = _Settings.of(url, kept | given)

    def upsert(self, records: Records) -> None:
        """Store records; those whose ids are there already are replaced as a whole. All are stored or, if it raises, none.

        Returns once all is on the disk. Then, where a shard has become full, its index is built; what was stored stays stored if
        that fails.

        Raises:
            ValueError: vectors of another dimension.
            UserError: another process writes, or the disk is full.
        """
        if records.vectors.shape[1] != self.dim:
            raise ValueError(f"store {self.url}: vectors have {records.vectors.shape[1]} dimensions, not {self.dim}")
        if not len(records):
            return
        with self._writing() as connection:
            self._bury(connection, records.ids)
            positions = self._append(connection, np.ascontiguousarray(records.vectors.detach().numpy()))
            payloads = (json.dumps(dict(payload), ensure_ascii=False) for payload in records.payloads)
            rows = zip(positions, records.ids, records.uncertainty.tolist(), payloads, strict=True)
            connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
        self._build_indexes(least=self._settings.shard_size)

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items.

        Returns:
            How many of these ids were there.

        Raises:
            UserError: another process writes, or the disk is full.
        """
        with self._writing() as connection:
            return self._bury(connection, ids)

    def get(self, ids: Sequence[str]) -> Records:
        """The records of those of these ids that are there, each once, in the order asked for."""
        with self._snapshot() as (connection, view):
            found = {row[1]: row for row in connection.execute(f"{SELECT} WHERE id IN {LIST}", (listed(ids),))}
            return view.records([found[i] for i in dict.fromkeys(ids) if i in found], self.dim)

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        """The nearest items of each query, by distances computed from the full vectors; equally near ones in the order stored.

        Args:
            queries: (n, e) float32.
            k: at least 1.
            filter: which items may be found; all if None. What the last few filters let through is remembered, and only
                what was written since is looked at.

        Returns:
            For each query k records, nearest first; fewer only if fewer fit the filter. With engine flat exactly the nearest.

        Raises:
            ValueError: k or the queries do not fit.
            UserError: a file of the store is damaged; the message names it.
        """
        wanted = check_queries(self.url, queries, k, self.dim)
        with self._snapshot() as (connection, view):
            allowed = None if filter is None else view.allowed(connection, filter)
            distances = [np.empty(0)] * len(wanted)
            positions = [np.empty(0, dtype=np.int64)] * len(wanted)
            for shard in view.shards.values():
                rows = shard.live if allowed is None else allowed.get(shard.number)
                if rows is None or not len(rows) or not len(wanted):
                    continue
                for i, found in enumerate(self._candidates(shard, rows, wanted, k).numpy()):
                    near = found[found >= 0]
                    distance = np.append(distances[i], squared_l2(shard.vectors[near], wanted[i].numpy()))
                    position = np.append(positions[i], shard.first + near)
                    best = np.lexsort((position, distance))[:k]
                    distances[i], positions[i] = distance[best], position[best]
            everything = sorted({int(p) for part in positions for p in part})
            found_rows = connection.execute(f"{SELECT} WHERE position IN {LIST}", (listed(everything),))
            by_position = {row[0]: row for row in found_rows}
            return [view.records([by_position[int(p)] for p in part], self.dim) for part in positions]

    def count(self, filter: Filter | None = None) -> int:
        """Number of items that fit."""
        where, values = condition_of(filter)
        counted = f"SELECT count(*) FROM items WHERE {where}"
        if filter is None:  # without a look at every item: this is asked at every search
            counted = "SELECT (SELECT total(rows) FROM shards) - (SELECT count(*) FROM dead)"
        with self._transaction() as connection:
            return int(connection.execute(counted, values).fetchone()[0])

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items that fit, in batches, each once, as they were when the first batch was asked for; in the order stored."""
        where, values = condition_of(filter)
        with self._snapshot() as (connection, view):
            cursor = connection.execute(f"{SELECT} WHERE {where} ORDER BY position", values)
            while rows := cursor.fetchmany(batch):
                yield view.records(rows, self.dim)

    def optimise(self) -> None:
        """Rewrite shards with many dead rows, join small ones, and build the indexes that are missing, a shard at a time.

        Takes as much memory as a shard. Searches go on; writes of other threads wait. If it dies, what was done stays.

        Raises:
            UserError: another process writes, or the disk is full.
        """
        with self._writer:
            self.begin_writing()
            for group in self._sparse():
                self._rewrite(group)
            self._build_indexes(least=_FEW)
            self._remove_strangers()

    def begin_writing(self) -> None:
        """Take the right to write, as every write does, and keep it until close; the system takes it from a process that dies.

        Raises:
            UserError: another process writes, or the folder cannot be written to.
        """
        with self._writer:
            if not (self._lock or self._closed):
                self._lock = self._locked()
                self._remove_strangers()

    def close(self) -> None:
        """Let go of files and of the right to write."""
        with self._writer, self._view_lock:
            self._closed = True
            while self._pool:
                self._pool.pop().close()
            self._indexes, self._latest = {}, View(-1, 0, {})
            if self._lock:
                self._lock.close()
                self._lock = None

    def _locked(self) -> BinaryIO:
        """The lock file, locked."""
        try:
            stream = (self.path / _LOCK).open("ab")
        except OSError as error:
            raise UserError(f"store {self.url}: cannot be written ({error}); see to permissions") from error
        if sys.platform != "win32":
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                stream.close()
                raise UserError(
                    f"store {self.url}: another process, or another opening in this one, writes to it; wait until it closes the store"
                ) from error
        return stream

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
            raise _damaged(self.url, self._database, str(error)) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes."""
        with self._writer:
            self.begin_writing()
            try:
                with self._transaction("BEGIN IMMEDIATE") as connection:
                    yield connection
                    connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'version'")
            except OSError as error:
                raise UserError(
                    f"store {self.url}: cannot be written ({error}); see to free space, permissions"
                ) from error

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[tuple[sqlite3.Connection, View]]:
        """A transaction that reads, and the vectors as they were when it began."""
        for attempt in range(3):
            with self._transaction() as connection:
                try:
                    view = self._view(connection)
                except FileNotFoundError as error:
                    # Another process may have rewritten the shard since: then the next transaction knows the new one.
                    if attempt == 2:
                        raise _damaged(self.url, Path(error.filename), "is missing") from error
                    continue
                yield connection, view
                return

    def _view(self, connection: sqlite3.Connection) -> View:
        """The shards that this transaction sees; those of the last view are used again where they fit."""
        version = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()[0]
        with self._view_lock:
            last = self._latest if self._latest.version <= version else View(-1, 0, {})
            if last.version == version:
                return last
            dead: dict[int, list[int]] = {}
            died = list(connection.execute("SELECT seq, position FROM dead WHERE seq > ? ORDER BY seq", (last.seen,)))
            for _, position in died:
                dead.setdefault(position >> ROW_BITS, []).append(position & (1 << ROW_BITS) - 1)
            shards = {}
            facts = connection.execute("SELECT number, rows, indexed, index_bytes FROM shards ORDER BY number")
            for number, rows, indexed, index_bytes in facts:
                shards[number] = self._shard(
                    last.shards.get(number), dead.get(number, []), number, rows, indexed, index_bytes
                )
            with last.memory:
                remembered = dict(last.remembered)
            view = View(version, died[-1][0] if died else last.seen, shards, remembered)
            if version > self._latest.version:
                self._latest = view
                files = {self._index_file(shard) for shard in shards.values()}
                self._indexes = {file: index for file, index in self._indexes.items() if file in files}
            return view

    def _shard(
        self, last: Shard | None, died: list[int], number: int, rows: int, indexed: int, index_bytes: int
    ) -> Shard:
        if last and not died and (len(last.vectors), last.indexed, last.index_bytes) == (rows, indexed, index_bytes):
            return last
        vectors, dead = (last.vectors, last.dead) if last else (None, NO_ROWS)
        if vectors is None or len(vectors) < rows:
            file = self._vector_file(number)
            self._check_length(file, rows)
            # Mode c, copy on write, because torch wants its memory writable; nobody writes.
            vectors = np.asarray(np.memmap(file, dtype="<f4", mode="c", shape=(rows, self.dim)))
        return Shard(number, vectors, indexed, index_bytes, np.union1d(dead, np.array(died, dtype=np.int64)))

    def _candidates(self, shard: Shard, rows: Rows, queries: Tensor, k: int) -> Tensor:
        """(n, c) rows of a shard, -1 where there are fewer; among them, as far as the engine finds them, the k nearest.

        A few more than k: rounding may have put near ties in the wrong order, and codes more than that.
        """
        c = k * self._settings.overfetch if self._settings.engine == "ivf-pq" else k + max(8, k // 4)
        head, tail = np.split(rows, [np.searchsorted(rows, shard.indexed)])
        few = len(head) < max(_FEW, _FEW_SHARE * shard.indexed)
        index = None if few else self._index(shard)
        if index is None:
            return scan(shard.vectors, rows, queries, k, c)
        among = None if len(head) == index.n else torch.from_numpy(head)
        found = index.search(queries, min(c, len(head)), among)[1]
        short = ((found >= 0).sum(1) < k).nonzero().squeeze(1)
        if len(short):
            found[short] = scan(shard.vectors, head, queries[short], k, found.shape[1])
        return torch.cat([found, scan(shard.vectors, tail, queries, k, c)], dim=1)

    def _index(self, shard: Shard) -> FaissStore | None:
        """FAISS's part of a shard, mapped into memory; None if its file is gone."""
        file = self._index_file(shard)
        with self._view_lock:
            if file not in self._indexes:
                try:
                    size = file.stat().st_size
                    if size != shard.index_bytes:
                        raise ValueError(f"{size} bytes where {shard.index_bytes} were written")
                    self._indexes[file] = FaissStore.read(
                        file, self._settings.engine, self._settings.faiss, mapped=True
                    )
                except FileNotFoundError:
                    return None
                except ValueError as error:
                    raise UserError(
                        f"store {self.url}: {file} is damaged ({error}); remove this file and optimise the store, which builds it anew"
                    ) from error
            return self._indexes[file]

    def _append(self, connection: sqlite3.Connection, vectors: Vectors) -> list[int]:
        """Write vectors behind the last shard's, or into new shards; their positions."""
        positions: list[int] = []
        while len(vectors):
            last = connection.execute("SELECT number, rows FROM shards ORDER BY number DESC LIMIT 1").fetchone()
            if last is None or last[1] >= self._settings.shard_size:
                last = (connection.execute("INSERT INTO shards (rows) VALUES (0)").lastrowid, 0)
            number, rows = last
            part, vectors = np.split(vectors, [self._settings.shard_size - rows])
            self._write_rows(number, rows, [part])
            connection.execute("UPDATE shards SET rows = ? WHERE number = ?", (rows + len(part), number))
            positions.extend(range(number << ROW_BITS | rows, (number << ROW_BITS | rows) + len(part)))
        return positions

    def _write_rows(self, number: int, rows: int, parts: Sequence[Vectors] | Iterator[Vectors]) -> None:
        """Write vectors behind the first rows of a shard, over whatever a killed writer left there, and force them to disk."""
        file = self._vector_file(number)
        if rows:
            self._check_length(file, rows)
        with file.open("ab") as stream:
            stream.truncate(rows * self.dim * 4)
            for part in parts:
                stream.write(np.ascontiguousarray(part, dtype="<f4").data)
            stream.flush()
            os.fsync(stream.fileno())
        if not rows:
            sync_folder(self.path)

    def _bury(self, connection: sqlite3.Connection, ids: Sequence[str]) -> int:
        """Remove these items; their rows stay as dead ones."""
        condition, wanted = f"id IN {LIST}", (listed(ids),)
        connection.execute(f"INSERT INTO dead (position) SELECT position FROM items WHERE {condition}", wanted)
        return connection.execute(f"DELETE FROM items WHERE {condition}", wanted).rowcount

    def _sparse(self) -> list[list[Shard]]:
        """Groups of shards to make one of each."""
        with self._snapshot() as (_, view):
            shards, size = list(view.shards.values()), self._settings.shard_size
        groups: list[list[Shard]] = []
        for shard in shards:
            small = shard is not shards[-1] and len(shard.vectors) * 2 < size
            if len(shard.dead) <= _SPARSE * len(shard.vectors) and not small:
                continue
            if groups and sum(len(other.live) for other in groups[-1]) + len(shard.live) <= size:
                groups[-1].append(shard)
            else:
                groups.append([shard])
        return [group for group in groups if len(group) > 1 or len(group[0].dead)]

    def _rewrite(self, group: Sequence[Shard]) -> None:
        """Copy the live rows of shards into a new one; the transaction is the step from the old to the new."""
        with self._writing() as connection:
            number = connection.execute("INSERT INTO shards (rows) VALUES (0)").lastrowid or 0
            step = max(1, BLOCK // self.dim)
            blocks = (s.vectors[s.live[i : i + step]] for s in group for i in range(0, len(s.live), step))
            self._write_rows(number, 0, blocks)
            old = np.concatenate([shard.first + shard.live for shard in group]).tolist()
            moves = ((number << ROW_BITS | row, position) for row, position in enumerate(old))
            connection.executemany("UPDATE items SET position = ? WHERE position = ?", moves)
            connection.execute("UPDATE shards SET rows = ? WHERE number = ?", (len(old), number))
            for shard in group:
                ends = (shard.first, shard.first + len(shard.vectors) - 1)
                connection.execute("DELETE FROM dead WHERE position BETWEEN ? AND ?", ends)
                connection.execute("DELETE FROM shards WHERE number = ?", (shard.number,))
            connection.execute("DELETE FROM shards WHERE rows = 0")

    def _build_indexes(self, least: int) -> None:
        """Index every shard of at least so many rows that is not, or whose index is gone."""
        engine = self._settings.engine
        if engine == "flat":
            return
        with self._writer:
            with self._snapshot() as (_, view):
                shards = list(view.shards.values())
            for shard in shards:
                rows = len(shard.vectors)
                if rows < max(least, _FEW) or (shard.indexed == rows and self._index_file(shard).exists()):
                    continue
                numbers = self._settings.faiss
                if numbers.n_lists:
                    # A shard that is not full may be too small for so many.
                    numbers = replace(numbers, n_lists=min(numbers.n_lists, max(1, rows // 39)))
                index = FaissStore.build(torch.from_numpy(shard.vectors), engine, numbers)
                file = self._index_file(replace(shard, indexed=rows))
                temporary = file.with_name(f".{file.name}.tmp")
                with self._writing() as connection:
                    index.write(temporary)
                    with temporary.open("rb+") as stream:
                        os.fsync(stream.fileno())
                        size = os.fstat(stream.fileno()).st_size
                    os.replace(temporary, file)
                    sync_folder(self.path)
                    values = (rows, size, shard.number)
                    connection.execute("UPDATE shards SET indexed = ?, index_bytes = ? WHERE number = ?", values)

    def _remove_strangers(self) -> None:
        """Remove what killed writers and earlier shards have left. Who has such a file open keeps it."""
        with self._transaction() as connection:
            known = {_LOCK}
            for number, indexed in connection.execute("SELECT number, indexed FROM shards"):
                known |= {self._vector_file(number).name, f"shard-{number}.{indexed}.{self._settings.engine}"}
        for file in self.path.iterdir():
            if _OURS.fullmatch(file.name) and file.name not in known:
                file.unlink(missing_ok=True)

    def _check_length(self, file: Path, rows: int) -> None:
        if (size := file.stat().st_size) < (expected := rows * self.dim * 4):
            raise _damaged(self.url, file, f"{size} bytes where at least {expected} were written")

    def _vector_file(self, number: int) -> Path:
        return self.path / f"shard-{number}.vectors"

    def _index_file(self, shard: Shard) -> Path:
        return self.path / f"shard-{shard.number}.{shard.indexed}.{self._settings.engine}"


@dataclass(frozen=True)
class _Settings:
    """What a store was created and opened with."""

    engine: str
    shard_size: int
    overfetch: int
    faiss: FaissOptions

    @staticmethod
    def of(url: str, given: Mapping[str, Any]) -> "_Settings":
        rest = dict(given)
        engine, shard_size = rest.pop("engine"), rest.pop("shard_size")
        if engine not in STORE_ENGINES:
            raise UserError(f"store {url}: unknown engine {engine!r}; known: {', '.join(STORE_ENGINES)}")
        if foreign := sorted(set(rest) - set(_OF_ENGINE[engine])):
            known = ", ".join(("shard_size", *_OF_ENGINE[engine]))
            raise UserError(f"store {url}: engine {engine} has no option {foreign[0]!r}; it has {known}")
        overfetch = rest.pop("overfetch", 10)
        try:
            settings = _Settings(engine, shard_size, overfetch, FaissOptions(**rest))
        except ValueError as error:
            raise UserError(f"store {url}: {str(error).removeprefix('FaissOptions: ')}") from error
        if shard_size < 1 or shard_size > 2**31 or overfetch < 1:
            raise UserError(
                f"store {url}: shard_size must be from 1 to 2^31 and overfetch at least 1, got {shard_size} and {overfetch}"
            )
        if engine != "flat":
            require_faiss()
        return settings


def check_queries(url: str, queries: Tensor, k: int, dim: int) -> Tensor:
    """(n, e) queries as float32 on the CPU.

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


def _parse(url: str) -> tuple[Path, dict[str, Any]]:
    """Folder and options of a URL, numbers as numbers."""
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


def _damaged(url: str, file: Path, what: str) -> UserError:
    return UserError(f"store {url}: {file} is damaged ({what}); put back a copy of the folder, or build it again")
