"""Embedded engines for `benchmarks/stores.py`, each reduced to what a vector store of sfumato must do.

    sfumato      the store of `file:` URLs, as it is in this checkout
    milvus       the store of `milvus:` URLs, Milvus Lite
    lancedb      LanceDB, exact search; needs lancedb
    sqlite-vec   records and vectors in SQLite, searched by the extension sqlite-vec; needs sqlite-vec, and pysqlite3
                 where Python's own sqlite3 was built without loadable extensions
    sqlite-faiss records and vectors in SQLite, FAISS's flat index over all vectors in memory
    sqlite-torch records and vectors in SQLite, plain matrix products over all vectors in memory

The last four are prototypes: no locks between processes, no messages for users.
"""

import contextlib
import importlib
import json
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sfumato.search.stores.protocol import Filter, Records, create_store, open_store

MODULES = {
    "sfumato": "sqlite3",
    "milvus": "pymilvus",
    "lancedb": "lancedb",
    "sqlite-vec": "sqlite_vec",
    "sqlite-faiss": "faiss",
    "sqlite-torch": "sqlite3",
}
"""By engine, the module that is imported for it."""

PACKAGES: dict[str, tuple[str, ...]] = {
    "sfumato": (),
    "milvus": ("pymilvus", "milvus-lite"),
    "lancedb": ("lancedb",),
    "sqlite-vec": ("sqlite-vec", "pysqlite3"),
    "sqlite-faiss": ("faiss-cpu",),
    "sqlite-torch": (),
}
"""By engine, the packages that have to be installed for it."""


class Engine(Protocol):
    """What is measured: a part of :class:`~sfumato.search.stores.protocol.VectorStore`."""

    def upsert(self, records: Records) -> None: ...
    def delete(self, ids: Sequence[str]) -> int: ...
    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]: ...
    def scan(self) -> Iterator[Records]: ...
    def optimise(self) -> None: ...
    def close(self) -> None: ...


def open_engine(name: str, folder: Path, dim: int, *, create: bool) -> Engine:
    """An engine with its files in a folder.

    Args:
        name: one of MODULES.
        folder: exists, and is empty if `create`.
        dim: e, of the vectors.
        create: make an empty collection; otherwise open the one that is there.
    """
    if name in ("sfumato", "milvus"):
        url = f"file:{folder}/store" if name == "sfumato" else f"milvus:{folder}/store.db"
        return create_store(url, dim, "benchmark") if create else open_store(url)
    made: dict[str, Callable[[Path, int, bool], Engine]] = {
        "lancedb": LanceEngine,
        "sqlite-vec": SqliteVecEngine,
        "sqlite-faiss": SqliteFaissEngine,
        "sqlite-torch": SqliteTorchEngine,
    }
    return made[name](folder, dim, create)


class LanceEngine:
    """A table of LanceDB; payload fields are a list of name=value texts, so that a filter can ask for any of them."""

    def __init__(self, folder: Path, dim: int, create: bool) -> None:
        import lancedb
        import pyarrow as pa

        self._arrow, self._dim = pa, dim
        database = lancedb.connect(str(folder / "lance"), read_consistency_interval=timedelta(0))
        self._schema = pa.schema(
            [
                ("id", pa.utf8()),
                ("vector", pa.list_(pa.float32(), dim)),
                ("uncertainty", pa.float32()),
                ("payload", pa.utf8()),
                ("pairs", pa.list_(pa.utf8())),
            ]
        )
        self._table = database.create_table("items", schema=self._schema) if create else database.open_table("items")

    def upsert(self, records: Records) -> None:
        pa = self._arrow
        flat = pa.array(records.vectors.numpy().reshape(-1))
        columns = [
            pa.array(records.ids),
            pa.FixedSizeListArray.from_arrays(flat, self._dim),
            pa.array(records.uncertainty.numpy()),
            pa.array([json.dumps(dict(payload)) for payload in records.payloads]),
            pa.array([[f"{k}={v}" for k, v in payload.items()] for payload in records.payloads], pa.list_(pa.utf8())),
        ]
        data = pa.Table.from_arrays(columns, schema=self._schema)
        merge = self._table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(data)

    def delete(self, ids: Sequence[str]) -> int:
        condition = f"id IN ({', '.join(map(_quoted, ids))})"
        there = self._table.count_rows(condition)
        self._table.delete(condition)
        return int(there)

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        single = len(queries) == 1
        query: Any = self._table.search(queries[0].numpy() if single else list(queries.numpy()))
        query = query.distance_type("l2").limit(k)
        if filter is not None:
            conditions = [f"uncertainty <= {filter.max_uncertainty}"] if filter.max_uncertainty is not None else []
            for name, values in filter.where.items():
                pairs = ", ".join(_quoted(f"{name}={value}") for value in values)
                conditions.append(f"array_has_any(pairs, [{pairs}])")
            query = query.where(" AND ".join(conditions), prefilter=True)
        found = query.to_arrow()
        if single:
            return [self._records(found)]
        numbers = found["query_index"].to_numpy()
        parts = [found.take((numbers == i).nonzero()[0]).sort_by("_distance") for i in range(len(queries))]
        return [self._records(part) for part in parts]

    def scan(self) -> Iterator[Records]:
        yield self._records(self._table.to_arrow())

    def optimise(self, keep: float = 60.0) -> None:
        """Compact; versions younger than `keep` seconds stay for the readers of other processes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._table.optimize(cleanup_older_than=timedelta(seconds=keep))

    def close(self) -> None:
        pass

    def _records(self, rows: Any) -> Records:
        flat = rows["vector"].combine_chunks().flatten().to_numpy()
        return Records(
            tuple(rows["id"].to_pylist()),
            torch.tensor(flat.reshape(-1, self._dim)),
            torch.tensor(rows["uncertainty"].to_numpy()),
            tuple(json.loads(text) for text in rows["payload"].to_pylist()),
        )


class _SqliteEngine:
    """Records in SQLite; subclasses say where the vectors are and how they are searched."""

    _vectors = "CREATE TABLE vectors (row INTEGER PRIMARY KEY, vector BLOB NOT NULL)"
    _key = "row"

    def __init__(self, folder: Path, dim: int, create: bool) -> None:
        self._dim = dim
        self._db = self._connect(folder / "store.sqlite")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA mmap_size={2**40}")
        if create:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE items (position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,"
                " uncertainty REAL NOT NULL, payload TEXT NOT NULL)"
            )
            self._db.execute(self._vectors.format(dim=dim))

    def _connect(self, file: Path) -> Any:
        return sqlite3.connect(file, isolation_level=None, check_same_thread=False)

    def upsert(self, records: Records) -> None:
        with self._transaction():
            self._remove(records.ids)
            for i, id in enumerate(records.ids):
                row = (id, float(records.uncertainty[i]), json.dumps(dict(records.payloads[i])))
                position = self._db.execute(
                    "INSERT INTO items (id, uncertainty, payload) VALUES (?, ?, ?)", row
                ).lastrowid
                vector = records.vectors[i].numpy().tobytes()
                self._db.execute(f"INSERT INTO vectors ({self._key}, vector) VALUES (?, ?)", (position, vector))

    def delete(self, ids: Sequence[str]) -> int:
        with self._transaction():
            return self._remove(ids)

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        with self._transaction("BEGIN"):
            return [self._fetch(positions) for positions in self._nearest(queries, k, filter)]

    def scan(self) -> Iterator[Records]:
        with self._transaction("BEGIN"):
            positions = [row[0] for row in self._db.execute("SELECT position FROM items ORDER BY position")]
            for start in range(0, len(positions), 4096):
                yield self._fetch(positions[start : start + 4096])

    def optimise(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._db.close()

    def _nearest(self, queries: Tensor, k: int, filter: Filter | None) -> Iterator[Sequence[int]]:
        raise NotImplementedError

    @contextlib.contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        self._db.execute(begin)
        yield
        self._db.execute("COMMIT")

    def _remove(self, ids: Sequence[str]) -> int:
        listed = (json.dumps(list(ids)),)
        old = "SELECT position FROM items WHERE id IN (SELECT value FROM json_each(?))"
        self._db.execute(f"DELETE FROM vectors WHERE {self._key} IN ({old})", listed)
        return int(self._db.execute(f"DELETE FROM items WHERE position IN ({old})", listed).rowcount)

    def _allowed(self, filter: Filter) -> tuple[str, list[Any]]:
        """A query for the positions that fit a filter, and its values."""
        conditions, values = ["1"], list[Any]()
        if filter.max_uncertainty is not None:
            conditions.append("uncertainty <= ?")
            values.append(filter.max_uncertainty)
        for name, texts in filter.where.items():
            conditions.append(
                "EXISTS (SELECT 1 FROM json_each(payload) WHERE key = ? AND atom IN (SELECT value FROM json_each(?)))"
            )
            values += [name, json.dumps(list(texts))]
        return f"SELECT position FROM items WHERE {' AND '.join(conditions)}", values

    def _fetch(self, positions: Sequence[int]) -> Records:
        listed = json.dumps([int(p) for p in positions])
        rows = self._db.execute(
            f"SELECT position, id, uncertainty, payload, vector FROM items JOIN vectors ON {self._key} = position"
            " WHERE position IN (SELECT value FROM json_each(?))",
            (listed,),
        )
        by_position = {row[0]: row[1:] for row in rows}
        found = [by_position[int(p)] for p in positions]
        flat = np.frombuffer(b"".join(row[3] for row in found), dtype=np.float32).copy()
        return Records(
            tuple(row[0] for row in found),
            torch.from_numpy(flat.reshape(-1, self._dim)),
            torch.tensor([row[1] for row in found]),
            tuple(json.loads(row[2]) for row in found),
        )


class SqliteVecEngine(_SqliteEngine):
    """A virtual table of sqlite-vec."""

    _vectors = "CREATE VIRTUAL TABLE vectors USING vec0(vector float[{dim}])"
    _key = "rowid"

    def _connect(self, file: Path) -> Any:
        import sqlite_vec

        loadable = hasattr(sqlite3.Connection, "enable_load_extension")
        driver: Any = sqlite3 if loadable else importlib.import_module("pysqlite3")
        connection = driver.connect(file, isolation_level=None, check_same_thread=False)
        connection.enable_load_extension(True)
        sqlite_vec.load(connection)
        return connection

    def _fetch(self, positions: Sequence[int]) -> Records:
        # One vector after the other: a virtual table joined by rowid is scanned as a whole.
        listed = json.dumps([int(p) for p in positions])
        select = (
            "SELECT position, id, uncertainty, payload FROM items WHERE position IN (SELECT value FROM json_each(?))"
        )
        by_position = {row[0]: row[1:] for row in self._db.execute(select, (listed,))}
        one = "SELECT vector FROM vectors WHERE rowid = ?"
        vectors = [self._db.execute(one, (int(p),)).fetchone()[0] for p in positions]
        found = [by_position[int(p)] for p in positions]
        return Records(
            tuple(row[0] for row in found),
            torch.from_numpy(np.frombuffer(b"".join(vectors), dtype=np.float32).copy().reshape(-1, self._dim)),
            torch.tensor([row[1] for row in found]),
            tuple(json.loads(row[2]) for row in found),
        )

    def _nearest(self, queries: Tensor, k: int, filter: Filter | None) -> Iterator[Sequence[int]]:
        condition, values = ("", list[Any]())
        if filter is not None:
            allowed, values = self._allowed(filter)
            condition = f" AND rowid IN ({allowed})"
        for query in queries.numpy():
            sql = f"SELECT rowid FROM vectors WHERE vector MATCH ? AND k = ?{condition} ORDER BY distance"
            yield [row[0] for row in self._db.execute(sql, (query.tobytes(), k, *values))]


class _SqliteMatrix(_SqliteEngine):
    """Vectors as a column; a search first reads what has changed since the last one."""

    _version = -1

    def _refresh(self) -> None:
        """Read all vectors again if another connection or this one has written."""
        version = self._db.total_changes + self._db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self._version = version
            self._load()

    def _load(self) -> None:
        raise NotImplementedError

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(b,) positions and (b, e) vectors."""
        cursor = self._db.execute("SELECT row, vector FROM vectors ORDER BY row")
        while rows := cursor.fetchmany(8192):
            flat = np.frombuffer(b"".join([row[1] for row in rows]), dtype=np.float32)
            yield np.array([row[0] for row in rows]), flat.reshape(-1, self._dim)

    def _positions(self, filter: Filter) -> np.ndarray:
        sql, values = self._allowed(filter)
        return np.fromiter((row[0] for row in self._db.execute(sql, values)), dtype=np.int64)


class SqliteFaissEngine(_SqliteMatrix):
    """FAISS's flat index of all vectors, in memory."""

    def _load(self) -> None:
        faiss: Any = importlib.import_module("faiss")
        self._faiss, self._index = faiss, faiss.IndexIDMap(faiss.IndexFlatL2(self._dim))
        for positions, vectors in self._blocks():
            self._index.add_with_ids(vectors, positions)

    def _nearest(self, queries: Tensor, k: int, filter: Filter | None) -> Iterator[Sequence[int]]:
        self._refresh()
        parameters = None
        if filter is not None:
            parameters = self._faiss.SearchParameters(sel=self._faiss.IDSelectorBatch(self._positions(filter)))
        found = self._index.search(queries.numpy(), k, params=parameters)[1]
        yield from ([int(p) for p in row if p >= 0] for row in found)


class SqliteTorchEngine(_SqliteMatrix):
    """Matrix products over blocks in memory; a few more than k candidates are ranked by differences in float64."""

    def _load(self) -> None:
        self._kept = [(positions, torch.from_numpy(vectors.copy())) for positions, vectors in self._blocks()]

    def _nearest(self, queries: Tensor, k: int, filter: Filter | None) -> Iterator[Sequence[int]]:
        self._refresh()
        allowed = None if filter is None else self._positions(filter)
        best = [(np.empty(0), np.empty(0, dtype=np.int64))] * len(queries)
        for positions, block in self._kept:
            vectors = block
            if allowed is not None:
                inside = np.isin(positions, allowed)
                positions, vectors = positions[inside], block[torch.from_numpy(inside)]
            product = torch.addmm(vectors.square().sum(1), queries, vectors.T, alpha=-2)
            near = product.topk(min(len(vectors), k + max(8, k // 4)), largest=False).indices
            for i, rows in enumerate(near):
                exact = (vectors[rows].double() - queries[i].double()).square().sum(1).numpy()
                distance, position = np.append(best[i][0], exact), np.append(best[i][1], positions[rows.numpy()])
                order = distance.argsort(kind="stable")[:k]
                best[i] = distance[order], position[order]
        yield from (position.tolist() for _, position in best)


def _quoted(text: str) -> str:
    """A text in an expression of SQL."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"
