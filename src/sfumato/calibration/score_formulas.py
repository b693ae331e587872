"""The fitted formula of a score calibrator: its constants, and the logits of described hits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.calibration.logistic import Floats

SHAPE = ("gap", "order", "lead", "height", "crowd")
"""Features of a hit in its list."""

SEGMENTS = ("low", "middle", "high")
"""The score below the first knot, between the knots, and above the second."""


@dataclass(frozen=True)
class ScoreFormula:
    """A fitted formula: the logit is the intercept plus the weighted features."""

    weights: Mapping[str, float]  # by feature: of SHAPE, of SEGMENTS, and "evidence 1", ...
    intercept: float
    knots: tuple[float, float] | None  # of SEGMENTS; None if scores of different queries are not comparable
    nothing: tuple[float, float, float]  # intercept, and weights of the first hit's logit and of log(expected matches)

    @property
    def n_evidence(self) -> int:
        """Number of further columns."""
        return sum(name.startswith("evidence") for name in self.weights)

    def logit(self, features: Floats) -> Floats:
        """(n,) logits. features (n, f)."""
        found: Floats = self.intercept + features @ np.array(list(self.weights.values()))
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "weights": dict(self.weights),
            "intercept": self.intercept,
            "knots": self.knots,
            "nothing": self.nothing,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ScoreFormula":
        """The reverse; it raises an error if the values are not such."""
        weights = {str(name): float(weight) for name, weight in values["weights"].items()}
        knots = None if values["knots"] is None else (float(values["knots"][0]), float(values["knots"][1]))
        own = [name for name in weights if not name.startswith("evidence")]
        if own != [*SHAPE, *(SEGMENTS if knots else ())]:
            raise ValueError(f"unknown features {own}")
        a, b, c = map(float, values["nothing"])
        numbers = (*weights.values(), *(knots or ()), float(values["intercept"]), a, b, c)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a number is not finite")
        return cls(weights, float(values["intercept"]), knots, (a, b, c))
