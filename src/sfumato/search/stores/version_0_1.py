"""Stores in folders as version 0.1 wrote them; read once, to be converted by search/stores/local.py.

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

from sfumato.search.stores.protocol import Records

_DATABASE, _FORMAT, _ROW_BITS = "store.sqlite", 1, 32
"""A position is shard << _ROW_BITS | row."""

_FILES = re.compile(r"store\.sqlite(-wal|-shm)?|\.?shard-\d+\.(vectors|[\d.a-z-]+)(\.tmp)?")


def is_one(folder: Path) -> bool:
    """Whether a folder holds a store of version 0.1."""
    return (folder / _DATABASE).is_file()


def settings_of(folder: Path) -> tuple[int, str, dict[str, Any]]:
    """Dimensions, fingerprint and options of a store.

    Raises:
        ValueError: the format is not that of version 0.1.
        sqlite3.Error: the database is damaged.
    """
    with contextlib.closing(sqlite3.connect(folder / _DATABASE)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != _FORMAT:
            raise ValueError(f"{folder / _DATABASE} has format {version}, version 0.1 wrote {_FORMAT}")
        about = dict(connection.execute("SELECT name, value FROM meta"))
        settings = json.loads(about["settings"])
        return about["dim"], about["fingerprint"], {n: v for n, v in settings.items() if n != "shard_size"}


def count(folder: Path) -> int:
    """Number of items of a store."""
    with contextlib.closing(sqlite3.connect(folder / _DATABASE)) as connection:
        return int(connection.execute("SELECT count(*) FROM items").fetchone()[0])


def records(folder: Path, dim: int, batch: int = 2048) -> Iterator[Records]:
    """All items of a store, in the order stored.

    Args:
        folder: of the store; nobody may write to it meanwhile.
        dim: e, of the vectors.
        batch: items at a time.

    Raises:
        ValueError: a file of vectors is shorter than the database says.
        OSError, sqlite3.Error: a file is missing or damaged.
    """
    with contextlib.closing(sqlite3.connect(folder / _DATABASE)) as connection:
        for number, rows in connection.execute("SELECT number, rows FROM shards ORDER BY number").fetchall():
            file = folder / f"shard-{number}.vectors"
            if (size := file.stat().st_size) < rows * dim * 4:
                raise ValueError(f"{file} has {size} bytes where at least {rows * dim * 4} were written")
            vectors = np.memmap(file, dtype="<f4", mode="r", shape=(rows, dim))
            first = number << _ROW_BITS
            select = (
                "SELECT position, id, uncertainty, payload FROM items WHERE position BETWEEN ? AND ? ORDER BY position"
            )
            cursor = connection.execute(select, (first, first + rows - 1))
            while found := cursor.fetchmany(batch):
                positions = [row[0] - first for row in found]
                yield Records(
                    tuple(row[1] for row in found),
                    torch.from_numpy(np.array(vectors[positions], dtype=np.float32)),
                    torch.tensor([row[2] for row in found], dtype=torch.float32),
                    tuple(json.loads(row[3]) for row in found),
                )


def remove(folder: Path) -> None:
    """Remove the files of a store that has been converted."""
    for file in folder.iterdir():
        if _FILES.fullmatch(file.name):
            file.unlink(missing_ok=True)
