"""Charts as matplotlib SVG (curves, bars, maps of Gaussians as ellipses), and pages from templates."""

import base64
import contextlib
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sfumato.errors import need

if TYPE_CHECKING:
    import jinja2
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FIRST, SECOND, INK, SOFT, FAINT, GRID, CARD = (
    "#2563eb", "#c2410c", "#1d2430", "#5d6878", "#9aa4b2", "#e8ebf0", "#fefefe"
)  # fmt: skip
"""Colours of the light style: of the two series, of text, labels, guiding lines, the grid and the background."""

FAMILIES = ("#be185d", "#0f766e", "#7c3aed", "#a16207", "#4d7c0f")
"""Colours of highlighted items."""

_VARIABLES = {
    FIRST: "--sure", SECOND: "--vague", INK: "--ink", SOFT: "--soft", FAINT: "--faint", GRID: "--grid", CARD: "--card",
}  # fmt: skip
_VARIABLES |= {colour: f"--f{k}" for k, colour in enumerate(FAMILIES)}

STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 11, "axes.axisbelow": True,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.edgecolor": FAINT,
    "axes.labelcolor": INK, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.major.size": 0, "ytick.major.size": 0,
    "grid.color": GRID, "grid.linewidth": 1, "text.color": INK, "legend.frameon": False, "legend.borderaxespad": 0.4,
    "errorbar.capsize": 3, "axes.titlesize": 11,
}  # fmt: skip
"""Settings of matplotlib for every chart."""


def require_matplotlib() -> None:
    """Check that charts can be drawn, before a long computation."""
    with need("report", "charts are drawn with matplotlib"):
        import matplotlib.figure  # noqa: F401


def new_axes(width: float, height: float, title: str = "") -> "Axes":
    """Axes in the style of the charts, on a new figure that notebooks show."""
    import matplotlib
    from matplotlib import pyplot

    # Outside of the style: the first figure loads the backend, whose settings the end of the style would undo.
    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    with matplotlib.rc_context(STYLE):
        if title:
            figure.suptitle(title, x=0.01, ha="left", wrap=True)
        return figure.subplots()


@contextlib.contextmanager
def styled_axes(axes: "Axes | None", width: float, height: float, title: str = "") -> "Iterator[Axes]":
    """The given axes, or new ones, and the style of the charts until the block ends."""
    require_matplotlib()
    import matplotlib

    axes = new_axes(width, height, title) if axes is None else axes
    with matplotlib.rc_context(STYLE):
        yield axes


def draw_intervals(axes: "Axes", x: Any, y: Sequence[float], low: Sequence[float], high: Sequence[float]) -> None:
    """A line of points with their intervals."""
    gaps = [[max(0.0, b - a) for a, b in zip(*ends, strict=True)] for ends in ((low, y), (y, high))]
    axes.errorbar(x, y, yerr=gaps, fmt="o-", color=FIRST, markersize=5, zorder=2)


@contextlib.contextmanager
def laid_out(figure: "Figure") -> Iterator[None]:
    """Within, the layout stands: matplotlib would draw everything once more for each file to find it."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvas, engine = figure.canvas, figure.get_layout_engine()
    if engine is None:
        yield
        return
    FigureCanvasSVG(figure)  # Widths of words are those of the drawing.
    try:
        engine.execute(figure)
        figure.set_layout_engine(None)
        yield
    finally:
        figure.set_layout_engine(engine)
        figure.set_canvas(canvas)


Points = Sequence[Mapping[str, Any]]
"""The points of a curve: {"x", "value", "low", "high"}."""


def draw_curve(
    axes: "Axes", points: Points, colour: str, *, label: str = "", markers: bool = True, line: Any = "-"
) -> "list[Line2D]":
    """Draw points as a line with intervals where there are any; the markers."""
    xs, values = [p["x"] for p in points], [p["value"] for p in points]
    axes.plot(xs, values, color=colour, linestyle=line, linewidth=2, label=label or None)
    if known := [(p["x"], p["low"], p["high"]) for p in points if p["low"] is not None]:
        axes.vlines(*zip(*known, strict=True), color=INK if markers else colour, linewidth=1.2)
    return [axes.plot([x], [v], "o", color=colour, markersize=6)[0] for x, v in zip(xs, values, strict=True) if markers]


class Chart:
    """A matplotlib figure with one pair of axes."""

    def __init__(self, label: str, *, width: int = 380, height: int = 230) -> None:
        require_matplotlib()
        import matplotlib
        from matplotlib.figure import Figure

        self._label, self._width, self._height = label, width, height
        self._titles: dict[str, str] = {}
        with matplotlib.rc_context(STYLE):
            self.figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
            self.axes: Axes = self.figure.subplots()
            self.axes.grid(axis="y")

    def hover(self, artist: "Artist", title: str) -> None:
        """Give a shape a title that browsers show under the pointer."""
        name = f"titled-{len(self._titles)}"
        artist.set_gid(name)
        self._titles[name] = f"<title>{html.escape(title)}</title>"

    def legend(self) -> None:
        """Put a legend of all labelled series above the axes."""
        import matplotlib

        with matplotlib.rc_context(STYLE):
            self.figure.legend(loc="outside upper left", ncols=4, handlelength=2.1, columnspacing=1.4)

    def svg(self) -> Markup:
        """The chart as an SVG element."""
        import matplotlib

        file = io.StringIO()
        with matplotlib.rc_context(STYLE | {"svg.hashsalt": self._label}):
            nothing: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            with laid_out(self.figure):
                self.figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        text = re.sub(r"\s+", " ", file.getvalue().split("</defs>", 1)[1].rpartition("</svg>")[0])
        text = re.sub(r' clip-path="[^"]*"|; font-family: [^;"]*|<defs> <clipPath.*?</defs>', "", text)
        text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
        text = re.sub(r'<g id="[^"]*" ?/>', "", text)
        text = re.sub(r'<g id="([^"]*)">', lambda found: "<g>" + self._titles.get(found[1], ""), text)
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, f"var({variable}, {colour})")
        label = html.escape(self._label)
        return Markup(f'<svg viewBox="0 0 {self._width} {self._height}" role="img" aria-label="{label}">{text}</svg>')


@cache
def _environment(*folders: Path) -> "jinja2.Environment":
    import jinja2

    packaged = jinja2.PackageLoader("sfumato", "reports/templates")
    templates = jinja2.ChoiceLoader([packaged, *map(jinja2.FileSystemLoader, folders)])
    return jinja2.Environment(loader=templates, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def render_page(template: str, values: Mapping[str, Any], *folders: Path) -> str:
    """Fill a template of the package or of other folders; all texts are escaped."""
    return _environment(*folders).get_template(template).render(values)


def data_url(content: bytes) -> str:
    """The bytes of an image file as a URL that a page can hold."""
    kind = "png" if content[:4] == b"\x89PNG" else "webp" if content[:4] == b"RIFF" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def shown_probability(p: float) -> str:
    """A probability in per cent that never rounds to 0% or 100%."""
    if p >= 0.995:
        return ">99%"
    return "<1%" if p < 0.005 else f"{p:.0%}"
