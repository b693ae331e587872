"""Sources "karpathy", "cub" and "scan": the files in which the data sets of the papers are published.

karpathy: Karpathy's JSON of COCO, Flickr30k and Flickr8k. cub: CUB Captions, where every image of a class of birds
matches every caption of the class; the images are those of CUB-200-2011, the captions ten for each image (text_c10),
and the splits lists of classes for zero-shot learning. scan: region features in the layout of VSE++ and SCAN.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from sfumato.data.archives import TarArchive
from sfumato.data.captioned import hashed_split
from sfumato.data.coco import archive_of, find_image, refuse_cocos_own
from sfumato.data.feature_tables import FeatureRow
from sfumato.data.images import FileImage, Problems
from sfumato.data.pairs import PairData, SourceItem, make_splits
from sfumato.data.region_files import RegionFile
from sfumato.errors import UserError
from sfumato.files import read_json


@dataclass(frozen=True)
class KarpathyEntry:
    """An image of a split file."""

    location: str  # where it stands, for messages
    filename: str = ""  # name of the image file
    split: str = "none"  # "train" (also for "restval"), "val" or "test"; "none" if it has none, "" if it cannot be read
    folder: str = ""  # COCO's subfolder; "" if there is none
    sentences: tuple[tuple[str, str], ...] = ()  # (sentid, caption as written) of each caption
    mistake: str = ""


def karpathy_entries(path: str | Path) -> list[KarpathyEntry]:
    """All entries of a dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json, in their order."""
    path = Path(path)
    loaded = read_json(path)
    refuse_cocos_own(path, loaded)
    entries = loaded.get("images") if isinstance(loaded, dict) else None
    if not isinstance(entries, list):
        raise UserError(f"{path}: not a Karpathy split file; expected an object with a list under 'images'")
    return [_entry(f"{path}:images[{number}]", entry) for number, entry in enumerate(entries)]


def _entry(location: str, entry: Any) -> KarpathyEntry:
    split = (entry.get("split") or "none") if isinstance(entry, dict) else ""
    split = {"restval": "train"}.get(split, split) if isinstance(split, str) else ""
    if mistake := _mistake(entry):
        return KarpathyEntry(location, split=split, mistake=mistake)
    sentences = tuple((str(sentence["sentid"]), sentence["raw"]) for sentence in entry["sentences"])
    return KarpathyEntry(location, entry["filename"], split, entry.get("filepath") or "", sentences)


def read_karpathy(path: str | Path, images: str | Path, problems: Problems) -> dict[str, PairData]:
    """Read a dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json.

    Args:
        path: the JSON file.
        images: folder or uncompressed tar file of the images; either in COCO's subfolders (``filepath``) or in one
            folder. COCO's names of 2014 and 2017 stand for each other.
        problems: receives missing images, empty captions, repeated ids and malformed entries.

    Returns:
        "train" (with "restval"), "val", "test": image ids are file names, text ids are sentence ids. Entries without a
        split, or with the split "none", are left out.

    Raises:
        UserError: a file is missing, the JSON is not of this layout (COCO's own captions are named as such), or nothing
            in it is usable.
    """
    images = Path(images)
    entries = karpathy_entries(path)
    if not (items := list(_karpathy_items(entries, images, archive_of(images), problems))):
        raise UserError(f"{path} with {images} gives no usable pair:\n{problems.summary()}")
    return make_splits(items)


def _karpathy_items(
    entries: Iterable[KarpathyEntry], images: Path, archive: TarArchive | None, problems: Problems
) -> Iterator[SourceItem]:
    seen_images: set[str] = set()
    seen_texts: set[str] = set()
    for entry in entries:
        if entry.mistake:
            problems.add(entry.location, f"malformed entry: {entry.mistake}")
        elif entry.split == "none":
            continue
        elif entry.filename in seen_images:
            problems.add(entry.location, f"image {entry.filename} occurred before")
        elif (source := find_image(images, archive, entry.folder, entry.filename)) is None:
            problems.add(entry.location, f"image {entry.filename} is missing from {images}")
        elif captions := _usable_sentences(entry, seen_texts, problems):
            seen_images.add(entry.filename)
            yield SourceItem(entry.filename, source, captions, entry.split)


def _mistake(entry: Any) -> str:
    """What is wrong with the form of an entry."""
    if not isinstance(entry, dict):
        return f"found {type(entry).__name__}, expected an object"
    if not isinstance(entry.get("filename"), str) or not entry["filename"]:
        return f"filename is {entry.get('filename')!r}, expected a name"
    for key in ("split", "filepath"):
        if not isinstance(entry.get(key), str | None):
            return f"{key} is of type {type(entry[key]).__name__}, expected a string"
    sentences = entry.get("sentences")
    if not isinstance(sentences, list) or not sentences:
        return "sentences is missing, empty or not a list"
    for sentence in sentences:
        if not isinstance(sentence, dict) or not isinstance(sentence.get("raw"), str) or "sentid" not in sentence:
            return "a sentence lacks sentid, or the string raw"
    return ""


def _usable_sentences(entry: KarpathyEntry, seen: set[str], problems: Problems) -> tuple[tuple[str, str], ...]:
    """(id, caption) of each usable one; the ids are added to the seen ids."""
    usable = []
    for identity, raw in entry.sentences:
        text = " ".join(raw.split())
        if not text:
            problems.add(f"{entry.location} sentence {identity}", "empty caption")
        elif identity in seen:
            problems.add(f"{entry.location} sentence {identity}", "this sentid occurred before")
        else:
            seen.add(identity)
            usable.append((identity, text))
    return tuple(usable)


TrainPairs = Literal["class", "own"]


class CubOptions(BaseModel):
    """Section ``data.options`` of the source "cub"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    captions: str = Field("text_c10", description="folder of CLASS/IMAGE.txt; relative to data.path, or absolute")
    lists: str = Field(
        "splits",
        description="folder of trainvalclasses.txt, testclasses.txt, trainclasses1.txt to valclasses3.txt and"
        " seen_test_images.txt; relative to data.path, or absolute",
    )
    fold: Literal[0, 1, 2, 3] = Field(
        0,
        description="0: train on the 150 classes of the benchmark; 1, 2, 3: train on 100 of them and validate on the"
        " other 50, to choose hyper-parameters",
    )
    classes: tuple[str, ...] = Field(
        (),
        description="read these classes alone, e.g. 192.Downy_Woodpecker, and divide their images into train, val and"
        " test by a hash of their ids; lists and fold have no effect",
    )
    train_pairs: TrainPairs = Field(
        "class",
        description="training pairs. class: every image with every caption of its class; own: every image with its own"
        " captions, for data.positives=sampled, which makes all pairs of a class in a batch matches",
    )


def read_cub(
    root: str | Path,
    problems: Problems,
    options: CubOptions | None = None,
    *,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> dict[str, PairData]:
    """Read CUB Captions.

    Papers: Reed et al., CVPR 2016 (the captions); Xian et al., CVPR 2017 (the classes); Chun et al., CVPR 2021 (the
    benchmark).
    """
    root, options = Path(root), options or CubOptions()
    for folder in (root / "images", root / options.captions):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; expected images/CLASS/IMAGE.jpg and CLASS/IMAGE.txt")
    if options.classes:
        chosen = {"": list(options.classes)}
    else:
        lists = root / options.lists
        train = "trainvalclasses" if options.fold == 0 else f"trainclasses{options.fold}"
        chosen = {"train": _class_list(lists / f"{train}.txt"), "test": _class_list(lists / "testclasses.txt")}
        if options.fold:
            chosen["val"] = _class_list(lists / f"valclasses{options.fold}.txt")
        seen = set(_class_list(lists / "seen_test_images.txt"))
    number = {bird: i for i, bird in enumerate(sorted({bird for birds in chosen.values() for bird in birds}))}

    def split_of(identity: str, name: str) -> str:
        if options.classes:
            return hashed_split(identity, val_fraction, test_fraction)
        return "seen" if name == "train" and identity in seen else name

    found = make_splits(
        replace(one, split=split_of(one.id, name))
        for name, birds in chosen.items()
        for bird in sorted(set(birds))
        for one in _birds(root, options.captions, bird, number[bird], problems)
    )
    if not found:
        raise UserError(f"{root} holds no usable pair of image and caption:\n{problems.summary()}")
    own = {"train"} if options.train_pairs == "own" else set()
    return {name: data if name in own else _pairs_of_groups(data) for name, data in found.items()}


def _birds(root: Path, captions: str, bird: str, group: int, problems: Problems) -> Iterator[SourceItem]:
    """The usable images of a class."""
    folder = root / "images" / bird
    if not folder.is_dir():
        raise UserError(f"there is no class {bird} in {root / 'images'}; expected those of CUB-200-2011")
    for path in sorted(folder.glob("*.jpg")):
        text = root / captions / bird / f"{path.stem}.txt"
        try:
            lines = [line.strip() for line in text.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            problems.add(path, f"captions {text} cannot be read: {error}")
            continue
        if lines:
            texts = tuple(("", line) for line in lines)
            yield SourceItem(f"{bird}/{path.name}", FileImage(path), texts, group=group)
        else:
            problems.add(path, f"captions {text} are empty")


def _pairs_of_groups(data: PairData) -> PairData:
    """The split with a pair of every image and every text of its group."""
    of_text = np.empty(len(data.texts), np.int64)
    of_text[data.pairs[:, 1]] = data.groups[data.pairs[:, 0]]
    groups = (np.meshgrid(*(np.flatnonzero(of == g) for of in (data.groups, of_text))) for g in np.unique(data.groups))
    return replace(data, pairs=np.concatenate([np.stack([i.ravel(), t.ravel()], axis=1) for i, t in groups]))


def _class_list(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the list {path}: {error}; data.options.lists is the folder of the splits of Xian et al., CVPR"
            " 2017, which the code of PCME has in datasets/annotations/cub"
        ) from error
    return [line.strip() for line in lines if line.strip()]


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
        raise UserError(
            f"{folder} holds no NAME_caps.txt; expected train_caps.txt with train_ims.npy, and dev_ and test_"
        )
    if "testall" in splits:
        splits.setdefault("test", splits["testall"])
    return splits


def _read_split(folder: Path, name: str, problems: Problems) -> PairData:
    path = folder / f"{name}_caps.txt"
    lines = _lines(path)
    file = RegionFile(folder / f"{name}_ims.npy")
    if not lines or len(lines) % file.n:
        raise UserError(
            f"{path} has {len(lines)} captions and {file.path.name} {file.n} rows; expected as many captions for"
            f" every row"
        )
    each = len(lines) // file.n
    of_line = np.arange(len(lines)) // each
    ids = _ids(folder / f"{name}_ids.txt", file.n, of_line)
    if each == 1 and ids is None:
        of_line = _first_of_equal(file)
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
        raise UserError(f"{path} with {file.path.name} gives no usable pair:\n{problems.summary()}")
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


def _first_of_equal(file: RegionFile) -> np.ndarray:
    """(n,) position of the first row in each row's run of consecutive equal rows."""
    first = np.arange(file.n)
    for row in range(1, file.n):
        if file.same(row, row - 1):
            first[row] = first[row - 1]
    return first


def equal_captions(data: PairData) -> Sequence[Sequence[int]] | None:
    """The texts of each image, if SCAN's layout can represent them: equal numbers, and no text of two images."""
    counts = np.bincount(data.pairs[:, 0], minlength=len(data.image_ids))
    if len(set(counts.tolist())) != 1 or len(data.pairs) != len(data.texts):
        return None
    texts: list[list[int]] = data.pairs[:, 1].reshape(len(data.image_ids), -1).tolist()
    return texts
