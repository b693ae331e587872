"""Image transforms: decoding, the random augmentations of training, and corruptions of images and texts.

Corruptions increase in strength, to test whether an uncertainty rises. Each takes a seed. With the same seed a stronger
corruption contains the weaker one: the squares that are erased at 10 % are among those erased at 25 %. So a change from
one strength to the next is caused by the added corruption alone.
"""

import io
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFilter, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the formats that are read; others (EPS, say, which runs a program) are refused."""

IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
"""File name endings that count as images when a folder is searched."""

MAX_PIXELS = 80_000_000
"""Larger images are refused: a small file can hold an image that fills the memory. Below pillow's own limit."""

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels, in [0, 1]."""

Fit = Literal["squash", "crop", "crop-nearest", "crop-margin"]
"""How an image becomes a square: by changing its aspect, or by cutting off the ends of its longer side. The two crops
differ by at most one pixel: where the ends have an odd number of pixels together, "crop" starts at the pixel before the
exact centre, and "crop-nearest" at the even one of its two neighbours. "crop-margin" cuts the centre out of an image
whose shorter side is 8/7 as long as the square: 256 pixels for 224, as usual for ImageNet."""

Box = tuple[float, float, float, float]
"""(left, top, width, height) of a part of an image, as fractions of its width and height."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

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
) -> np.ndarray:
    """Decode an image of any mode: turned upright by its EXIF data, transparency on white, in RGB.

    Args:
        data: the bytes of a file in one of FORMATS; the first frame of several.
        size: side of the resized square in pixels (bicubic). None keeps the size of the image.
        fit: "squash": resized to the square without keeping the aspect ratio. "crop": the shorter side resized to
            ``size`` and the middle cut out, pixel for pixel what the CLIP image processor of transformers does.
            "crop-nearest": the same as open_clip and torchvision do it. "crop-margin": as "crop-nearest", from an image
            whose shorter side is 8/7 as long.
        crop: the part to cut out first, in coordinates of the upright image, rounded to whole pixels; or a function
            from the image's width / height to this part. Large JPEG files
            are then decoded at a half, a quarter or an eighth of their size as long as the part keeps twice ``size`` on
            both sides.
        upright: False keeps the pixels in the orientation of the file and ignores its EXIF data. Pillow rotates TIFF
            files even so.

    Returns:
        (3, h, w) uint8.

    Raises:
        ValueError: the data is not an image, is truncated, or has more than MAX_PIXELS pixels; fit is unknown; or the
            crop is not within [0, 1].
    """
    check_fit(fit)
    if crop is not None and not callable(crop):
        _check_box(crop)
    with _opened(data) as image:
        if callable(crop):
            width, height = image.size
            turned = upright and _orientation(image) in _TURNED
            crop = crop(height / width if turned else width / height)
        if crop is not None and size is not None:
            enough = math.ceil(2 * size / min(crop[2:]))
            image.draft(None, (enough, enough))
        rgb = _on_white(_upright(image) if upright else image)
    if crop is not None:
        rgb = rgb.crop(_pixels(crop, rgb.size))
    if size is not None and rgb.size != (size, size):
        rgb = _squash(rgb, size) if fit == "squash" else _centre(rgb, size, fit)
    return np.ascontiguousarray(np.asarray(rgb).transpose(2, 0, 1))


def check_image(data: bytes) -> None:
    """Check quickly whether an image can be decoded; the whole file is read.

    Args:
        data: the bytes of a file.

    Raises:
        ValueError: the error that :func:`decode_image` would raise.
    """
    with _opened(data) as image:
        image.draft(
            None, (1, 1)
        )  # A JPEG is decoded at an eighth of its size: the stream is read to the end without all pixels.
        image.load()
        # One pixel is enough to detect a mode or a palette that cannot be converted.
        _on_white(image.crop((0, 0, 1, 1)))


def check_fit(fit: str) -> None:
    """Raise an error if :func:`decode_image` does not support ``fit``.

    Args:
        fit: value given by the user.

    Raises:
        ValueError: it is unknown; the message lists the known ones.
    """
    if fit not in get_args(Fit):
        raise ValueError(f"unknown fit {fit!r}; known: {', '.join(get_args(Fit))}")


def random_crop_box(random: np.random.Generator, low: float = 0.6) -> Box:
    """Sample a random crop for training: a random width and height, which changes the aspect, then a random position.

    Args:
        random: random generator; four numbers are sampled from it.
        low: smallest fraction of either side, in (0, 1]; the largest is 1.

    Returns:
        (left, top, width, height) as fractions of the sides. Width and height are uniform in [low, 1]; left and top are
        uniform over all positions inside the image.

    Raises:
        ValueError: low is not in (0, 1].

    Source: the training crop of the PCME++ code, https://github.com/naver-ai/pcmepp, which samples one fraction for
        both sides.
    """
    if not 0 < low <= 1:
        raise ValueError(f"random_crop_box: low must be in (0, 1], got {low}")
    width, height, across, down = random.random(4).tolist()
    width, height = low + (1 - low) * width, low + (1 - low) * height
    return across * (1 - width), down * (1 - height), width, height


def resized_crop_box(random: np.random.Generator, aspect: float, *, low: float = 0.08) -> Box:
    """Sample a random crop as it is usual for ImageNet: a fraction of the area, then an aspect, then a position.

    Args:
        random: random generator.
        aspect: width / height of the image.
        low: smallest fraction of the area, in (0, 1]; the largest is 1.

    Returns:
        (left, top, width, height) as fractions of the sides. The area is uniform in [low, 1], the logarithm of the
        crop's own aspect uniform between those of 3/4 and 4/3, and the position uniform. If ten samples do not fit into
        the image: its centre, cut to the nearest of these aspects.

    Raises:
        ValueError: low is not in (0, 1], or aspect is not positive.

    Source: Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, section 6.
    """
    if not (0 < low <= 1 and aspect > 0):
        raise ValueError(f"resized_crop_box: low must be in (0, 1] and aspect positive, got {low} and {aspect}")
    for _ in range(10):
        area, shape = random.uniform(low, 1), math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = math.sqrt(area * shape / aspect), math.sqrt(area * aspect / shape)
        if width <= 1 and height <= 1:
            across, down = random.random(2).tolist()
            return across * (1 - width), down * (1 - height), width, height
    shape = min(max(aspect, 3 / 4), 4 / 3)
    width, height = min(1.0, shape / aspect), min(1.0, aspect / shape)
    return (1 - width) / 2, (1 - height) / 2, width, height


def augment(pixels: Tensor, *, generator: torch.Generator) -> Tensor:
    """Apply random changes of geometry and colour, different for each image, that keep the identity of the object.

    Rotation by up to 15 degrees, scale 0.75 to 1.15, shift by up to 12 % and, for every other image, a mirror image;
    then a random background instead of white for half of them, brightness, contrast, a random mix of the colour
    channels, and grey for one in five.

    Args:
        pixels: (n, 3, h, w) uint8.
        generator: random generator on the CPU.

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
    # Pixels outside of the image are 0, so the image is inverted: white stays white.
    dark = functional.grid_sample(1 - pixels.float() / 255, grid, align_corners=False)
    background = torch.where(uniform(0, 1, 1, 1, 1) < 0.5, uniform(0, 1, 3, 1, 1), 0.0)
    light = 1 - dark
    whiteness = light.amin(1, keepdim=True).sub(0.85).clamp_min(0) / 0.15
    image = light * (1 - whiteness * background)
    mix = torch.eye(3) + 0.25 * torch.randn(n, 3, 3, generator=generator)
    mix = mix / mix.sum(2, keepdim=True).clamp_min(0.3)
    grey = uniform(0, 1, 1, 1) < 0.2
    mix = torch.where(grey, torch.full((3, 3), 1 / 3), mix)
    image = torch.einsum("nij,njhw->nihw", mix, image)
    mean = image.mean((1, 2, 3), keepdim=True)
    image = (image - mean) * uniform(0.6, 1.4, 1, 1, 1) + mean + uniform(-0.2, 0.2, 1, 1, 1)
    return image.clamp(0, 1)


def crop_and_mirror(pixels: Tensor, *, generator: torch.Generator, low: float = 0.6) -> Tensor:
    """PCME++'s training geometry on decoded images: a random part of each, stretched; half of them mirrored.

    Args:
        pixels: (n, 3, h, w) uint8.
        generator: random generator on the CPU.
        low: smallest fraction of either side, as in :func:`random_crop_box`.

    Returns:
        (n, 3, h, w) float32 in [0, 1].
    """
    fraction = low + (1 - low) * torch.rand(len(pixels), 2, generator=generator)
    shift = (2 * torch.rand(len(pixels), 2, generator=generator) - 1) * (1 - fraction)
    fraction[:, 0] *= torch.where(torch.rand(len(pixels), generator=generator) < 0.5, -1.0, 1.0)
    matrix = torch.cat([torch.diag_embed(fraction), shift.unsqueeze(2)], 2)
    grid = functional.affine_grid(matrix, list(pixels.shape), align_corners=False)
    values = pixels.float() / 255
    return functional.grid_sample(values, grid, padding_mode="border", align_corners=False).clamp(0, 1)


def erase_rectangles(pixels: Tensor, *, fraction: float, generator: torch.Generator) -> Tensor:
    """Random erasing: in some images a rectangle is filled with the mean colour of ImageNet.

    The rectangle has between 2 % and a third of the image's area, an aspect ratio between 0.3 and 1 / 0.3, and a random
    position. A side longer than the image is reduced to the side of the image.

    Args:
        pixels: (n, 3, h, w) uint8, or float in [0, 1].
        fraction: probability that an image is changed.
        generator: random generator on the CPU; five numbers are sampled for each image.

    Returns:
        (n, 3, h, w) float32 in [0, 1].

    Raises:
        ValueError: fraction is not in [0, 1].

    Paper: Zhong et al., "Random Erasing Data Augmentation", AAAI 2020, with its limits of area and aspect.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"erase_rectangles: fraction must be in [0, 1], got {fraction}")
    values = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
    chosen, area, aspect, down, across = torch.rand(5, len(pixels), 1, generator=generator)
    area, aspect = 0.02 + area * (1 / 3 - 0.02), ((2 * aspect - 1) * math.log(1 / 0.3)).exp()
    inside = []
    for side, length, start in (
        (pixels.shape[2], (area * aspect).sqrt(), down),
        (pixels.shape[3], (area / aspect).sqrt(), across),
    ):
        middle = (torch.arange(side) + 0.5) / side
        first = start * (1 - length.clamp(max=1))
        inside.append((middle >= first) & (middle < first + length))
    erased = inside[0].unsqueeze(2) & inside[1].unsqueeze(1) & (chosen < fraction).unsqueeze(2)
    return torch.where(erased.unsqueeze(1), torch.tensor(IMAGENET_MEAN).view(3, 1, 1), values)


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """An open image, not decoded yet; every error while it is open becomes a ValueError with a clear message."""
    if not data:
        raise ValueError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are more than the limit of {MAX_PIXELS}")
            yield image
    except UnidentifiedImageError as error:
        if data.startswith(b"\x93NUMPY"):
            raise ValueError('region features (.npy), not an image; model.image.kind="regions" reads them') from error
        raise ValueError(f"not an image in one of the formats {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"more pixels than the limit of {MAX_PIXELS}") from error
    except (OSError, *_DAMAGED) as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def _squash(rgb: Image.Image, size: int) -> Image.Image:
    return rgb.resize((size, size), Image.Resampling.BICUBIC)


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
        return rgb.resize((size, size), Image.Resampling.BICUBIC, box=_clipped(part, rgb.size))
    rgb = rgb.resize((shorter, longer) if tall else (longer, shorter), Image.Resampling.BICUBIC)
    left, top = (edge, start) if tall else (start, edge)
    return rgb.crop((left, top, left + size, top + size))


def _clipped(box: Box, size: tuple[int, int]) -> Box:
    """A box in pixels within the image; scaling may have rounded it over the edge."""
    return max(0.0, box[0]), max(0.0, box[1]), min(float(size[0]), box[2]), min(float(size[1]), box[3])


def _check_box(box: Box) -> None:
    left, top, width, height = box
    # Sums of fractions may exceed 1 by rounding.
    fits = left >= 0 and top >= 0 and width > 0 and height > 0 and max(left + width, top + height) <= 1 + 1e-9
    if not fits:
        raise ValueError(f"crop must be (left, top, width, height) in fractions of the image, within [0, 1]; got {box}")


def _pixels(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A box in fractions -> (left, top, right, bottom) in pixels, at least one of each."""
    left, top = (min(round(start * side), side - 1) for start, side in zip(box[:2], size, strict=True))
    right, bottom = (
        min(round((start + fraction) * side), side)
        for start, fraction, side in zip(box[:2], box[2:], size, strict=True)
    )
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


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # 16-bit and float grey values are scaled from their own range to 8 bits; convert() would clip them.
        values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0.0)
        top = 65535.0 if image.mode.startswith("I") else max(float(values.max(initial=0)), 1e-12)
        return Image.fromarray((values.clip(0, top) * (255 / top)).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        white.alpha_composite(rgba)
        return white.convert("RGB")
    return image.convert("RGB")


_SQUARES = 8

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def erase_squares(image: bytes, fraction: float, seed: Sequence[int]) -> bytes:
    """Cover a fraction of an image with grey squares of an 8 x 8 grid.

    Args:
        image: a file in a format that :func:`~sfumato.data.transforms.decode_image` reads.
        fraction: fraction of the 64 squares that are erased, in [0, 1].
        seed: seed of the order in which squares are erased.

    Returns:
        A PNG file.

    Raises:
        ValueError: the image cannot be decoded, or fraction is outside of [0, 1].
    """
    pixels = decode_image(image, None).copy()
    erased = np.zeros(_SQUARES**2, bool)
    erased[_first(_SQUARES**2, fraction, seed)] = True
    down, across = (np.arange(k) * _SQUARES // k for k in pixels.shape[1:])
    pixels[:, erased.reshape(_SQUARES, _SQUARES)[down][:, across]] = 128
    return encode_png(pixels)


def blur(image: bytes, radius: float, seed: Sequence[int] = ()) -> bytes:
    """Apply a Gaussian blur to an image.

    Args:
        image: see :func:`erase_squares`.
        radius: standard deviation as a fraction of the shorter side.
        seed: not used; a blur is not random.

    Returns:
        A PNG file.

    Raises:
        ValueError: the image cannot be decoded, or radius is negative.
    """
    if radius < 0:
        raise ValueError(f"blur: radius must not be negative, got {radius}")
    sharp = Image.fromarray(decode_image(image, None).transpose(1, 2, 0))
    return encode_png(np.asarray(sharp.filter(ImageFilter.GaussianBlur(radius * min(sharp.size)))).transpose(2, 0, 1))


def drop_words(text: str, fraction: float, seed: Sequence[int]) -> str:
    """Drop a random fraction of the words of a text; at least one word remains.

    Args:
        text: words are separated by white space.
        fraction: in [0, 1]; rounded to whole words, halves up.
        seed: seed of the order in which words are left out.

    Returns:
        The remaining words, separated by single blanks.

    Raises:
        ValueError: fraction is outside of [0, 1].
    """
    words = text.split()
    gone = set(_first(len(words), fraction, seed)[: max(len(words) - 1, 0)].tolist())
    return " ".join(word for i, word in enumerate(words) if i not in gone)


def replace_letters(text: str, fraction: float, seed: Sequence[int]) -> str:
    """Replace a random fraction of the letters of a text by other letters, like spelling mistakes.

    Args:
        text: letters are a-z and A-Z; everything else stays.
        fraction: fraction of the letters in [0, 1]; rounded to whole letters, halves up.
        seed: seed of the order in which letters are replaced and of the new letters.

    Returns:
        A text of the same length.

    Raises:
        ValueError: fraction is outside of [0, 1].
    """
    positions = [m.start() for m in re.finditer("[a-zA-Z]", text)]
    letters = np.random.default_rng([*seed, 1]).integers(1, 26, len(positions))
    result = list(text)
    for i in _first(len(positions), fraction, seed):
        # A shift by 1 to 25 letters never gives the original letter.
        old = _LETTERS.index(text[positions[i]].lower())
        result[positions[i]] = _LETTERS[(old + int(letters[i])) % 26]
    return "".join(result)


def unknown_words(text: str, fraction: float, seed: Sequence[int]) -> str:
    """Replace a random fraction of the words of a text by random letters, so that they become unknown words.

    This simulates the <unk> tokens of PCME's appendix F.1 with any tokenizer.

    Args:
        text: words are separated by white space.
        fraction: in [0, 1]; rounded to whole words, halves up.
        seed: seed of the order in which words are replaced and of the letters.

    Returns:
        As many words of the same lengths.

    Raises:
        ValueError: fraction is outside of [0, 1].
    """
    words = text.split()
    gone = set(_first(len(words), fraction, seed).tolist())
    return " ".join(_nonsense(len(word), (*seed, 1, i)) if i in gone else word for i, word in enumerate(words))


@dataclass(frozen=True)
class ImageCorruption:
    """A way to corrupt images.

    Attributes:
        name: key in IMAGE_CORRUPTIONS.
        strengths: ascending.
        apply: (encoded image, strength, seed) -> encoded image.
    """

    name: str
    strengths: tuple[float, ...]
    apply: Callable[[bytes, float, Sequence[int]], bytes]


@dataclass(frozen=True)
class TextCorruption:
    """A way to corrupt texts.

    Attributes:
        name: key in TEXT_CORRUPTIONS.
        strengths: ascending.
        apply: (text, strength, seed) -> text.
        suits: returns whether a text can be corrupted this way.
    """

    name: str
    strengths: tuple[float, ...]
    apply: Callable[[str, float, Sequence[int]], str]
    suits: Callable[[str], bool]


IMAGE_CORRUPTIONS: dict[str, ImageCorruption] = {
    c.name: c
    for c in (
        ImageCorruption("erased", (0.1, 0.25, 0.5, 0.75, 0.9), erase_squares),
        ImageCorruption("blurred", (0.01, 0.02, 0.04, 0.08, 0.16), blur),
    )
}
"""Corruptions of images by name."""

TEXT_CORRUPTIONS: dict[str, TextCorruption] = {
    c.name: c
    for c in (
        TextCorruption("dropped_words", (0.2, 0.4, 0.6, 0.8), drop_words, lambda text: len(text.split()) > 1),
        TextCorruption("unknown_words", (0.25, 0.5, 0.75, 1.0), unknown_words, lambda text: bool(text.split())),
        TextCorruption(
            "wrong_letters",
            (0.1, 0.2, 0.35, 0.5, 0.75),
            replace_letters,
            lambda text: re.search("[a-zA-Z]", text) is not None,
        ),
    )
}
"""Corruptions of texts by name."""


def _first(n: int, fraction: float, seed: Sequence[int]) -> np.ndarray:
    """The first fraction of n positions in a random order."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction must be between 0 and 1, got {fraction}")
    return np.random.default_rng(list(seed)).permutation(n)[: int(fraction * n + 0.5)]


def _nonsense(n: int, seed: Sequence[int]) -> str:
    return "".join(_LETTERS[i] for i in np.random.default_rng(list(seed)).integers(26, size=n))


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode pixels as a PNG file, with little compression.

    Args:
        pixels: (3, h, w) uint8.

    Returns:
        The bytes of the file.
    """
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, "PNG", compress_level=1)
    return file.getvalue()
