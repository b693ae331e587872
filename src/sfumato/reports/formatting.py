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
    """A value with its interval, as text.

    Attributes:
        value: the value.
        interval: "low to high"; empty if there is none.
    """

    value: str
    interval: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.interval})" if self.interval else self.value


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; True and False do not count as numbers.

    Args:
        value: anything.

    Returns:
        The answer.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, decimals: int | None = None) -> str:
    """A number as text, with a minus sign.

    Args:
        value: the number; anything else is shown as missing.
        decimals: number of decimals; None uses two decimals, or three significant digits below 0.1 and from 100 on.

    Returns:
        The text.

    Example:
        >>> number(-0.5), number(0.00312), number(-0.001, 1), number(None)
        ('−0.50', '0.00312', '0.0', '–')
    """
    if not is_number(value):
        return MISSING
    if decimals is None:
        text = f"{value:.2f}" if 0.1 <= abs(value) < 100 or value == 0 else f"{value:.3g}"
    else:
        text = f"{value:.{decimals}f}"
    return (text if text.strip("-0.") else text.lstrip("-")).replace("-", "−")


def digits(value: Any, n: int = 4) -> str:
    """A number with a given number of significant digits.

    Args:
        value: the number; anything else is shown as missing.
        n: number of digits.

    Returns:
        The text.
    """
    return f"{value:.{n}g}".replace("-", "−") if is_number(value) else MISSING


def column_decimals(values: Iterable[float | None]) -> int:
    """Decimals for a column of numbers: its largest number gets three digits, and all at least two decimals.

    Args:
        values: of the column; None is skipped.

    Returns:
        The number of decimals.
    """
    largest = max((abs(v) for v in values if v), default=1.0)
    return max(2, 2 - math.floor(math.log10(largest)))


def percent(value: Any, decimals: int = 1) -> str:
    """A fraction in per cent.

    Args:
        value: the fraction; anything but a number is shown as missing.
        decimals: number of decimals.

    Returns:
        The text.

    Example:
        >>> percent(0.1234), percent(0.5, 0), percent(None)
        ('12.3%', '50%', '–')
    """
    return f"{value:.{decimals}%}" if is_number(value) else MISSING


def probability(value: float | None) -> str:
    """A probability in per cent that never rounds to 0% or 100%.

    Args:
        value: in [0, 1]; None is shown as missing.

    Returns:
        The text.

    Example:
        >>> probability(0.7), probability(0.999), probability(0.0001)
        ('70%', '>99%', '<1%')
    """
    if value is None:
        return MISSING
    if value >= 0.995:
        return ">99%"
    return "<1%" if value < 0.005 else f"{value:.0%}"


def signed(value: float | None, missing: str = "undefined") -> str:
    """A correlation with its sign.

    Args:
        value: the correlation; None if it is undefined.
        missing: text for an undefined correlation.

    Returns:
        The text.

    Example:
        >>> signed(-0.25), signed(None)
        ('−0.25', 'undefined')
    """
    return missing if value is None else f"{value:+.2f}".replace("-", "−")


def interval(value: Any, show: Callable[[Any], str] = number) -> Shown:
    """A value with its confidence interval, as text.

    Args:
        value: an :class:`Interval`, its mapping {"value", "low", "high"}, or a bare number.
        show: converts one number to text.

    Returns:
        The texts; the interval is empty if one of its bounds is missing.

    Example:
        >>> str(interval({"value": 0.61, "low": 0.55, "high": 0.67}))
        '0.61 (0.55 to 0.67)'
    """
    if isinstance(value, Interval):
        value = {"value": value.value, "low": value.low, "high": value.high}
    if not isinstance(value, Mapping):
        return Shown(show(value))
    low, high = value.get("low"), value.get("high")
    both = is_number(value.get("value")) and is_number(low) and is_number(high)
    return Shown(show(value.get("value")), f"{show(low)} to {show(high)}" if both else "")


def compact_number(value: float | None) -> str:
    """Two decimals without a leading zero, for wide tables on the screen.

    Args:
        value: the number; None is shown as missing.

    Returns:
        The text.
    """
    return MISSING if value is None else re.sub(r"^(-?)0\.", r"\1.", f"{value:.2f}")


def compact_interval(value: Interval | None) -> str:
    """A value and its interval in short form, for wide tables on the console.

    Args:
        value: the interval; None is shown as missing.

    Returns:
        The text.

    Example:
        >>> compact_interval(Interval(0.61, 0.55, 0.67))
        '.61 [.55, .67]'
    """
    if value is None or value.value is None:
        return MISSING
    if value.low is None or value.high is None:
        return compact_number(value.value)
    return f"{compact_number(value.value)} [{compact_number(value.low)}, {compact_number(value.high)}]"


def in_words(name: str) -> str:
    """The name of an estimator or a figure in words.

    Args:
        name: the name in files.

    Returns:
        The words.

    Example:
        >>> in_words("off_line"), in_words("wrong_auroc"), in_words("knn_distance")
        ('distance off the line', 'wrong AUROC', 'distance to 10 items')
    """
    plain = str(name).replace("_", " ").replace("auroc", "AUROC").replace("aurc", "AURC")
    return _WORDS.get(name, plain)


def clipped(text: str, most: int = CLIPPED) -> str:
    """A text in one line, cut to a length.

    Args:
        text: any text.
        most: largest number of characters.

    Returns:
        The text; an ellipsis marks a cut.
    """
    text = " ".join(str(text).split())
    return text if len(text) <= most else text[: most - 1] + "…"
