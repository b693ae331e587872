"""What the pages draw with: axes, round numbers, pictures as addresses, and short words. Templates turn it into SVG; nothing here knows HTML."""

import base64
import math
from collections.abc import Iterable, Sequence
from typing import Any

CLIPPED = 240
"""Longest text on a page, in characters."""

_MARGIN = 14

_LABEL, _LETTER = 25, 6.4
"""Room for the label of a vertical axis beside its ticks, and for a letter of these, in units of a drawing."""

_MARK = 15, 14
"""Width and height that a letter beside an ellipse is given, in units of a drawing."""


class Axes:
    """From values to the coordinates of a drawing, whose size in its own units fits a phone."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self._x, self._y = x, y if y[1] > y[0] else (y[0], y[0] + 1)
        self.width, self.height = 380, 230
        self.left, self.right, self.top, self.bottom = 54, self.width - 18, 12, self.height - 42

    def x(self, value: float) -> float:
        """Horizontal place of a value."""
        low, high = self._x
        return round(self.left + (self.right - self.left) * (float(value) - low) / (high - low), 1)

    def y(self, value: float) -> float:
        """Vertical place of a value."""
        low, high = self._y
        return round(self.bottom - (self.bottom - self.top) * (float(value) - low) / (high - low), 1)

    def y_steps(self) -> list[float]:
        """Round values within the vertical range."""
        return round_steps(*self._y, 5)

    def chart(
        self,
        *,
        x_ticks: Iterable[tuple[float, str]],
        y_ticks: Iterable[tuple[float, str]],
        x_label: str,
        y_label: str,
        label: str,
    ) -> dict[str, Any]:
        """An empty drawing, with room for the longest tick on the left; label is what is read out in its place.

        Called before anything is placed with these axes.
        """
        x_ticks, y_ticks = list(x_ticks), list(y_ticks)
        longest = max((len(name) for _, name in y_ticks), default=0)
        self.left = max(self.left, round(_LABEL + _LETTER * longest))
        return {
            "axes": self,
            "x_ticks": [{"at": self.x(v), "label": name} for v, name in x_ticks],
            "y_ticks": [{"at": self.y(v), "label": name} for v, name in y_ticks],
            "x_label": x_label,
            "y_label": y_label,
            "label": label,
            **{shape: [] for shape in ("bars", "whiskers", "lines", "dots", "legend", "diagonal")},
        }

    def bar(self, at: float, value: float, width: float, colour: str, title: str) -> dict[str, Any]:
        """From the axis up to the value."""
        top = self.y(value)
        return {
            "x": round(self.x(at) - width / 2, 1),
            "y": top,
            "width": round(width, 1),
            "height": round(self.bottom - top, 1),
            "colour": colour,
            "title": title,
        }

    def whisker(self, at: float, low: float, high: float) -> dict[str, Any]:
        """An interval."""
        return {"x": self.x(at), "low": self.y(low), "high": self.y(high), "colour": ""}

    def line(self, points: Iterable[tuple[float, float]], colour: str) -> dict[str, Any]:
        """A line through points."""
        return {"points": " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points), "colour": colour}

    def dot(self, x: float, y: float, radius: float, colour: str, title: str) -> dict[str, Any]:
        """A dot."""
        return {"x": self.x(x), "y": self.y(y), "r": round(radius, 1), "colour": colour, "title": title}


Ellipse = tuple[float, float, float, float, float]
"""x, y, half axes a >= b, and the angle of the first in radians."""


def magnification(ellipses: Sequence[Ellipse], share: float) -> float:
    """How many times as large ellipses may be drawn: 1, or a round number that makes all but the largest tenth visible.

    Args:
        ellipses: of one picture, which all get the same factor.
        share: what the long half axis of the ninth decile may take of the wider side of the centres.
    """
    if not ellipses:
        return 1.0
    wide = max(max(e[axis] for e in ellipses) - min(e[axis] for e in ellipses) for axis in (0, 1))
    long = sorted(e[2] for e in ellipses)[math.ceil(0.9 * len(ellipses)) - 1]
    if long <= 0 or wide <= long / share:
        return 1.0
    factor = share * wide / long
    power = 10.0 ** math.floor(math.log10(factor))
    return max(step * power for step in (1, 2, 5) if step * power <= factor * 1.001)


class Plane:
    """From ellipses in a plane to those of a drawing: one scale for both axes, so that shapes stay what they are.

    Args:
        ellipses: all fit into the drawing.
        width, height: of the drawing.
        reach: half axes are drawn this many times as long.
        margin: on all sides.
    """

    def __init__(
        self,
        ellipses: Sequence[Ellipse],
        *,
        width: int = 720,
        height: int = 540,
        reach: float = 1.0,
        margin: int = _MARGIN,
    ) -> None:
        self.width, self.height, self._reach = width, height, reach
        sides = []
        for axis in (0, 1):
            low = min((e[axis] - reach * e[2] for e in ellipses), default=0.0)
            high = max((e[axis] + reach * e[2] for e in ellipses), default=0.0)
            sides.append((low, high))
        (self._left, right), (low, self._top) = sides
        across, down = right - self._left, self._top - low
        room = self.width - 2 * margin, self.height - 2 * margin
        scales = [have / need for have, need in zip(room, (across, down), strict=True) if need > 0]
        self._scale = min(scales, default=1.0)
        self._x0 = (self.width - self._scale * across) / 2
        self._y0 = (self.height - self._scale * down) / 2

    def ellipse(self, ellipse: Ellipse) -> dict[str, float]:
        """Centre, radii and turn in degrees, for an SVG ellipse."""
        x, y, a, b, angle = ellipse
        k = self._scale * self._reach
        return {
            "cx": round(self._x0 + self._scale * (x - self._left), 1),
            "cy": round(self._y0 + self._scale * (self._top - y), 1),
            "rx": round(k * a, 2),
            "ry": round(k * b, 2),
            "turn": round(-math.degrees(angle), 1),  # Down is positive in a drawing.
        }


def place_marks(ellipses: Sequence[dict[str, float]], width: int, height: int) -> list[tuple[float, float]]:
    """Places for a letter beside each drawn ellipse: outside of it, apart from each other, away from the middle of all.

    Args:
        ellipses: as :meth:`Plane.ellipse` gives them.
        width, height: of the drawing.

    Returns:
        (x, y) of the middle of each letter; they overlap only where there is no room.
    """
    if not ellipses:
        return []
    middle = tuple(sum(e[key] for e in ellipses) / len(ellipses) for key in ("cx", "cy"))
    wide, high = _MARK
    placed: list[tuple[float, float]] = []
    for one in ellipses:
        outward = math.atan2(one["cy"] - middle[1], one["cx"] - middle[0])
        best = (math.inf, one["cx"], one["cy"])
        for away in (0, 8, 16, 26, 38):
            for k in range(24):
                angle = outward + k * math.pi / 12
                reach = _radius(one, angle) + 11 + away
                x, y = one["cx"] + reach * math.cos(angle), one["cy"] + reach * math.sin(angle)
                hidden = sum(abs(x - other[0]) < wide and abs(y - other[1]) < high for other in placed)
                hidden += sum(math.hypot(x - e["cx"], y - e["cy"]) < 9 for e in ellipses)  # On a dot.
                cut = not (wide / 2 <= x <= width - wide / 2 and high / 2 <= y <= height - high / 2)
                within = sum(_within(e, x, y) for e in ellipses)
                cost = 100 * (hidden + cut) + 3 * within + away / 8 + 1 - math.cos(angle - outward)
                best = min(best, (cost, x, y))
        placed.append((round(best[1], 1), round(best[2], 1)))
    return placed


def _radius(ellipse: dict[str, float], angle: float) -> float:
    """From its centre to its edge."""
    rx, ry = max(ellipse["rx"], 0.1), max(ellipse["ry"], 0.1)
    turned = angle - math.radians(ellipse["turn"])
    return 1 / math.hypot(math.cos(turned) / rx, math.sin(turned) / ry)


def _within(ellipse: dict[str, float], x: float, y: float) -> bool:
    """Whether a letter at this place touches the ellipse's inside."""
    dx, dy = x - ellipse["cx"], y - ellipse["cy"]
    return math.hypot(dx, dy) < _radius(ellipse, math.atan2(dy, dx)) + 9


def round_steps(low: float, high: float, most: int) -> list[float]:
    """At most about ``most`` round values from low to high."""
    raw = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def round_top(value: float, most: float = 1.0) -> float:
    """A round upper end of an axis that holds the value."""
    if value <= 0:
        return min(1.0, most)
    step = round_steps(0, value, 5)[1]
    return min(most, math.ceil(value / step - 1e-9) * step)


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round values on an axis of decimal logarithms, from coarse to as fine as gives three."""
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        marks = [d * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for d in digits]
        marks = [m for m in marks if low <= math.log10(m) <= high]
        if len(marks) >= 3:
            break
    return [(math.log10(m), f"{m:g}") for m in marks]


def data_address(content: bytes) -> str:
    """The bytes of a PNG, WebP or JPEG file as an address that a page can hold."""
    kind = "png" if content[:4] == b"\x89PNG" else "webp" if content[:4] == b"RIFF" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def clipped(text: str, most: int = CLIPPED) -> str:
    """A text in one line, cut after so many characters."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def signed(value: float | None) -> str:
    """A correlation with its sign; None is undefined."""
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "−")
