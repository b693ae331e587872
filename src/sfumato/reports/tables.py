"""Tables and paragraphs for the console, in one style: nothing is wider than the screen, and no value is cut."""

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 80
"""Columns of the output where it is no terminal."""

_GAP = 2
"""Columns between two columns of a table."""

_FLEXIBLE = 24
"""Fewest columns that a column of running text takes, if its longest text is not shorter."""


def screen_width() -> int:
    """Number of columns of the output."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH


def print_wrapped(text: str, indent: int = 0) -> None:
    """Print a paragraph in lines that fit the screen; paths and other long words stay whole."""
    words = text.lstrip(" ")
    print(
        textwrap.fill(
            words, screen_width(), initial_indent=" " * (len(text) - len(words)), subsequent_indent=" " * indent,
            break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    running: Collection[int] = (),
) -> None:
    """Print a table. One that is wider than the screen is continued below, with its first columns again."""
    width = screen_width()
    widths = [_column_width(headings[k], [row[k] for row in rows], k in running) for k in range(len(headings))]
    if title:
        print_wrapped(title)
    for number, part in enumerate(_parts(widths, left, width)):
        table = Table(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
        needed = sum(widths[k] + _GAP for k in part) - _GAP
        for k in part:
            flows = k in running
            own = max(widths[k], widths[k] + width - needed) if flows else widths[k]
            table.add_column(
                textwrap.fill(headings[k], own, break_long_words=False, break_on_hyphens=False),
                justify="left" if k < left or flows else "right",
                width=None if flows else own,
                max_width=own if flows else None,
                no_wrap=not flows,
                overflow="fold",
            )
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
