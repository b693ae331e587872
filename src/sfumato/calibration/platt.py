"""Two curves from distances to match probabilities: Platt scaling and, for many held-out pairs, isotonic regression."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration.logistic import newton
from sfumato.errors import need
from sfumato.gaussian import Array, as_tensor
from sfumato.matching import match_logit


def fit_logistic(
    features: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    penalty: float = 0.0,
    offset: Tensor | None = None,
) -> tuple[Tensor, float]:
    r"""The weights w and the bias b that minimise the mean log loss of sigmoid(x w + b) plus penalty/2 ||w||^2.

    Use standardised features: the penalty treats all alike. With an offset the logits are offset + x w + b, and the
    bias is penalised, too: the offset is where a strong penalty leaves them.

    features (k, f), target (k,), weight (k,), offset (k,).
    """
    x, y = features.detach().double(), target.detach().double()
    w = torch.ones_like(y) if weight is None else weight.detach().double()
    start = torch.zeros_like(y) if offset is None else offset.detach().double()
    if x.ndim != 2 or y.shape != x.shape[:1] or w.shape != y.shape or start.shape != y.shape:
        raise ValueError(
            f"fit_logistic: got features {tuple(x.shape)}, target {tuple(y.shape)}, weight {tuple(w.shape)} and offset"
            f" {tuple(start.shape)}; expected (k, f), (k,), (k,) and (k,)"
        )
    if not w.sum() > 0:
        raise ValueError("fit_logistic: the weights of the rows add up to 0")
    columns, labels = torch.cat([x, torch.ones_like(y).unsqueeze(1)], dim=1).cpu().numpy(), y.cpu().numpy()
    weights = (w / w.sum()).cpu().numpy()
    ridge, first = np.full(columns.shape[1], penalty), np.zeros(columns.shape[1])
    if offset is None:
        ridge[-1], first[-1] = 0, log_odds((weights @ labels + 1e-6) / (1 + 2e-6))
    found = newton(columns, labels, weights, ridge, first, centre=np.zeros_like(first), offset=start.cpu().numpy())
    return torch.from_numpy(found[:-1]).to(x.device), float(found[-1])


def fit_logits(distance: Array, match: Array, *, weight: Array | None = None) -> tuple[float, float]:
    """The (logit_scale, logit_bias) that maximise the likelihood of known matches (Platt scaling).

    A convex problem in two numbers, solved in float64. Fit on held-out pairs, never on the training pairs.
    The probabilities are valid for pairs from the same distribution; with another fraction of matches they need a
    shift.

    Args:
        distance: (k,) or any shape, a tensor or an array; flattened.
        match: labels in [0, 1] of the same shape.
        weight: of each pair, same shape; 1 for all if None.

    Returns:
        (logit_scale > 0, logit_bias).

    Raises:
        ValueError: shapes differ, values are not finite, there are only matches or only non-matches, or matches are on
            average not closer than non-matches, so that no positive scale fits.

    Paper: Platt, "Probabilistic outputs for support vector machines", 1999.
    """
    who = "fit_logits"
    distance, match = (
        as_tensor(value, name, who).detach().flatten().double()
        for value, name in ((distance, "distance"), (match, "match"))
    )
    weight = torch.ones_like(match) if weight is None else as_tensor(weight, "weight", who).detach().flatten().double()
    if distance.shape != match.shape or weight.shape != match.shape:
        raise ValueError(
            f"fit_logits: got {distance.numel()} distances, {match.numel()} labels and {weight.numel()} weights;"
            " the numbers must be equal"
        )
    if not torch.isfinite(distance).all() or not ((match >= 0) & (match <= 1)).all():
        raise ValueError("fit_logits: distances must be finite and match must lie in [0, 1]")
    positive, negative = weight * match, weight * (1 - match)
    if positive.sum() == 0 or negative.sum() == 0:
        raise ValueError("fit_logits: needs matching and non-matching pairs, got only one kind")
    means = (positive * distance).sum() / positive.sum(), (negative * distance).sum() / negative.sum()
    if not means[0] < means[1]:
        raise ValueError(
            f"fit_logits: matches (mean distance {means[0]:.4g}) are not closer than non-matches ({means[1]:.4g});"
            " train the model further"
        )
    # Standardised distances make the problem well scaled; a weak prior keeps separable data finite.
    centre, deviation = distance.mean(), distance.std(correction=0).clamp_min(1e-12)
    z = (distance - centre) / deviation
    slope, intercept = fit_logistic(-z.unsqueeze(1), match, weight=weight, penalty=2e-9)
    scale = float(slope / deviation)
    bias = intercept + scale * float(centre)
    if not scale > 0:
        raise ValueError(
            "fit_logits: the best scale is not positive; the distances do not separate matches from non-matches"
        )
    return scale, bias


Knots = tuple[tuple[float, float], ...]
"""(distance, logit) by ascending distance, falling logits."""


def fit_knots(distance: Tensor, match: Tensor) -> Knots:
    """Centred isotonic regression: the mean distance and the log odds of each level of the monotone fit.

    Paper: Oron and Flournoy, "Centered isotonic regression", Statistics in Biopharmaceutical Research, 2017.
    """
    with need("calibration", "isotonic calibration needs scikit-learn", ", or use platt"):
        from sklearn.isotonic import isotonic_regression
    d, y = distance.detach().flatten().double().cpu().numpy(), match.detach().flatten().double().cpu().numpy()
    x, position, weight = np.unique(d, return_inverse=True, return_counts=True)
    fitted = isotonic_regression(
        np.bincount(position, y) / weight, sample_weight=weight.astype(float), increasing=False
    )
    start = np.flatnonzero(np.append(True, np.diff(fitted) < 0))
    n, at = (np.add.reduceat(values, start) for values in (weight.astype(float), weight * x))
    hits = np.add.reduceat(np.bincount(position, y), start)
    # Levels of 0 and 1 would have infinite odds: half a pair of the other kind is added. Levels that are no longer in
    # order are pooled with their neighbours.
    pooled: list[tuple[float, float, float]] = []
    for level in zip((at / n).tolist(), hits.tolist(), n.tolist(), strict=True):
        pooled.append(level)
        while len(pooled) > 1 and _smoothed(pooled[-1]) >= _smoothed(pooled[-2]):
            (a, i, s), (b, j, t) = pooled.pop(), pooled.pop()
            pooled.append(((a * s + b * t) / (s + t), i + j, s + t))
    if len(pooled) < 2:
        raise ValueError("isotonic calibration: the distances do not separate matches from non-matches; use platt")
    return tuple((level[0], log_odds(_smoothed(level))) for level in pooled)


def knots_logit(distance: Tensor, knots: Knots, slope: float) -> Tensor:
    """The logit of an isotonic fit: linear between the knots, and falling with a constant slope outside of them."""
    x, y = (np.array(values) for values in zip(*knots, strict=True))
    inside = distance.clamp(x[0], x[-1])
    values = torch.as_tensor(np.interp(inside.cpu().numpy(), x, y)).to(distance.device)
    return values - slope * (distance - inside)


def log_odds(p: float) -> float:
    """Logarithm of the odds of a probability."""
    return math.log(p) - math.log1p(-p)


def _smoothed(level: tuple[float, float, float]) -> float:
    _, hits, n = level
    if hits == 0:
        return 0.5 / (n + 1)
    return (hits if hits < n else hits + 0.5) / (n if hits < n else n + 1)


METHODS = ("platt", "isotonic")
"""Ways to fit the probability."""


@dataclass(frozen=True)
class PairLogits:
    """The probability of a random pair by its distance: the part of a :class:`Calibration` without directions."""

    logit_scale: float
    logit_bias: float
    match_fraction: float  # fraction of matches among the pairs of the fit
    knots: Knots | None = None

    @classmethod
    def of_pairs(cls, distance: Array, match: Array, method: str = "platt") -> "PairLogits":
        """Fit on pairs, any shape; match is 0 and 1."""
        if method not in METHODS:
            raise ValueError(f"Calibration: unknown method {method!r}; known: {', '.join(METHODS)}")
        distance, match = as_tensor(distance, "distance", "Calibration"), as_tensor(match, "match", "Calibration")
        knots = fit_knots(distance, match) if method == "isotonic" else None
        return PairLogits(*fit_logits(distance, match), float(match.double().mean()), knots)

    def shift(self, match_fraction: float) -> float:
        """The shift of every logit where matches are rarer or more frequent than in the fit."""
        if not 0 < match_fraction < 1:
            raise ValueError(f"Calibration: match_fraction must be between 0 and 1, got {match_fraction}")
        return log_odds(match_fraction) - log_odds(self.match_fraction)

    def logit(self, distance: Array, *, match_fraction: float | None = None) -> Tensor:
        """Logarithm of the odds of :meth:`probability`, strictly falling with the distance. Returns (...)."""
        shift = 0.0 if match_fraction is None else self.shift(match_fraction)
        d = as_tensor(distance, "distance", "Calibration").detach().double()
        if self.knots is None:
            return match_logit(d, self.logit_scale, self.logit_bias + shift)
        return knots_logit(d, self.knots, self.logit_scale) + shift

    def probability(self, distance: Array, *, match_fraction: float | None = None) -> Tensor:
        """Probability that a random pair at this distance matches. Returns (...)."""
        distance = as_tensor(distance, "distance", "Calibration")
        return torch.sigmoid(self.logit(distance, match_fraction=match_fraction)).to(distance.dtype)
