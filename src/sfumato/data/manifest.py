"""Data that users own: manifests (JSONL, CSV, Parquet) and folders of pictures with captions beside them.

A manifest row has ``image`` (a path, relative to the manifest or to a given root), ``captions`` (a list, or one string;
``caption`` works too), and optionally ``split`` and ``id``. What cannot be used is reported with its place and left out.
"""

import csv
import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.data.images import FileImage
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.data.problems import Problems
from sfumato.errors import UserError

PICTURE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
"""File name endings that count as pictures when a folder is searched through."""

_COLUMNS = ("image", "captions", "caption", "split", "id")
_SPLIT_NAMES = {"restval": "train", "training": "train", "valid": "val", "validation": "val", "dev": "val"}


@dataclass(frozen=True)
class _Row:
    place: str
    image: Path
    id: str
    captions: list[str]
    split: str


def read_manifest(
    path: str | Path,
    problems: Problems,
    *,
    image_root: str | Path | None = None,
    val_share: float = 0.1,
    test_share: float = 0.1,
) -> dict[str, PairData]:
    """Read a manifest.

    Args:
        path: a .jsonl, .csv or .parquet file. In CSV, ``captions`` is one caption or a JSON list of them.
        problems: receives malformed lines, missing pictures, empty captions and repeated ids.
        image_root: what the image paths are relative to; the manifest's folder if None.
        val_share, test_share: where no row names a split, the shares of images for "val" and "test", chosen by a hash of
            their ids, so that adding rows moves none. Where some rows do, those that do not are in "train".

    Returns:
        split -> data; "valid", "validation" and "dev" are "val". Rows of one image and split are put together.

    Raises:
        UserError: the file is missing, of an unknown kind, lacks a column, or holds nothing usable.
        ValueError: the shares are negative or leave nothing to train on.
    """
    _check_shares(val_share, test_share)
    path = Path(path)
    read = _row_reader(path)
    root = Path(image_root) if image_root is not None else path.parent
    rows = []
    for place, values in read(path, problems, ("image", "captions")):
        if row := _check_row(place, values, root, problems):
            rows.append(row)
    return _splits(rows, path, problems, val_share, test_share)


def read_image_folder(
    path: str | Path, problems: Problems, *, val_share: float = 0.1, test_share: float = 0.1
) -> dict[str, PairData]:
    """Read a folder of pictures, each with its captions in a .txt file of the same name beside it, one a line.

    Args:
        path: the folder, searched through. Subfolders "train", "val" (or "valid", "validation", "dev") and "test" at its top are
            the splits, if there are any.
        problems: receives pictures without captions, empty captions files and names that are not valid Unicode.
        val_share, test_share: see :func:`read_manifest`.

    Returns:
        split -> data; ids are paths relative to the folder.

    Raises:
        UserError: the folder is missing or holds nothing usable.
        ValueError: the shares are negative or leave nothing to train on.
    """
    _check_shares(val_share, test_share)
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    tops = {top.name: _split_name(top.name) for top in path.iterdir() if top.is_dir()}
    named = {top: split for top, split in tops.items() if split in {"train", "val", "test"}}
    rows = []
    for image in sorted(p for p in path.rglob("*") if p.suffix.lower() in PICTURE_ENDINGS and p.is_file()):
        relative = image.relative_to(path)
        captions = image.with_suffix(".txt")
        if not _is_unicode(relative.as_posix()):
            problems.add(image, "the name is not valid UTF-8")
            continue
        if not captions.is_file():
            problems.add(image, f"no captions: {captions.name} is missing")
            continue
        if named and relative.parts[0] not in named:
            problems.add(image, f"lies outside of the split folders {', '.join(sorted(named))}")
            continue
        try:
            lines = captions.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            problems.add(captions, f"not UTF-8: {error.reason} at byte {error.start}")
            continue
        except OSError as error:
            problems.add(captions, f"cannot be read: {error.strerror}")
            continue
        texts = _usable_captions(str(captions), [line for line in lines if line.strip()] or [""], problems)
        if texts:
            rows.append(_Row(str(image), image, relative.as_posix(), texts, named[relative.parts[0]] if named else ""))
    return _splits(rows, path, problems, val_share, test_share)


@dataclass(frozen=True, slots=True)
class ListedImage:
    """A row of a manifest that is read for its pictures alone.

    Attributes:
        place: file and line, for messages.
        id: the row's, else its ``image`` as written.
        path: of the picture; nobody has looked whether it is there.
        error: what is wrong with the row; "" if nothing is.
    """

    place: str
    id: str
    path: str
    error: str = ""


def list_images(path: str | Path, *, image_root: str | Path | None = None) -> Iterator[ListedImage]:
    """The pictures of a manifest in its order, for embedding: a row needs an ``image``, no captions, and no file is looked for.

    A picture that occurs again under its id (one caption a row is a common layout) comes once.

    Args:
        path: a .jsonl, .csv or .parquet file.
        image_root: what the image paths are relative to; the manifest's folder if None.

    Yields:
        The usable rows, and what is wrong with the others, where they stand.

    Raises:
        UserError: the file is missing, of an unknown kind, or lacks the column image.
    """
    path = Path(path)
    read = _row_reader(path)
    root = Path(image_root) if image_root is not None else path.parent
    problems, told = Problems(), 0
    seen: dict[str, str] = {}

    def malformed() -> Iterator[ListedImage]:
        nonlocal told
        for problem in problems.items[told:]:
            yield ListedImage(problem.place, "", "", problem.reason)
        told = len(problems)

    for place, values in read(path, problems, ("image",)):
        yield from malformed()
        image = values.get("image")
        if not isinstance(image, str) or not image.strip():
            yield ListedImage(place, "", "", f"no image: found {reprlib.repr(image)}, expected a path")
            continue
        identity = image if values.get("id") in (None, "") else str(values["id"])
        if not _is_unicode(identity + image):
            yield ListedImage(place, "", "", "not valid Unicode; save the manifest as UTF-8")
        elif identity not in seen:
            seen[identity] = image
            yield ListedImage(place, identity, str(root / image))
        elif seen[identity] != image:
            yield ListedImage(place, "", "", f"id {identity!r} occurs before with another image")
    yield from malformed()


def _row_reader(path: Path) -> Callable[[Path, Problems, Sequence[str]], Iterator[tuple[str, dict[str, Any]]]]:
    if not path.is_file():
        raise UserError(f"there is no manifest {path}")
    readers = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    if path.suffix.lower() not in readers:
        raise UserError(f"{path}: unknown kind of manifest {path.suffix!r}; expected {', '.join(readers)}")
    return readers[path.suffix.lower()]


def _jsonl_rows(path: Path, problems: Problems, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                problems.add(place, f"not JSON: {error}")
                continue
            if isinstance(values, dict):
                yield place, values
            else:
                problems.add(place, f"expected an object with image and captions, got {type(values).__name__}")


def _csv_rows(path: Path, problems: Problems, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    # Strict, because the lenient reader lets one stray quote swallow rows and change captions in silence.
    with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        line = 0  # The last one read; the reader's own count leaves out lines with errors.

        def lines() -> Iterator[str]:
            nonlocal line
            for line, text in enumerate(file, 1):  # noqa: B007
                yield text

        reader = csv.DictReader(lines(), strict=True)
        try:
            columns = reader.fieldnames or []
        except csv.Error as error:
            raise UserError(f"{path}:1: not CSV: {error}") from error
        _check_columns(path, columns, needed)
        while True:
            first = line + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                swallowed = f"; from line {first} on, a quote may be missing" if line > first else ""
                problems.add(f"{path}:{line}", f"not CSV: {error}{swallowed}")
                continue
            place = f"{path}:{line}"
            if None in values:
                problems.add(place, f"more values than the {len(columns)} columns; quote captions that hold commas")
            else:
                yield place, {key: _json_list(text) if key == "captions" else text for key, text in values.items()}


def _json_list(text: str | None) -> str | list[Any] | None:
    """The list that a CSV cell holds as JSON, else the text itself: a caption may merely begin with a bracket."""
    if text and text.lstrip().startswith("["):
        try:
            captions = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(captions, list):
            return captions
    return text


def _parquet_rows(path: Path, problems: Problems, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet manifests need pyarrow: pip install 'sfumato[parquet]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            _check_columns(path, columns, needed)
            for batch in file.iter_batches(columns=[name for name in _COLUMNS if name in columns]):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", values
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged after row {number}, or not a Parquet file ({error})") from error


def _check_columns(path: Path, columns: Sequence[str], needed: Sequence[str]) -> None:
    known = {*columns, "captions"} if "caption" in columns else set(columns)
    if not known.issuperset(needed):
        raise UserError(
            f"{path}: the columns are {', '.join(columns) or '(none)'}; expected {' and '.join(needed)} among them"
        )


def _check_shares(val_share: float, test_share: float) -> None:
    if not (val_share >= 0 and test_share >= 0 and val_share + test_share < 1):
        raise ValueError(
            f"val_share and test_share must not be negative, and below 1 together; got {val_share} and {test_share}"
        )


def _check_row(place: str, values: dict[str, Any], root: Path, problems: Problems) -> _Row | None:
    image, captions = values.get("image"), values.get("captions", values.get("caption"))
    if not isinstance(image, str) or not image.strip():
        problems.add(place, f"no image: found {reprlib.repr(image)}, expected a path")
        return None
    captions = [captions] if isinstance(captions, str) else captions
    if not isinstance(captions, list) or not all(isinstance(c, str) for c in captions):
        problems.add(place, f"captions: found {reprlib.repr(captions)}, expected a string or a list of strings")
        return None
    identity = image if values.get("id") in (None, "") else str(values["id"])
    split = str(values.get("split") or "")
    if not all(map(_is_unicode, (image, identity, split, *captions))):
        problems.add(place, "not valid Unicode; save the manifest as UTF-8")
        return None
    texts = _usable_captions(place, captions or [""], problems)
    if not texts:
        return None
    path = root / image
    if not os.path.isfile(path):  # Unlike Path.is_file, false for whatever cannot be a path, such as a whole caption.
        problems.add(place, f"image {reprlib.repr(image) if len(image) > 500 else path} is missing")
        return None
    return _Row(place, path, identity, texts, _split_name(split))


def _split_name(name: str) -> str:
    name = name.strip().lower()
    return _SPLIT_NAMES.get(name, name)


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8; undecodable bytes and lone surrogates cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _usable_captions(place: str, captions: list[str], problems: Problems) -> list[str]:
    for caption in captions:
        if not caption.strip():
            problems.add(place, "empty caption")
    return [caption.strip() for caption in captions if caption.strip()]


def _splits(
    rows: list[_Row], path: Path, problems: Problems, val_share: float, test_share: float
) -> dict[str, PairData]:
    if not rows:
        raise UserError(f"{path} holds no usable pair of image and caption:\n{problems.summary()}")
    named = any(row.split for row in rows)
    chosen: dict[str, dict[str, _Row]] = {}
    seen: set[str] = set()
    for row in rows:
        split = (row.split or "train") if named else _hashed_split(row.id, val_share, test_share)
        if row.id in seen:
            known = chosen.get(split, {}).get(row.id)
            if known is None or known.image != row.image:
                problems.add(row.place, f"id {row.id!r} occurs before with another image or split")
                continue
            known.captions.extend(row.captions)  # One caption a row is a common layout.
            continue
        seen.add(row.id)
        chosen.setdefault(split, {})[row.id] = row
    return {
        split: make_pair_data(list(own), [FileImage(r.image) for r in own.values()], [r.captions for r in own.values()])
        for split, own in chosen.items()
    }


def _hashed_split(identity: str, val_share: float, test_share: float) -> str:
    share = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:6], "big") / 2**48
    return "val" if share < val_share else "test" if share < val_share + test_share else "train"
