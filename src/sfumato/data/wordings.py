"""Captions that training leaves out, of images that it does not: what a search in a gallery of one's own images asks.

Validation images are unknown to the model, and so are their captions. Someone who searches the images that the model
was trained on has new words for known images. The split "wordings" holds such words.
"""

from collections.abc import Mapping

import numpy as np

from sfumato.data.pairs import PairData, merge_equal_texts, normal_wording
from sfumato.ids import uniform_hash

WORDINGS = "wordings"
"""Name of the split with the texts that training leaves out."""


def hold_out_wordings(
    splits: Mapping[str, PairData], part: int, of: int, *, merged: bool = True
) -> dict[str, PairData]:
    """The splits, with part of the texts of "train" left out of it, and the split "wordings".

    An image with c texts of its own loses c / of of them, rounded up or down, and keeps at least one. A text of several
    images, such as a tag, stays: training would lose its word. Only if more than half of the images have no text of
    their own, such texts are left out too.
    """
    n = len(splits["train"].image_ids)
    both = joined(splits["train"], splits["val"]) if "val" in splits else splits["train"]
    both = merge_equal_texts(both) if merged else both
    held_out = _part_of_texts(both, part, of)
    if not held_out.any():
        return dict(splits)
    return {
        **splits,
        "train": both.keep_texts(~held_out).keep_images(np.arange(n)),
        WORDINGS: both.keep_texts(held_out),
    }


def joined(first: PairData, second: PairData) -> PairData:
    """Two splits as one."""
    n, m = len(first.image_ids), len(first.text_ids)
    return PairData(
        first.image_ids + second.image_ids,
        first.images + second.images,
        first.text_ids + second.text_ids,
        first.texts + second.texts,
        first.text_kinds + second.text_kinds,
        np.concatenate([first.pairs, second.pairs + np.array([n, m])]),
        np.concatenate([first.groups, second.groups - second.groups.min(initial=0) + first.groups.max(initial=-1) + 1]),
        first.text_rows + second.text_rows,
    )


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
