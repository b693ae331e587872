"""Files that are either whole or absent: write under a temporary name, force to disk, rename."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Replace the file at path by data; whoever reads it, and whatever dies, sees the old content or the new, never a part.

    Args:
        path: the file; its folder must exist.
        data: the whole content; text is written as UTF-8.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: str | Path, value: Any) -> None:
    """Write value as indented JSON, atomically; NaN is refused because JSON has none."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (a rename, say) to disk where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_plain_name(name: str) -> bool:
    """Whether it can be the name of a file in a folder: a name, never a path to somewhere else."""
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
