"""Checks of what a command will write, before its work begins. Nothing is left behind by a check."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sfumato.errors import UserError, disk_cause


def check_out_folder(path: Path, *, ours: Callable[[Path], bool] | None = None, option: str = "--out") -> None:
    """Check that a folder can be written, or made with its parents."""
    if path.is_dir():
        found = next((p.name for p in sorted(path.iterdir()) if not p.name.startswith(".")), None)
        if ours is not None and found is not None and not ours(path):
            raise UserError(f"{option} {path}: the folder holds something else ({found}); give a new or empty one")
    elif path.exists():
        raise UserError(f"{option} {path} is a file; give a folder")
    _check_writable(path, path, option)


def check_out_file(path: Path, *, option: str = "--out") -> None:
    """Check that a file can be written."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; give the name of a file, e.g. {path / 'NAME'}{path.suffix}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist; create it first")
    _check_writable(path.parent, path, option)


def _check_writable(folder: Path, path: Path, option: str) -> None:
    """Try to make a file in a folder, or in the nearest one above it that exists."""
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir():
        raise UserError(f"{option} {path}: {above} is a file, so nothing can be made below it; give another folder")
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise UserError(
            f"{option} {path}: nothing can be written there: {disk_cause(error) or error.strerror}"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the output in errors of the disk that name no file, and in those of libraries with classes of their own."""
    try:
        yield
    except Exception as error:
        if getattr(error, "filename", None) is not None or (cause := disk_cause(error)) is None:
            raise
        raise UserError(f"{path}: {cause}") from error
