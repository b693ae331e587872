"""Decoding of image files to pixels. It needs numpy and Pillow alone, so that a process that only decodes is small.

HEIC, RAW files and videos need an extra each, whose package is imported when such a file is read.
"""

import importlib.util
import io
import itertools
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from PIL import ExifTags, Image, JpegImagePlugin, UnidentifiedImageError

from sfumato.files import read_regular

Frame = TypeVar("Frame")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "HEIF", "AVIF")
"""Pillow's names of the formats that are read; others (EPS, say, which runs a program) are refused."""

_RAW_ENDINGS = frozenset({
    ".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".iiq", ".kdc", ".mef", ".mos", ".mrw", ".nef",
    ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f",
})  # fmt: skip

EXTRAS: dict[str, tuple[str, frozenset[str]]] = {
    "heif": ("pillow_heif", frozenset({".heic", ".heif", ".hif"})),
    "raw": ("rawpy", _RAW_ENDINGS),
    "video": ("av", frozenset({".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm", ".mts", ".3gp"})),
}
"""The extras that read further files: their package, and the endings of the files."""

PLAIN_ENDINGS = frozenset({
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif",
})  # fmt: skip
"""File name endings of the images that need no extra."""

IMAGE_ENDINGS = PLAIN_ENDINGS.union(*(endings for _, endings in EXTRAS.values()))
"""File name endings that count as images when a folder is searched."""

MAX_PIXELS = 80_000_000
"""Larger images are refused: a small file can hold an image that fills the memory. Below pillow's own limit."""

_QUARTERED, _MAX_JPEG = 40_000_000, 4 * MAX_PIXELS
"""JPEG files between these numbers of pixels are decoded at a quarter of their width and height."""

_CONTAINERS = {"format_whitelist": "mov,matroska,webm,avi,mpegts", "protocol_whitelist": "none"}
"""What a video may be, whatever its name; a list of files or a session would have others opened."""

_MAX_BYTES = 1 << 30
"""Size of a file from which it is no photograph."""

REDUCED_FROM = 4_000_000
"""Number of pixels from which :func:`decode_image` decodes a JPEG file at a reduced size, if it may."""

_KEPT = 3
"""Times the size that a reduced JPEG keeps at least. Features of EfficientNet-Lite0 of 12 megapixels at a quarter
have a mean cosine of .9997 with those of all pixels."""

USUAL_SIZE = 512
"""Side in pixels that is assumed where the network resizes by itself."""

_PLAIN = 64
"""Range of a channel, of 255, below which an image counts as one colour."""

_MOST_FRAMES, _ANIMATED = 300, ("GIF", "WEBP", "PNG", "AVIF")
"""Frames of a video that are looked at for one that is not one colour; formats of animations."""

_SMALL = 400
"""Longer side of an embedded preview, in pixels, below which a RAW file is developed instead."""

_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}

Fit = Literal["squash", "crop", "crop-nearest", "crop-margin"]
"""How an image becomes a square: by changing its aspect, or by cutting off the ends of its longer side. The two crops
differ by at most one pixel: where the ends have an odd number of pixels together, "crop" starts at the pixel before the
exact centre, and "crop-nearest" at the even one of its two neighbours. "crop-margin" cuts the centre out of an image
whose shorter side is 8/7 as long as the square: 256 pixels for 224, as usual for ImageNet."""

Box = tuple[float, float, float, float]
"""(left, top, width, height) of a part of an image, as fractions of its width and height."""

_TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
_UPRIGHT = {orientation: Image.Transpose[turn] for orientation, turn in enumerate(_TURNS.split(), 2)}
"""What turns an image upright, by the orientation in its EXIF data."""

_TURNED = (5, 6, 7, 8)
"""EXIF orientations that exchange width and height."""


# Exceptions that pillow's parsers raise on damaged files, beside OSError and ValueError.
_DAMAGED = (SyntaxError, TypeError, EOFError, LookupError, OverflowError, RuntimeError, struct.error)


def decode_image(
    data: bytes,
    size: int | None,
    *,
    fit: Fit = "squash",
    crop: Box | Callable[[float], Box] | None = None,
    upright: bool = True,
    reduced: bool = False,
) -> np.ndarray:
    """Decode an image of any mode: turned upright by its EXIF data, in RGB.

    Transparency is on white, or on black where a drawing does not stand out from white; an animation is its first frame
    that is not one colour. Returns (3, h, w).
    """
    if fit not in get_args(Fit):
        raise ValueError(f"unknown fit {fit!r}; known: {', '.join(get_args(Fit))}")
    if crop is not None and not callable(crop):
        _check_box(crop)
    with opened_image(data) as image:
        if callable(crop):
            width, height = image.size
            turned = upright and _orientation(image) in _TURNED
            crop = crop(height / width if turned else width / height)
        if crop is not None and size is not None:
            enough = math.ceil(2 * size / min(crop[2:]))
            image.draft(None, (enough, enough))
        elif reduced and image.width * image.height > REDUCED_FROM:
            image.draft(None, (_KEPT * (size or USUAL_SIZE),) * 2)
        if image.format in _ANIMATED and getattr(image, "is_animated", False):
            _seek_varied(image)
        rgb = _on_ground(_upright(image) if upright else image)
    if crop is not None:
        rgb = rgb.crop(_pixels(crop, rgb.size))
    if size is not None and rgb.size != (size, size):
        rgb = rgb.resize((size, size), Image.Resampling.BICUBIC) if fit == "squash" else _centre(rgb, size, fit)
    return np.ascontiguousarray(np.asarray(rgb).transpose(2, 0, 1))


def check_image(data: bytes) -> None:
    """Check quickly whether an image can be decoded; the whole file is read."""
    with opened_image(data) as image:
        # A JPEG is decoded at an eighth of its size: the stream is read to the end without all pixels.
        image.draft(None, (1, 1))
        image.load()
        # One pixel is enough to detect a mode or a palette that cannot be converted.
        _on_ground(image.crop((0, 0, 1, 1)))


@contextmanager
def opened_image(data: bytes, max_pixels: int | None = MAX_PIXELS) -> Iterator[Image.Image]:
    """An open image, not decoded yet; every error while it is open becomes a ValueError with a clear message."""
    if not data:
        raise ValueError("the file is empty")
    try:
        if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
            _register_heif()
        with _open(data) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise ValueError(f"{image.width} x {image.height} pixels are more than the limit of {max_pixels}")
            yield image
    except UnidentifiedImageError as error:
        if data.startswith(b"\x93NUMPY"):
            raise ValueError('region features (.npy), not an image; model.image.kind="regions" reads them') from error
        raise ValueError(f"not an image in one of the formats {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"more pixels than the limit of {MAX_PIXELS}") from error
    except (OSError, *_DAMAGED) as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def _open(data: bytes) -> Image.Image:
    if not data.startswith(b"\xff\xd8\xff"):
        formats = [name for name in FORMATS if name != "HEIF" or name in Image.OPEN]
        return Image.open(io.BytesIO(data), formats=formats)
    # Not by Image.open, which refuses a JPEG file for the pixels that it has before they are reduced.
    image = JpegImagePlugin.jpeg_factory(io.BytesIO(data + b"\xff\xd9" if is_cut(data) else data))
    if _QUARTERED < image.width * image.height <= _MAX_JPEG:
        image.draft(None, (image.width // 4, image.height // 4))
    return image


_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


PIXELS = "_pixels"
"""Payload field: the number of pixels of an image, by which one stands for those that are nearly the same."""


def n_pixels(data: bytes) -> int:
    """Number of pixels of an image file, before any are reduced; 0 if its header cannot be read."""
    with suppress(ValueError), opened_image(data, max_pixels=None) as image:
        reduced = (getattr(image, "decoderconfig", ()) or (1,))[0]
        return image.width * image.height * int(reduced) ** 2
    return 0


def is_cut(data: bytes) -> bool:
    """Whether a JPEG file ends before its end marker; it is then read as far as it goes, and the rest is grey."""
    if not data.startswith(b"\xff\xd8\xff"):
        return False
    position = 2
    while marker := _MARKER.search(data, position):
        if marker[0] == b"\xff\xd9":
            return False
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])  # The length of the segment.
    return True


def needs_extra(name: str) -> str:
    """Why a file of this name cannot be read here: the extra to install; "" if nothing is missing."""
    ending = Path(name).suffix.lower()
    for extra, (package, endings) in EXTRAS.items():
        if ending in endings and importlib.util.find_spec(package) is None:
            return f'needs the extra {extra}: pip install "sfumato[{extra}]"'
    return ""


def spelt(endings: Collection[str]) -> str:
    """File name endings for a message; those that need an extra in short."""
    more = ", and HEIC, RAW and videos with their extras" if EXTRAS["heif"][1] <= set(endings) else ""
    return ", ".join(sorted(PLAIN_ENDINGS.intersection(endings) or endings)) + more


def still_bytes(path: Path) -> bytes:
    """The bytes of an image that :func:`decode_image` reads: the file, the preview of RAW, a frame of a video."""
    ending = path.suffix.lower()
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    for extra, read in (("raw", _raw_preview), ("video", _first_frame)):
        if ending in EXTRAS[extra][1]:
            if reason := needs_extra(path.name):
                raise ValueError(reason)
            return read(path)
    return read_regular(path, _MAX_BYTES)


def _register_heif() -> None:
    """Make Pillow read HEIC files."""
    if "HEIF" not in Image.OPEN:
        if reason := needs_extra("a.heic"):
            raise ValueError(reason)
        import pillow_heif

        pillow_heif.register_heif_opener()


def _raw_preview(path: Path) -> bytes:
    import rawpy

    with path.open("rb") as file:
        try:
            with rawpy.imread(file) as raw:
                if preview := _embedded_preview(raw):
                    return preview
                developed = Image.fromarray(raw.postprocess(half_size=True, use_camera_wb=True))
        except rawpy.LibRawError as error:
            reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            raise ValueError(f"cannot be decoded: {reason}") from error
    exif = Image.Exif()
    with suppress(Exception):  # Most RAW files are TIFF files inside.
        exif.load(path.read_bytes())
    taken = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal, exif.get(ExifTags.Base.DateTime))
    return _jpeg(developed, taken, exif.get(ExifTags.Base.Make), exif.get(ExifTags.Base.Model))


def _embedded_preview(raw: Any) -> bytes | None:
    """The preview that the camera wrote, with its orientation; None if there is none, or only a small one."""
    import rawpy

    try:
        preview = raw.extract_thumb()
        if preview.format != rawpy.ThumbFormat.JPEG:
            return None
        with opened_image(preview.data) as image:
            return bytes(preview.data) if max(image.size) >= _SMALL else None
    except (rawpy.LibRawNoThumbnailError, rawpy.LibRawUnsupportedThumbnailError, ValueError):
        return None


def _first_frame(path: Path) -> bytes:
    """The first frame that is not one colour, upright, with the date and the camera of the video as EXIF data."""
    import av

    with path.open("rb") as file:
        try:
            with av.open(file, "r", options=_CONTAINERS) as video:
                frames = itertools.islice(video.decode(video=0), _MOST_FRAMES) if video.streams.video else ()
                frame = _first_varied(frames, lambda one: one.to_image(width=64, height=64))
                if frame is None:
                    raise ValueError("cannot be decoded: the video has no frame")
                known = {key.removeprefix("com.apple.quicktime."): text for key, text in video.metadata.items()}
                image = frame.to_image().rotate(frame.rotation, expand=True)
        except (av.FFmpegError, OSError) as error:
            raise ValueError(f"cannot be decoded: {error.strerror}") from error
    return _jpeg(image, known.get("creationdate") or known.get("creation_time"), known.get("make"), known.get("model"))


def _first_varied(frames: Iterable[Frame], small: Callable[[Frame], Image.Image]) -> Frame | None:
    """The first frame that is not one colour; else the most varied one before a damaged one."""
    best, most = None, -1
    try:
        for frame in frames:
            if (found := _range(small(frame))) > most:
                best, most = frame, found
            if most >= _PLAIN:
                break
    except (OSError, ValueError, *_DAMAGED):
        if best is None:
            raise
    return best


def _seek_varied(image: Image.Image) -> None:
    def small(number: int) -> Image.Image:
        image.seek(number)
        return image

    most = max(MAX_PIXELS // (image.width * image.height), 1)
    image.seek(_first_varied(range(min(getattr(image, "n_frames", 1), most)), small) or 0)


def _range(image: Image.Image) -> int:
    """The largest range of a channel in a small copy."""
    small = image.convert("RGB").resize((32, 32), Image.Resampling.BOX)
    return int(np.ptp(np.asarray(small), axis=(0, 1)).max())


def _jpeg(image: Image.Image, *about: str | None) -> bytes:
    """A JPEG file; ``about`` are date, make and model, None where unknown."""
    file, exif = io.BytesIO(), Image.Exif()
    for tag, text in zip((ExifTags.Base.DateTime, ExifTags.Base.Make, ExifTags.Base.Model), about, strict=True):
        if text:
            exif[tag] = text
    image.convert("RGB").save(file, "JPEG", quality=92, exif=exif)
    return file.getvalue()


def _centre(rgb: Image.Image, size: int, fit: Fit) -> Image.Image:
    """Resize the shorter side to size (8/7 of it with a margin), round the longer one down, and crop the centre."""
    short, long = min(rgb.size), max(rgb.size)
    shorter = size * 8 // 7 if fit == "crop-margin" else size
    longer = int(shorter * long / short)
    # round() takes the even neighbour.
    edge, start = ((s - size) // 2 if fit == "crop" else round((s - size) / 2) for s in (shorter, longer))
    tall = rgb.height > rgb.width
    if shorter * longer > MAX_PIXELS:
        # A very long and thin image would fill the memory: its centre is cropped first, which may round differently.
        scale = long / longer
        along, across = (start * scale, (start + size) * scale), (edge * scale, (edge + size) * scale)
        part = (across[0], along[0], across[1], along[1]) if tall else (along[0], across[0], along[1], across[1])
        # Within the image: scaling may have rounded it over the edge.
        within: Any = tuple(np.clip(part, 0, rgb.size * 2).tolist())
        return rgb.resize((size, size), Image.Resampling.BICUBIC, box=within)
    rgb = rgb.resize((shorter, longer) if tall else (longer, shorter), Image.Resampling.BICUBIC)
    left, top = (edge, start) if tall else (start, edge)
    return rgb.crop((left, top, left + size, top + size))


def _check_box(box: Box) -> None:
    left, top, width, height = box
    # Sums of fractions may exceed 1 by rounding.
    if not (left >= 0 and top >= 0 and width > 0 and height > 0 and max(left + width, top + height) <= 1 + 1e-9):
        raise ValueError(f"crop must be (left, top, width, height) in fractions of the image, within [0, 1]; got {box}")


def _pixels(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A box in fractions -> (left, top, right, bottom) in pixels, at least one of each."""
    left, top = (min(round(start * side), side - 1) for start, side in zip(box[:2], size, strict=True))
    ends = zip(box[:2], box[2:], size, strict=True)
    right, bottom = (min(round((start + fraction) * side), side) for start, fraction, side in ends)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _upright(image: Image.Image) -> Image.Image:
    """Rotate an image by its EXIF data. With damaged EXIF data it is kept unchanged, because its pixels are valid."""
    image.load()
    orientation = _orientation(image)
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _orientation(image: Image.Image) -> int | None:
    """The orientation in the EXIF data; None without it."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except (OSError, ValueError, *_DAMAGED):
        return None


def _on_ground(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # 16-bit and float grey values are scaled from their own range to 8 bits; convert() would clip them.
        values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0.0)
        top = 65535.0 if image.mode.startswith("I") else max(float(values.max(initial=0)), 1e-12)
        return Image.fromarray((values.clip(0, top) * (255 / top)).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        grounds = [Image.new("RGBA", rgba.size, colour) for colour in ("white", "black")]
        white, black = (Image.alpha_composite(ground, rgba).convert("RGB") for ground in grounds)
        return white if _range(white) >= min(_PLAIN, _range(black)) else black
    return image.convert("RGB")


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode pixels as a PNG file, with little compression. pixels (3, h, w)."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, "PNG", compress_level=1)
    return file.getvalue()
