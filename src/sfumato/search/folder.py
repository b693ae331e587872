"""The folder of a collection: its settings, the centre and the calibration. What the store keeps there is its own.

    FOLDER/manifest.json     kind, settings, name of the data folder, size and SHA-256 of every file and of itself
    FOLDER/data-xxxx/...     the centre and the calibration
    FOLDER/unfinished.txt    what to do, while the collection is being filled

The files are written once, and forced to disk before the manifest is renamed into place. Later only the metadata
change, and a calibration may come: the manifest is replaced, so readers see the old or the new one, even after a crash.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sfumato.calibration.calibrator import Calibration
from sfumato.errors import UserError, first_line, refuse_newer
from sfumato.files import MANIFEST, is_plain_name, is_unused, sync_folder, write_atomically, write_json
from sfumato.search.exact import lifted_dim

KIND = "sfumato-collection-1"

_LOCK, _UNFINISHED, _WRITERS = ".lock", "unfinished.txt", ".pictures.lock"
_CENTRE, _CALIBRATION = "centre.safetensors", "calibration.json"
_DATA = re.compile("data-[0-9a-f]{16}")

# What reading the files of a folder leads to when checksums fit, but the content does not: another program made them.
_MISFITS = (
    LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, UnicodeError, json.JSONDecodeError,
    SafetensorError,
)  # fmt: skip


def write_settings(folder: Path, settings: dict[str, Any], centre: np.ndarray, calibration: Calibration | None) -> None:
    """Write the settings beside what the store has put into the folder. centre (d,)."""
    data = folder / f"data-{secrets.token_hex(8)}"
    data.mkdir(parents=True)
    save_file({"centre": np.ascontiguousarray(centre)}, data / _CENTRE)
    if calibration is not None:
        calibration.save(data / _CALIBRATION)
    files, mode = {}, data.stat().st_mode & 0o666  # safetensors makes files that only their owner can read.
    for file in sorted(data.iterdir()):
        file.chmod(mode)
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
    sync_folder(data)
    sync_folder(folder)
    about = {**settings, "calibration": calibration is not None}
    _write_manifest(folder, {"kind": KIND, "data": data.name, "files": files, "about": about})
    sync_folder(folder.parent)


def change_metadata(
    folder: Path, changes: Callable[[dict[str, Any]], Mapping[str, Any]], calibration: Calibration | None = None
) -> dict[str, Any]:
    """Replace values of the metadata, computed from what others left there; returns all of them.

    A new calibration gets a data folder of its own beside the one that readers may just be reading.
    """
    try:
        with FileLock(folder / _LOCK, blocking=False):  # The system drops the lock of a process that dies.
            manifest = _read_manifest(folder)
            metadata: dict[str, Any] = manifest["about"]["about"]
            metadata |= json.loads(json.dumps(dict(changes(metadata)), allow_nan=False))
            if calibration is None:
                _write_manifest(folder, manifest)
            else:
                logits = {name: getattr(calibration, name) for name in ("logit_scale", "logit_bias")}
                centre = load_file(folder / manifest["data"] / _CENTRE)["centre"]
                write_settings(folder, manifest["about"] | logits, centre, calibration)
    except Timeout as error:
        raise BlockingIOError(f"cannot save to {folder}: another process is saving there; wait for it") from error
    return metadata


def version_of(folder: Path) -> tuple[int, int] | None:
    """What changes whenever the settings do; None while there are none."""
    try:
        about = (folder / MANIFEST).stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def read_settings(folder: Path) -> tuple[dict[str, Any], np.ndarray, Calibration | None]:
    """The settings, the centre (d,) and the calibration; a ValueError says what is damaged."""
    manifest = _read_manifest(folder)
    data, settings = folder / manifest["data"], manifest["about"]
    try:
        for name, expected in manifest["files"].items():
            _check_file(data / name, expected)
        calibration = Calibration.load(data / _CALIBRATION) if settings["calibration"] else None
        centre = load_file(data / _CENTRE)["centre"]
        texts, known = (settings["store"], settings["fingerprint"]), settings["direction"] in ("t2i", "i2t")
        known &= 0 < settings["logit_scale"] < math.inf and math.isfinite(settings["logit_bias"])
        fits = known and isinstance(settings["about"], dict) and all(isinstance(one, str) for one in texts)
        lifted_dim(settings["d"], settings["distance"])
    except FileNotFoundError as error:
        missing = Path(error.filename or data).name
        raise ValueError(f"{folder}: damaged, {missing} is missing; build it again") from error
    except _MISFITS as error:
        raise ValueError(f"{folder}: damaged ({type(error).__name__}: {first_line(error)}); build it again") from error
    if not fits or centre.shape != (settings["d"],):
        raise ValueError(f"{folder}: damaged, its settings do not fit together; build it again")
    return settings, centre, calibration


@contextlib.contextmanager
def marked_unfinished(folder: Path, way_out: str) -> Iterator[None]:
    """Mark a collection as incomplete while the block runs; the mark stays if the block never ends."""
    write_atomically(folder / _UNFINISHED, way_out + "\n")
    yield
    (folder / _UNFINISHED).unlink()
    sync_folder(folder)


def is_collection(folder: str | Path) -> bool:
    """Whether a folder holds a collection, complete or not, also of a later version."""
    return kind_of(folder) == KIND.rpartition("-")[0]


def is_unfinished(folder: str | Path) -> bool:
    """Whether a filling of the collection in a folder was interrupted."""
    return (Path(folder) / _UNFINISHED).is_file()


def refuse_unfinished(folder: Path) -> None:
    """Refuse an incomplete collection, with its advice."""
    if is_unfinished(folder):
        way_out = (folder / _UNFINISHED).read_text(encoding="utf-8").strip()
        raise UserError(f"{folder} is incomplete: {way_out}")


def writers_lock(folder: Path, timeout: float) -> FileLock:
    """The lock under which services write, so that one does not remove an image that another one has just written.

    It is not yet held; entering it raises :class:`filelock.Timeout` after so many seconds.
    """
    return FileLock(folder / _WRITERS, timeout=timeout)


def refuse_index(folder: str | Path) -> None:
    """Refuse a folder with an index, which earlier versions saved in a form of its own."""
    if kind_of(folder) == "sfumato-index":
        way = "index again: sfumato index RUN --images FOLDER --out NEW"
        raise UserError(f"{folder} holds an index of an earlier version, which this version does not read: {way}")


def kind_of(folder: str | Path) -> str:
    """What a folder holds, without its version; "" if that cannot be read."""
    try:
        return str(json.loads((Path(folder) / MANIFEST).read_bytes())["kind"].rpartition("-")[0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""


def check_empty(folder: Path) -> None:
    """Raise an error if a folder is not empty."""
    if not is_unused(folder):
        way = "give a new or empty folder (sfumato index --add adds to a collection)"
        raise UserError(f"{folder} exists already; {way}")


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, manifest | {"sha256": _digest_of(manifest)})


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if not file.is_file():
        way = f"not a {KIND} folder, or its first save did not finish: build it again"
        raise FileNotFoundError(f"{folder}: no {MANIFEST} here; {way}")
    try:
        manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: damaged ({error}); build it again") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        found = manifest.get("kind") if isinstance(manifest, dict) else None
        refuse_newer(str(folder), found, KIND)
        raise ValueError(f"{folder}: holds {found!r}, expected {KIND!r}; give another folder, or build it again")
    if manifest.pop("sha256", None) != _digest_of(manifest):
        raise ValueError(f"{file}: damaged or edited, its checksum does not fit; build it again")
    files, settings = manifest.get("files"), manifest.get("about")
    if not (
        isinstance(files, dict) and isinstance(settings, dict) and all(isinstance(one, dict) for one in files.values())
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


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
