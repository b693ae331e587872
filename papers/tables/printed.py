"""The tables of the papers, ours beside published: on the screen, as Markdown and LaTeX."""

import re
from collections.abc import Sequence
from pathlib import Path

from papers.shown import write_files
from papers.tables.items import PaperItem, data_sets
from papers.tables.paper_tables import Table as PaperTable
from papers.tables.paper_tables import TableRow, table_columns
from sfumato.errors import UserError
from sfumato.reports.tables import (
    MISSING,
    Table,
    digits,
    latex,
    mean_and_deviation,
    number,
    print_table,
    print_wrapped,
    short_name,
    tex,
)  # fmt: skip
from sfumato.workflows.evaluation import OverSeeds

_PLAIN = ("total_variance", "minus_rho", "log_sigma")
"""Figures that are no per cent: they get significant digits."""


def print_published(item: PaperItem) -> None:
    """Print the paper's figures alone."""
    if not item.rows:
        raise UserError(f"{item.id} has no published figures that could be shown; {item.reason or item.about}")
    cells = [
        [label, *(_published(figures.get(name), name) for name in item.columns)] for label, figures in item.rows.items()
    ]
    print_table(f"{item.id}: {item.about}; {units(item.columns)}", ["", *map(short_name, item.columns)], cells, left=1)
    for line in filter(None, (f"{item.source}.", item.note)):
        print_wrapped(line)


def paper_table(table: PaperTable) -> Table:
    """A repeated table: label, then ours and published of each figure, if some are."""
    wide = 1 + _published_too(table)
    averaged = averaged_over(table.n_seeds, table.n_variants)
    data = f"{table.data.title}, split {table.split}"
    title = f"{table.item.id}: {table.item.about}. Ours: {data}, {averaged}; {units(table.columns)}"
    headings = ["", *(cell for name in table.columns for cell in (short_name(name), "published")[:wide])]

    def cells(row: TableRow, name: str) -> list[str]:
        return [_ours(row.own.get(name), name), _published(row.published.get(name), name)][:wide]

    rows = [[row.label, *(cell for name in table.columns for cell in cells(row, name))] for row in table.rows]
    return Table(title, headings, rows, notes=notes(table))


def write_table(table: PaperTable, folder: Path) -> list[Path]:
    """Write table.json, table.md and table.tex; the paths."""
    shown = paper_table(table)
    return write_files(shown, folder, table.to_json(), _latex(shown, 1 + _published_too(table)))


def _latex(table: Table, wide: int) -> str:
    """The table for the package booktabs: each figure has a column of ours and, if wide is 2, one of the paper."""
    names = [rf"\multicolumn{{{wide}}}{{c}}{{{tex(name)}}}" for name in table.headings[1::wide]]
    rules = [rf"\cmidrule(lr){{{wide * k + 2}-{wide * k + 1 + wide}}}" for k in range(len(names))]
    second = " & ".join(("ours", "published")[:wide] * len(names))
    head = "\n".join([rf" & {' & '.join(names)} \\", "".join(rules), rf" & {second} \\"])
    caption = " ".join([table.title + ".", *table.notes])
    return latex("l" + "r" * wide * len(names), head, [[tex(cell) for cell in row] for row in table.rows], caption)


def _published_too(table: PaperTable) -> bool:
    """Whether figures of the paper stand beside ours."""
    return any(row.published for row in table.rows)


def notes(table: PaperTable) -> list[str]:
    """What a reader has to know beside the figures."""
    found = [f"Published: {table.item.source}."] if _published_too(table) else []
    if not table.same_data and _published_too(table):
        other = data_sets()[table.item.benchmark].title
        found.append(f"The published figures are of other data, {other}: only the order can be compared.")
        if beside := _beside(table):
            found.append(f"Of several published figures these stand beside ours: {beside}.")
    if table.data.overrides:
        found.append(f"Changed in all recipes: {', '.join(table.data.overrides)}.")
    found += [f"{row.label}: {reason}." for row in table.rows for reason in row.failed]
    if left := [row.label for row in table.rows if not (row.runs or row.failed or row.own)]:
        found.append(f"Not repeated, because no recipe trains them on this data: {'; '.join(left)}.")
    if table.item.note:
        found.append(table.item.note)
    return found


def _beside(table: PaperTable) -> str:
    """Which published figure stands beside each of ours, where the names differ."""
    names = {own: published for own, published in table_columns(table.item, table.data).items() if own in table.columns}
    pairs = [[short_name(re.sub(r"^(i2t|t2i) ", "", name)) for name in pair] for pair in names.items()]
    return "; ".join(dict.fromkeys(f"{own}: {published}" for own, published in pairs if own != published))


def averaged_over(n_seeds: int, n_variants: int) -> str:
    """What a figure is the mean of."""
    if n_variants > 1:
        return f"mean ± standard deviation over {n_variants} folds with {n_seeds} {'seeds' if n_seeds > 1 else 'seed'}"
    return f"mean ± standard deviation over {n_seeds} seeds" if n_seeds > 1 else "one seed"


def units(columns: Sequence[str]) -> str:
    """What the figures of some columns are counted in."""
    others = [short_name(name) for name in columns if name.endswith(_PLAIN)]
    rsum = ", RSUM of 600" if any(name.endswith("rsum") for name in columns) else ""
    return f"per cent{rsum}" + (f"; {' and '.join(others)} as they are" if others else "")


def _published(value: float | None, name: str) -> str:
    if name.endswith(_PLAIN):
        return digits(value)
    return MISSING if value is None else number(value, 1 if round(value, 1) == value else 2)


def _ours(value: OverSeeds | None, name: str) -> str:
    if value is None or not name.endswith(_PLAIN):
        return MISSING if value is None else mean_and_deviation(value.mean, value.deviation)
    return digits(value.mean, 3) + ("" if value.deviation is None else f" ± {digits(value.deviation, 2)}")
