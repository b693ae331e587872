"""Cross-fit folds: a split in parts, so that a model can be trained on some and evaluated on the others."""

import re

import numpy as np

from sfumato.data.pairs import PairData


def parse_part(text: str) -> tuple[int, int]:
    """The part that "I/K" names.

    Args:
        text: I/K with 0 <= I < K and K >= 2.

    Returns:
        (I, K).

    Raises:
        ValueError: the text is not of this form.

    Example:
        >>> parse_part("1/3")
        (1, 3)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if of < 2 or part >= of:
        raise ValueError(f"a part is written I/K with I below K and K at least 2, such as 0/2 and 1/2; got {text!r}")
    return part, of


def images_of_part(data: PairData, part: int, of: int, *, seed: int = 0) -> np.ndarray:
    """Positions of the images of one of several parts of about equal size; images of one group are in one part.

    Args:
        data: the split.
        part: number of the part, from 0.
        of: number of parts; equal arguments give equal parts, and every image is in one of them.
        seed: seed of the random assignment.

    Returns:
        (k,) sorted positions.

    Raises:
        ValueError: there are fewer groups than parts.
    """
    group = np.unique(data.groups, return_inverse=True)[1]
    n_groups = int(group.max(initial=-1)) + 1
    if n_groups < of:
        raise ValueError(f"images_of_part: {n_groups} groups of images cannot be cut into {of} parts")
    part_of_group = np.random.default_rng(seed).permutation(n_groups) % of
    return np.flatnonzero(part_of_group[group] == part)


def without_part(data: PairData, part: int, of: int, *, seed: int = 0) -> PairData:
    """The split without the images of a part, and without the texts that only they have.

    Args:
        data: the split.
        part: number of the part, from 0.
        of: number of parts.
        seed: see :func:`images_of_part`.

    Returns:
        The rest of the split.
    """
    return data.keep_images(np.setdiff1d(np.arange(len(data.image_ids)), images_of_part(data, part, of, seed=seed)))
