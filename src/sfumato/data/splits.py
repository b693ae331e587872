"""Changes of splits: texts merged, parts and wordings left out of training, and noisy correspondence.

Validation images are unknown to the model, and so are their captions. Someone who searches the images that the model
was trained on has new words for known images: the split "wordings" holds such words. Noisy correspondence are training
pairs with deliberately wrong images. The array of an index file has one entry for each pair: the position of its image.
The pairs are ordered by text, then by image.
"""

import dataclasses
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from sfumato.data.pairs import PairData, normal_wording
from sfumato.files import write_atomically
from sfumato.ids import uniform_hash

WORDINGS = "wordings"
"""Name of the split with the texts that training leaves out."""


def hold_out_wordings(splits: Mapping[str, PairData], part: int, of: int, merged: bool = True) -> dict[str, PairData]:
    """The splits, with part of the texts of "train" left out of it, and the split "wordings".

    An image with c texts of its own loses c / of of them, rounded up or down, and keeps at least one. A text of several
    images, such as a tag, stays: training would lose its word. Only if more than half of the images have no text of
    their own, such texts are left out too.
    """
    both = joined(splits["train"], splits["val"]) if "val" in splits else splits["train"]
    both = merge_equal_texts(both) if merged else both
    held_out = _part_of_texts(both, part, of)
    if not held_out.any():
        return dict(splits)
    train = both.keep_texts(~held_out).keep_images(np.arange(len(splits["train"].image_ids)))
    return {**splits, "train": train, WORDINGS: both.keep_texts(held_out)}


def joined(first: PairData, second: PairData) -> PairData:
    """Two splits as one."""
    names = ("image_ids", "images", "text_ids", "texts", "text_kinds", "text_rows")
    both = {name: getattr(first, name) + getattr(second, name) for name in names}
    pairs = np.concatenate([first.pairs, second.pairs + np.array([len(first.image_ids), len(first.text_ids)])])
    groups = second.groups - second.groups.min(initial=0) + first.groups.max(initial=-1) + 1
    return PairData(**both, pairs=pairs, groups=np.concatenate([first.groups, groups]))


def _part_of_texts(data: PairData, part: int, of: int) -> np.ndarray:
    """(m,) whether each text is left out. It depends on the text and its images alone, not on the other images."""
    n, m = len(data.image_ids), len(data.texts)
    wordings = [normal_wording(text) for text in data.texts]
    chance = np.array([uniform_hash(words) for words in wordings])
    own = np.bincount(data.pairs[:, 1], minlength=m) == 1
    images, texts = data.pairs[own[data.pairs[:, 1]]].T
    held_out = np.zeros(m, bool)
    if 2 * len(np.unique(images)) >= n:  # Dealt among the texts of each image, from another part on for each.
        texts = texts[np.lexsort((chance[texts], images))]
        rank = np.arange(len(images)) - np.searchsorted(images, images)
        first = np.array([int(uniform_hash(f"image {i}") * of) for i in data.image_ids])
        held_out[texts] = (rank + first[images]) % of == part
    else:
        held_out = (chance * of).astype(int) == part
    # An equal wording elsewhere, where equal texts are separate, would show it to the training.
    seen = {words for words, out in zip(wordings, held_out, strict=True) if not out}
    held_out &= np.array([words not in seen for words in wordings], dtype=bool)
    left = np.bincount(data.pairs[~held_out[data.pairs[:, 1]], 0], minlength=n)
    held_out[data.pairs[left[data.pairs[:, 0]] == 0, 1]] = False
    return held_out


_TRIES = 20


def shuffle_pairs(data: PairData, rate: float, seed: int = 0) -> tuple[PairData, np.ndarray]:
    r"""Permute the images of a fraction of the pairs, so that none of these pairs is a true pair afterwards.

    The images of round(rate * p) pairs are permuted among them; the rest stay as they are. Every image and every text
    keeps its number of pairs. Equal arguments give equal results, on every process.

    Paper: Huang et al., "Learning with noisy correspondence", NeurIPS 2021 (NCR); Chun, ICLR 2024, section 3.2. Their
    code shuffles without a check, which leaves a few true pairs among the shuffled ones.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"shuffle_pairs: rate must lie in [0, 1], got {rate}")
    image, text = _in_text_order(data)
    p, k = len(image), round(rate * len(image))
    if rate > 0 and k < 2:
        least = "at least 2 pairs are needed to exchange their images"
        raise ValueError(f"shuffle_pairs: a rate of {rate} of {p} pairs is {k}; {least}; raise the rate")
    random = np.random.default_rng(seed)
    for _ in range(_TRIES):
        chosen = np.sort(random.permutation(p)[:k])
        wrong = _wrong_images(image[chosen], text[chosen], data, random)
        if wrong is not None:
            image[chosen] = wrong
            return apply_noise(data, image), image
    why = f"too many texts match most of the {len(data.image_ids)} images"
    raise ValueError(f"shuffle_pairs: found no way to give {k} of {p} pairs a wrong image; {why}: lower the rate")


def apply_noise(data: PairData, image_of_pair: np.ndarray) -> PairData:
    """Replace the images of the pairs. image_of_pair (p,)."""
    image_of_pair = _checked(image_of_pair, data, "apply_noise")
    noisy = dataclasses.replace(data, pairs=np.stack([image_of_pair, _in_text_order(data)[1]], axis=1))
    if len(noisy.pairs) < len(data.pairs):
        raise ValueError("apply_noise: the array gives a text the same image twice; expected different images")
    return noisy


def save_noise(path: str | Path, image_of_pair: np.ndarray) -> None:
    """Write an index file, atomically. image_of_pair (p,)."""
    buffer = io.BytesIO()
    np.save(buffer, image_of_pair.astype(np.int64), allow_pickle=False)
    write_atomically(path, buffer.getvalue())


def load_noise(path: str | Path, data: PairData) -> np.ndarray:
    """Read an index file of :func:`save_noise`. Returns (p,)."""
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: not the index of noisy pairs that the run wrote ({error})") from error
    return _checked(array, data, str(path))


def _checked(image_of_pair: np.ndarray, data: PairData, who: str) -> np.ndarray:
    """The array as int64, checked against the clean data."""
    p, n = len(data.pairs), len(data.image_ids)
    if image_of_pair.dtype.kind not in "iu" or image_of_pair.shape != (p,):
        found = f"got shape {image_of_pair.shape} of {image_of_pair.dtype}; the file of another split?"
        raise ValueError(f"{who}: expected {p} integers, the image of each pair in text order, {found}")
    if p and not (image_of_pair.min() >= 0 and image_of_pair.max() < n):
        found = f"got images {image_of_pair.min()} to {image_of_pair.max()}, but the data's are 0 to {n - 1}"
        raise ValueError(f"{who}: {found}; the file of another split?")
    return image_of_pair.astype(np.int64)


def _in_text_order(data: PairData) -> tuple[np.ndarray, np.ndarray]:
    """(p,) image and (p,) text of each pair, by text and then by image; fresh arrays."""
    order = np.lexsort((data.pairs[:, 0], data.pairs[:, 1]))
    return data.pairs[order, 0], data.pairs[order, 1]


def _wrong_images(image: np.ndarray, text: np.ndarray, data: PairData, rng: np.random.Generator) -> np.ndarray | None:
    """The (k,) images permuted so that no pair is a true one and none occurs twice; None if that fails."""
    image, m = image[rng.permutation(len(image))], len(data.text_ids)
    true, keys = data.pairs[:, 0] * m + data.pairs[:, 1], image * m + text  # One number for each pair.
    bad = np.isin(keys, true)
    bad[np.setdiff1d(np.arange(len(keys)), np.unique(keys, return_index=True)[1])] = True
    if not bad.any():
        return image
    # A random permutation has few true pairs; these swap their images with pairs where the swap is allowed.
    images, texts, taken = image.tolist(), text.tolist(), {*true.tolist(), *keys.tolist()}
    for j in np.flatnonzero(bad).tolist():
        if not bad[j]:
            continue
        for other in rng.permutation(len(images)).tolist():
            new = {images[other] * m + texts[j], images[j] * m + texts[other]}
            if texts[j] != texts[other] and images[j] != images[other] and taken.isdisjoint(new):
                break
        else:
            return None
        if not bad[other]:
            taken.remove(images[other] * m + texts[other])
        taken |= new
        images[j], images[other] = images[other], images[j]
        bad[[j, other]] = False
    return np.array(images, dtype=np.int64)


def merge_equal_texts(data: PairData) -> PairData:
    """Make equally worded texts one text, which matches every image that one of them matches.

    Two equally worded texts have the same embedding. Kept separate, each counts as a wrong match of the other's images,
    in a ranking and in a batch.
    """
    number: dict[str, int] = {}
    # An embedding without a wording has its id instead, in which upper and lower case differ.
    unworded = [bool(data.text_rows) and text == i for text, i in zip(data.texts, data.text_ids, strict=True)]
    wordings = [text if own else normal_wording(text) for text, own in zip(data.texts, unworded, strict=True)]
    merged = np.array([number.setdefault(wording, len(number)) for wording in wordings], dtype=np.int64)
    if len(number) == len(data.texts):
        return data
    pairs = np.stack([data.pairs[:, 0], merged[data.pairs[:, 1]]], axis=1)
    return replace(data, pairs=pairs, **data.text_fields(np.unique(merged, return_index=True)[1]))


def parse_part(text: str) -> tuple[int, int]:
    """The part that "I/K" names. Returns (I, K)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if of < 2 or part >= of:
        raise ValueError(f"expected a part I/K, with K at least 2 and I from 0 to K - 1, such as 0/2; got {text!r}")
    return part, of


def images_of_part(data: PairData, part: int, of: int, *, seed: int = 0) -> np.ndarray:
    """The positions of the images in one part of a split; the parts have about equal size and never divide a group.

    Returns (k,).
    """
    group = np.unique(data.groups, return_inverse=True)[1]
    n_groups = int(group.max(initial=-1)) + 1
    if n_groups < of:
        raise ValueError(f"images_of_part: {n_groups} groups of images cannot be divided into {of} parts")
    part_of_group = np.random.default_rng(seed).permutation(n_groups) % of
    return np.flatnonzero(part_of_group[group] == part)


def without_part(data: PairData, part: int, of: int, *, seed: int = 0) -> PairData:
    """The split without the images of a part, and without the texts that only they have."""
    return data.keep_images(np.setdiff1d(np.arange(len(data.image_ids)), images_of_part(data, part, of, seed=seed)))
