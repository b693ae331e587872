"""The SQLite database of a store in a folder: its tables, what a write does to them, and filters in SQL.

Knows nothing of searching (search/stores/local.py).
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from sfumato.errors import UserError
from sfumato.files import sync_folder
from sfumato.search.stores.nearest import Positions
from sfumato.search.stores.protocol import Filter, Records

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
    """A new database in a transaction; it is in its place after the block, unless that raises.

    Args:
        folder: where it will be.
        dim: e, of the vectors.
        fingerprint: kept.
        settings: options of the store, kept.

    Yields:
        A connection to it.

    Raises:
        OSError, sqlite3.Error: it cannot be written.
    """
    new = folder / f".creating-{os.getpid()}.sqlite"
    new.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size={_PAGE}")
        connection.executescript(_SCHEMA)
        about = {"dim": dim, "fingerprint": fingerprint, "settings": json.dumps(dict(settings)), "version": 0}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", about.items())
        connection.execute(f"PRAGMA user_version={FORMAT}")
        connection.execute("BEGIN")
        yield connection
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")
    os.replace(new, folder / DATABASE)
    sync_folder(folder)


def lock_of(folder: Path) -> filelock.BaseFileLock:
    """The lock of the one process that writes.

    Args:
        folder: of the store.

    Returns:
        The lock, which nobody has taken through it yet.
    """
    return filelock.FileLock(folder / ".lock", thread_local=False)


def take(lock: filelock.BaseFileLock, url: str) -> None:
    """Take the right to write.

    Args:
        lock: of :func:`lock_of`.
        url: of the store, for messages.

    Raises:
        UserError: somebody else has it, or the folder cannot be written to.
    """
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise UserError(
            f"store {url}: another process, or another opening in this one, writes to it; wait until it closes the"
            " store"
        ) from error
    except OSError as error:
        raise UserError(f"store {url}: cannot be written ({error}); see to permissions") from error


def insert(connection: sqlite3.Connection, records: Records) -> None:
    """Store records whose ids are not there, at new positions.

    Args:
        connection: in a transaction.
        records: at least one.
    """
    last = connection.execute("SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'items'").fetchone()[0]
    positions = range(last + 1, last + 1 + len(records))
    payloads = (json.dumps(dict(payload), ensure_ascii=False) for payload in records.payloads)
    rows = zip(positions, records.ids, records.uncertainty.tolist(), payloads, strict=True)
    connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
    vectors = np.ascontiguousarray(records.vectors.detach().numpy(), dtype="<f4")
    connection.executemany("INSERT INTO vectors VALUES (?, ?)", zip(positions, map(bytes, vectors), strict=True))


def remove(connection: sqlite3.Connection, ids: Sequence[str]) -> int:
    """Remove items.

    Args:
        connection: in a transaction.
        ids: of the items.

    Returns:
        How many of them were there.
    """
    found = positions_of(connection, f"SELECT position FROM items WHERE id IN {LIST}", (listed(ids),)).tolist()
    for table in ("items", "vectors") if found else ():
        connection.execute(f"DELETE FROM {table} WHERE position IN {LIST}", (listed(found),))
    return len(found)


def positions_of(connection: sqlite3.Connection, select: str, values: Sequence[Any] = ()) -> Positions:
    """Positions that a query finds.

    Args:
        connection: in a transaction.
        select: the query; its first column is a position.
        values: of the query.

    Returns:
        (m,) ascending.
    """
    return np.sort(np.fromiter((row[0] for row in connection.execute(select, values)), dtype=np.int64))


def listed(values: Sequence[Any]) -> str:
    """Values for LIST.

    Args:
        values: texts or numbers.

    Returns:
        What stands for LIST's question mark.
    """
    return json.dumps(list(values), ensure_ascii=False)


def condition_of(filter: Filter | None) -> tuple[str, list[Any]]:
    """A filter in SQL.

    Args:
        filter: which items; all if None.

    Returns:
        A condition on the table items, and its values.
    """
    conditions, values = ["1"], list[Any]()
    if filter is not None and filter.max_uncertainty is not None:
        conditions.append("uncertainty <= ?")
        values.append(filter.max_uncertainty)
    for name, texts in filter.where.items() if filter is not None else ():
        conditions.append(f"EXISTS (SELECT 1 FROM json_each(payload) WHERE key = ? AND atom IN {LIST})")
        values += [name, listed(texts)]
    return " AND ".join(conditions), values
