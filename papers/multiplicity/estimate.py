"""Estimators of a caption's multiplicity from the caption alone; higher means more images."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from papers.multiplicity.data import LABELS, Captions
from papers.multiplicity.features import FEATURES, References
from papers.uncertainty.estimators import ESTIMATORS as UNCERTAINTIES
from sfumato.distances.distance import squared_l2_product
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.errors import progress_bar
from sfumato.evaluation.estimators import Matching
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.run import load_model
from sfumato.models.sections import VarianceStageConfig
from sfumato.training.validation import fit_variance_stage

WITHOUT_LABELS: dict[str, dict[str, float]] = {
    "words": {"words": -1},
    "rarity": {"rarest word": -1},
    "coverage": {"coverage 0.6": 1},
    "density": {"density 30": 1},
    "unlabelled": {"density 30": 1, "coverage 0.6": 0.5, "log probability": 0.4},
}
"""Estimators that read no label: weights of standardised FEATURES."""

VARIANCES, REGRESSION = ("total_variance", "log_det"), "regression"
"""Estimators of `sfumato trust` that are read off the model's text Gaussian; the one that is fitted on the labels."""

TAUGHT = ("variance_by_density", "variance_by_counts")
"""Total variance after the variance stage has taught it density 30, or log_relevant, of the training captions."""

ESTIMATORS = (*WITHOUT_LABELS, *VARIANCES, *TAUGHT, REGRESSION)

_BLOCK = 256
"""The sentence vectors of so many texts are remembered from their embedding by a model on MiniLM."""


@dataclass(frozen=True, eq=False)
class _Embedded:
    """n captions as the estimators read them."""

    texts: Sequence[str]
    vectors: np.ndarray  # (n, 384) unit sentence vectors of MiniLM
    gaussians: GaussianEmbedding  # (n, d) text Gaussians of the model
    numbers: np.ndarray  # (n, f) standardised FEATURES


class Predictor:
    """All estimators, with the captions that they know."""

    def __init__(self, known: Captions, model: str, *, seed: int = 0) -> None:
        """model: name or folder of a model with text Gaussians; seed: of the variances that are taught."""
        self._model, self._captions, self._seed = model, known, seed
        vectors, gaussians = self._embed(known.texts)
        self._references = References(known.texts, vectors)
        features = self._references.features(known.texts, vectors, own=True)
        self._centre, self._spread = features.mean(0), features.std(0) + 1e-9
        self._known = _Embedded(known.texts, vectors, gaussians, self._standardised(features))

    def __call__(self, texts: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        """{estimator: {label: (n,) predictions}}; all but the regression predict the same for all labels."""
        vectors, gaussians = self._embed(texts)
        numbers = self._standardised(self._references.features(texts, vectors))
        asked, found = _Embedded(texts, vectors, gaussians, numbers), dict[str, dict[str, np.ndarray]]()
        for name in names:
            if name == REGRESSION:
                found[name] = self._regression(asked)
            elif name in TAUGHT:
                found[name] = dict.fromkeys(LABELS, self._taught(name, texts))
            elif name in VARIANCES:
                values = UNCERTAINTIES[name](gaussians, gaussians[:0], Matching())
                found[name] = dict.fromkeys(LABELS, values)
            else:
                weights = WITHOUT_LABELS[name]
                values = numbers[:, list(map(FEATURES.index, weights))] @ np.array([*weights.values()])
                found[name] = dict.fromkeys(LABELS, values)
        return found

    def _embed(self, texts: Sequence[str]) -> tuple[np.ndarray, GaussianEmbedding]:
        tower, vectors, gaussians = load_model(self._model).model.text, [], []
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        with progress_bar("embedding captions", len(texts)) as advance:
            for start in range(0, len(texts), _BLOCK):
                block = [texts[i] for i in order[start : start + _BLOCK]]
                gaussians.append(tower.embed(_stored(tower, block)).numpy())
                vectors.append(sentence_vectors(block))
                advance(len(block))
        back = np.argsort(order)
        return np.concatenate(vectors)[back], GaussianEmbedding.cat(gaussians)[back]

    def _standardised(self, features: np.ndarray) -> np.ndarray:
        return np.clip((features - self._centre) / self._spread, -4, 4).astype(np.float32)

    def _kernel(self, asked: _Embedded) -> np.ndarray:
        """(n, m) kernel of captions with the known ones; weights and scales by leaving out one caption of train."""
        known, n = self._known, len(FEATURES)
        return (
            0.3 * (asked.numbers @ known.numbers.T) / n
            + 0.5 * np.exp(-0.3 / n * squared_l2_product(asked.numbers, known.numbers))
            + 0.3 * np.exp(-1.5 * squared_l2_product(asked.vectors, known.vectors))
            + 0.5 * np.exp(-0.4 * squared_l2_product(asked.gaussians.mean, known.gaussians.mean))
        )

    def _regression(self, asked: _Embedded) -> dict[str, np.ndarray]:
        """The mean of a Gaussian process, whose noise has the variance 1 of the kernel's scale."""
        labels = np.stack([*self._captions.labels.values()], axis=1).astype(np.float32)
        kernel, mean = self._kernel(self._known), labels.mean(0)
        kernel[np.diag_indices_from(kernel)] += 1
        predicted = self._kernel(asked) @ np.linalg.solve(kernel, labels - mean) + mean
        return dict(zip(self._captions.labels, predicted.T, strict=True))

    def _taught(self, name: str, texts: Sequence[str]) -> np.ndarray:
        """Total variances of texts by a text tower whose means stay as they are."""
        density = self._known.numbers[:, FEATURES.index("density 30")]
        column = density if name == TAUGHT[0] else self._captions.log_relevant
        low, high = np.quantile(column, (0.01, 0.99))
        wanted = torch.from_numpy(np.clip((column - low) / (high - low), 0, 1)).float()
        tower: Any = load_model(self._model, trainable=True).model.text
        known, asked = _stored(tower, self._known.texts), _stored(tower, texts)
        stage = VarianceStageConfig(epochs=20, lr=3e-3)
        fit_variance_stage(tower, known, wanted, np.arange(len(wanted)), stage, seed=self._seed)
        return tower.embed(asked).total_variance.numpy()


def _stored(tower: Any, texts: Sequence[str]) -> Any:
    """Texts as a tower reads them; one that reads embeddings gets their sentence vectors."""
    read = _sentence_file if tower.processor.reads else str
    return tower.processor.read([partial(read, text) for text in texts])[0]


def _sentence_file(text: str) -> bytes:
    with io.BytesIO() as file:
        np.save(file, sentence_vectors([text])[0])
        return file.getvalue()
