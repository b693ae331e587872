"""What the file of a photograph says about it: captions, title, tags, name, folder, date, place and camera.

From EXIF, IPTC and XMP in the file, and from files beside it: ``photo.txt`` with captions, an XMP sidecar, the JSON of
Google Takeout. No pixel is decoded. With the extra places, a position (GPS) gives the names of city, state and country.
Damaged metadata are no metadata. With the extra ocr, lines of text in the pixels are read, too.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, cast
from xml.etree import ElementTree

from PIL import ExifTags, Image, ImageFile, IptcImagePlugin

from sfumato.data.image_decoding import decode_image, opened_image
from sfumato.errors import first_line
from sfumato.files import read_regular

LINES, LENGTH = 100, 1000
"""Largest number of lines of a field, and of characters of a line; the rest is cut."""

MAX_SIDECAR = 10_000_000
"""Largest file of texts beside an image, in bytes."""

_MOST_ELEMENTS = 500
"""Elements of an XMP packet that are read; nested ones would be read again and again."""

_FIELDS = ("captions", "title", "tags", "date", "place", "country", "camera")
_LISTS = ("captions", "tags")
_DATES = ("date", "changed", "taken", "named")
"""Dates from the most to the least certain; of Takeout, in UTC, is "taken"."""

_RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"

_SPACES = {
    "http://purl.org/dc/elements/1.1/": {"description": "captions", "title": "title", "subject": "tags"},
    "http://iptc.org/std/Iptc4xmpExt/2008-02-29/": {"PersonInImage": "tags"},
    "http://www.metadataworkinggroup.com/schemas/regions/": {"Name": "tags"},  # a face with its name
    "http://ns.adobe.com/exif/1.0/": {"DateTimeOriginal": "date"},
    "http://ns.adobe.com/photoshop/1.0/": {"DateCreated": "date", "City": "city", "Country": "country"},
    "http://ns.adobe.com/tiff/1.0/": {"Make": "make", "Model": "model"},
}
_XMP = {f"{{{space}}}{name}": field for space, names in _SPACES.items() for name, field in names.items()}
_IPTC = {120: "captions", 5: "title", 25: "tags", 55: "date", 90: "city", 101: "country"}
_TAG = ExifTags.Base
_XP_TITLE, _XP_COMMENT, _XP_KEYWORDS = 0x9C9B, 0x9C9C, 0x9C9E

_DATE = re.compile(r"\s*(\d{4})(?:[-:]?(\d\d)(?:[-:]?(\d\d)(?:[T ]?(\d\d):?(\d\d)(?::?(\d\d))?)?)?)?")
_NAMED_DATE = re.compile(
    r"(?<!\d)((?:19|20)\d\d)([-_.]?)(0[1-9]|1[0-2])\2(0[1-9]|[12]\d|3[01])"
    r"(?:(?:[-_ .T]| at )?([01]\d|2[0-3])([-_.]?)([0-5]\d)\6([0-5]\d)(?:\d{3})?(?! ?[ap]m))?(?!\d)",
    re.IGNORECASE,
)
"""A date in the name of a file, with the time if it counts 24 hours."""

_TAKEOUT, _CUT = ("", ".supplemental-metadata"), 46
_NUMBERED = re.compile(r"(.*?)(\(\d+\))?", re.DOTALL)
_EDITED = re.compile(
    r"-(?:e(?:d(?:i(?:t(?:ed?)?)?)?)?|bearbeitet|modifié|editad[oa]|modificato|bewerkt|edytowane|redigera?[dt]|muokattu"
    r"|upraveno|düzenlendi|изменено|编辑|已修改|編集済み|수정됨|effects)(\(\d+\))?",
    re.IGNORECASE,
)
"""The end of the name of a copy that Google Photos edited; like all names it may be cut."""

_DEFAULT_CAPTION = re.compile(
    r"<.*>|.*digital (still )?camera|.*camera pictures|sony dsc|default|untitled|screenshot|exif[_ ]jpeg.*|applemark"
    r"|creator: gd-jpeg.*|created with .*|lead technologies.*|binary comment|image description|charset=.*",
    re.IGNORECASE,
)
"""Descriptions that cameras and programs write into every file."""

_COMPANY = re.compile(
    r"[\s,]+(corporation|corp|imaging|co|ltd|inc|company|electronics|camera|optical|gmbh|ag)\b.*", re.IGNORECASE
)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_CHUNK = re.compile(r"[^\W_]+")
_YEAR = re.compile("(?:19|20)[0-9][0-9]")
_DATED = re.compile(r"(?<!\d)(?:19|20)\d\d[-_. ]?\d[-_. \d]*")
_PARTS = re.compile(r"(?<=[^\W\dA-Z_])(?=[A-Z])")
_CAMERA_FOLDER = re.compile(r"\d{3}[A-Z_\d]{5}")
_NO_WORDS = frozenset(
    "dcim img mvimg vid mov image images photo photos picture pictures pic pics camera edited copy whatsapp".split()  # noqa: SIM905
)

_STORAGE = frozenset("train training val valid validation dev test testing data dataset datasets home".split())  # noqa: SIM905
"""Names of folders, with a number or without, that say how files are kept; "train.jpg" may be a train."""

Found = Iterator[tuple[str, str]]
"""(field, text); a camera is "make" and "model", a place "city", "state" and "country", "changed" a date."""

_FAR = 1.0
"""A position that is more degrees than this from the nearest town has no place."""


def describe_image(data: bytes) -> dict[str, str]:
    """The fields captions, title, tags, date, place, country and camera of the metadata in an image file."""
    with contextlib.suppress(Exception), opened_image(data, max_pixels=None) as image:
        readers = _of_exif(image), _of_xmp(_packet(image)), _of_iptc(image), _of_position(image)
        found = [pair for reader in readers for pair in _safe(reader)]
        return _fields((field, text) for field, text in found if field != "captions" or _is_caption(text))
    return {}


OCR = "ocr"
"""Field of the lines of text that are in the pixels."""

_READ, _LOOK, _SURE = 1280, 320, 0.8
"""Pixels of the sides of the copies in which text is read and looked for, and confidence from which a line counts."""

_WORDY = re.compile(r"\w{3}|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]{2}")  # two of Chinese, Japanese, Korean

_READING = threading.Lock()


def reads_text() -> bool:
    """Whether the package that reads text in images is installed."""
    return find_spec("rapidocr") is not None


@functools.cache
def _reader() -> Any:
    from rapidocr import RapidOCR

    return RapidOCR(params={"Global.log_level": "critical", "Det.limit_type": "max", "Det.limit_side_len": 960})


def lines_in(data: bytes) -> str:
    """The lines of text in the pixels of an image; "" if a small copy shows none, which is found out fast."""
    image = Image.fromarray(decode_image(data, None).transpose(1, 2, 0))
    image.thumbnail((_READ, _READ))
    small = image.copy()
    small.thumbnail((_LOOK, _LOOK))
    with _READING:
        if _reader()(small, use_det=True, use_cls=False, use_rec=False).boxes is None:
            return ""
        found = _reader()(image, use_det=True, use_cls=True, use_rec=True)
    lines = zip(found.txts or (), found.scores or (), strict=True)
    sure = [" ".join(line.split())[:LENGTH] for line, score in lines if score >= _SURE and _WORDY.search(line)]
    return "\n".join(sure[:LINES])


def names_in(folder: Path) -> dict[str, str]:
    """The files of a folder, by their names and by :func:`_folded` ones, for :func:`sidecars`; none if unreadable."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    return {_folded(name): name for name in names} | {name: name for name in names}


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def sidecars(name: str, names: Mapping[str, str]) -> list[str]:
    """The files of texts beside an image: captions, XMP, and what Google Takeout wrote, in any case of letters."""

    def there(wanted: Iterable[str]) -> list[str]:
        found = (names.get(one) or names.get(_folded(one)) for one in wanted)
        return [one for one in dict.fromkeys(found) if one]

    stem, ending = os.path.splitext(name)
    takeout = there(_takeout_names(stem, ending))
    if not takeout and (end := _EDITED.search(stem)) and end.end() == len(stem):
        takeout = there(_takeout_names(stem[: end.start()] + (end[1] or ""), ending))
    return there([f"{stem}.txt", f"{stem}.xmp", f"{name}.xmp"]) + takeout[:1]


def _takeout_names(stem: str, ending: str) -> Iterator[str]:
    """What Takeout may call the JSON of an image: cut, without its ending, and with its number at the end."""
    bare, number = _NUMBERED.fullmatch(stem).groups("")  # type: ignore[union-attr]
    titles = ((bare + ending, number), (bare, number), (stem + ending, ""), (stem, ""))
    for longest in (None, _CUT):
        yield from (f"{(title + end)[:longest]}{count}.json" for title, count in titles for end in _TAKEOUT)


def file_fields(
    root: Path, file: str, data: bytes, beside: Sequence[str], remark: Callable[[Path, str], None], shared: int = 0
) -> dict[str, str]:
    """The payload of an image file: its metadata, the texts beside it, the words of its name, and its folder.

    A name with a number, such as IMG_1039.jpg, is kept in parts, and can be searched for. Words of the first ``shared``
    folders, and of those for storage, say nothing about the image. ``data`` are its bytes as
    :func:`~sfumato.data.image_decoding.still_bytes` gives them, ``beside`` its :func:`sidecars`. What is wrong with one
    of these is remarked, and stops nothing.
    """
    below, found = PurePosixPath(file), list[tuple[str, str]]()
    for name in beside:
        path = root / below.parent / name
        try:
            found.extend(_SIDECARS[path.suffix.lower()](read_regular(path, MAX_SIDECAR, root)))
        except OSError as error:
            remark(path, f"{UNREADABLE}{error.strerror}")
        except Exception as error:  # Whatever a parser raises.
            remark(path, f"not UTF-8: {error}" if isinstance(error, UnicodeError) else first_line(error))
    own_fields = describe_image(data)
    found += [(field, line) for field in _FIELDS if field in own_fields for line in own_fields[field].split("\n")]
    if date := _NAMED_DATE.search(below.stem):
        time = f"T{':'.join(date.group(5, 7, 8))}" if date[5] else ""
        found.append(("named", "-".join(date.group(1, 3, 4)) + time))
    folder = unicodedata.normalize("NFC", below.parent.as_posix())
    parts = PurePosixPath(folder).parts[shared:]
    folders = [part for part in parts if part.casefold().rstrip("0123456789") not in _STORAGE]
    words = " ".join(_words([*folders, _DATED.sub(" ", unicodedata.normalize("NFC", below.stem))]))
    numbered = " ".join(_CHUNK.findall(below.name)) if re.search(r"\d{3}", below.stem) else ""
    return _fields(found) | _kept({"name": words, "file": numbered, "folder": "" if folder == "." else folder})


def _is_caption(text: str) -> bool:
    """Whether a description is none that a camera or a program wrote, such as a file name."""
    return bool(_words([text])) and not _DEFAULT_CAPTION.fullmatch(text.strip(" \0"))


def _safe(found: Found) -> list[tuple[str, str]]:
    """What a reader finds before the first damage."""
    result = []
    with contextlib.suppress(Exception):
        for field, text in found:
            result.append((field, text))
    return result


def _fields(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """All captions and tags, and of the other fields the first text."""
    lists: dict[str, dict[str, str]] = {field: {} for field in _LISTS}
    first: dict[str, str] = {}
    for field, text in found:
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LENGTH]
        if field in _DATES:
            line = _date(line)
        if line and field in lists:
            if len(lists[field]) < LINES:
                lists[field].setdefault(line.casefold(), line)
        elif line:
            first.setdefault(field, line)
    values = {field: "\n".join(lines.values()) for field, lines in lists.items()} | first
    values["place"] = first.get("place") or ", ".join(first[f] for f in ("city", "state", "country") if f in first)
    values["date"] = next((first[field] for field in _DATES if field in first), "")
    values["camera"] = first.get("camera") or _camera(first.get("make", ""), first.get("model", ""))
    return _kept({field: values.get(field, "") for field in _FIELDS})


def _kept(values: dict[str, str]) -> dict[str, str]:
    return {field: text for field, text in values.items() if text}


def _exif(image: Image.Image) -> Image.Exif:
    """Of a PNG file only what precedes its pixels: Pillow would decode them to look behind."""
    if image.format != "PNG":
        return image.getexif()
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    return exif


def _of_position(image: Image.Image) -> Found:
    gps, places = _exif(image).get_ifd(ExifTags.IFD.GPSInfo), list[float]()
    for tag, negative in ((ExifTags.GPS.GPSLatitude, "S"), (ExifTags.GPS.GPSLongitude, "W")):
        degrees, minutes, seconds = map(float, gps[tag])
        value = degrees + minutes / 60 + seconds / 3600
        places.append(-value if gps.get(tag - 1) == negative else value)
    yield from _of_place(*places)


def _of_place(latitude: float, longitude: float) -> Found:
    """The nearest town of a position, if the package that knows it is installed."""
    with contextlib.suppress(ImportError):
        import reverse_geocode

        found = reverse_geocode.get((latitude, longitude))
        if abs(found["latitude"] - latitude) + abs(found["longitude"] - longitude) < _FAR:
            yield from ((field, str(found.get(field, ""))) for field in ("city", "state", "country"))


def _of_exif(image: Image.Image) -> Found:
    exif = _exif(image)
    inner = exif.get_ifd(ExifTags.IFD.Exif)
    yield from (("date", str(inner.get(tag, ""))) for tag in (_TAG.DateTimeOriginal, _TAG.DateTimeDigitized))
    for field, tag in (("changed", _TAG.DateTime), ("make", _TAG.Make), ("model", _TAG.Model)):
        yield field, str(exif.get(tag, ""))
    yield "captions", _repaired(exif.get(_TAG.ImageDescription, ""))
    yield "title", _utf16(exif.get(_XP_TITLE, b""))
    yield "captions", _utf16(exif.get(_XP_COMMENT, b""))
    yield from (("tags", tag) for tag in _utf16(exif.get(_XP_KEYWORDS, b"")).split(";"))
    for field, name in (("title", "Title"), ("captions", "Description")):  # Text chunks of PNG files.
        yield field, str(image.info.get(name, ""))


def _repaired(text: object) -> str:
    """A text of EXIF, which Pillow reads as Latin-1 and most programs write as UTF-8."""
    try:
        return str(text).encode("latin-1").decode()
    except UnicodeError:
        return str(text)


def _utf16(value: Any) -> str:
    return bytes(value).decode("utf-16-le", errors="replace")


def _packet(image: Image.Image) -> bytes:
    """The XMP packet of an image."""
    packet = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or b""
    return packet.encode() if isinstance(packet, str) else bytes(packet)


def _of_xmp(packet: bytes) -> Found:
    """No declaration of entities is accepted, so that none can be expanded: what defusedxml would do."""
    text = packet.decode("utf-8-sig").strip("\0 \r\n\t")
    if not text or "<!DOCTYPE" in text or "<!ENTITY" in text:
        return
    every = ElementTree.fromstring(text).iter()
    named = (one for one in every if one.tag in _XMP or not _XMP.keys().isdisjoint(one.attrib))
    for element in itertools.islice(named, _MOST_ELEMENTS):
        yield from ((_XMP[name], value) for name, value in element.attrib.items() if name in _XMP)
        if field := _XMP.get(element.tag):
            inner = [item.text for item in itertools.islice(element.iter(f"{_RDF}li"), LINES)] or [element.text]
            yield from ((field, value) for value in inner if value)


def _of_iptc(image: Image.Image) -> Found:
    records = IptcImagePlugin.getiptcinfo(cast(ImageFile.ImageFile, image)) or {}
    clock = "".join(_iptc_texts(records.get((2, 60))))
    for number, field in _IPTC.items():
        for text in _iptc_texts(records.get((2, number))):
            yield field, text + clock if field == "date" else text


def _iptc_texts(value: Any) -> list[str]:
    """Values of a record; UTF-8 whether declared or not, else Latin-1."""
    texts = []
    for item in value if isinstance(value, list) else [value] if value else []:
        try:
            texts.append(bytes(item).decode())
        except UnicodeDecodeError:
            texts.append(bytes(item).decode("latin-1"))
    return texts


def _of_takeout(content: bytes) -> Found:
    """Description, people and date (UTC) of Google Takeout; other JSON has none of these."""
    values = json.loads(content)
    if not isinstance(values, dict):
        return
    yield "captions", str(values.get("description", ""))
    yield from (("tags", str(person.get("name", ""))) for person in values.get("people", ()))
    if taken := values.get("photoTakenTime"):
        # Windows makes no date before 1970 of a timestamp.
        yield "taken", (datetime.fromtimestamp(0, UTC) + timedelta(seconds=int(taken["timestamp"]))).isoformat()
    if (position := values.get("geoData")) and any(position.values()):
        yield from _of_place(position["latitude"], position["longitude"])


def _of_captions(content: bytes) -> Found:
    yield from (("captions", line) for line in content.decode("utf-8-sig").splitlines())


_SIDECARS: dict[str, Callable[[bytes], Found]] = {".txt": _of_captions, ".xmp": _of_xmp, ".json": _of_takeout}
UNREADABLE = "cannot be read: "
"""Begins the remark on a sidecar that may be read another time."""


def _date(text: str) -> str:
    """The date of any notation in ISO form, as exact as it is given; "" for none."""
    if not (found := _DATE.match(text)):
        return ""
    year, month, day, hour, minute, second = found.groups()
    try:
        datetime(int(year), int(month or 1), int(day or 1), int(hour or 0), int(minute or 0), int(second or 0))
    except ValueError:
        return ""
    return "-".join(filter(None, (year, month, day))) + (f"T{hour}:{minute}:{second or '00'}" if hour else "")


def _camera(make: str, model: str) -> str:
    """The model, after the name of its maker if it does not begin with it."""
    maker = _COMPANY.sub("", make)
    known = {word.casefold() for word in make.split()}
    return model if model and model.split()[0].casefold() in known else f"{maker} {model}".strip()


def _words(names: Iterable[str]) -> list[str]:
    """The words of names of files and folders: no numbers but years, no abbreviations of cameras, no hashes."""
    words: dict[str, str] = {}
    for name in names:
        if _CAMERA_FOLDER.fullmatch(name):
            continue
        for chunk in _CHUNK.findall(_UUID.sub(" ", name)):
            if _YEAR.fullmatch(chunk):
                words.setdefault(chunk, chunk)
            bare = chunk.strip("0123456789")
            if bare.isalpha() and bare.casefold() not in _NO_WORDS:
                for word in _PARTS.split(bare):
                    if _is_word(word) and (len(bare) == len(chunk) or _is_long(word)):
                        words.setdefault(word.casefold(), word)
    return list(words.values())


def _is_long(text: str) -> bool:
    """Whether letters beside digits are a word, unlike those of 2088394eb4 and 533ceeddfc."""
    return len(text) > 2 and not set(text.casefold()) <= set("abcdef")


def _is_word(text: str) -> bool:
    low = text.casefold()
    if not low.isascii():
        return True
    hexadecimal = len(low) >= 8 and not set(low) - set("abcdef")
    return len(low) > 1 and bool(set(low) & set("aeiouy")) and low not in _NO_WORDS and not hexadecimal
