"""Charts by matplotlib as inline SVG, with the page's light or dark colours and titles under the pointer."""

import html
import io
import re
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sfumato.errors import UserError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

FIRST, SECOND, INK, SOFT, FAINT, GRID, CARD = (
    "#2563eb", "#c2410c", "#1d2430", "#5d6878", "#9aa4b2", "#e8ebf0", "#fefefe"
)  # fmt: skip
"""Colours of the light style: of the two series, of text, labels, guiding lines, the grid and the background."""

FAMILIES = ("#be185d", "#0f766e", "#7c3aed", "#a16207", "#4d7c0f")
"""Colours of highlighted items."""

_VARIABLES = {
    FIRST: "--sure",
    SECOND: "--vague",
    INK: "--ink",
    SOFT: "--soft",
    FAINT: "--faint",
    GRID: "--grid",
    CARD: "--card",
}
_VARIABLES |= {colour: f"--f{k}" for k, colour in enumerate(FAMILIES)}

_STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 11, "axes.axisbelow": True,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.edgecolor": FAINT,
    "axes.labelcolor": INK, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.major.size": 0, "ytick.major.size": 0,
    "grid.color": GRID, "grid.linewidth": 1, "text.color": INK, "legend.frameon": False, "legend.borderaxespad": 0.4,
    "errorbar.capsize": 3, "axes.titlesize": 11,
}  # fmt: skip


def require_matplotlib() -> None:
    """Check that charts can be drawn, before a long computation.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError("the page draws charts with matplotlib: pip install 'sfumato[report]'") from error


class Chart:
    """A matplotlib figure with one pair of axes.

    Attributes:
        axes: matplotlib's axes, to draw on.

    Args:
        label: what the chart shows, for readers who do not see it.
        width: of the drawing, in points; pages scale it.
        height: of the drawing, in points.
        plane: whether the axes are a plane without ticks, in which both have one scale.

    Raises:
        UserError: matplotlib is not installed.

    Example:
        >>> chart = Chart("a line")
        >>> chart.hover(chart.axes.plot([0, 1], [2, 3])[0], "from 2 to 3")
        >>> "<title>from 2 to 3</title>" in chart.svg()
        True
    """

    def __init__(self, label: str, *, width: int = 380, height: int = 230, plane: bool = False) -> None:
        require_matplotlib()
        import matplotlib
        from matplotlib.figure import Figure

        self._label, self._width, self._height = label, width, height
        self._titles: dict[str, list[str]] = {}
        with matplotlib.rc_context(_STYLE):
            self._figure = Figure(figsize=(width / 72, height / 72), layout=None if plane else "constrained")
            self.axes: Axes = self._figure.add_axes((0, 0, 1, 1)) if plane else self._figure.subplots()
            if plane:
                self.axes.set_aspect("equal", adjustable="datalim")
                self.axes.axis("off")
            else:
                self.axes.grid(axis="y")

    def hover(self, artist: "Artist", *titles: str) -> None:
        """Give a shape a title that browsers show under the pointer.

        Args:
            artist: what matplotlib's drawing functions return.
            titles: one; of a collection of equal markers one for each.
        """
        name = f"titled-{len(self._titles)}"
        artist.set_gid(name)
        self._titles[name] = [f"<title>{html.escape(title)}</title>" for title in titles]

    def legend(self) -> None:
        """Put a legend of all labelled series above the axes."""
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            self._figure.legend(loc="outside upper left", ncols=4, handlelength=2.1, columnspacing=1.4)

    def svg(self) -> Markup:
        """The chart as an SVG element.

        Returns:
            Markup for a page, without any reference to another file.
        """
        import matplotlib

        file = io.StringIO()
        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": self._label}):
            nothing: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self._figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        text = re.sub(r"\s+", " ", file.getvalue().split("</defs>", 1)[1].rpartition("</svg>")[0])
        text = re.sub(r' clip-path="[^"]*"|; font-family: [^;"]*|<defs> <clipPath.*?</defs>', "", text)
        text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
        text = re.sub(r'<g id="[^"]*" ?/>', "", text)
        text = re.sub(r'<g id="([^"]*)">', lambda found: "<g>" + self._children(found[1]), text)
        for name, titles in self._titles.items():
            if len(titles) > 1:
                text = _title_each(text, f"<!--{name}-->", titles)
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, f"var({variable}, {colour})")
        label = html.escape(self._label)
        return Markup(f'<svg viewBox="0 0 {self._width} {self._height}" role="img" aria-label="{label}">{text}</svg>')

    def _children(self, name: str) -> str:
        titles = self._titles.get(name, [])
        return titles[0] if len(titles) == 1 else f"<!--{name}-->" if titles else ""


def _title_each(text: str, mark: str, titles: list[str]) -> str:
    """Put one title into each marker of the group that starts with a mark."""
    before, _, after = text.partition(mark)
    waiting = iter(titles)
    return before + re.sub(
        r"<use ([^>]*)/>", lambda use: f"<use {use[1]}>{next(waiting)}</use>", after, count=len(titles)
    )
