"""Calibrations for queries that calibrate themselves: each half of them by a fit on the other."""

from collections.abc import Sequence

import numpy as np
import torch

from sfumato.calibration.conditional import Population
from sfumato.data.pairs import PairData
from sfumato.evaluation.hits import Fold
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.calibrate import calibrate_split, queries_of


def cross_fitted(
    embedded: tuple[GaussianEmbedding, GaussianEmbedding],
    data: PairData,
    distance: str,
    *,
    split: str,
    population: Population = "planted",
    reference: tuple[GaussianEmbedding, GaussianEmbedding] | None = None,
    seed: int = 0,
) -> Sequence[Fold]:
    """Calibrate on the queries of each half of the images of a split, in the gallery of all.

    Groups of images are not divided. A text with images in both halves is in neither.
    """
    group = np.unique(data.groups, return_inverse=True)[1]
    first = (np.random.default_rng(seed).permutation(int(group.max()) + 1) % 2 == 0)[group]
    halves = [np.flatnonzero(first), np.flatnonzero(~first)]
    queries = [queries_of(data, half) for half in halves]
    if not all(len(texts) for _, texts in queries):
        raise ValueError("the split cannot be halved: all texts of one half have images in the other too")
    folds = []
    for fitting, measured in zip(halves, reversed(queries), strict=True):
        fitted = calibrate_split(
            embedded,
            data,
            distance,
            split=split,
            population=population,
            reference=reference,
            of_images=fitting,
            seed=seed,
        )
        folds.append(Fold(fitted, *(torch.from_numpy(positions) for positions in measured)))
    return folds
