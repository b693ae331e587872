"""How many photographs a sentence means, by people: an estimate from the sentence alone.

A Gaussian process on the sentence's place among 6,000 captions of COCO. PQPP (Poesina et al., CVPR 2025, annotations CC
BY 4.0) has the images of COCO that people found relevant for each. scripts/make_multiplicity.py fits the constants.
"""

import functools
from importlib.resources import files

import numpy as np
from safetensors.numpy import load

from sfumato.arrays import Array, as_numpy
from sfumato.calibration.logistic import Floats

COCO_IMAGES = 123_287
"""Images among which people counted."""

FEWEST_WORDS = 3
"""Words of the shortest text that is asked for like a caption."""

_SHARPNESS = (8, 15, 20, 30, 40)


@functools.cache
def _constants() -> dict[str, np.ndarray]:
    """captions (n, k) directions, axes (d, k), numbers (n, 9) standardised, centre and spread (9,), weights (n,)."""
    values = load(files(__package__).joinpath("multiplicity.safetensors").read_bytes())
    found = {name: value.astype(np.float32) for name, value in values.items()}
    return found | {"captions": unit(found["captions"])}


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def place(cosine: np.ndarray, n_words: np.ndarray) -> np.ndarray:
    """(q, 9) numbers of words, nearness to the closest captions, and densities of captions. cosine (q, n)."""
    near = -np.sort(-cosine, axis=1)[:, :100]
    density = [np.log(np.exp(k * (cosine - 1)).sum(1)) for k in _SHARPNESS]
    return np.stack([n_words, near[:, 0], near[:, :10].mean(1), near.mean(1), *density], axis=1)


def kernel(numbers: np.ndarray, cosine: np.ndarray, known: np.ndarray) -> np.ndarray:
    """(q, n) likeness of texts and captions. numbers (q, 9), known (n, 9), cosine (q, n)."""
    n = known.shape[1]
    square = (numbers**2).sum(1)[:, None] + (known**2).sum(1) - 2 * numbers @ known.T
    return np.asarray(0.3 * numbers @ known.T / n + 0.5 * np.exp(-0.3 / n * square) + 0.8 * np.exp(2 * (cosine - 1)))


def multiplicity(vectors: Array, n_words: np.ndarray) -> Floats:
    """(q,) numbers of COCO's images that people would find relevant. vectors (q, 384), n_words (q,)."""
    known = _constants()
    cosine = unit(as_numpy(vectors) @ known["axes"]) @ known["captions"].T
    numbers = ((place(cosine, n_words) - known["centre"]) / known["spread"]).clip(-4, 4)
    log = kernel(numbers, cosine, known["numbers"]) @ known["weights"] + known["mean"]
    return np.asarray(np.exp(log), np.float64)
