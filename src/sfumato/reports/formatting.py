"""The formats of numbers, intervals and texts on pages and on the console."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sfumato.metrics.bootstrap import Interval

MISSING = "–"
"""Stands where there is no value."""

CLIPPED = 240
"""Longest text on a page, in characters."""

DIRECTIONS = {"i2t": "image → text", "t2i": "text → image"}
"""The two directions of retrieval in words."""

_WORDS = {
    "total_variance": "total variance",
    "log_det": "log volume",
    "geometric_std": "geometric mean σ",
    "sample_spread": "sample distance",
    "self_mismatch": "mismatch with itself",
    "expected_matches": "expected matches",
    "match_entropy": "entropy, all items",
    "match_entropy_top10": "entropy, 10 nearest",
    "top1_mismatch": "first hit mismatch",
    "margin": "margin to second hit",
    "knn_distance": "distance to 10 items",
    "nearest_mean": "distance of means",
    "inclusion": "includes its hits",
    "not_included": "outside of its hits",
    "predicted_miss": "trained predictor",
    "more_uncertain": "more uncertain",
    "variance_ratio": "ratio of total variances",
    "between": "lies between its parts",
    "off_line": "distance off the line",
    "covers": "covers a part",
    "includes": "includes a part",
    "moved": "has moved by",
    "wrong_gain": "wrong, PRR",
    "wrong_excess_aurc": "wrong E-AURC",
    "out_of_gallery": "unanswerable, AUROC",
}


@dataclass(frozen=True)
class Shown:
    """A value with its interval, as text."""

    value: str  # the value
    interval: str = ""  # "low to high"; empty if there is none

    def __str__(self) -> str:
        return f"{self.value} ({self.interval})" if self.interval else self.value


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; True and False do not count as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, decimals: int | None = None) -> str:
    """A number as text, with a minus sign."""
    if not is_number(value):
        return MISSING
    if decimals is None:
        text = f"{value:.2f}" if 0.1 <= abs(value) < 100 or value == 0 else f"{value:.3g}"
    else:
        text = f"{value:.{decimals}f}"
    return (text if text.strip("-0.") else text.lstrip("-")).replace("-", "−")


def digits(value: Any, n: int = 4) -> str:
    """A number with a given number of significant digits."""
    return f"{value:.{n}g}".replace("-", "−") if is_number(value) else MISSING


def column_decimals(values: Iterable[float | None]) -> int:
    """Decimals for a column of numbers: its largest number gets three digits, and all at least two decimals."""
    largest = max((abs(v) for v in values if v), default=1.0)
    return max(2, 2 - math.floor(math.log10(largest)))


def percent(value: Any, decimals: int = 1) -> str:
    """A fraction in per cent."""
    return f"{value:.{decimals}%}" if is_number(value) else MISSING


def probability(value: float | None) -> str:
    """A probability in per cent that never rounds to 0% or 100%."""
    if value is None:
        return MISSING
    if value >= 0.995:
        return ">99%"
    return "<1%" if value < 0.005 else f"{value:.0%}"


def signed(value: float | None, missing: str = "undefined") -> str:
    """A correlation with its sign."""
    return missing if value is None else f"{value:+.2f}".replace("-", "−")


def interval(value: Any, show: Callable[[Any], str] = number) -> Shown:
    """A value with its confidence interval, as text."""
    if isinstance(value, Interval):
        value = {"value": value.value, "low": value.low, "high": value.high}
    if not isinstance(value, Mapping):
        return Shown(show(value))
    low, high = value.get("low"), value.get("high")
    both = is_number(value.get("value")) and is_number(low) and is_number(high)
    return Shown(show(value.get("value")), f"{show(low)} to {show(high)}" if both else "")


def compact_number(value: float | None) -> str:
    """Two decimals without a leading zero, for wide tables on the screen."""
    return MISSING if value is None else re.sub(r"^(-?)0\.", r"\1.", f"{value:.2f}")


def compact_interval(value: Interval | None) -> str:
    """A value and its interval in short form, for wide tables on the console."""
    if value is None or value.value is None:
        return MISSING
    if value.low is None or value.high is None:
        return compact_number(value.value)
    return f"{compact_number(value.value)} [{compact_number(value.low)}, {compact_number(value.high)}]"


def in_words(name: str) -> str:
    """The name of an estimator or a figure in words."""
    plain = str(name).replace("_", " ").replace("auroc", "AUROC").replace("aurc", "AURC")
    return _WORDS.get(name, plain)


def clipped(text: str, most: int = CLIPPED) -> str:
    """A text in one line, cut to a length."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else text[: most - 1] + "…"
