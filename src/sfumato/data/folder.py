"""Source "folder": a folder of images, each with its captions in a text file beside it."""

from collections.abc import Iterator
from pathlib import Path

from sfumato.data.captioned import (
    CaptionedImage,
    canonical_split,
    check_fractions,
    is_unicode,
    splits_of_rows,
    usable_captions,
)
from sfumato.data.image_decoding import IMAGE_ENDINGS
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.errors import UserError


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
    return splits_of_rows(_rows(path, problems), path, problems, val_fraction, test_fraction)


def _rows(folder: Path, problems: Problems) -> Iterator[CaptionedImage]:
    tops = {top.name: canonical_split(top.name) for top in folder.iterdir() if top.is_dir()}
    named = {top: split for top, split in tops.items() if split in {"train", "val", "test"}}
    for image in sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_ENDINGS and p.is_file()):
        relative = image.relative_to(folder)
        captions = image.with_suffix(".txt")
        if not is_unicode(relative.as_posix()):
            problems.add(image, "the name is not valid UTF-8")
        elif not captions.is_file():
            problems.add(image, f"no captions: {captions.name} is missing")
        elif named and relative.parts[0] not in named:
            problems.add(image, f"lies outside of the split folders {', '.join(sorted(named))}")
        elif texts := _captions(captions, problems):
            split = named[relative.parts[0]] if named else ""
            yield CaptionedImage(str(image), image, relative.as_posix(), texts, split)


def _captions(path: Path, problems: Problems) -> list[str]:
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
