"""Ids of items: one line of text that a path of HTTP, a log and a table can hold; sides, directions and plain text."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

Direction = Literal["i2t", "t2i"]
"""Images search among texts, or texts among images."""

Side = Literal["image", "text"]
"""The modality of an item."""

DIRECTIONS: tuple[Direction, ...] = ("i2t", "t2i")

DIRECTION_OF: dict[Side, Direction] = {"image": "i2t", "text": "t2i"}
"""The direction of a search by the side of its queries."""

OTHER_SIDE: dict[Side, Side] = {"image": "text", "text": "image"}
"""The side of the gallery by that of the queries."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")

MOST_TEXT = 1_000_000
NO_TEXT = f"a text holds NUL or half a character (a lone surrogate), or more than {MOST_TEXT:,} characters"
"""What is wrong with a text that no store takes."""


def id_error(id: str) -> str:
    r"""What is wrong with an id."""
    if not id:
        return "the id '' is empty; expected a text"
    if not {".", ".."}.isdisjoint(id.split("/")):
        return f"the id {id!r} names a folder in paths; expected another text"
    if _CONTROL.search(id):
        return f"the id {id!r} holds a line break or another control character; expected one line of text"
    if _SURROGATE.search(id):
        return f"the id {id!r} is not Unicode (a lone surrogate); expected a text that UTF-8 can hold"
    return ""


def check_id(id: str) -> str:
    """The id itself, unless no gallery takes it."""
    if error := id_error(id):
        raise ValueError(error)
    return id


def is_text(value: object) -> bool:
    """Whether every store can keep it, see :data:`NO_TEXT`: a string that UTF-8 can write, and without NUL."""
    return isinstance(value, str) and len(value) <= MOST_TEXT and "\0" not in value and not _SURROGATE.search(value)


def plain_id(path: str) -> str:
    """A path as an id: clients of HTTP resolve the parts "." and "..", so it is without them, and never absolute."""
    return "/".join(part for part in path.split("/") if part not in (".", "..")).strip("/") or path


def check_ids(ids: Iterable[str], what: str) -> None:
    """Refuse ids that no gallery takes."""
    for row, id in enumerate(ids):
        if error := id_error(id):
            raise ValueError(f"{what}: row {row}: {error}")


def fits_pattern(path: str, pattern: str) -> bool:
    """Whether a path with "/" fits a shell pattern; one without a slash may fit the last part alone."""
    path, pattern = (unicodedata.normalize("NFC", one.strip("/")) for one in (path, pattern))
    return fnmatchcase(path, pattern) or ("/" not in pattern and fnmatchcase(path.rpartition("/")[2], pattern))


NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def plain_text(text: str) -> str:
    """A text in one form: NFKC, and nothing that is not seen, such as a zero-width space."""
    if text.isascii():
        return text
    return "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")


def composed(payload: Mapping[str, str]) -> dict[str, str]:
    """A payload with its texts in the composed form (NFC), as filters are; the fields of the package stay."""
    shown = {name: value for name, value in payload.items() if isinstance(value, str) and not name.startswith("_")}
    return {**payload, **{name: unicodedata.normalize("NFC", value) for name, value in shown.items()}}


def has_words(text: str) -> bool:
    """Whether a text has a letter or a digit, so that it can be searched for."""
    return any(letter.isalnum() for letter in plain_text(text))


def spelled_numbers(text: str) -> str:
    """A text with the numbers from 1 to 10 as words."""
    return re.sub(r"\b([1-9]|10)\b(?![.,:/-]\d)", lambda digits: NUMBERS[int(digits[0]) - 1], text)


Named = TypeVar("Named")


def first_twice(ids: Iterable[Named]) -> Named | None:
    """Find a repeated id."""
    return next((identity for identity, n in Counter(ids).items() if n > 1), None)


def uniform_hash(key: str) -> float:
    """A number that looks random and depends on a string alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48


def natural_key(name: str) -> list[str | int]:
    """Sorts a name with its numbers as numbers: 2 before 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))]
