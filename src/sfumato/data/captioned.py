"""Images with captions, of a folder or any other source without fixed splits, and images with classes.

Classes come from folders in ImageNet's layout, emoji with groups, or data whose texts are classes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from sfumato.data.image_decoding import IMAGE_ENDINGS, spelt
from sfumato.data.images import FileImage, Problems, image_files
from sfumato.data.pairs import PairData, SourceItem, make_splits
from sfumato.errors import UserError
from sfumato.ids import uniform_hash

_SPLIT_NAMES = {"restval": "train", "training": "train", "valid": "val", "validation": "val", "dev": "val"}


def check_fractions(val_fraction: float, test_fraction: float) -> None:
    """Raise an error if the fractions leave no images for training."""
    if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
        raise ValueError(
            "val_fraction and test_fraction must not be negative, and below 1 together;"
            f" got {val_fraction} and {test_fraction}"
        )


def canonical_split(name: str) -> str:
    """The canonical name of a split: "valid", "validation" and "dev" become "val", "restval" becomes "train"."""
    name = name.strip().lower()
    return _SPLIT_NAMES.get(name, name)


def is_unicode(text: str) -> bool:
    r"""Whether a text can be written as UTF-8; undecodable bytes and lone surrogates cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def usable_captions(location: str, captions: Iterable[str], problems: Problems) -> dict[int, str]:
    """The captions that are not empty, stripped of surrounding white space."""
    usable = {}
    for number, caption in enumerate(captions):
        if caption.strip():
            usable[number] = caption.strip()
        else:
            problems.add(location, "empty caption")
    return usable


def _nothing_usable(source: Path, problems: Problems) -> UserError:
    if problems.left_out:
        return UserError(f"{source} holds no usable pair of image and caption:\n{problems.summary()}")
    if source.is_dir():
        return UserError(
            f"{source} holds no image ({spelt(IMAGE_ENDINGS)}); expected images, each with a .txt file of"
            " the same name that holds its captions, one a line"
        )
    return UserError(f"{source} is empty; expected a line for each image, with its path and its captions")


def splits_of_items(
    items: Iterable[SourceItem], source: Path, problems: Problems, val_fraction: float, test_fraction: float
) -> dict[str, PairData]:
    """Convert items to splits; those of one image and split are merged: many manifests have a row for each caption."""
    items = list(items)
    named = any(item.split for item in items)
    chosen: dict[str, SourceItem] = {}
    wordings: dict[str, str] = {}
    for item in items:
        if not (texts := _consistent(item, wordings, problems)):
            continue
        split = (item.split or "train") if named else hashed_split(item.id, val_fraction, test_fraction)
        known = chosen.setdefault(item.id, replace(item, split=split, texts=()))
        if (known.image, known.split) == (item.image, split):
            chosen[item.id] = replace(known, texts=known.texts + texts)
        else:
            problems.add(item.location, f"id {item.id!r} occurred before, with another image or split")
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
            problems.add(item.location, f"caption id {identity!r} occurred before, with another wording")
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
    check_fractions(val_fraction, test_fraction)
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    return splits_of_items(_items(path, problems), path, problems, val_fraction, test_fraction)


def _items(folder: Path, problems: Problems) -> Iterator[SourceItem]:
    tops = {top.name: canonical_split(top.name) for top in folder.iterdir() if top.is_dir()}
    named = {top: split for top, split in tops.items() if split in {"train", "val", "test"}}
    for relative in map(Path, image_files(folder, problems)):
        image = folder / relative
        captions = image.with_suffix(".txt")
        if not is_unicode(relative.as_posix()):
            problems.add(image, "the name is not valid UTF-8")
        elif not captions.is_file():
            problems.add(image, f"no captions: {captions.name} is missing")
        elif named and relative.parts[0] not in named:
            problems.add(image, f"lies outside of the split folders {', '.join(sorted(named))}")
        elif texts := read_captions(captions, problems):
            split = named[relative.parts[0]] if named else ""
            captioned = tuple(("", text) for text in texts)
            yield SourceItem(relative.as_posix(), FileImage(image), captioned, split, str(image))


def read_captions(path: Path, problems: Problems) -> list[str]:
    """The captions of a file; if it cannot be used, an empty list, and the problem is recorded."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        problems.add(path, f"not UTF-8: {error.reason} at byte {error.start}")
        return []
    except OSError as error:
        problems.add(path, f"cannot be read: {error.strerror}")
        return []
    return list(usable_captions(str(path), [line for line in lines if line.strip()] or [""], problems).values())
