"""Tables of runs on the screen, as Markdown and as LaTeX; strategies and differences on the screen."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from papers.runs.paired import RSUM, Difference
from papers.runs.strategies import StrategyResult
from papers.runs.table import LEVEL, RunsTable
from papers.shown import write_files
from sfumato.reports import evaluation as reports
from sfumato.reports.evaluation import metric_cell
from sfumato.reports.tables import MISSING, Table, print_table, print_wrapped, short_name, tex

_ALSO = 6
"""Number of further keys that a note names."""


def print_runs_table(table: RunsTable) -> None:
    """Print it; what is best has a star."""
    runs_table(table, lambda cell: f"{cell} *", "A star marks").show()


def write_runs_table(table: RunsTable, folder: Path) -> None:
    """Write table.json, table.md and table.tex."""
    shown = runs_table(table, lambda cell: f"**{cell}**", "Bold type marks")
    write_files(shown, folder, table.to_json(), runs_latex(table))


def runs_latex(table: RunsTable) -> str:
    """The table for LaTeX with the package booktabs."""
    return reports.runs_latex(runs_table(table, lambda cell: rf"\textbf{{{cell}}}", "Bold type marks", tex))


def runs_table(
    table: RunsTable, best: Callable[[str], str], marks: str, text: Callable[[str], str] = lambda cell: cell
) -> Table:
    """The rows as texts; ``best`` marks a cell that is best and differs from all others."""
    rows = []
    for place, row in enumerate(table.rows):
        cells = [text(reports.cell(column.partition(" by ")[0], row.figures.get(column))) for column in table.columns]
        for k, column in enumerate(table.columns):
            if (found := table.best.get(column)) and found.row == place and found.differs:
                cells[k] = best(cells[k])
        rows.append([*map(text, reports.labels(row)), *cells])
    headings = [*(table.keys or ("",)), *(short_name(column.replace(".", " ")) for column in table.columns)]
    return Table(_title(table), headings, rows, left=max(1, len(table.keys)), notes=_notes(table, marks))


def _title(table: RunsTable) -> str:
    counts = sorted({len(row.runs) for row in table.rows})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seeds"
    averaged = "one seed" if counts == [1] else f"mean ± standard deviation over {seeds}"
    own = len(table.distances) > 1 and not any(" by " in column for column in table.columns)
    distances = f", {'each ' * own}ranked by {'its own distance, ' * own}{', '.join(table.distances)}"
    of_600 = ", RSUM of 600" if any(column.partition(" by ")[0] == RSUM for column in table.columns) else ""
    return f"Split {table.split}{distances}; per cent{of_600}; {averaged}"


def _notes(table: RunsTable, marks: str) -> list[str]:
    notes = []
    if len(table.rows) > 1 and table.best:
        notes.append(
            f"{marks} the highest figure of a column if it differs from that of every other row: paired randomisation"
            f" test over {table.n_queries:,} queries, each averaged over the seeds, with the queries of one of"
            f" {table.n_groups:,} images swapped together; p below {LEVEL:g}. The test is about other queries, not"
            " about other seeds."
        )
    if table.also:
        more = f" and {len(table.also) - _ALSO} more keys" if len(table.also) > _ALSO else ""
        notes.append(f"Rows also differ in {', '.join(table.also[:_ALSO])}{more}.")
    return [*notes, *table.notes]


def print_strategies(strategies: Mapping[str, StrategyResult]) -> None:
    """By ground truth and direction."""
    figures = [one for result in strategies.values() for one in result.figures.values()]
    metrics = list(dict.fromkeys(name for one in figures for name in one["i2t"] if not name.startswith("n_")))
    rows = []
    for result in strategies.values():
        for ground_truth, one in result.figures.items():
            for direction in ("i2t", "t2i"):
                cells = [metric_cell(name, one[direction].get(name)) for name in metrics]
                rows.append([result.strategy.label, ground_truth, direction, *cells, f"{result.seconds:.2f}"])
    print_table("strategies", ["strategy", "ground truth", "direction", *metrics, "seconds"], rows, left=3)


def print_differences(differences: Sequence[Difference], title: str) -> None:
    """Print a comparison as one table; what all rows share stands above it."""
    rows, names = [], list(dict.fromkeys(d.ground_truth for d in differences))
    for d in differences:
        own = d.difference
        interval = MISSING if own.low is None or own.high is None else f"{100 * own.low:+.2f} .. {100 * own.high:+.2f}"
        rows.append([
            *([d.ground_truth] if len(names) > 1 else []), d.direction, d.metric, f"{100 * d.first:.2f}",
            f"{100 * d.second:.2f}", f"{100 * (own.value or 0):+.2f}", interval, f"{d.p_value:.4f}",
        ])  # fmt: skip
    first = ["ground truth"] if len(names) > 1 else []
    print_table(
        f"{title}, query by query, in per cent; 95 % intervals, p by random swaps of groups with the same matches",
        [*first, "direction", "metric", "other", "this", "difference", "interval", "p"],
        rows, left=2 + len(first),
    )  # fmt: skip
    sizes = dict.fromkeys(f"{d.n_queries:,} {d.direction} queries in {d.n_groups:,} groups" for d in differences)
    if len(names) == 1:
        print_wrapped("; ".join(sizes))
