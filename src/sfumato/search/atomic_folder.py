"""A folder of data files that is replaced atomically: readers see the old or the new content, even after a crash.

    FOLDER/manifest.json     kind, metadata, name of the data folder, size and SHA-256 of every file and of itself
    FOLDER/data-xxxx/...     the files

A save writes a new data folder, forces it to disk, and then renames a new manifest into place: this rename replaces the
old content by the new. After it, older data folders are removed, also those of killed writers. The caller defines the
content.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from sfumato.errors import UserError, first_line, refuse_newer
from sfumato.files import is_plain_name, sync_folder, write_json

_MANIFEST, _LOCK, _UNFINISHED = "manifest.json", ".lock", ".manifest.json."
_DATA = re.compile("data-[0-9a-f]{16}")
Result = TypeVar("Result")

# What reading the files of a folder leads to when checksums fit, but the content does not: another program made them.
_MISFITS = (
    LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, UnicodeError, json.JSONDecodeError,
    SafetensorError,
)  # fmt: skip


def save_folder(
    path: str | Path,
    kind: str,
    metadata: Mapping[str, Any],
    write: Callable[[Path], None],
    *,
    beside: tuple[str, ...] = (),
) -> None:
    """Write a folder, or replace what an earlier save wrote there. The umask decides who may read its files."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"cannot save to {path}: it is a file, expected a folder or a new name")
    path.mkdir(parents=True, exist_ok=True)
    if stranger := _stranger(path, kind, beside):
        raise ValueError(
            f"cannot save to {path}: the folder holds something else ({stranger}); give a new or empty folder,"
            " or remove it"
        )
    with _locked(path):
        data = path / f"data-{secrets.token_hex(8)}"
        data.mkdir()
        try:
            write(data)
            files = {}
            mode = data.stat().st_mode & 0o666  # safetensors makes files that only their owner can read.
            for file in sorted(data.iterdir()):
                file.chmod(mode)
                _sync_file(file)
                files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
            sync_folder(data)
            sync_folder(path)
            manifest = {"kind": kind, "data": data.name, "files": files, "about": dict(metadata)}
            write_json(path / _MANIFEST, manifest | {"sha256": _digest_of(manifest)})
        except BaseException:
            if not _names(path, data.name):
                shutil.rmtree(data, ignore_errors=True)
            raise
        sync_folder(path.parent)
        for old in path.iterdir():
            if _DATA.fullmatch(old.name) and old.name != data.name:
                shutil.rmtree(old, ignore_errors=True)
            elif old.name.startswith(_UNFINISHED):
                old.unlink(missing_ok=True)


def change_metadata(
    path: str | Path, kind: str, changes: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Replace values of the metadata of a folder of :func:`save_folder`, computed from what others left there."""
    path = Path(path)
    with _locked(path):
        manifest = _read_manifest(path, kind)
        manifest["about"] |= changes(manifest["about"])
        write_json(path / _MANIFEST, manifest | {"sha256": _digest_of(manifest)})
    return dict(manifest["about"])


def load_folder(path: str | Path, kind: str, read: Callable[[Path, dict[str, Any]], Result]) -> Result:
    """Check a folder of :func:`save_folder` and read it."""
    path = Path(path)
    for _ in range(3):
        manifest = _read_manifest(path, kind)
        data = path / manifest["data"]
        try:
            for name, expected in manifest["files"].items():
                _check_file(data / name, expected)
            return read(data, manifest["about"])
        except FileNotFoundError as error:
            # A save may have replaced the data between the two reads; the manifest then names another data folder.
            if _names(path, manifest["data"]):
                raise ValueError(
                    f"{path}: damaged, {Path(error.filename or data).name} is missing; build it again"
                ) from error
        except _MISFITS as error:
            raise ValueError(
                f"{path}: damaged ({type(error).__name__}: {first_line(error)}); build it again"
            ) from error
    raise ValueError(f"{path}: was replaced three times while being read; try again")


def _read_manifest(path: Path, kind: str) -> dict[str, Any]:
    file = path / _MANIFEST
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    if not file.is_file():
        raise FileNotFoundError(
            f"{path}: no {_MANIFEST} here; not a {kind} folder, or its first save did not finish: build it again"
        )
    try:
        manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: damaged ({error}); build it again") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        found = manifest.get("kind") if isinstance(manifest, dict) else None
        refuse_newer(str(path), found, kind)
        raise ValueError(f"{path}: holds {found!r}, expected {kind!r}; give another folder, or build it again")
    if manifest.pop("sha256", None) != _digest_of(manifest):
        raise ValueError(f"{file}: damaged or edited, its checksum does not fit; build it again")
    files, metadata = manifest.get("files"), manifest.get("about")
    if not (
        isinstance(files, dict) and isinstance(metadata, dict) and all(isinstance(one, dict) for one in files.values())
    ):
        raise ValueError(f"{file}: damaged, files and about must be objects; build it again")
    if not all(is_plain_name(name) for name in files) or not _DATA.fullmatch(str(manifest.get("data"))):
        raise ValueError(f"{file}: names files outside its data folder; build it again")
    return manifest


def _check_file(file: Path, expected: dict[str, Any]) -> None:
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise ValueError(f"{file}: damaged, {size} bytes where {expected['bytes']} were written; build it again")
    if _digest(file) != expected["sha256"]:
        raise ValueError(f"{file}: damaged, its checksum does not fit; build it again")


def _stranger(path: Path, kind: str, beside: tuple[str, ...]) -> str | None:
    """Name of a file in the folder that was not written by a save of this kind; None if there is none."""
    if (path / _MANIFEST).exists():
        try:
            _read_manifest(path, kind)
        except (UserError, ValueError, FileNotFoundError):
            return _MANIFEST
        return None
    ours = (_LOCK, _UNFINISHED)
    return next(
        (
            p.name
            for p in sorted(path.iterdir())
            if not (p.name.startswith(ours) or p.name in beside or _DATA.fullmatch(p.name))
        ),
        None,
    )


def _names(path: Path, data: str) -> bool:
    """Whether the current manifest names this data folder."""
    try:
        return bool(json.loads((path / _MANIFEST).read_bytes())["data"] == data)
    except (OSError, ValueError, KeyError):
        return False


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _sync_file(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time; the system drops the lock of a process that dies."""
    try:
        with FileLock(path / _LOCK, blocking=False):
            yield
    except Timeout as error:
        raise BlockingIOError(f"cannot save to {path}: another process is saving there; wait for it") from error
