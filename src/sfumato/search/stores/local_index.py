"""FAISS's index of a store in a folder: a file beside the database that can be rebuilt at any time.

FOLDER/index-LAST-COUNT.ENGINE       the last position in it, and the number of items
"""

import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sfumato.errors import UserError
from sfumato.files import sync_folder
from sfumato.search.stores.faiss import FaissStore
from sfumato.search.stores.local_database import LocalSettings
from sfumato.search.stores.nearest import Positions, Vectors


@dataclass(frozen=True, eq=False)
class LocalIndex:
    """An index, mapped into memory.

    Attributes:
        file: its file.
        faiss: the index.
        positions: of its rows, ascending.
    """

    file: Path
    faiss: FaissStore
    positions: Positions


def read_index(
    url: str, folder: Path, connection: sqlite3.Connection, settings: LocalSettings, known: LocalIndex | None
) -> LocalIndex | None:
    """Read the index that the database names.

    Args:
        url: of the store, for messages.
        folder: of the store.
        connection: in a transaction.
        settings: of the store.
        known: an index that was read before; returned if it is still current.

    Returns:
        None if there is no index, or its file is gone.

    Raises:
        UserError: the file is damaged.
    """
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
    """Build an index and force it to disk.

    Args:
        url: of the store, for messages.
        folder: of the store.
        positions: (n,) ascending, n >= 16.
        vectors: (n, e).
        settings: of the store.

    Returns:
        Its file; the caller must record it in the database.

    Raises:
        UserError: the disk is full.
    """
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
    """Record a written index in the database.

    Args:
        connection: in a transaction that writes.
        file: of :func:`write_index`.
        positions: (n,) of its rows.
    """
    connection.execute("DELETE FROM indexes")
    row = (file.name, file.stat().st_size, positions.astype("<i8").tobytes())
    connection.execute("INSERT INTO indexes VALUES (?, ?, ?)", row)


def remove_others(folder: Path, connection: sqlite3.Connection) -> None:
    """Remove index files that the database does not name; processes that have one open can still read it.

    Args:
        folder: of the store.
        connection: in a transaction.
    """
    known: Iterable[tuple[str]] = connection.execute("SELECT file FROM indexes")
    for file in set(folder.glob("index-*.*")) - {folder / row[0] for row in known}:
        file.unlink(missing_ok=True)
