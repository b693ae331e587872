"""Image transforms: the random augmentations of training, and corruptions of images and texts.

Corruptions increase in strength, to test whether an uncertainty rises. Each takes a seed. With the same seed a stronger
corruption contains the weaker one: the squares that are erased at 10 % are among those erased at 25 %. So a change from
one strength to the next is caused by the added corruption alone.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.nn import functional

from sfumato.data.image_decoding import Box, decode_image

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels, in [0, 1]."""


def random_crop_box(random: np.random.Generator, low: float = 0.6) -> Box:
    """Sample a random crop for training: a random width and height, which changes the aspect, then a random position.

    Source: the training crop of the PCME++ code, https://github.com/naver-ai/pcmepp, which samples one fraction for
        both sides.

    Returns (left, top, width, height).
    """
    if not 0 < low <= 1:
        raise ValueError(f"random_crop_box: low must be in (0, 1], got {low}")
    width, height, across, down = random.random(4).tolist()
    width, height = low + (1 - low) * width, low + (1 - low) * height
    return across * (1 - width), down * (1 - height), width, height


def resized_crop_box(random: np.random.Generator, aspect: float, *, low: float = 0.08) -> Box:
    """Sample a random crop as it is usual for ImageNet: a fraction of the area, then an aspect, then a position.

    Source: Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, section 6.

    Returns (left, top, width, height).
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

    pixels (n, 3, h, w) -> (n, 3, h, w).
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

    pixels (n, 3, h, w) -> (n, 3, h, w).
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

    Paper: Zhong et al., "Random Erasing Data Augmentation", AAAI 2020, with its limits of area and aspect.

    pixels (n, 3, h, w) -> (n, 3, h, w).
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


_SQUARES = 8

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def erase_squares(image: bytes, fraction: float, seed: Sequence[int]) -> bytes:
    """Cover a fraction of an image with grey squares of an 8 x 8 grid."""
    pixels = decode_image(image, None).copy()
    erased = np.zeros(_SQUARES**2, bool)
    erased[_first(_SQUARES**2, fraction, seed)] = True
    down, across = (np.arange(k) * _SQUARES // k for k in pixels.shape[1:])
    pixels[:, erased.reshape(_SQUARES, _SQUARES)[down][:, across]] = 128
    return encode_png(pixels)


def blur(image: bytes, radius: float, seed: Sequence[int] = ()) -> bytes:
    """Apply a Gaussian blur to an image."""
    if radius < 0:
        raise ValueError(f"blur: radius must not be negative, got {radius}")
    sharp = Image.fromarray(decode_image(image, None).transpose(1, 2, 0))
    return encode_png(np.asarray(sharp.filter(ImageFilter.GaussianBlur(radius * min(sharp.size)))).transpose(2, 0, 1))


def drop_words(text: str, fraction: float, seed: Sequence[int]) -> str:
    """Drop a random fraction of the words of a text; at least one word remains."""
    words = text.split()
    gone = set(_first(len(words), fraction, seed)[: max(len(words) - 1, 0)].tolist())
    return " ".join(word for i, word in enumerate(words) if i not in gone)


def replace_letters(text: str, fraction: float, seed: Sequence[int]) -> str:
    """Replace a random fraction of the letters of a text by other letters, like spelling mistakes."""
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
    """
    words = text.split()
    gone = set(_first(len(words), fraction, seed).tolist())
    return " ".join(_nonsense(len(word), (*seed, 1, i)) if i in gone else word for i, word in enumerate(words))


@dataclass(frozen=True)
class ImageCorruption:
    """A way to corrupt images."""

    name: str  # key in IMAGE_CORRUPTIONS
    strengths: tuple[float, ...]  # ascending
    apply: Callable[[bytes, float, Sequence[int]], bytes]  # (encoded image, strength, seed) -> encoded image


@dataclass(frozen=True)
class TextCorruption:
    """A way to corrupt texts."""

    name: str  # key in TEXT_CORRUPTIONS
    strengths: tuple[float, ...]  # ascending
    apply: Callable[[str, float, Sequence[int]], str]  # (text, strength, seed) -> text
    suits: Callable[[str], bool]  # returns whether a text can be corrupted this way


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
    """Encode pixels as a PNG file, with little compression. pixels (3, h, w)."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, "PNG", compress_level=1)
    return file.getvalue()
