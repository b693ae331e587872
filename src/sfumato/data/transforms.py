"""Pictures: from encoded bytes to squares of pixels, and the random changes of training."""

import io
import math
import struct

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the formats that are read; others (EPS, say, which runs a program) are refused."""

MAX_PIXELS = 80_000_000
"""Larger pictures are refused: a small file can hold a picture that fills the memory. Below pillow's own limit."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What pillow's parsers raise, beside OSError and ValueError, on files that are damaged in one place or another.
_DAMAGED = (SyntaxError, TypeError, EOFError, LookupError, OverflowError, RuntimeError, struct.error)


def decode_image(data: bytes, size: int | None) -> np.ndarray:
    """Decode a picture of any mode: turned upright, transparency on white, in RGB.

    Args:
        data: the bytes of a file in one of FORMATS; the first frame of several.
        size: side in pixels; resized to a square whatever the aspect (bicubic). None keeps the picture's own size.

    Returns:
        (3, h, w) uint8.

    Raises:
        ValueError: not a picture, cut short, or of more than MAX_PIXELS pixels.
    """
    if not data:
        raise ValueError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels are more than the limit of {MAX_PIXELS}")
            rgb = _on_white(_upright(picture))
    except UnidentifiedImageError as error:
        raise ValueError(f"not a picture in one of the formats {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"more pixels than the limit of {MAX_PIXELS}") from error
    except (OSError, *_DAMAGED) as error:
        raise ValueError(f"cannot be decoded: {error}") from error
    if size is not None and rgb.size != (size, size):
        rgb = rgb.resize((size, size), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(rgb).transpose(2, 0, 1))


def augment(pixels: Tensor, *, generator: torch.Generator) -> Tensor:
    """Random geometry and colours, different for each picture: what a drawing style may change and a thing's identity not.

    Rotation by up to 15 degrees, scale 0.75 to 1.15, shift by up to 12 % and, for every other picture, a mirror image; then a
    random background instead of white for half of them, brightness, contrast, a random mix of the colour channels, and grey
    for one in five.

    Args:
        pixels: (n, 3, h, w) uint8.
        generator: source of everything random, on the CPU.

    Returns:
        (n, 3, h, w) float32 in [0, 1].
    """
    n = len(pixels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(n, *shape, generator=generator) * (high - low) + low

    angle, scale = uniform(-math.pi / 12, math.pi / 12), uniform(0.75, 1.15)
    mirror = torch.where(uniform(0, 1) < 0.25, -1.0, 1.0)
    cos, sin = angle.cos() / scale, angle.sin() / scale
    matrix = torch.stack(
        [
            torch.stack([cos * mirror, -sin, uniform(-0.24, 0.24)], 1),
            torch.stack([sin * mirror, cos, uniform(-0.24, 0.24)], 1),
        ],
        1,
    )
    grid = functional.affine_grid(matrix, list(pixels.shape), align_corners=False)
    # Outside of the picture is 0, so it is turned negative: white stays white.
    dark = functional.grid_sample(1 - pixels.float() / 255, grid, align_corners=False)
    background = torch.where(uniform(0, 1, 1, 1, 1) < 0.5, uniform(0, 1, 3, 1, 1), 0.0)
    light = 1 - dark
    whiteness = light.amin(1, keepdim=True).sub(0.85).clamp_min(0) / 0.15
    picture = light * (1 - whiteness * background)
    mix = torch.eye(3) + 0.25 * torch.randn(n, 3, 3, generator=generator)
    mix = mix / mix.sum(2, keepdim=True).clamp_min(0.3)
    grey = uniform(0, 1, 1, 1) < 0.2
    mix = torch.where(grey, torch.full((3, 3), 1 / 3), mix)
    picture = torch.einsum("nij,njhw->nihw", mix, picture)
    mean = picture.mean((1, 2, 3), keepdim=True)
    picture = (picture - mean) * uniform(0.6, 1.4, 1, 1, 1) + mean + uniform(-0.2, 0.2, 1, 1, 1)
    return picture.clamp(0, 1)


def _upright(picture: Image.Image) -> Image.Image:
    """Turned as its EXIF data says. A picture whose EXIF data is damaged stays as it is: its pixels are whole."""
    picture.load()
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    except (OSError, ValueError, *_DAMAGED):
        return picture
    return picture.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else picture


def _on_white(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I") or picture.mode == "F":
        # 16-bit and float greys: to 8 bits by their own range, which convert() would clip.
        values = np.nan_to_num(np.asarray(picture, dtype=np.float64), posinf=0.0)
        top = 65535.0 if picture.mode.startswith("I") else max(float(values.max(initial=0)), 1e-12)
        return Image.fromarray((values.clip(0, top) * (255 / top)).astype(np.uint8)).convert("RGB")
    if "A" in picture.getbands() or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        white.alpha_composite(rgba)
        return white.convert("RGB")
    return picture.convert("RGB")
