"""Source "manifest": a JSONL, CSV or Parquet file that lists images with their captions.

A row has ``image`` (a path, relative to the manifest or to a given root), ``captions`` (a list, or one string;
``caption`` works too), and optionally ``split``, ``id`` and ``caption_ids`` (as many as captions; ``caption_id`` works
too): captions with one id are one text, of all images that name it. Unusable rows are reported with their location and
left out.
"""

import csv
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sfumato.data.captioned import canonical_split, check_fractions, is_unicode, splits_of_items, usable_captions
from sfumato.data.images import FileImage, Problems
from sfumato.data.pairs import PairData, SourceItem
from sfumato.errors import UserError, expected_columns, first_line, need

MANIFEST_SUFFIXES = (".jsonl", ".csv", ".parquet")
"""Endings of manifests."""

_COLUMNS = ("image", "captions", "caption", "caption_ids", "caption_id", "split", "id")


def read_manifest(
    path: str | Path,
    problems: Problems,
    *,
    image_root: str | Path | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> dict[str, PairData]:
    """Read a manifest.

    Args:
        path: a .jsonl, .csv or .parquet file. In CSV, ``captions`` is one caption or a JSON list of them, and
            ``caption_ids`` likewise.
        problems: receives malformed lines, missing images, empty captions, repeated ids, and captions whose id has
            another wording before.
        image_root: folder that the image paths are relative to; the manifest's folder if None.
        val_fraction: fraction of the images for "val" where no row names a split, in [0, 1); chosen by a hash of the
            id, so that new rows never change the split of old rows. If some rows name a split, the rows without one are
            in "train".
        test_fraction: the same for "test".

    Returns:
        split -> data; "valid", "validation" and "dev" are "val". Rows with the same image and split are merged, and
        captions with the same id are one text. Equal wordings with different ids stay apart; see
        :func:`~sfumato.data.splits.merge_equal_texts`.

    Raises:
        UserError: the file is missing, of an unknown kind, lacks a column, or holds nothing usable.
        ValueError: the fractions are negative or leave nothing to train on.
    """
    check_fractions(val_fraction, test_fraction)
    path = Path(path)
    root = Path(image_root) if image_root is not None else path.parent
    items = _items(usable_rows(path, problems, ("image", "captions")), root, problems)
    return splits_of_items(items, path, problems, val_fraction, test_fraction)


_Row = tuple[str, dict[str, Any]]


def usable_rows(path: Path, problems: Problems, needed: Sequence[str]) -> Iterator[_Row]:
    """The rows of a manifest; those that are none are reported."""
    for location, values in read_rows(path, needed):
        if isinstance(values, str):
            problems.add(location, values)
        else:
            yield location, values


def read_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The rows of a manifest as they stand in the file, each with its place; of a damaged one what is wrong with it."""
    if not path.is_file():
        raise UserError(f"there is no manifest {path}")
    if path.suffix.lower() not in MANIFEST_SUFFIXES:
        raise UserError(f"{path}: unknown kind of manifest {path.suffix!r}; expected {', '.join(MANIFEST_SUFFIXES)}")
    return {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}[path.suffix.lower()](path, needed)


def _jsonl_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    first = True
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            location = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                yield location, f"not JSON: {error}"
                continue
            if isinstance(values, dict):
                if first and not any(name in values for name in (*_COLUMNS, *needed)):
                    _check_columns(path, list(values), needed)
                first = False
                yield location, values
            else:
                yield location, f"expected an object with image and captions, got {type(values).__name__}"


def _csv_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    # Strict, because with the lenient reader one stray quote merges rows and changes captions without an error.
    with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        line = 0  # The number of the last line read; the reader's own count leaves out lines with errors.

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
                yield f"{path}:{line}", f"not CSV: {error}{swallowed}"
                continue
            location = f"{path}:{line}"
            if None in values:
                yield location, f"more values than the {len(columns)} columns; quote captions that hold commas"
            else:
                yield location, {key: _json_list(text) if key in _LISTS else text for key, text in values.items()}


_LISTS = ("captions", "caption_ids")


def _json_list(text: str | None) -> str | list[Any] | None:
    """The JSON list in a CSV cell, else the text itself, because a caption may begin with a bracket."""
    if text and text.lstrip().startswith("["):
        try:
            captions = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(captions, list):
            return captions
    return text


def _parquet_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    with need("parquet", "Parquet manifests need pyarrow"):
        import pyarrow
        import pyarrow.parquet
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            _check_columns(path, columns, needed)
            for batch in file.iter_batches(columns=[name for name in columns if name in {*_COLUMNS, *needed}]):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", values
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # The last: names of columns.
        raise UserError(f"{path}: damaged after row {number}, or not a Parquet file ({first_line(error)})") from error


def _check_columns(path: Path, columns: Sequence[str], needed: Sequence[str]) -> None:
    known = {*columns, "captions"} if "caption" in columns else set(columns)
    if lacking := [name for name in needed if name not in known]:
        raise UserError(f"{path}: {expected_columns(columns, lacking)}")


def _items(rows: Iterable[_Row], root: Path, problems: Problems) -> Iterator[SourceItem]:
    """The usable rows as items; the others are reported."""
    for location, values in rows:
        try:
            item = _item(location, values, root, problems)
        except ValueError as error:
            problems.add(location, str(error))
        else:
            if item.texts:
                yield item


def _item(location: str, values: dict[str, Any], root: Path, problems: Problems) -> SourceItem:
    """A row as an item; it has no texts if all captions are empty. A ValueError says what is wrong with it."""
    image, captions = values.get("image"), values.get("captions", values.get("caption"))
    if not isinstance(image, str) or not image.strip():
        found = f"found {reprlib.repr(image)}; expected a path"
        raise ValueError(f"no image: {found if 'image' in values else expected_columns(list(values), ['image'])}")
    if captions is None and not {"captions", "caption"} & values.keys():
        raise ValueError(f"no captions: {expected_columns(list(values), ['captions'])}")
    captions = [captions] if isinstance(captions, str) else captions
    if not isinstance(captions, list) or not all(isinstance(c, str) for c in captions):
        raise ValueError(f"captions: found {reprlib.repr(captions)}, expected a string or a list of strings")
    ids = _caption_ids(values, len(captions))
    identity = image if values.get("id") in (None, "") else str(values["id"])
    split = str(values.get("split") or "")
    if not all(map(is_unicode, (image, identity, split, *captions, *ids))):
        raise ValueError("not valid Unicode; save the manifest as UTF-8")
    texts = usable_captions(location, captions or [""], problems)
    path = root / image
    if texts and not os.path.isfile(path):  # Unlike Path.is_file, false for strings that cannot be paths.
        raise ValueError(f"image {reprlib.repr(image) if len(image) > 500 else path} is missing")
    named = tuple((ids[number], text) for number, text in texts.items())
    return SourceItem(identity, FileImage(path), named, canonical_split(split), location)


def _caption_ids(values: dict[str, Any], n_captions: int) -> list[str]:
    """The ids of a row's captions, "" where it has none; a ValueError says what is wrong with them."""
    given = values.get("caption_ids", values.get("caption_id"))
    if given in (None, "", []):
        return [""] * n_captions
    ids = given if isinstance(given, list) else [given]
    if not all(isinstance(i, str | int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"caption_ids: found {reprlib.repr(given)}, expected strings or whole numbers")
    if len(ids) != n_captions:
        raise ValueError(f"caption_ids: found {len(ids)} for {n_captions} captions; give one for each")
    return [str(i) for i in ids]
