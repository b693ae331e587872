"""Drawings in files, and ellipses of Gaussians on a plane."""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.charts import STYLE, Chart, laid_out
from sfumato.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_drawing(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg, equal in every run; the paths."""
    import matplotlib

    paths = []
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # A character that the font lacks is a box in the PNG alone.
        with laid_out(figure):
            for ending in ("png", "svg"):
                drawn = io.BytesIO()
                nothing: Any = {"Date": None} if ending == "svg" else None
                figure.savefig(drawn, format=ending, dpi=150, metadata=nothing)
                paths.append(path := folder / f"{name}.{ending}")
                write_atomically(path, drawn.getvalue())
    return paths


def make_plane(axes: "Axes") -> None:
    """Give both axes one scale, and no ticks."""
    axes.set_aspect("equal", adjustable="datalim")
    axes.axis("off")


@dataclass(frozen=True)
class Ellipse:
    """An ellipse with a dot at its centre."""

    x: float  # of the centre
    y: float  # of the centre
    a: float  # first half axis
    b: float  # second half axis, at most a
    angle: float  # of the first half axis, in radians
    colour: str  # of line, area and dot
    title: str = ""  # shown under the pointer; empty for none
    letter: str = ""  # written beside it; empty for none
    dashed: bool = False  # whether its line is dashed
    strong: bool = True  # whether it stands out from others


def magnification(ellipses: Sequence[Ellipse], fraction: float) -> float:
    """The drawing scale of ellipses: 1, or a round factor that makes most of them visible."""
    if not ellipses:
        return 1.0
    wide = max(max(v) - min(v) for v in ([e.x for e in ellipses], [e.y for e in ellipses]))
    long = sorted(e.a for e in ellipses)[math.ceil(0.9 * len(ellipses)) - 1]
    if long <= 0 or wide <= long / fraction:
        return 1.0
    factor = fraction * wide / long
    power = 10.0 ** math.floor(math.log10(factor))
    return max(step * power for step in (1, 2, 5) if step * power <= factor * 1.001)


def ellipse_chart(
    ellipses: Sequence[Ellipse], label: str, *, times: float, width: int = 720, height: int = 540
) -> Chart:
    """Draw ellipses in one scale for both axes."""
    chart = Chart(label, width=width, height=height)
    chart.figure.set_layout_engine("none")
    chart.axes.set_position((0, 0, 1, 1))
    chart.axes.grid(visible=False)
    make_plane(chart.axes)
    for e, patch in zip(ellipses, draw_ellipses(chart.axes, ellipses, times), strict=True):
        if e.title:
            chart.hover(patch, e.title)
    return chart


def draw_ellipses(axes: "Axes", ellipses: Sequence[Ellipse], times: float) -> "list[Artist]":
    """Draw ellipses with their dots and letters on a plane; the ellipses."""
    from matplotlib.patches import Ellipse as Patch

    drawn: list[Artist] = []
    for e in ellipses:
        style: dict[str, Any] = {"linestyle": (0, (4, 3)) if e.dashed else "-", "linewidth": 1.6 if e.strong else 0.6}
        size = 2 * times * e.a, 2 * times * e.b
        patch = Patch(
            (e.x, e.y), *size, angle=math.degrees(e.angle), facecolor=(e.colour, 0.12), edgecolor=e.colour, **style
        )
        drawn.append(axes.add_patch(patch))
        axes.plot([e.x], [e.y], "o", color=e.colour, markersize=3.6 if e.strong else 2, markeredgewidth=0)
    lettered = any(e.letter for e in ellipses)
    axes.margins(0.08 if lettered else 0.02)
    for e, (x, y) in zip(ellipses, letter_positions(ellipses, times), strict=True) if lettered else ():
        if e.letter:
            axes.text(x, y, e.letter, color=e.colour, weight="bold", ha="center", va="center")
    return drawn


def letter_positions(ellipses: Sequence[Ellipse], times: float) -> list[tuple[float, float]]:
    """Positions for a letter beside each ellipse: apart from letters and centres, outside of ellipses, outwards.

    Returns (x, y).
    """
    if not ellipses:
        return []
    sides = [(max(v) - min(v)) for v in ([e.x for e in ellipses], [e.y for e in ellipses])]
    gap = 0.04 * (max(sides) + 2 * times * max(e.a for e in ellipses)) or 1.0
    middle = sum(e.x for e in ellipses) / len(ellipses), sum(e.y for e in ellipses) / len(ellipses)
    taken = [(e.x, e.y) for e in ellipses]
    for e in ellipses:
        outward = math.atan2(e.y - middle[1], e.x - middle[0])
        angles = [outward + math.pi * k / 12 for k in range(24)]

        def merit(angle: float, one: Ellipse = e, outward: float = outward) -> tuple[float, int, float]:
            point = _beside(one, times, gap, angle)
            apart = min(math.dist(point, other) for other in taken)
            inside = sum(_contains(other, times, point, 0.9 * gap) for other in ellipses)
            return min(apart, 1.8 * gap), -inside, math.cos(angle - outward)

        taken.append(_beside(e, times, gap, max(angles, key=merit)))
    return taken[len(ellipses) :]


def _radius(ellipse: Ellipse, times: float, angle: float) -> float:
    """The distance from the centre of an ellipse to its edge in a direction."""
    a, b = max(times * ellipse.a, 1e-12), max(times * ellipse.b, 1e-12)
    return 1 / math.hypot(math.cos(angle - ellipse.angle) / a, math.sin(angle - ellipse.angle) / b)


def _beside(ellipse: Ellipse, times: float, gap: float, angle: float) -> tuple[float, float]:
    """The point that lies a gap outside of an ellipse's edge, in a direction from its centre."""
    radius = _radius(ellipse, times, angle) + gap
    return ellipse.x + radius * math.cos(angle), ellipse.y + radius * math.sin(angle)


def _contains(ellipse: Ellipse, times: float, point: tuple[float, float], margin: float) -> bool:
    """Whether a point lies within an ellipse, or less than a margin outside."""
    dx, dy = point[0] - ellipse.x, point[1] - ellipse.y
    return math.hypot(dx, dy) < _radius(ellipse, times, math.atan2(dy, dx)) + margin
