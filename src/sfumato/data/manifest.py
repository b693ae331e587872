"""Source "manifest": a JSONL, CSV or Parquet file that lists images with their captions.

A row has ``image`` (a path, relative to the manifest or to a given root), ``captions`` (a list, or one string;
``caption`` works too), and optionally ``split``, ``id`` and ``caption_ids`` (as many as captions; ``caption_id`` works
too): captions with one id are one text, of all images that name it. Unusable rows are reported with their location and
left out.
"""

import ast
import contextlib
import csv
import functools
import io
import json
import os
import reprlib
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sfumato.data.image_decoding import IMAGE_ENDINGS, spelt
from sfumato.data.images import FileImage, Problems, image_files
from sfumato.data.pairs import PairData, SourceItem, make_splits
from sfumato.data.photographs import MAX_SIDECAR, names_in, sidecars
from sfumato.errors import UserError, expected_columns, first_line, need_pyarrow
from sfumato.files import read_regular
from sfumato.ids import NO_TEXT, is_text, uniform_hash

MANIFEST_SUFFIXES = (".jsonl", ".csv", ".parquet")
"""Endings of manifests."""

COLUMNS = ("image", "captions", "caption", "caption_ids", "caption_id", "split", "id")
"""Columns of a manifest that say what an item is."""


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
    path = Path(path)
    root = Path(image_root) if image_root is not None else path.parent
    items = (item for item, _ in manifest_items(path, root, problems))
    return splits_of_items(items, path, problems, val_fraction, test_fraction)


def usable_rows(path: Path, problems: Problems, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a manifest as they stand in the file, each with its place; damaged ones are reported."""
    if not path.is_file():
        raise UserError(f"there is no manifest {path}")
    if path.suffix.lower() not in MANIFEST_SUFFIXES:
        raise UserError(f"{path}: unknown kind of manifest {path.suffix!r}; expected {', '.join(MANIFEST_SUFFIXES)}")
    read = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}[path.suffix.lower()]
    for location, values in read(path, needed):
        if isinstance(values, str):
            problems.add(location, values)
        else:
            yield location, values


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
                yield location, f"not {'UTF-8' if isinstance(error, UnicodeError) else 'JSON'}: {error}"
                continue
            if isinstance(values, dict):
                if first and not any(name in values for name in (*COLUMNS, *needed)):
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

        reader = csv.DictReader(lines(), strict=True, skipinitialspace=True)
        try:
            reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or ()]
        except csv.Error as error:
            raise UserError(f"{path}:1: not CSV: {error}") from error
        if not all(map(is_text, columns)):
            raise UserError(f"{path}:1: not UTF-8; save the manifest as UTF-8")
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
    """The list in a CSV cell, of JSON or Python, else the text itself, because a caption may begin with a bracket."""
    if text and text.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            captions = json.loads(text)
            return captions if isinstance(captions, list) else text
        with contextlib.suppress(tokenize.TokenError, SyntaxError, ValueError):
            tokens = list(tokenize.generate_tokens(io.StringIO(text.strip()).readline))
            parts = [one for one in tokens if one.string.strip("[], \n")]  # NumPy writes no commas.
            if all(one.type == tokenize.STRING or one.string in ("None", "nan") for one in parts):
                return [ast.literal_eval(one.string) for one in parts if one.type == tokenize.STRING]
    return text


def _parquet_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    pyarrow = need_pyarrow("Parquet manifests need pyarrow")
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            _check_columns(path, columns, needed)
            for batch in file.iter_batches(columns=[name for name in columns if name in {*COLUMNS, *needed}]):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", values
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # The last: names of columns.
        raise UserError(f"{path}: damaged after row {number}, or not a Parquet file ({first_line(error)})") from error


def _check_columns(path: Path, columns: Sequence[str], needed: Sequence[str]) -> None:
    known = {*columns, "captions"} if "caption" in columns else set(columns)
    if lacking := [name for name in needed if name not in known]:
        cuts = [f"; {sep!r} separates the columns, save with commas" for sep in ";\t" if any(sep in c for c in columns)]
        raise UserError(f"{path}: {expected_columns(columns, lacking)}{''.join(cuts)}")


def manifest_items(
    path: Path, root: Path, problems: Problems, *, captioned: bool = True
) -> Iterator[tuple[SourceItem, dict[str, Any]]]:
    """The usable rows of a manifest as items, each with its values; the others are reported.

    Without ``captioned`` a row need not have captions.
    """
    for location, values in usable_rows(path, problems, ("image", "captions") if captioned else ("image",)):
        try:
            item = _item(location, values, root, problems, captioned)
        except ValueError as error:
            problems.add(location, str(error))
        else:
            yield item, values


def _is_missing(caption: object) -> bool:
    """Whether a caption is what JSON and pandas write for none."""
    text = caption.strip().casefold() if isinstance(caption, str) else ""
    return caption is None or caption != caption or text in ("nan", "none", "null", "<na>")


def _item(location: str, values: dict[str, Any], root: Path, problems: Problems, captioned: bool) -> SourceItem:
    """A row as an item; it has no texts if all captions are empty. A ValueError says what is wrong with it."""
    image, captions = values.get("image"), values.get("captions", values.get("caption"))
    if not isinstance(image, str) or not image.strip():
        found = f"found {reprlib.repr(image)}; expected a path"
        raise ValueError(f"no image: {found if 'image' in values else expected_columns(list(values), ['image'])}")
    if captioned and values.keys().isdisjoint(("captions", "caption")):
        problems.remark(location, f"no captions: {expected_columns(list(values), ['captions'])}")
    if not captions or _is_missing(captions):
        captions = []
    captions = [captions] if isinstance(captions, str) else captions
    captions = ["" if _is_missing(one) else one for one in captions] if isinstance(captions, list) else captions
    if not isinstance(captions, list) or not all(isinstance(c, str) for c in captions):
        raise ValueError(f"captions: found {reprlib.repr(captions)}, expected a string or a list of strings")
    ids = _caption_ids(values, len(captions))
    identity = image if values.get("id") in (None, "") else str(values["id"])
    split = str(values.get("split") or "")
    others = (one for one in values.values() if isinstance(one, str))
    if not all(map(is_text, (identity, split, *captions, *ids, *values, *others))):
        raise ValueError(f"not UTF-8, or {NO_TEXT}; save the manifest as UTF-8")
    texts = usable_captions(location, captions, problems if captioned else Problems())
    path = root / image
    if not os.path.isfile(path):  # Unlike Path.is_file, false for no path at all.
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


_SPLIT_NAMES = {"restval": "train", "training": "train", "valid": "val", "validation": "val", "dev": "val"}


def check_fractions(val_fraction: float, test_fraction: float) -> None:
    """Raise an error if the fractions leave no images for training."""
    if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
        given = f"got {val_fraction} and {test_fraction}"
        raise ValueError(f"val_fraction and test_fraction must not be negative, and below 1 together; {given}")


def canonical_split(name: str) -> str:
    """The canonical name of a split: "valid", "validation" and "dev" become "val", "restval" becomes "train"."""
    name = name.strip().lower()
    return _SPLIT_NAMES.get(name, name)


def usable_captions(location: str, captions: Sequence[str], problems: Problems) -> dict[int, str]:
    """The captions that are not empty, stripped of surrounding white space."""
    usable = {number: caption.strip() for number, caption in enumerate(captions) if caption.strip()}
    if usable and len(usable) < len(captions):
        problems.remark(location, "empty caption")
    return usable


def _nothing_usable(source: Path, problems: Problems) -> UserError:
    if problems.left_out or problems.excluded:
        return UserError(f"{source} holds no usable pair of image and caption:\n{problems.summary()}")
    if source.is_dir():
        expected = "expected images, each with a .txt file of the same name that holds its captions, one a line"
        return UserError(f"{source} holds no image ({spelt(IMAGE_ENDINGS)}); {expected}")
    return UserError(f"{source} is empty; expected a line for each image, with its path and its captions")


def splits_of_items(
    items: Iterable[SourceItem], source: Path, problems: Problems, val_fraction: float, test_fraction: float
) -> dict[str, PairData]:
    """Convert items to splits; those of one image and split are merged: many manifests have a row for each caption.

    Images without a caption are kept with the problems, which counts those with one: an index takes both.
    """
    check_fractions(val_fraction, test_fraction)
    items = list(items)
    named = any(item.split for item in items)
    chosen: dict[str, SourceItem] = {}
    wordings, bare = dict[str, str](), dict[str, SourceItem]()
    for item in items:
        if not (texts := _consistent(item, wordings, problems)):
            bare.setdefault(item.id, item)
            continue
        split = (item.split or "train") if named else hashed_split(item.id, val_fraction, test_fraction)
        known = chosen.setdefault(item.id, replace(item, split=split, texts=()))
        if (known.image, known.split) == (item.image, split):
            chosen[item.id] = replace(known, texts=known.texts + texts)
        else:
            problems.add(item.location, f"id {item.id!r} occurred before, with another image or split")
    problems.bare |= {i: (item.location, item.image) for i, item in bare.items() if i not in chosen}
    problems.captioned += len(chosen)
    if not chosen:
        raise _nothing_usable(source, problems)
    return make_splits(chosen.values())


def _consistent(item: SourceItem, wordings: dict[str, str], problems: Problems) -> tuple[tuple[str, str], ...]:
    """The texts of an item without those whose id has another wording already."""
    kept = []
    for identity, text in item.texts:
        if not identity or wordings.setdefault(identity, text) == text:
            kept.append((identity, text))
        else:
            problems.remark(item.location, f"caption id {identity!r} occurred before, with another wording; left out")
    return tuple(kept)


def hashed_split(identity: str, val_fraction: float, test_fraction: float) -> str:
    """The split of an image in data without splits; it depends on its id and the fractions alone."""
    number = uniform_hash(identity)
    return "val" if number < val_fraction else "test" if number < val_fraction + test_fraction else "train"


def read_image_folder(
    path: str | Path, problems: Problems, *, val_fraction: float = 0.1, test_fraction: float = 0.1
) -> dict[str, PairData]:
    """Read a folder of images, each with a .txt file of the same name, one caption on each line.

    Args:
        path: the folder, searched with its subfolders. If it has subfolders "train", "val" (or "valid", "validation",
            "dev") or "test", these are the splits.
        problems: receives images without captions, empty caption files and names that are not valid Unicode.
        val_fraction: fraction of the images for "val" if there are no such subfolders, in [0, 1); chosen by a hash of
            the id.
        test_fraction: the same for "test".

    Returns:
        split -> data; ids are paths relative to the folder.

    Raises:
        UserError: the folder is missing or holds nothing usable.
        ValueError: the fractions are negative or leave nothing to train on.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    return splits_of_items(_folder_items(path, problems), path, problems, val_fraction, test_fraction)


def _folder_items(folder: Path, problems: Problems) -> Iterator[SourceItem]:
    tops = {top.name: canonical_split(top.name) for top in folder.iterdir() if top.is_dir()}
    named = {top: split for top, split in tops.items() if split in {"train", "val", "test"}}
    names_of = functools.cache(names_in)
    for relative in map(Path, image_files(folder, problems)):
        image = folder / relative
        beside = sidecars(image.name, names_of(image.parent))
        captions = next((image.with_name(n) for n in beside if n.lower().endswith(".txt")), image.with_suffix(".txt"))
        if not is_text(relative.as_posix()):
            problems.add(image, "the name is not valid UTF-8")
        elif named and relative.parts[0] not in named:
            problems.add(image, f"lies outside of the split folders {', '.join(sorted(named))}")
        elif (texts := _read_captions(captions, folder, problems) if captions.exists() else []) is not None:
            split = named[relative.parts[0]] if named else ""
            captioned = tuple(("", text) for text in texts)
            yield SourceItem(relative.as_posix(), FileImage(image), captioned, split, str(image))


def _read_captions(path: Path, folder: Path, problems: Problems) -> list[str] | None:
    """The captions of a file; if it cannot be used, None, and the problem is recorded."""
    try:
        lines = read_regular(path, MAX_SIDECAR, folder).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        problems.add(path, f"not UTF-8: {error.reason} at byte {error.start}")
        return None
    except (OSError, ValueError) as error:
        problems.add(path, f"cannot be read: {getattr(error, 'strerror', error)}")
        return None
    return [line.strip() for line in lines if line.strip()]
