"""Sources "karpathy", "cub" and "scan": the files in which the data sets of the papers are published.

karpathy: Karpathy's JSON of COCO, Flickr30k and Flickr8k. cub: CUB Captions, where every image of a class of birds
matches every caption of the class; the images are those of CUB-200-2011, the captions ten for each image (text_c10),
and the splits lists of classes for zero-shot learning. scan: region features in the layout of VSE++ and SCAN.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from sfumato.data.coco import karpathy_entries
from sfumato.data.feature_tables import EmbeddingRow, FeatureRow, NamedTable, RegionFile, open_table
from sfumato.data.images import FileImage, Problems
from sfumato.data.manifest import canonical_split, check_fractions, hashed_split, usable_rows
from sfumato.data.pairs import PairData, SourceItem, make_splits
from sfumato.errors import UserError
from sfumato.files import read_json
from sfumato.ids import is_text

Fractions = tuple[float, float]
"""Of the images for "val" and for "test", where no splits are named."""

_FRACTIONS: Fractions = (0.1, 0.1)

_CAPTIONS = "text_c10"
"""Folder of CLASS/IMAGE.txt, ten captions each."""


class CubOptions(BaseModel):
    """Section ``data.options`` of the source "cub"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lists: str = "splits"
    """folder of trainvalclasses.txt, testclasses.txt, trainclasses1.txt to valclasses3.txt and seen_test_images.txt;
    relative to data.path, or absolute"""
    fold: Literal[0, 1, 2, 3] = 0
    """0: train on the 150 classes of the benchmark; 1, 2, 3: train on 100 of them and validate on the other 50, to
    choose hyper-parameters"""
    classes: tuple[str, ...] = ()
    """read these classes alone, e.g. 192.Downy_Woodpecker, and divide their images into train, val and test by a hash
    of their ids; lists and fold have no effect"""
    train_pairs: Literal["class", "own"] = "class"
    """training pairs. class: every image with every caption of its class; own: every image with its own captions, for
    data.positives=sampled, which makes all pairs of a class in a batch matches"""


def read_cub(
    root: str | Path, problems: Problems, options: CubOptions | None = None, fractions: Fractions = _FRACTIONS
) -> dict[str, PairData]:
    """Read CUB Captions.

    Papers: Reed et al., CVPR 2016 (the captions); Xian et al., CVPR 2017 (the classes); Chun et al., CVPR 2021 (the
    benchmark).
    """
    check_fractions(*fractions)
    root, options = Path(root), options or CubOptions()
    for folder in (root / "images", root / _CAPTIONS):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; expected images/CLASS/IMAGE.jpg and CLASS/IMAGE.txt")
    if options.classes:
        chosen = {"": list(options.classes)}
    else:
        lists = root / options.lists
        train = "trainvalclasses" if options.fold == 0 else f"trainclasses{options.fold}"
        named = {"train": train, "test": "testclasses"}
        named |= {"val": f"valclasses{options.fold}"} if options.fold else {}
        read = partial(read_list, way=f"; data.options.lists is {_LISTS}")
        chosen = {split: read(lists / f"{name}.txt") for split, name in named.items()}
        seen = set(read(lists / "seen_test_images.txt"))
    number = {bird: i for i, bird in enumerate(sorted({bird for birds in chosen.values() for bird in birds}))}

    def split_of(identity: str, name: str) -> str:
        if options.classes:
            return hashed_split(identity, *fractions)
        return "seen" if name == "train" and identity in seen else name

    found = make_splits(
        replace(one, split=split_of(one.id, name))
        for name, birds in chosen.items()
        for bird in sorted(set(birds))
        for one in _birds(root, bird, number[bird], problems)
    )
    if not found:
        raise UserError(f"{root} holds no usable pair of image and caption:\n{problems.summary()}")
    own = {"train"} if options.train_pairs == "own" else set()
    return {name: data if name in own else _pairs_of_groups(data) for name, data in found.items()}


def _birds(root: Path, bird: str, group: int, problems: Problems) -> Iterator[SourceItem]:
    """The usable images of a class."""
    folder = root / "images" / bird
    if not folder.is_dir():
        raise UserError(f"there is no class {bird} in {root / 'images'}; expected those of CUB-200-2011")
    for path in sorted(folder.glob("*.jpg")):
        text = root / _CAPTIONS / bird / f"{path.stem}.txt"
        try:
            lines = read_list(text, "captions")
        except UserError as error:
            problems.add(path, str(error))
            continue
        if lines:
            yield SourceItem(f"{bird}/{path.name}", FileImage(path), tuple(("", line) for line in lines), group=group)
        else:
            problems.add(path, f"captions {text} are empty")


def _pairs_of_groups(data: PairData) -> PairData:
    """The split with a pair of every image and every text of its group."""
    of_text = np.empty(len(data.texts), np.int64)
    of_text[data.pairs[:, 1]] = data.groups[data.pairs[:, 0]]
    groups = (np.meshgrid(*(np.flatnonzero(of == g) for of in (data.groups, of_text))) for g in np.unique(data.groups))
    return replace(data, pairs=np.concatenate([np.stack([i.ravel(), t.ravel()], axis=1) for i, t in groups]))


def read_list(path: Path, what: str = "the list", way: str = "") -> list[str]:
    """The lines of a file that are not empty."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {what} {path}: {error}{way}") from error
    return [line.strip() for line in lines if line.strip()]


_LISTS = "the folder of the splits of Xian et al., CVPR 2017, in the code of PCME datasets/annotations/cub"


def read_scan(folder: str | Path, problems: Problems) -> dict[str, PairData]:
    """Read precomputed features in the layout of VSE++ and SCAN.

    ``NAME_caps.txt`` has one caption a line and ``NAME_ims.npy`` the features, see :class:`RegionFile`; NAME is train,
    dev, test, testall or any other. If there are k times as many captions as rows, row i has the captions of lines k *
    i to k * i + k - 1. If there are as many captions as rows, lines with the same id are captions of one image; without
    ids, consecutive lines with equal rows are captions of one image. The optional ``NAME_ids.txt`` has one image id for
    each row, or one for each caption; without it the id of an image is NAME-ROW.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; expected one with train_caps.txt, train_ims.npy and so on")
    splits = {}
    for path in sorted(folder.glob("*_caps.txt")):
        name = path.name.removesuffix("_caps.txt")
        splits["val" if name == "dev" else name] = _read_split(folder, name, problems)
    if not splits:
        raise UserError(f"{folder} holds no NAME_caps.txt; expected train_caps.txt with train_ims.npy, dev_ and test_")
    if "testall" in splits:
        splits.setdefault("test", splits["testall"])
    return splits


def _read_split(folder: Path, name: str, problems: Problems) -> PairData:
    path = folder / f"{name}_caps.txt"
    lines = _lines(path)
    file = RegionFile(folder / f"{name}_ims.npy")
    if not lines or len(lines) % file.n:
        raise UserError(f"{path} has {len(lines)} captions and {file.name} {file.n} rows; give every row as many")
    each = len(lines) // file.n
    of_line = np.arange(len(lines)) // each
    ids = _ids(folder / f"{name}_ids.txt", file.n, of_line)
    if each == 1 and ids is None:
        is_new = [row == 0 or not file.same(row, row - 1) for row in range(file.n)]
        of_line = np.maximum.accumulate(np.where(is_new, of_line, 0))  # The first of consecutive equal rows.
    elif each == 1 and ids is not None:
        first: dict[str, int] = {}
        of_line = np.array([first.setdefault(identity, row) for row, identity in enumerate(ids)])
    captions: dict[int, list[tuple[str, str]]] = {}
    taken: dict[str, int] = {}
    for number, (line, row) in enumerate(zip(lines, of_line.tolist(), strict=True)):
        location = f"{path}:{number + 1}"
        identity = f"{name}-{row}" if ids is None else ids[row]
        if taken.setdefault(identity, row) != row:
            problems.add(location, f"id {identity} belongs to another row already")
        elif text := _text(line, location, problems):
            captions.setdefault(row, []).append(("", text))
    if not captions:
        raise UserError(f"{path} with {file.name} gives no usable pair:\n{problems.summary()}")
    id_of = {row: identity for identity, row in taken.items()}
    items = (SourceItem(id_of[row], FeatureRow(file, row), tuple(own), name) for row, own in captions.items())
    return make_splits(items)[name]


def _lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return data.removesuffix(b"\n").split(b"\n") if data else []


def _text(line: bytes, location: str, problems: Problems) -> str:
    """The caption of a line; if it has none, "", and the problem is recorded."""
    try:
        text = " ".join(line.decode("utf-8").split())
    except UnicodeDecodeError as error:
        problems.add(location, f"not UTF-8: {error.reason} at byte {error.start}")
        return ""
    if not text:
        problems.add(location, "empty caption")
    return text


def _ids(path: Path, rows: int, of_line: np.ndarray) -> list[str] | None:
    """The id of every row; None if there are no ids."""
    if not path.is_file():
        return None
    try:
        ids = [line.decode("utf-8").strip() for line in _lines(path)]
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    if "" in ids:
        raise UserError(f"{path}:{ids.index('') + 1}: a line without an id; give every row one, or every caption")
    if len(ids) == rows:
        return ids
    if len(ids) != len(of_line):
        raise UserError(f"{path} has {len(ids)} ids; expected one for each of {rows} rows or {len(of_line)} captions")
    of_row: dict[int, str] = {}
    for number, (row, identity) in enumerate(zip(of_line.tolist(), ids, strict=True), 1):
        if of_row.setdefault(row, identity) != identity:
            raise UserError(f"{path}:{number}: {identity!r} stands where row {row} was {of_row[row]!r} before")
    return list(of_row.values())


_SIDES = ("image", "text")


def read_embedding_pairs(
    images: str, texts: str, problems: Problems, pairs: str | Path | None = None, fractions: Fractions = _FRACTIONS
) -> dict[str, PairData]:
    """Read pairs of embeddings; the values of all rows in a pair are checked once, block by block."""
    check_fractions(*fractions)
    tables = open_table(images), open_table(texts)
    if pairs is None:
        listed = _row_by_row(tables)
    elif (path := Path(pairs)).suffix.lower() == ".json" and isinstance(read_json(path), dict):
        tables, listed = _karpathy(path, tables)
    else:
        tables, listed = _from_rows(path, tables, problems)
    usable = _usable(tables, listed, problems)
    splits = np.array(_splits(tables[0], listed, fractions, problems))
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
        sizes = f"{tables[0].table.name} has {n} rows and {tables[1].table.name} has {m}"
        way = "Name the pairs in a file with the columns image and text: data.path=pairs.csv"
        other = "sfumato adopt: --pairs pairs.csv; in Python: pairs="
        raise UserError(f"{sizes}; without pairs row i belongs to row i. {way} ({other})")
    return _Listed(np.stack([np.arange(n)] * 2, axis=1), [""] * n, [""] * n)


def _karpathy(path: Path, tables: _Tables) -> tuple[_Tables, _Listed]:
    """The pairs of a Karpathy JSON; its file names, sentence ids and sentences name the rows."""
    entries = karpathy_entries(path)
    if broken := next((entry for entry in entries if entry.mistake), None):
        raise UserError(f"{broken.location}: {broken.mistake}; the rows of the texts can then not be counted")
    sentences = [sentence for entry in entries for sentence in entry.sentences]
    for named, what, n in ((tables[0], "images", len(entries)), (tables[1], "sentences", len(sentences))):
        if named.table.n != n:
            raise UserError(f"{path} has {n} {what} and {named.table.name} has {named.table.n} rows; give as many")
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
        elif not is_text("".join(own)):
            problems.add(location, "not valid Unicode; save the file as UTF-8")
        else:
            locations.append(location)
            names.append(own[:2])
            splits.append(canonical_split(own[2]))
            captions.append(own[3])
    if not names:
        raise UserError(f"{path} names no usable pair:\n{problems.summary()}")
    sides = enumerate(zip(_SIDES, tables, strict=True))
    columns = [_positions([own[k] for own in names], named, side, locations) for k, (side, named) in sides]
    if any(captions):
        wordings = list(tables[1].captions or [""] * tables[1].table.n)
        for text, caption in zip(reversed(columns[1]), reversed(captions), strict=True):
            wordings[text] = caption or wordings[text]
        tables = tables[0], replace(tables[1], captions=wordings)
    return tables, _Listed(np.stack(columns, axis=1), splits, locations)


def _rows(path: Path, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix.lower() in (".npy", ".npz", ".safetensors"):
        form = "pairs are a .csv, .jsonl or .parquet file with the columns image and text, of ids or row numbers"
        without = "Without pairs row i of the images belongs to row i of the texts"
        raise UserError(f"{path} holds embeddings, not pairs; {form}. {without}")
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
            way = "" if number or by_id else "; ids would stand beside it, one a line, in a file NAME_ids.txt"
            raise UserError(f"{locations[k]}: {side} {value!r} is not {known}{way}")
        rows[k] = row
    return rows


def _usable(tables: _Tables, listed: _Listed, problems: Problems) -> np.ndarray:
    """(p,) whether both rows of a pair can be used; the others are reported."""
    usable = np.ones(len(listed.pairs), dtype=bool)
    for k, (side, named) in enumerate(zip(_SIDES, tables, strict=True)):
        errors = named.table.errors(np.unique(listed.pairs[:, k]))
        for row, error in errors.items():
            problems.add(f"{named.table.name}[{row}]", f"{side} {_id(named, row)!r} {error}")
        usable &= ~np.isin(listed.pairs[:, k], list(errors))
    return usable


def _splits(images: NamedTable, listed: _Listed, fractions: Fractions, problems: Problems) -> list[str]:
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
    sides = (images, image_rows.tolist()), (texts, text_rows.tolist())
    image_ids, text_ids = (tuple(_id(named, row) for row in rows) for named, rows in sides)
    of_images, of_texts = (tuple(EmbeddingRow(named.table, row) for row in rows) for named, rows in sides)
    captions = [texts.captions[row] if texts.captions else "" for row in text_rows.tolist()]
    wordings = tuple(" ".join(text.split()) or i for text, i in zip(captions, text_ids, strict=True))
    kinds, own = ("caption",) * len(text_ids), np.stack([image, text], axis=1)
    return PairData(image_ids, of_images, text_ids, wordings, kinds, own, text_rows=of_texts)


def _id(named: NamedTable, row: int) -> str:
    return str(row) if named.ids is None else named.ids[row]
