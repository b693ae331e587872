"""Corruptions of images and texts in increasing strengths, to test whether an uncertainty rises.

This module does not depend on models. Each corruption takes a seed. With the same seed a stronger corruption contains
the weaker one: the squares that are erased at 10 % are among those erased at 25 %. So a change from one strength to the
next is caused by the added corruption alone.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from sfumato.data.transforms import decode_image

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
