"""Source "embeddings": images and texts as rows of two tables, which an encoder reads instead of them.

A file names their pairs. A text keeps its wording for tables and pages where a file has one; else its id stands there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.captioned import canonical_split, check_fractions, hashed_split, is_unicode
from sfumato.data.feature_tables import EmbeddingRow, NamedTable, open_table
from sfumato.data.images import Problems
from sfumato.data.layouts import karpathy_entries
from sfumato.data.manifest import usable_rows
from sfumato.data.pairs import PairData
from sfumato.errors import UserError
from sfumato.files import read_json

_SIDES = ("image", "text")


def read_embedding_pairs(
    images: str,
    texts: str,
    problems: Problems,
    *,
    pairs: str | Path | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> dict[str, PairData]:
    """Read pairs of embeddings; the values of all rows in a pair are checked once, block by block."""
    check_fractions(val_fraction, test_fraction)
    tables = open_table(images), open_table(texts)
    if pairs is None:
        listed = _row_by_row(tables)
    elif (path := Path(pairs)).suffix.lower() == ".json" and _starts(path) == "{":
        tables, listed = _karpathy(path, tables)
    else:
        tables, listed = _from_rows(path, tables, problems)
    usable = _usable(tables, listed, problems)
    splits = np.array(_splits(tables[0], listed, (val_fraction, test_fraction), problems))
    chosen = {name: listed.pairs[usable & (splits == name)] for name in dict.fromkeys(splits.tolist()) if name}
    found = {name: _data(tables, of_split) for name, of_split in chosen.items() if len(of_split)}
    if not found:
        raise UserError(f"{images} with {texts} gives no usable pair:\n{problems.summary()}")
    return found


_Tables = tuple[NamedTable, NamedTable]


@dataclass(frozen=True, eq=False)
class _Listed:
    """(p, 2) rows of the pairs, and the split and the location of each; "" for a pair without a split."""

    pairs: np.ndarray
    splits: Sequence[str]
    locations: Sequence[str]


def _row_by_row(tables: _Tables) -> _Listed:
    n, m = (named.table.n for named in tables)
    if n != m:
        raise UserError(
            f"{tables[0].table.name} has {n} rows and {tables[1].table.name} has {m}; without pairs row i belongs"
            " to row i. Name the pairs in a file with the columns image and text: data.path=pairs.csv (sfumato adopt:"
            " --pairs pairs.csv; in Python: pairs=)"
        )
    return _Listed(np.stack([np.arange(n)] * 2, axis=1), [""] * n, [""] * n)


def _karpathy(path: Path, tables: _Tables) -> tuple[_Tables, _Listed]:
    """The pairs of a Karpathy JSON; its file names, sentence ids and sentences name the rows."""
    entries = karpathy_entries(path)
    if broken := next((entry for entry in entries if entry.mistake), None):
        raise UserError(f"{broken.location}: {broken.mistake}; the rows of the texts can then not be counted")
    sentences = [sentence for entry in entries for sentence in entry.sentences]
    for named, what, n in ((tables[0], "images", len(entries)), (tables[1], "sentences", len(sentences))):
        if named.table.n != n:
            raise UserError(
                f"{path} has {n} {what} and {named.table.name} has {named.table.n} rows; give equal numbers"
            )
    image = np.repeat(np.arange(len(entries)), [len(entry.sentences) for entry in entries])
    chosen = np.flatnonzero([entries[i].split != "none" for i in image])
    own = [entries[image[k]] for k in chosen]
    renamed = (
        replace(tables[0], ids=[entry.filename for entry in entries]),
        replace(tables[1], ids=[i for i, _ in sentences], captions=[raw for _, raw in sentences]),
    )
    pairs = np.stack([image[chosen], chosen], axis=1)
    return renamed, _Listed(pairs, [entry.split for entry in own], [entry.location for entry in own])


def _from_rows(path: Path, tables: _Tables, problems: Problems) -> tuple[_Tables, _Listed]:
    """The pairs that stand in the lines of a file, by ids or row numbers, and the texts with the captions there."""
    locations, names, splits, captions = [], [], [], []
    for location, values in _rows(path, problems):
        own = ["" if values.get(key) is None else str(values[key]).strip() for key in (*_SIDES, "split", "caption")]
        if not (own[0] and own[1]):
            problems.add(location, "image or text is empty; expected an id or a row number")
        elif not is_unicode("".join(own)):
            problems.add(location, "not valid Unicode; save the file as UTF-8")
        else:
            locations.append(location)
            names.append(own[:2])
            splits.append(canonical_split(own[2]))
            captions.append(own[3])
    if not names:
        raise UserError(f"{path} names no usable pair:\n{problems.summary()}")
    try:
        columns = [
            _positions([own[k] for own in names], named, side, locations)
            for k, (side, named) in enumerate(zip(_SIDES, tables, strict=True))
        ]
    except UserError as error:
        if not _fit_exchanged(names, tables, locations):
            raise
        raise UserError(
            f"{error}. With images and texts exchanged every row exists: check that the columns image and text of"
            f" {path} are not swapped, nor the tables {tables[0].table.name} and {tables[1].table.name}"
        ) from error
    if any(captions):
        wordings = list(tables[1].captions or [""] * tables[1].table.n)
        for text, caption in zip(reversed(columns[1]), reversed(captions), strict=True):
            wordings[text] = caption or wordings[text]
        tables = tables[0], replace(tables[1], captions=wordings)
    return tables, _Listed(np.stack(columns, axis=1), splits, locations)


def _rows(path: Path, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix.lower() in (".npy", ".npz", ".safetensors"):
        raise UserError(
            f"{path} holds embeddings, not pairs; pairs are a .csv, .jsonl or .parquet file with the columns image and"
            " text, of ids or row numbers. Without pairs row i of the images belongs to row i of the texts"
        )
    if path.suffix.lower() != ".json":
        yield from usable_rows(path, problems, _SIDES)
        return
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path}: found {type(entries).__name__}; expected a list of objects with image and text")
    for number, entry in enumerate(entries):
        if isinstance(entry, dict):
            yield f"{path}[{number}]", entry
        else:
            problems.add(f"{path}[{number}]", f"expected an object with image and text, got {type(entry).__name__}")


def _positions(values: Sequence[str], named: NamedTable, side: str, locations: Sequence[str]) -> np.ndarray:
    """(p,) rows of the named items: ids if one of them is an id of the table, else row numbers."""
    table, number = named.table, {i: row for row, i in enumerate(named.ids or ())}
    by_id = any(value in number for value in values)
    rows = np.empty(len(values), dtype=np.int64)
    for k, value in enumerate(values):
        row = number.get(value, -1) if by_id else int(value) if value.isascii() and value.isdecimal() else -1
        if not 0 <= row < table.n:
            known = f"an id of {table.name}" if by_id else f"a row number from 0 to {table.n - 1} of {table.name}"
            raise UserError(
                f"{locations[k]}: {side} {value!r} is not {known}"
                + ("" if number or by_id else "; ids would stand beside it, one a line, in a file NAME_ids.txt")
            )
        rows[k] = row
    return rows


def _fit_exchanged(names: Sequence[Sequence[str]], tables: _Tables, locations: Sequence[str]) -> bool:
    """Whether every image is a row of the texts, and every text a row of the images."""
    try:
        for k, (side, named) in enumerate(zip(_SIDES, reversed(tables), strict=True)):
            _positions([own[k] for own in names], named, side, locations)
    except UserError:
        return False
    return True


def _usable(tables: _Tables, listed: _Listed, problems: Problems) -> np.ndarray:
    """(p,) whether both rows of a pair can be used; the others are reported."""
    usable = np.ones(len(listed.pairs), dtype=bool)
    for k, (side, named) in enumerate(zip(_SIDES, tables, strict=True)):
        errors = named.table.errors(np.unique(listed.pairs[:, k]))
        for row, error in errors.items():
            problems.add(f"{named.table.name}[{row}]", f"{side} {_id(named, row)!r} {error}")
        usable &= ~np.isin(listed.pairs[:, k], list(errors))
    return usable


def _splits(images: NamedTable, listed: _Listed, fractions: tuple[float, float], problems: Problems) -> list[str]:
    """The split of each pair, "" for a pair that is left out."""
    rows = listed.pairs[:, 0].tolist()
    if not any(listed.splits):
        hashed = {row: hashed_split(_id(images, row), *fractions) for row in dict.fromkeys(rows)}
        return [hashed[row] for row in rows]
    first: dict[int, str] = {}
    found = []
    for row, named, location in zip(rows, listed.splits, listed.locations, strict=True):
        split = named or "train"
        known = first.setdefault(row, split)
        if split != known:
            problems.add(location, f"image {_id(images, row)!r} was in split {known!r} before")
        found.append(split if split == known else "")
    return found


def _data(tables: _Tables, pairs: np.ndarray) -> PairData:
    """A split of the (p, 2) pairs of rows."""
    images, texts = tables
    (image_rows, image), (text_rows, text) = (np.unique(column, return_inverse=True) for column in pairs.T)
    text_ids = [_id(texts, row) for row in text_rows.tolist()]
    wordings = [texts.captions[row] if texts.captions else "" for row in text_rows.tolist()]
    return PairData(
        tuple(_id(images, row) for row in image_rows.tolist()),
        tuple(EmbeddingRow(images.table, row) for row in image_rows.tolist()),
        tuple(text_ids),
        tuple(" ".join(wording.split()) or i for wording, i in zip(wordings, text_ids, strict=True)),
        ("caption",) * len(text_ids),
        np.stack([image, text], axis=1),
        text_rows=tuple(EmbeddingRow(texts.table, row) for row in text_rows.tolist()),
    )


def _id(named: NamedTable, row: int) -> str:
    return str(row) if named.ids is None else named.ids[row]


def _starts(path: Path) -> str:
    """The first character of a file that is no blank."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(1000).lstrip()[:1]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
