"""Calibrations for queries that calibrate themselves: each half of them by a fit on the other."""

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.conditional import Population
from sfumato.data.pairs import PairData
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.calibrate import calibrate_split


def cross_fitted(
    embedded: tuple[GaussianEmbedding, GaussianEmbedding],
    data: PairData,
    distance: str,
    *,
    split: str,
    population: Population = "planted",
    reference: tuple[GaussianEmbedding, GaussianEmbedding] | None = None,
    seed: int = 0,
) -> list[tuple[Calibration, Tensor]]:
    """Calibrate on each half of the texts of a split, in the gallery of all its images.

    The halves divide the images, groups whole. A text with images in both halves is in neither measurement.

    Args:
        embedded, data, distance, split, population, reference: see :func:`~sfumato.models.calibrate.calibrate_split`.
        seed: of the halves and of the fits.

    Returns:
        Two pairs of a calibration and the (n, m) matches of the half that it was not fitted on; 0 for all others.

    Raises:
        ValueError: nothing can be fitted on a half, or no text has all its images there.
    """
    group = np.unique(data.groups, return_inverse=True)[1]
    first = (np.random.default_rng(seed).permutation(int(group.max()) + 1) % 2 == 0)[group]
    match = torch.from_numpy(data.match(np.arange(embedded[0].n), np.arange(embedded[1].n)))
    has = [match[torch.from_numpy(half)].bool().any(0) for half in (first, ~first)]
    folds = []
    for fitting, measuring in ((0, 1), (1, 0)):
        kept = has[fitting].numpy()
        fitted = calibrate_split(
            (embedded[0], embedded[1][has[fitting]]),
            data.keep_texts(kept),
            distance,
            split=split,
            population=population,
            reference=reference,
            seed=seed,
        )
        only_here = has[measuring] & ~has[fitting]
        if not only_here.any():
            raise ValueError("the split cannot be halved: all texts of one half have images in the other too")
        folds.append((fitted, match * only_here))
    return folds
