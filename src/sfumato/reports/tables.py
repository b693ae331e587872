"""Numbers, intervals and names in words, and tables of them, in one style for screens, pages and files.

On a screen nothing is wider than it, and no value is cut.
"""

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Printed

from sfumato.charts import shown_probability
from sfumato.errors import counted, printable
from sfumato.metrics.bootstrap import Interval
from sfumato.search.answer import LINE
from sfumato.search.texts import WORD_FIELDS

MISSING = "–"
"""Stands where there is no value."""

CLIPPED = 240
"""Longest text on a page, in characters."""

DIRECTIONS = {"i2t": "image → text", "t2i": "text → image"}
"""The two directions of retrieval in words."""

ARROWS = {"t2i": "text -> image", "i2t": "image -> text"}
"""The same on a screen."""

WORDS = {
    "total_variance": "total variance", "log_det": "log volume", "geometric_std": "geometric mean σ",
    "expected_matches": "expected matches", "match_entropy": "entropy, all items",
    "top1_mismatch": "first hit mismatch", "margin": "margin to second hit", "nearest_mean": "distance of means",
    "misses": "misses in 10",
    "wrong_gain": "wrong, PRR", "wrong_excess_aurc": "wrong E-AURC", "out_of_gallery": "unanswerable, AUROC",
}  # fmt: skip
"""Names of estimators and figures in words; others stand as they are."""


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


def mean_and_deviation(mean: float, deviation: float | None, decimals: int | None = 1) -> str:
    """Mean ± standard deviation; the mean alone of a single value."""
    return number(mean, decimals) + ("" if deviation is None else f" ± {number(deviation, decimals)}")


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
    return MISSING if value is None else shown_probability(value)


def signed(value: float | None) -> str:
    """A correlation with its sign."""
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "−")


def compact_number(value: float | None) -> str:
    """Two decimals without a leading zero, for wide tables on the screen."""
    return MISSING if value is None else re.sub(r"^(-?)0\.", r"\1.", f"{value:.2f}")


def compact_interval(value: Interval | None, number: Callable[[float | None], str] = compact_number) -> str:
    """A value and its interval in short form, for wide tables on the console."""
    if value is None or value.value is None:
        return MISSING
    if value.low is None or value.high is None:
        return number(value.value)
    return f"{number(value.value)} [{number(value.low)}, {number(value.high)}]"


def in_words(name: str) -> str:
    """The name of an estimator or a figure in words."""
    return WORDS.get(name, str(name).replace("_", " ").replace("auroc", "AUROC").replace("aurc", "AURC"))


def short_name(figure: str) -> str:
    """The name of a figure of the papers in short words, for headings."""
    for long, short in _SHORT:
        figure = figure.replace(long, short)
    return figure


_SHORT = (("r_precision", "R-P"), ("recall@", "R@"), ("map@r", "mAP@R"), ("rsum", "RSUM"), ("_", " "))


def clipped(text: str, most: int = CLIPPED) -> str:
    """A text in one line, cut to a length."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else text[: most - 1] + "…"


PLAIN_WIDTH = 80
"""Columns of the output where it is no terminal."""

_GAP = 2
"""Columns between two columns of a table."""

_FLEXIBLE = 24
"""Fewest columns that a column of running text takes, if its longest text is not shorter."""


_filled = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)


def screen_width() -> int:
    """Number of columns of the output."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH


def print_wrapped(text: str, indent: int = 0) -> None:
    """Print a paragraph in lines that fit the screen; paths and other long words stay whole."""
    words = text.lstrip(" ")
    start, rest = " " * (len(text) - len(words)), " " * indent
    print(_filled(words, screen_width(), initial_indent=start, subsequent_indent=rest))


def print_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, running: Collection[int] = ()
) -> None:
    """Print a table. One that is wider than the screen is continued below, with its first columns again."""
    width = screen_width()
    widths = [_column_width(headings[k], [row[k] for row in rows], k in running) for k in range(len(headings))]
    if title:
        print_wrapped(title)
    for number, part in enumerate(_parts(widths, left, width)):
        table = Printed(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
        needed = sum(widths[k] + _GAP for k in part) - _GAP
        for k in part:
            flows = k in running
            own = max(widths[k], widths[k] + width - needed) if flows else widths[k]
            table.add_column(
                _filled(headings[k], own), justify="left" if k < left or flows else "right",
                width=None if flows else own, max_width=own if flows else None, no_wrap=not flows, overflow="fold",
            )  # fmt: skip
        for row in rows:
            table.add_row(*(row[k] for k in part))
        console = Console(width=max(width, needed), highlight=False, markup=False)
        with console.capture() as capture:
            console.print(table)
        print("" if number == 0 else "\n", end="")
        print("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))


def _column_width(heading: str, cells: Sequence[str], running: bool) -> int:
    """The columns that the widest line of a cell takes, and the longest word of the heading."""
    widest = max((cell_len(line) for cell in cells for line in cell.split("\n")), default=0)
    return max(min(widest, _FLEXIBLE) if running else widest, *(cell_len(word) for word in heading.split() or [""]))


def _parts(widths: Sequence[int], left: int, width: int) -> list[list[int]]:
    """The columns of each part of a table: the first ones, and as many others as fit beside them."""
    keys = list(range(left))
    taken = sum(widths[k] + _GAP for k in keys)
    parts: list[list[int]] = [[]]
    used = taken
    for k in range(left, len(widths)):
        if parts[-1] and used + widths[k] > width:
            parts.append([])
            used = taken
        parts[-1].append(k)
        used += widths[k] + _GAP
    return [keys + part for part in parts]


@dataclass(frozen=True)
class Table:
    """A table."""

    title: str  # what it is about
    headings: Sequence[str]  # of its columns
    rows: Sequence[Sequence[str]]  # as many texts as headings
    left: int = 1  # number of first columns that are repeated where it is continued
    running: Collection[int] = ()  # columns of running text
    notes: Sequence[str] = ()  # sentences below it

    def show(self, indent: int = 0) -> None:
        """Print it, and below it its notes."""
        print_table(self.title, self.headings, self.rows, left=self.left, running=self.running)
        for note in self.notes:
            print_wrapped(note, indent)


_LATEX = r"""\begin{table}
\centering
\begin{tabular}{%s}
\toprule
%s
\midrule
%s
\bottomrule
\end{tabular}
\caption{%s}
\end{table}
"""

_TEX = {character: f"\\{character}" for character in "%&#_${}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$",
    "–": "--", "×": r"$\times$", "²": "$^2$", "→": r"$\rightarrow$", "∞": r"$\infty$", "†": r"$\dagger$",
    "α": r"$\alpha$", "μ": r"$\mu$", "σ": r"$\sigma$", "ζ": r"$\zeta$",
}  # fmt: skip


def tex(text: str) -> str:
    """The text for LaTeX."""
    return "".join(_TEX.get(character, character) for character in text)


def latex(columns: str, head: str, rows: Iterable[Sequence[str]], caption: str) -> str:
    """A table for the package booktabs; head and cells are LaTeX, the caption is plain text."""
    return _LATEX % (columns, head, "\n".join(" & ".join(row) + r" \\" for row in rows), tex(caption))


def print_search(result: dict[str, Any], *, why: bool = False) -> None:
    """Print one query and its results, with the log odds of each if asked why."""
    calibrated, fits = result["calibrated"], result["target"] == "fits"
    if calibrated and fits:
        print(result["query"])
    elif calibrated:
        print(f"{result['query']}   about {result['expected_matches']:.1f} matches expected")
    else:
        by = "distance and texts" if fits else "distance"
        print(f"{result['query']}   (by {by}: match probabilities are not calibrated for such queries)")
    if result["verdict"] is not None:
        print(f"  {result['verdict']}")
    if result["suggestion"] is not None:
        print(f"  did you mean: {result['suggestion']}")
    if result["warning"] is not None:
        print_wrapped(f"  {result['warning']}")
    if fits and calibrated:
        _print_above_and_below(result["hits"], why)
    else:
        _print_hits(result["hits"], "" if fits else result["distance"], calibrated)
    if why and (number := result["multiplicity"]) is not None:
        photographs = f"{max(1, number):,.0f} or more of COCO's 123,287 photographs"
        print_wrapped(f"  by the words alone, people would find {photographs}")
    if why and result["hits"] and not any(hit.get("why") for hit in result["hits"]):
        print("  no parts of a probability here: --why is of a text, without --without and --target listed")
    if not result["hits"] and not (result["verdict"] or "").startswith(("No item", "The gallery is empty")):
        print("  no item reaches this probability")
    if result["hidden"]:
        print(f"  {result['hidden']} more below this probability; without --min-probability they are shown")
    if (found := result["conformal_set"]) is not None:
        print(f"  conformal set of the requested coverage: {counted(len(found), 'item')}")
        _print_hits(found[:_SET_SHOWN], result["distance"], calibrated)
        if len(found) > _SET_SHOWN:
            print(f"  ... and {len(found) - _SET_SHOWN} more; --json prints all")


def print_match_meaning(results: Sequence[Mapping[str, Any]]) -> None:
    """Print what "right" and "match" mean below calibrated results, and the notes of the gallery."""
    targets = {result["target"] for result in results if result["calibrated"]}
    if "fits" in targets:
        evidence = "its captions, tags and names count, too"
        print_wrapped(f"right: a person would say that the words describe the image; {evidence}")
    if "listed" in targets:
        print_wrapped("right: a match, a pair like those that the data list (a photo and its caption)")
    for note in dict.fromkeys(filter(None, (result["note"] for result in results))):
        print_wrapped(f"note: {note}")


def _print_hits(hits: list[dict[str, Any]], distance: str, calibrated: bool, why: bool = False) -> None:
    """Print hits; with the name of the distance, their distances."""
    for hit in hits:
        label = hit.get("label") or hit.get("best_text")
        p = hit["match_probability"]
        said = f"  {probability(p):>7}" if calibrated else ""
        measured = f"  {distance} {hit['distance']:.4f}" if distance else ""
        folded = f"  +{len(hit['duplicates'])} nearly the same" if hit.get("duplicates") else ""
        print(f"{said}{measured}  {printable(hit['id'] + (f'  {label}' if label else ''))}{folded}")
        if why and hit.get("why"):
            best = hit.get("best_text")
            fields = [f for f in WORD_FIELDS if best and best in hit.get(f, "").replace("\n", ", ")]
            kind = f"texts ({fields[0] if fields else 'date'})" if best else "texts"
            named = {kind if name == "texts" and value else name: value for name, value in hit["why"].items()}
            parts = ", ".join(f"{name} {value:+.2f}" for name, value in named.items())
            print(f"           {parts} = {sum(hit['why'].values()):+.2f}")


def _print_above_and_below(hits: list[dict[str, Any]], why: bool) -> None:
    """Print hits, with a line where they become less likely right than wrong, unless they are in another order."""
    above = [hit for hit in hits if hit["match_probability"] >= LINE]
    if above != hits[: len(above)]:
        return _print_hits(hits, "", True, why)
    _print_hits(above, "", True, why)
    if above and len(above) < len(hits):
        print(f"  ---- below {LINE:.0%} ----")
    _print_hits(hits[len(above) :], "", True, why)


_SET_SHOWN = 20
