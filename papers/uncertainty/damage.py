"""Corruptions of images and texts that increase in strength, to test whether an uncertainty rises.

Each takes a seed. With the same seed a stronger corruption contains the weaker one: the squares that are erased at 10 %
are among those erased at 25 %. So a change from one strength to the next is caused by the added corruption alone.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from sfumato.data.image_decoding import decode_image, encode_png

_SQUARES = 8

_LETTERS, _LETTER = "abcdefghijklmnopqrstuvwxyz", re.compile("[a-zA-Z]")


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
    sharp = Image.fromarray(decode_image(image, None).transpose(1, 2, 0))
    return encode_png(np.asarray(sharp.filter(ImageFilter.GaussianBlur(radius * min(sharp.size)))).transpose(2, 0, 1))


def drop_words(text: str, fraction: float, seed: Sequence[int]) -> str:
    """Drop a random fraction of the words of a text; at least one word remains."""
    words = text.split()
    gone = set(_first(len(words), fraction, seed)[: max(len(words) - 1, 0)].tolist())
    return " ".join(word for i, word in enumerate(words) if i not in gone)


def replace_letters(text: str, fraction: float, seed: Sequence[int]) -> str:
    """Replace a random fraction of the letters of a text by other letters, like spelling mistakes."""
    positions = [m.start() for m in _LETTER.finditer(text)]
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
class Corruption:
    """A way to corrupt images or texts."""

    strengths: tuple[float, ...]  # ascending
    apply: Callable[[Any, float, Sequence[int]], Any]  # (encoded image or text, strength, seed) -> the same, corrupted
    suits: Callable[[Any], bool] = lambda text: True  # whether a text can be corrupted this way


IMAGE_CORRUPTIONS = {
    "erased": Corruption((0.1, 0.25, 0.5, 0.75, 0.9), erase_squares),
    "blurred": Corruption((0.01, 0.02, 0.04, 0.08, 0.16), blur),
}
"""Corruptions of images by name."""

TEXT_CORRUPTIONS = {
    "dropped_words": Corruption((0.2, 0.4, 0.6, 0.8), drop_words, lambda text: len(text.split()) > 1),
    "unknown_words": Corruption((0.25, 0.5, 0.75, 1.0), unknown_words, lambda text: bool(text.split())),
    "wrong_letters": Corruption((0.1, 0.2, 0.35, 0.5, 0.75), replace_letters, lambda text: bool(_LETTER.search(text))),
}
"""Corruptions of texts by name."""


def _first(n: int, fraction: float, seed: Sequence[int]) -> np.ndarray:
    """The first fraction of n positions in a random order."""
    return np.random.default_rng(list(seed)).permutation(n)[: int(fraction * n + 0.5)]


def _nonsense(n: int, seed: Sequence[int]) -> str:
    return "".join(_LETTERS[i] for i in np.random.default_rng(list(seed)).integers(26, size=n))
