"""Calibrating a trained model on a split that it was not trained on; the loop does it after training, `sfumato calibrate` again."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration import Calibration, QueryScores
from sfumato.data.pairs import PairData
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_probability
from sfumato.metrics.calibration import expected_calibration_error
from sfumato.search.ranking import distance_blocks

_PAIRS = 4_000_000
_QUERIES = 5_000


def calibrate_split(
    embedded: tuple[GaussianEmbedding, GaussianEmbedding],
    data: PairData,
    distance: str,
    *,
    split: str,
    method: str = "platt",
    learnt: tuple[float, float] | None = None,
) -> Calibration:
    """Fit probabilities on the pairs of a split, and keep the scores of its queries in both directions.

    Of a large split as many images are taken, at random, as give 4,000,000 pairs with all its texts, and 5,000 queries of either
    side with the whole other side as their gallery.

    Args:
        embedded: (images, texts) of the split.
        data: what matches.
        distance: name in DISTANCES.
        split: its name, to be kept.
        method: see :meth:`Calibration.fit`.
        learnt: (logit_scale, logit_bias) of the loss, to compare with.

    Returns:
        The calibration; "expected_calibration_error" in its `about` is that of the very pairs of the fit, "before" with the logits of the
        loss. Texts of images: a larger gallery of texts comes with more images and brings no further texts of an image, so growth is
        0 there; of texts it is measured.

    Raises:
        ValueError: nothing can be fitted; see :func:`~sfumato.matching.fit_logits`.
    """
    images, texts = (side.to("cpu") for side in embedded)
    every_image, every_text = np.arange(images.n), np.arange(texts.n)

    def of_images(chosen: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        for start, block in distance_blocks(images[torch.from_numpy(chosen)], texts, distance):
            rows = chosen[start : start + len(block)]
            yield block, torch.from_numpy(data.match(rows, every_text))

    def of_texts(chosen: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        for start, block in distance_blocks(texts[torch.from_numpy(chosen)], images, distance, queries_first=False):
            rows = chosen[start : start + len(block)]
            yield block, torch.from_numpy(data.match(every_image, rows)).T

    blocks = list(of_images(_some(images.n, max(1, _PAIRS // texts.n))))
    d, match = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    some_images, some_texts = _some(images.n, _QUERIES), _some(texts.n, _QUERIES)
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
    calibration.about.update(about | found)
    return calibration


def _some(n: int, most: int) -> np.ndarray:
    """At most so many of n, at random but always the same, in their order."""
    return np.sort(np.random.default_rng(0).permutation(n)[:most])
