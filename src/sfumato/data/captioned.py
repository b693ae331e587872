"""Rows of images with their captions, read from manifests or image folders, and their conversion to splits.

This module does not depend on the files that the rows come from.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sfumato.data.images import FileImage
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.data.problems import Problems
from sfumato.errors import UserError

_SPLIT_NAMES = {"restval": "train", "training": "train", "valid": "val", "validation": "val", "dev": "val"}


@dataclass(frozen=True)
class CaptionedImage:
    """An image file with its captions.

    Attributes:
        location: where the row stands, for messages.
        image: path of the image file.
        id: id of the image.
        captions: its captions, at least one, none empty.
        split: name of its split; "" if the data does not say.
    """

    location: str
    image: Path
    id: str
    captions: list[str]
    split: str


def check_fractions(val_fraction: float, test_fraction: float) -> None:
    """Raise an error if the fractions leave no images for training.

    Args:
        val_fraction: fraction of the images for validation.
        test_fraction: fraction of the images for the test.

    Raises:
        ValueError: one is negative, or their sum is 1 or more.
    """
    if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
        raise ValueError(
            "val_fraction and test_fraction must not be negative, and below 1 together;"
            f" got {val_fraction} and {test_fraction}"
        )


def canonical_split(name: str) -> str:
    """The canonical name of a split: "valid", "validation" and "dev" become "val", "restval" becomes "train".

    Args:
        name: name of the split in the data, in upper or lower case.

    Returns:
        The canonical name in lower case.

    Example:
        >>> canonical_split("Validation"), canonical_split("mine")
        ('val', 'mine')
    """
    name = name.strip().lower()
    return _SPLIT_NAMES.get(name, name)


def is_unicode(text: str) -> bool:
    r"""Whether a text can be written as UTF-8; undecodable bytes and lone surrogates cannot.

    Args:
        text: any string.

    Returns:
        True if it can.

    Example:
        >>> is_unicode("Hund"), is_unicode("\ud800")
        (True, False)
    """
    return not any("\ud800" <= c <= "\udfff" for c in text)


def usable_captions(location: str, captions: Iterable[str], problems: Problems) -> list[str]:
    """The captions that are not empty, stripped of surrounding white space.

    Args:
        location: where they stand, for messages.
        captions: all captions of an image.
        problems: receives the empty ones.

    Returns:
        The captions that are not empty, in their order.
    """
    usable = []
    for caption in captions:
        if caption.strip():
            usable.append(caption.strip())
        else:
            problems.add(location, "empty caption")
    return usable


def splits_of_rows(
    rows: Iterable[CaptionedImage], source: Path, problems: Problems, val_fraction: float, test_fraction: float
) -> dict[str, PairData]:
    """Convert rows to splits; rows with the same image and split are merged.

    Args:
        rows: the usable rows.
        source: where they come from, for the message.
        problems: receives ids that occur with two images or in two splits.
        val_fraction: fraction of the images for "val" where no row names a split, chosen by a hash of the id, so that
            new rows never change the split of old rows. If some rows name a split, the rows without one are in "train".
        test_fraction: the same for "test".

    Returns:
        split -> data.

    Raises:
        UserError: there are no rows.
    """
    rows = list(rows)
    if not rows:
        raise UserError(f"{source} holds no usable pair of image and caption:\n{problems.summary()}")
    named = any(row.split for row in rows)
    chosen: dict[str, dict[str, CaptionedImage]] = {}
    seen: set[str] = set()
    for row in rows:
        split = (row.split or "train") if named else _hashed_split(row.id, val_fraction, test_fraction)
        if row.id in seen:
            known = chosen.get(split, {}).get(row.id)
            if known is None or known.image != row.image:
                problems.add(row.location, f"id {row.id!r} occurred before, with another image or split")
                continue
            known.captions.extend(row.captions)  # Many manifests have one row for each caption.
            continue
        seen.add(row.id)
        chosen.setdefault(split, {})[row.id] = row
    return {
        split: make_pair_data(list(own), [FileImage(r.image) for r in own.values()], [r.captions for r in own.values()])
        for split, own in chosen.items()
    }


def _hashed_split(identity: str, val_fraction: float, test_fraction: float) -> str:
    number = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:6], "big") / 2**48
    return "val" if number < val_fraction else "test" if number < val_fraction + test_fraction else "train"
