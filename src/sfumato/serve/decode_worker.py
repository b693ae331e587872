"""The process that decodes images for the service: one request after the other on its standard input.

It is started by :mod:`sfumato.serve.decoding`, has a memory limit and a limit of processor time where the system knows
them, and imports numpy and Pillow alone. Whatever a file does to it, the service goes on without it.

A message is two lengths, a JSON object and bytes. Nothing is pickled: the service must not trust what comes back.
"""

import contextlib
import io
import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps

from sfumato.data.image_decoding import Fit, decode_image, opened_image
from sfumato.data.photographs import describe_image

MAX_SCANS = 100
"""Scans of a progressive JPEG file; usual ones have ten. Each costs as much time as a whole image."""

Message = tuple[Mapping[str, Any], bytes]
"""A JSON object and bytes."""

KNOWS_ITS_TIME = hasattr(signal, "setitimer")
"""Whether the system ends a process that has used the processor for too long; Windows does not."""

_LENGTHS = struct.Struct(">IQ")
_SHOWN = {
    "PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif",
    "AVIF": "image/avif",
}  # fmt: skip
"""Formats that browsers show; others are re-encoded."""

_PHOTOGRAPHS = ("JPEG", "MPO", "HEIF", "AVIF", "TIFF")
"""Formats that become a JPEG file, unless something is transparent; others become a PNG file."""


def header(data: bytes) -> Message:
    """Read the header of an image file; nothing is decoded."""
    with opened_image(data, max_pixels=None) as image:
        return {"format": str(image.format), "width": image.width, "height": image.height}, b""


def square(data: bytes, size: int, fit: Fit) -> Message:
    """Decode an image to a square, see :func:`~sfumato.data.image_decoding.decode_image`. Returns (3, size, size)."""
    return {}, decode_image(data, size, fit=fit, reduced=True).tobytes()


def rgb(data: bytes, side: int | None) -> Message:
    """Decode an image of any format to one that is simple: upright, in RGB, uncompressed."""
    if side is not None:
        data = _drafted(data, side)
    image = Image.fromarray(decode_image(data, None).transpose(1, 2, 0))
    factor = 1 if side is None else min(image.size) // side
    return {}, _encoded(image.reduce(factor) if factor > 1 else image, "BMP")


def stored(data: bytes) -> Message:
    """Re-encode an image file, upright and in RGB, without its metadata, and give some of these as payload fields.

    The location of the camera is none of them.
    """
    with opened_image(data) as image:
        format = "PNG" if image.format == "TIFF" or image.format not in _PHOTOGRAPHS else "JPEG"
    pixels = np.ascontiguousarray(decode_image(data, None).transpose(1, 2, 0))
    return {"fields": describe_image(data)}, _encoded(Image.fromarray(pixels), format)


def shown(data: bytes, size: int | None) -> Message:
    """Convert a stored image for a browser."""
    with opened_image(data) as image:
        kind = str(image.format)
        if size is None and kind in _SHOWN:
            return {"type": _SHOWN[kind]}, b""
        if size is not None:
            image.draft(None, (2 * size, 2 * size))
        transparent = image.has_transparency_data
        kind = "JPEG" if kind in _PHOTOGRAPHS and not transparent else "PNG"
        if kind == "JPEG" and image.format not in ("JPEG", "MPO"):  # Scans of 16 bits, say.
            upright = Image.fromarray(decode_image(data, None).transpose(1, 2, 0))
        else:
            upright = ImageOps.exif_transpose(image)
        if size is not None:
            upright.thumbnail((size, size), Image.Resampling.BICUBIC)
        return {"type": _SHOWN[kind]}, _encoded(upright.convert("RGB" if kind == "JPEG" else "RGBA"), kind)


TASKS: dict[str, Callable[..., Message]] = {
    "header": header, "square": square, "rgb": rgb, "stored": stored, "shown": shown,
}  # fmt: skip
"""What the process can do with the bytes of an image file."""


def done(task: str, options: Mapping[str, Any], data: bytes) -> Message:
    """Do one task."""
    try:
        _check_scans(data)
        return TASKS[task](data, **options)
    except MemoryError:
        return {"error": "takes too much memory to decode; send a smaller copy"}, b""
    except ValueError as error:
        return {"error": str(error)}, b""


def send(pipe: IO[bytes], message: Message) -> None:
    """Write a message."""
    text, data = json.dumps(message[0]).encode(), message[1]
    pipe.write(_LENGTHS.pack(len(text), len(data)) + text)
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """Read a message."""
    of_text, of_data = _LENGTHS.unpack(_exactly(pipe, _LENGTHS.size))
    return json.loads(_exactly(pipe, of_text)), _exactly(pipe, of_data)


def _exactly(pipe: IO[bytes], n: int) -> bytes:
    data = pipe.read(n)
    if len(data) < n:
        raise EOFError
    return data


def _check_scans(data: bytes) -> None:
    scans = data.count(b"\xff\xda") if data.startswith(b"\xff\xd8") else 0
    if scans > MAX_SCANS:
        raise ValueError(f"a JPEG file with {scans} scans, more than the limit of {MAX_SCANS}; save it again")


def _drafted(data: bytes, side: int) -> bytes:
    """A large JPEG file decoded at a half, a quarter or an eighth of its size; anything else as it is."""
    with opened_image(data) as image:
        if image.format not in ("JPEG", "MPO") or min(image.size) < 2 * side:
            return data
        image.draft(None, (side, side))
        return _encoded(ImageOps.exif_transpose(image).convert("RGB"), "BMP")


def _encoded(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format, quality=90)
    return file.getvalue()


def _limit(memory_bytes: int) -> None:
    """Leave the computer to others: little memory, low priority, and no interest in Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if KNOWS_ITS_TIME:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # Ends the process.
    if hasattr(os, "nice"):
        os.nice(10)
    with contextlib.suppress(ImportError, OSError, ValueError):  # No such limit, or a stricter one holds already.
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _end_after(seconds: float) -> None:
    """End this process after so much time of the processor, where the system can; 0 for never."""
    if KNOWS_ITS_TIME:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main(memory_bytes: int) -> None:
    """Answer requests until the service closes the pipe."""
    _limit(memory_bytes)
    Image.MAX_IMAGE_PIXELS = None  # The service decides by the header.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # Nothing else may write there.
        while True:
            try:
                request, data = receive(sys.stdin.buffer)
            except EOFError:
                return
            _end_after(request["seconds"])
            answer = done(request["task"], request["options"], data)
            _end_after(0)
            del data
            send(answers, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
