"""The folder of an adopted model, and the files in it that name its embeddings and pairs."""

import contextlib
import csv
import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.data.feature_tables import resolved_table
from sfumato.errors import UserError
from sfumato.files import write_atomically
from sfumato.gaussian import Array

ADOPTED = "adopted.json"
"""File of a run folder with the figures of an adoption."""


@contextlib.contextmanager
def new_folder(folder: Path, force: bool, inputs: Sequence[Any]) -> Iterator[Path]:
    """An empty folder for an adopted model. If the block fails, everything is as it was before."""
    _check_unused(folder, force)
    for value in inputs:
        if isinstance(value, str | Path) and Path(value).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{value} lies in {folder}, which would be replaced; give another folder with --out")
    aside = folder.with_name(f"{folder.name}.replaced")
    replaces = folder.is_dir() and any(folder.iterdir())
    try:
        if replaces:
            folder.rename(aside)
        existed = folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder)
            if replaces:
                aside.rename(folder)
            elif existed:
                folder.mkdir()
            raise
        if replaces:
            shutil.rmtree(aside)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror or error}") from error


def _check_unused(folder: Path, force: bool) -> None:
    """Raise an error unless the folder is new, empty, or with force an adopted model."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder with --out")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / ADOPTED).is_file():
            raise UserError(f"{folder} is not empty and holds no adopted model; give an empty or new folder with --out")
        if not force:
            raise UserError(
                f"{folder} holds an adopted model already; give --force (force=True) to replace it, or another folder"
            )
        if (aside := folder.with_name(f"{folder.name}.replaced")).exists():
            raise UserError(
                f"{aside} exists: an interrupted replacement left the former model there; remove it, or rename it"
                f" to {folder}"
            )


def named_file(value: str | Path | Array, folder: Path, name: str) -> str:
    """The absolute path of a table; an array is written into the folder."""
    if isinstance(value, str | Path):
        return resolved_table(str(value))
    array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{name}: got an array of {array.shape} {array.dtype}; expected (n, c) floating numbers")
    path = folder / f"{name}.npy"
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_atomically(path, buffer.getvalue())
    return str(path.resolve())


def pair_file(pairs: str | Path | Sequence[tuple[int, int]] | None, folder: Path) -> str:
    """The absolute path of the pairs; "" for row i with row i. Rows are written into the folder."""
    if pairs is None:
        return ""
    if isinstance(pairs, str | Path):
        return str(Path(pairs).resolve())
    rows = np.asarray(pairs)
    if rows.ndim != 2 or rows.shape[1] != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise UserError(f"pairs: got {rows.shape} {rows.dtype}; expected (p, 2) rows of an image and a text")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["image", "text"])
    writer.writerows(rows.tolist())
    write_atomically(folder / "pairs.csv", buffer.getvalue())
    return str((folder / "pairs.csv").resolve())
