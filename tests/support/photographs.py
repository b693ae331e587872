"""Small files as cameras write them, made on the spot."""

import io
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

RED, BLUE = (200, 30, 30), (30, 30, 200)


def halves(size=(640, 480)) -> Image.Image:
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


def saved(format: str, image: Image.Image | None = None, **options) -> bytes:
    file = io.BytesIO()
    (image or halves()).save(file, format, **options)
    return file.getvalue()


def heic(image: Image.Image | None = None) -> bytes:
    """Without Pillow's knowledge of the format, which the package under test has to give it."""
    import pillow_heif

    file = io.BytesIO()
    pillow_heif.from_pillow(image or halves()).save(file)
    return file.getvalue()


def iptc(*records: tuple[int, str]) -> bytes:
    """A Photoshop segment with IPTC records of section 2, for a JPEG file."""
    body = b"".join(struct.pack(">BBBH", 0x1C, 2, number, len(t := text.encode())) + t for number, text in records)
    block = b"Photoshop 3.0\x008BIM" + struct.pack(">HHI", 0x0404, 0, len(body)) + body + b"\0" * (len(body) % 2)
    return b"\xff\xed" + struct.pack(">H", len(block) + 2) + block


def write_video(path: Path, image: Image.Image | None = None, **metadata: str) -> None:
    import av

    image = image or halves()
    with av.open(str(path), "w", options={"movflags": "use_metadata_tags"} if path.suffix == ".mov" else {}) as file:
        file.metadata.update(metadata)
        stream = file.add_stream("mpeg4", rate=Fraction(5))
        stream.width, stream.height, stream.pix_fmt = *image.size, "yuv420p"
        for shown in (image, Image.new("RGB", image.size)):
            file.mux(stream.encode(av.VideoFrame.from_image(shown)))
        file.mux(stream.encode())


def dng(preview: bytes = b"", size=(640, 480), camera=("Canon", "Canon EOS 5D")) -> bytes:
    """A raw file of :func:`halves`: a colour filter array of 16 bits, and a JPEG preview if one is given."""
    rgb = np.asarray(halves(size))
    mosaic = np.empty(rgb.shape[:2], "<u2")
    for (y, x), channel in {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 2}.items():
        mosaic[y::2, x::2] = rgb[y::2, x::2, channel].astype(np.uint16) * 257
    width, height = size
    matrix = [1, 0, 0, 0, 1, 0, 0, 0, 1]
    raw = {
        254: (4, [0]), 256: (4, [width]), 257: (4, [height]), 258: (3, [16]), 259: (3, [1]), 262: (3, [32803]),
        273: (4, [("data", mosaic.tobytes())]), 277: (3, [1]), 278: (4, [height]), 279: (4, [mosaic.nbytes]),
        33421: (3, [2, 2]), 33422: (1, [0, 1, 1, 2]),
    }  # fmt: skip
    about = {
        271: (2, camera[0].encode() + b"\0"), 272: (2, camera[1].encode() + b"\0"), 274: (3, [1]),
        306: (2, b"2024:06:13 12:01:09\0"), 50706: (1, [1, 4, 0, 0]), 50708: (2, camera[1].encode() + b"\0"),
        50721: (10, [part for value in matrix for part in (value, 1)]),
    }  # fmt: skip
    if not preview:
        return _tiff([raw | about])
    shown = {
        254: (4, [1]), 256: (4, [width]), 257: (4, [height]), 258: (3, [8, 8, 8]), 259: (3, [7]), 262: (3, [6]),
        273: (4, [("data", preview)]), 277: (3, [3]), 278: (4, [height]), 279: (4, [len(preview)]),
        330: (4, [("directory", 1)]),
    }  # fmt: skip
    return _tiff([shown | about, raw])


def _tiff(directories: list[dict]) -> bytes:
    """Directories tag -> (type, values); a value ("data", bytes) or ("directory", k) becomes its position."""
    sizes, starts = {1: ("B", 1), 2: ("s", 1), 3: ("H", 1), 4: ("I", 1), 10: ("i", 2)}, [8]
    for directory in directories:
        starts.append(starts[-1] + 2 + 12 * len(directory) + 4)
    head, extra = b"", b""
    for directory in directories:
        head += struct.pack("<H", len(directory))
        for tag, (kind, values) in sorted(directory.items()):
            code, per = sizes[kind]
            if kind == 2:
                count, packed = len(values), values
            else:
                resolved = []
                for value in values:
                    if isinstance(value, tuple) and value[0] == "data":
                        resolved.append(starts[-1] + len(extra))
                        extra += value[1]
                    else:
                        resolved.append(starts[value[1]] if isinstance(value, tuple) else value)
                count, packed = len(values) // per, struct.pack(f"<{len(resolved)}{code}", *resolved)
            if len(packed) > 4:
                extra += b"\0" * (len(extra) % 2)
                position = struct.pack("<I", starts[-1] + len(extra))
                extra += packed
            else:
                position = packed.ljust(4, b"\0")
            head += struct.pack("<HHI", tag, kind, count) + position
        head += struct.pack("<I", 0)
    return struct.pack("<2sHI", b"II", 42, 8) + head + extra
