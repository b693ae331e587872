"""Store folders of version 0.1, and their conversion to the current database.

FOLDER/store.sqlite              ids, payloads, uncertainties, where each vector lies, and the settings
FOLDER/shard-N.vectors           raw float32 rows
FOLDER/shard-N.ROWS.ENGINE       FAISS's index of a shard
"""

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.errors import UserError
from sfumato.progress import progress_bar
from sfumato.search.stores.local_database import insert, lock_of, new_database, take
from sfumato.search.stores.protocol import Records

_DATABASE, _FORMAT, _ROW_BITS, _BATCH = "store.sqlite", 1, 32, 2048
"""A position is shard << _ROW_BITS | row."""

_FILES = re.compile(r"store\.sqlite(-wal|-shm)?|\.?shard-\d+\.(vectors|[\d.a-z-]+)(\.tmp)?")


def is_one(folder: Path) -> bool:
    """Whether a folder holds a store of version 0.1."""
    return (folder / _DATABASE).is_file()


def convert(url: str, folder: Path) -> None:
    """Convert a store in place; if the process dies, the old store is unchanged."""
    lock = lock_of(folder)
    take(lock, url)
    try:
        with contextlib.closing(sqlite3.connect(folder / _DATABASE)) as old:
            about = _about(old)
            settings = {n: v for n, v in json.loads(about["settings"]).items() if n != "shard_size"}
            n_items = old.execute("SELECT count(*) FROM items").fetchone()[0]
            with (
                progress_bar(f"converting {folder} from version 0.1", n_items) as advance,
                new_database(folder, about["dim"], about["fingerprint"], settings) as connection,
            ):
                for records in _records(folder, old, about["dim"]):
                    insert(connection, records)
                    advance(len(records))
        remove(folder)
    except (OSError, ValueError, sqlite3.Error) as error:
        raise UserError(
            f"store {url}: is of version 0.1 and could not be converted ({error}); check free space and permissions"
            " and open it again, or put back a copy of the folder"
        ) from error
    finally:
        lock.release()


def remove(folder: Path) -> None:
    """Remove the files of a store that has been converted."""
    for file in folder.iterdir():
        if _FILES.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _about(connection: sqlite3.Connection) -> dict[str, Any]:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != _FORMAT:
        raise ValueError(f"{_DATABASE} has format {version}, version 0.1 wrote {_FORMAT}")
    return dict(connection.execute("SELECT name, value FROM meta"))


def _records(folder: Path, connection: sqlite3.Connection, dim: int) -> Iterator[Records]:
    """All items in the order of storage."""
    for number, rows in connection.execute("SELECT number, rows FROM shards ORDER BY number").fetchall():
        file = folder / f"shard-{number}.vectors"
        if (size := file.stat().st_size) < rows * dim * 4:
            raise ValueError(f"{file} has {size} bytes where at least {rows * dim * 4} were written")
        vectors = np.memmap(file, dtype="<f4", mode="r", shape=(rows, dim))
        first = number << _ROW_BITS
        select = "SELECT position, id, uncertainty, payload FROM items WHERE position BETWEEN ? AND ? ORDER BY position"
        cursor = connection.execute(select, (first, first + rows - 1))
        while found := cursor.fetchmany(_BATCH):
            yield Records(
                tuple(row[1] for row in found),
                torch.from_numpy(np.array(vectors[[row[0] - first for row in found]], dtype=np.float32)),
                torch.tensor([row[2] for row in found], dtype=torch.float32),
                tuple(json.loads(row[3]) for row in found),
            )
