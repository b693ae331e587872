"""Estimators of a caption's multiplicity from the caption alone; higher means more images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from scipy.stats import norm, rankdata

from papers.multiplicity.data import LABELS, Captions
from papers.multiplicity.features import FEATURES, References
from papers.uncertainty.estimators import ESTIMATORS as UNCERTAINTIES
from sfumato.data.image_inputs import vector_file
from sfumato.distances.distance import squared_l2_product
from sfumato.encoders.heads import AveragePool, hidden_network
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.errors import UserError, progress_bar
from sfumato.evaluation.estimators import Matching
from sfumato.models.run import load_model
from sfumato.models.sections import VarianceStageConfig
from sfumato.search.languages import words_of
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

TAUGHT = ("variance_by_density", "variance_by_counts", "variance_by_regression")
"""Total variance after the variance stage has taught it density 30, log_relevant, or what the regression says of it."""

ESTIMATORS = (*WITHOUT_LABELS, *VARIANCES, *TAUGHT, REGRESSION)

_BLOCK = 500
_WIDTH, _DROPOUT, _FLOOR = 512, 0.5, 0.2
"""Of the network that taught variances get, and the smallest total variance beside the range of the taught ones."""


@dataclass(frozen=True, eq=False)
class Scene:
    """Captions with labels, those asked, and others without labels: each is placed among all."""

    known: Captions
    asked: Sequence[str]
    others: Sequence[str] = ()
    model: str = "small"  # name or folder of a model with text Gaussians
    seed: int = 0  # of the variances that are taught

    def estimates(self, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        """{estimator: {label: (n,) of those asked}}; all but the regression say the same for all labels."""
        found = dict[str, dict[str, np.ndarray]]()
        for name in names:
            if name == REGRESSION:
                found[name] = self._regression()
                continue
            if name in TAUGHT:
                asked = np.arange(self._rows.start, self._rows.stop)
                values = self.taught(name).embed(self._store, asked).total_variance.numpy()
            elif name in VARIANCES:
                gaussians = self._tower().embed(self._store).numpy()[self._rows]
                values = UNCERTAINTIES[name](gaussians, gaussians[:0], Matching())
            else:
                weights = WITHOUT_LABELS[name]
                values = self._numbers[self._rows][:, list(map(FEATURES.index, weights))] @ [*weights.values()]
            found[name] = dict.fromkeys(LABELS, values)
        return found

    @cached_property
    def _texts(self) -> list[str]:
        """Those known, those asked, and others with other words."""
        said = [*self.known.texts, *self.asked]
        words = {tuple(words_of(text)) for text in said}
        others = {tuple(words_of(text)): text for text in self.others}
        return [*said, *(text for own, text in others.items() if own not in words)]

    @cached_property
    def _n_known(self) -> int:
        return len(self.known.rows)

    @cached_property
    def _rows(self) -> slice:
        """Of those asked."""
        return slice(self._n_known, self._n_known + len(self.asked))

    def _tower(self) -> Any:
        return load_model(self.model, trainable=True).model.text

    @cached_property
    def _store(self) -> Any:
        """All captions as the model's text tower reads them; one that reads embeddings gets their sentence vectors."""
        processor = self._tower().processor
        items: list[Callable[[], Any]] = [partial(str, text) for text in self._texts]
        if reads := processor.reads:
            items = [partial(vector_file, vector, "caption", reads) for vector in self._vectors]
        with progress_bar("reading captions", len(items)) as advance:
            return processor.read(items, progress=advance)[0]

    @cached_property
    def _vectors(self) -> np.ndarray:
        """(t, 384) unit sentence vectors of MiniLM."""
        return sentence_vectors(self._texts)

    @cached_property
    def _numbers(self) -> np.ndarray:
        """(t, f) FEATURES, standardised as those of the known."""
        features = References(self._texts, self._vectors).features()
        return np.clip(_standardised(features, self._n_known), -4, 4)

    @cached_property
    def _states(self) -> np.ndarray:
        """(t, c) average token features that the text tower's head reads, standardised as those of the known."""
        tower, parts = self._tower(), []
        if not hasattr(tower, "encoder"):  # A model as it is, without a head.
            return _standardised(tower.embed(self._store).numpy().mean, self._n_known)
        with torch.no_grad():
            for start in range(0, len(self._texts), _BLOCK):
                rows = np.arange(start, min(start + _BLOCK, len(self._texts)))
                tokens = tower.encoder(self._store.batch(rows).to(tower.device)).float()
                parts.append(AveragePool()(*tokens.for_log_var()).numpy())
        return _standardised(np.concatenate(parts), self._n_known)

    def _kernel(self, rows: slice) -> np.ndarray:
        """(n, k) kernel of captions with the known; its weights and scales were chosen on validation."""
        known, n, c = slice(self._n_known), len(FEATURES), self._states.shape[1]
        numbers, vectors, states = ((v[rows], v[known]) for v in (self._numbers, self._vectors, self._states))
        return (
            0.3 / n * (numbers[0] @ numbers[1].T)
            + 0.5 * np.exp(-0.3 / n * squared_l2_product(*numbers))
            + 0.4 * np.exp(-1.5 * squared_l2_product(*vectors))
            + 0.4 * np.exp(-0.5 / c * squared_l2_product(*states))
        )

    @cached_property
    def _fitted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A Gaussian process with noise of variance 1, fitted to the normal scores of the labels.

        (k, l) scores, (k, l) weights of the known, and (k, l) errors if each is left out.
        """
        labels = np.stack([*self.known.labels.values()], axis=1)
        scores = norm.ppf((rankdata(labels, axis=0) - 0.5) / len(labels))
        kernel = self._kernel(slice(self._n_known))
        kernel[np.diag_indices_from(kernel)] += 1
        inverse = np.linalg.inv(kernel)
        weights = inverse @ scores
        return scores, weights, weights / inverse.diagonal()[:, None]

    def _regression(self) -> dict[str, np.ndarray]:
        """The mean label, given the score of a caption and the errors of the known."""
        scores, weights, errors = self._fitted
        found, predicted = dict[str, np.ndarray](), self._kernel(self._rows) @ weights
        for k, (name, label) in enumerate(self.known.labels.items()):
            spread = np.quantile(errors[:, k], (np.arange(100) + 0.5) / 100)
            order = np.argsort(scores[:, k])
            found[name] = np.interp(predicted[:, [k]] + spread, scores[order, k], label[order]).mean(1)
        return found

    def taught(self, name: str) -> Any:
        """The model's text tower with variances taught by one of TAUGHT; its means stay as they are to the bit.

        The log variance gets a hidden layer. The mean total variance stays about what it was.
        """
        tower = self._tower()
        if (head := getattr(tower, "head", None)) is None or head.log_var is None:
            raise UserError(f"{name}: the text tower of {self.model} has no variances that can be trained")
        if name != TAUGHT[0]:
            self.known.check_relevant()
        index = np.r_[: self._n_known, self._rows.stop : len(self._texts)]
        if name == TAUGHT[0]:
            column = self._numbers[:, FEATURES.index("density 30")]
        elif name == TAUGHT[1]:
            column, index = self.known.log_relevant, index[: self._n_known]
        else:
            label = [*self.known.labels].index("log_relevant")
            column = self._kernel(slice(None)) @ self._fitted[1][:, label]
        low, high = np.quantile(column[index], (0.01, 0.99))
        if not low < high:
            raise UserError(f"{name}: all captions have {low:g}, so there is nothing to teach")
        wanted = torch.from_numpy(np.clip((column - low) / (high - low), 0, 1)).float()
        usual = tower.embed(self._store, index).total_variance.mean()
        level = float(usual / (wanted[index].mean() + _FLOOR))
        sizes = self._states.shape[1], head.log_var.linear.out_features
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            head.log_var_hidden = hidden_network(*sizes, _WIDTH, _DROPOUT)
        stage = VarianceStageConfig(epochs=20, lr=1e-3, floor=_FLOOR * level)
        fit_variance_stage(tower, self._store, level * wanted, index, stage, seed=self.seed)
        return tower


def _standardised(values: np.ndarray, n: int) -> np.ndarray:
    """(t, c) with mean 0 and deviation 1 of the first n rows; a constant stays 0."""
    values = values - values[:n].mean(0)
    return (values / (values[:n].std(0) + 1e-6)).astype(np.float32)
