"""Calibrating a model on a split that it was not trained on, and describing the result."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.query_scores import QueryScores
from sfumato.data.pairs import PairData
from sfumato.direction import Direction
from sfumato.distances import get_distance
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_probability
from sfumato.metrics.reliability import expected_calibration_error
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import CALIBRATION, load_run
from sfumato.search.exact import distance_blocks


def calibrate_split(
    embedded: tuple[GaussianEmbedding, GaussianEmbedding],
    data: PairData,
    distance: str,
    *,
    split: str,
    method: str = "platt",
    learnt: tuple[float, float] | None = None,
    max_pairs: int = 4_000_000,
    max_queries: int = 5_000,
    seed: int = 0,
) -> Calibration:
    """Fit match probabilities on the pairs of a split, and store the scores of its queries in both directions.

    A large split is sampled. The fit uses the pairs of random images with all texts. The scores use random queries of
    both sides, each with the whole other side as gallery.

    Args:
        embedded: (images, texts) of the split.
        data: pairs of the split, n images and m texts.
        distance: name in DISTANCES.
        split: name of the split, kept with the calibration.
        method: see :meth:`Calibration.fit`.
        learnt: (logit_scale, logit_bias) of the loss, for comparison; None if it learns none.
        max_pairs: largest number of pairs in the fit.
        max_queries: largest number of queries of either side whose scores are kept.
        seed: seed of the random choice of images and queries.

    Returns:
        The calibration. In its `metadata`, "expected_calibration_error" is measured on the pairs of the fit, and
        "expected_calibration_error_before" with the logits of the loss. For i2t the growth is 0, because a larger
        gallery of texts has more images and not more texts for an image; for t2i it is measured.

    Raises:
        ValueError: nothing can be fitted; see :func:`~sfumato.calibration.platt.fit_logits`.
    """
    images, texts = (side.to("cpu") for side in embedded)
    every_image, every_text = np.arange(images.n), np.arange(texts.n)

    def of_images(chosen: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        for start, block in distance_blocks(images[torch.from_numpy(chosen)], texts, distance):
            rows = chosen[start : start + len(block)]
            yield block, torch.from_numpy(data.match(rows, every_text))

    def of_texts(chosen: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        for start, block in distance_blocks(
            texts[torch.from_numpy(chosen)], images, get_distance(distance).for_direction("t2i")
        ):
            rows = chosen[start : start + len(block)]
            yield block, torch.from_numpy(data.match(every_image, rows)).T

    blocks = list(of_images(_some(images.n, max(1, max_pairs // texts.n), seed)))
    d, match = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    some_images, some_texts = _some(images.n, max_queries, seed), _some(texts.n, max_queries, seed)
    calibration = Calibration.fit(
        d,
        match,
        method=method,
        i2t=QueryScores.from_blocks(lambda: of_images(some_images), growth=0.0),
        t2i=QueryScores.from_blocks(lambda: of_texts(some_texts)),
    )
    about = {"split": split, "method": method, "distance": distance, "pairs": match.numel()}
    errors = {"expected_calibration_error": calibration.probability(d)}
    if learnt is not None:
        errors["expected_calibration_error_before"] = match_probability(d, *learnt)
    found = {name: expected_calibration_error(p.flatten(), match.flatten()) for name, p in errors.items()}
    calibration.metadata.update(about | found)
    return calibration


def _some(n: int, most: int, seed: int) -> np.ndarray:
    """A sorted random sample of n positions, of at most the given size."""
    return np.sort(np.random.default_rng(seed).permutation(n)[:most])


def calibrate_run(
    folder: str | Path, split: str = "val", *, method: str = "platt", device: torch.device | str = "cpu"
) -> Calibration:
    """Calibrate a run on a split of its data that it was not trained on, and write calibration.json into its folder.

    Args:
        folder: folder of the run.
        split: name of the split.
        method: see :meth:`Calibration.fit`.
        device: device that embeds.

    Returns:
        The calibration.

    Raises:
        UserError: it is not a run, or the data have no such split.
        ValueError: nothing can be fitted; see :func:`~sfumato.calibration.platt.fit_logits`.
    """
    if split == "train":
        raise UserError(
            "a run cannot be calibrated on the split that it was trained on; give another split, such as val"
        )
    run = load_run(folder, device=device)
    prepared = load_split(run.model, run.recipe.data, split)
    embedded = embed_split(run.model, prepared)
    calibration = calibrate_split(
        embedded, prepared.data, run.distance, split=split, method=method, learnt=run.loss.match_logits()
    )
    calibration.save(run.folder / CALIBRATION)
    return calibration


def describe_calibration(calibration: Calibration) -> dict[str, Any]:
    """The thresholds of a calibration at common levels.

    Args:
        calibration: fitted.

    Returns:
        Its `metadata`, and for "t2i" and "i2t" {"n_queries", "n_gallery", "matches_per_query", "growth", "precision":
        {0.5, 0.8, 0.9: threshold}, "risk": {0.2, 0.1, 0.05: {"abstain_below", "answered"}}, "coverage": {0.8, 0.9,
        0.95: radius}}; null if the held-out queries do not support a guarantee.
    """
    result: dict[str, Any] = dict(calibration.metadata)
    for direction in get_args(Direction):
        if getattr(calibration, direction) is None:
            continue
        scores = calibration.scores(direction)

        def at(guarantee: Callable[..., float], level: float, direction: Direction = direction) -> float | None:
            try:
                value = guarantee(level, direction=direction)
            except ValueError:
                return None
            return value if math.isfinite(value) else None

        result[direction] = {
            "n_queries": len(scores.nearest),
            "n_gallery": scores.n_gallery,
            "matches_per_query": scores.matches_per_query,
            "growth": scores.growth,
            "precision": {str(p): at(calibration.threshold, p) for p in (0.5, 0.8, 0.9)},
            "risk": {
                str(r): {
                    "abstain_below": at(calibration.abstain_below, r),
                    "answered": at(calibration.answered_fraction, r),
                }
                for r in (0.2, 0.1, 0.05)
            },
            "coverage": {str(c): at(calibration.conformal_radius, 1 - c) for c in (0.8, 0.9, 0.95)},
        }
    return result
