"""Atomic files: written under a temporary name, forced to disk, renamed. What a folder holds, told without torch."""

import contextlib
import json
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from sfumato.errors import UserError, as_typed

RECIPE, MANIFEST = "recipe.toml", "manifest.json"
"""The file that makes a folder a run; a collection."""

MODEL, LAST = "model.safetensors", "last.safetensors"
"""Names in the folder of a run."""

TOKENIZER, CALIBRATION = "tokenizer.json", "calibration.json"
"""Names in both."""

CONFIG, WEIGHTS, ENCODER = "config.json", "model.safetensors", "encoder"
"""Names in the folder of an exported or published model; the last is a folder, of its frozen model, which a run has too
if no name says where that is."""

IN_USE: tuple[type[OSError], ...] = (PermissionError,) if os.name == "nt" else ()
"""What the system raises if a file is to be replaced or removed that somebody has open; only Windows refuses that."""


def is_gone(model: str) -> bool:
    """Whether the folder of a model, or one of two that a + joins, is there no more."""
    there = Path(model).exists() or all(Path(one).exists() for one in model.split("+"))
    return Path(model).is_absolute() and not there


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Number of cores that this process may use: those of its affinity, at most those of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        most, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, math.ceil(int(most) / int(period))))
    except (OSError, ValueError):  # No such file, or "max".
        return cores


def cache_folder() -> Path:
    """The folder for token features of frozen backbones."""
    own, shared = os.environ.get("SFUMATO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "sfumato"


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Replace the file at path by data. Readers see only the old or the new content. The umask decides who they are."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    try:
        _replace(path, data)
    except OSError as error:  # Names the file, not its temporary neighbour, also where the system names none.
        if error.errno is not None:
            error.filename = str(path)
            del error.filename2
        raise
    sync_folder(path.parent)


def _replace(path: Path, data: bytes | str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        patiently(os.replace, temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def patiently(change: Callable[..., None], *paths: Path) -> None:
    """Replace or remove files; on Windows it is tried for a second, until nobody has one of them open."""
    for _ in range(19):
        with contextlib.suppress(*IN_USE):
            return change(*paths)
        time.sleep(0.05)
    change(*paths)


def write_json(path: str | Path, value: Any) -> None:
    """Write value as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_utf8(path: str | Path) -> str:
    """A text file that a user gave."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def read_json(path: str | Path, *, hook: Any = None) -> Any:
    """The value of a JSON file that a user gave; hook makes the objects of their pairs."""
    try:
        return json.loads(read_utf8(path), object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not usable JSON: {error}") from error


def read_regular(path: Path, most: int, root: Path | None = None) -> bytes:
    """The bytes of a file; a ValueError for a pipe, a device, a file that is too large, or a link out of ``root``."""
    if root is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise ValueError("a link to a file outside of the folder")
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a regular file")
    if found.st_size > most:
        raise ValueError(f"{found.st_size:,} bytes are more than the limit of {most:,}")
    return path.read_bytes()


def is_unused(folder: Path) -> bool:
    """Whether nothing is there, or an empty folder."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder that has a temporary name until the block ends, and goes if it fails. Check first that it is unused."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    unfinished.mkdir()
    try:
        yield unfinished
        sync_folder(unfinished)
        if folder.exists():
            folder.rmdir()
        patiently(os.replace, unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Force the entries of a folder, e.g. a rename, to disk. It does nothing on systems that cannot (Windows)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_plain_name(name: str) -> bool:
    """Whether a text can be the name of a file in a folder, and is not a path to another folder or drive."""
    return name not in ("", ".", "..") and not any(c in name for c in "/\\:\0")


def relative_name(path: str | Path, folder: str | Path) -> str:
    """A path from a folder on, with "/" on every system; the whole path if it lies on another drive of Windows."""
    with contextlib.suppress(ValueError):
        path = os.path.relpath(path, folder)
    return str(path).replace(os.sep, "/")


def recipe_folder() -> Traversable:
    """The recipes of the package, or in a checkout its folder ``recipes``."""
    packaged = resources.files("sfumato") / "recipe_files"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "recipes"


def is_gallery(folder: str | Path) -> bool:
    """Whether there is a collection in a folder, damaged or not."""
    return (Path(folder) / MANIFEST).is_file()


def is_model(folder: str | Path) -> bool:
    """Whether there is a run or an exported model in a folder."""
    return any((Path(folder) / name).is_file() for name in (RECIPE, CONFIG))


def check_gallery(folder: str | Path) -> None:
    """Refuse a folder without a collection. Commands ask before they import torch, which takes seconds."""
    if (Path(folder) / RECIPE).is_file():
        made = as_typed("sfumato", "index", folder, "--split", "test", "--out", f"{folder}-index")
        raise UserError(f"{folder} is a run; make an index of it: {made}")
    if not is_gallery(folder):
        data = folder if Path(folder).is_dir() and not is_model(folder) else "FOLDER"
        made = as_typed("sfumato", "index", "--data", data, "--out", "my-index")
        raise UserError(f"{folder} holds no collection; make one of a folder of images: {made}")
