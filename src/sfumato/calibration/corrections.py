"""A small correction of fitted logits by people's verdicts, as strong as other verdicts say that it should be.

The correction starts at no change, and a penalty holds it there: with few verdicts the fitted logits stay, with many
they follow the verdicts. Cross-validation over queries chooses the strength. A change must be clearly better than none,
and of equally good ones the most careful wins; so verdicts seldom do harm.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from sfumato.calibration.conditional import LinearLogit
from sfumato.calibration.platt import fit_logistic

PENALTIES = (math.inf, 100.0, 30.0, 10.0)
"""Strengths of the penalty, in verdicts; the first leaves the logits as they are."""

N_FOLDS = 5
"""Number of folds, and smallest number of queries."""

_LEAST_DEVIATION = 0.1

_SURE = 2.0
"""Standard errors by which a change must be better than none. benchmarks/judgements.py: with one, ten verdicts made the
packaged constants worse on average."""


@dataclass(frozen=True, eq=False)
class JudgedHits:
    """Hits that people judged."""

    query: Tensor  # (k,) number of the query
    n_words: Tensor  # (k,) number of its words
    logit: Tensor  # (k,) logit of the hit, by the calibration that is to be corrected
    has_texts: Tensor  # (k,) whether the item has texts
    yes: Tensor  # (k,) fraction of people who say yes
    weight: Tensor  # (k,) one over the probability that the hit was sampled

    def some(self, rows: Tensor) -> "JudgedHits":
        """Those of some rows. rows (k,) bool."""
        return JudgedHits(*(values[rows] for values in vars(self).values()))


@dataclass(frozen=True)
class Correction:
    """The logit becomes factor * logit + shift + by_words / (number of words)."""

    factor: float
    shift: float
    by_words: float

    def logit(self, logit: Tensor, inverse_words: Tensor) -> Tensor:
        """Corrected logits. logit (k,), inverse_words (k,)."""
        return self.factor * logit + self.shift + self.by_words * inverse_words

    def of(self, logit: LinearLogit, words: int) -> LinearLogit:
        """A logit that has it. words: position of the feature one over words."""
        weights = [self.factor * weight for weight in logit.weights]
        weights[words] += self.by_words
        intercept = self.factor * logit.intercept + self.shift
        return replace(logit, slope=self.factor * logit.slope, intercept=intercept, weights=tuple(weights))


def fit_correction(logit: Tensor, inverse_words: Tensor, hits: JudgedHits, *, seed: int = 0) -> Correction | None:
    """The correction of logits by verdicts; None if no change is best, or if there are fewer than N_FOLDS queries.

    logit (k,), inverse_words (k,).
    """
    queries, group = hits.query.unique(return_inverse=True)
    if len(queries) < N_FOLDS:
        return None
    w = hits.weight.double()
    raw = torch.stack([logit.double(), inverse_words.double()], dim=1)
    centre = (w @ raw) / w.sum()
    deviation = ((w @ (raw - centre).square()) / w.sum()).sqrt().clamp_min(_LEAST_DEVIATION)
    x, y, start = (raw - centre) / deviation, hits.yes.double(), logit.double()

    def fit(rows: Tensor, penalty: float) -> tuple[Tensor, float]:
        if math.isinf(penalty):
            return torch.zeros(2, dtype=torch.float64), 0.0
        n = float(w[rows].sum().square() / w[rows].square().sum())  # Verdicts of equal weights that say as much.
        return fit_logistic(x[rows], y[rows], weight=w[rows], penalty=penalty / n, offset=start[rows])

    random = torch.Generator().manual_seed(seed)
    fold = (torch.randperm(len(queries), generator=random) % N_FOLDS)[group]
    losses = torch.zeros(len(PENALTIES), len(y), dtype=torch.float64)
    for k in range(N_FOLDS):
        out = fold == k
        for i, penalty in enumerate(PENALTIES):
            weights, bias = fit(~out, penalty)
            said = start[out] + x[out] @ weights + bias
            losses[i, out] = w[out] * binary_cross_entropy_with_logits(said, y[out], reduction="none")
    by_query = torch.zeros(len(PENALTIES), len(queries), dtype=torch.float64).index_add_(1, group, losses)
    weights, bias = fit(torch.ones_like(fold, dtype=torch.bool), PENALTIES[_careful(by_query)])
    if not (weights.any() or bias):
        return None
    scaled = weights / deviation
    return Correction(1 + float(scaled[0]), bias - float(scaled @ centre), float(scaled[1]))


def _careful(losses: Tensor) -> int:
    """No change, row 0, unless the best is clearly better: by _SURE standard errors of the difference over queries, and
    more of few queries, as Student's t has it. Then the first row at most one worse than the best. losses (p, q)."""
    n = losses.shape[1]
    worse = losses - losses[losses.sum(1).argmin()]
    errors = worse.mean(1) * math.sqrt(n) / worse.std(1).clamp_min(1e-12)
    limit = _SURE + (_SURE**3 + _SURE) / (4 * (n - 1))
    return 0 if errors[0] <= limit else 1 + int((errors[1:] <= 1).nonzero()[0])
