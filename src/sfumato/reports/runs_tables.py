"""Tables of runs, methods by metrics: on the screen, as Markdown and as LaTeX."""

from collections.abc import Callable
from pathlib import Path

from sfumato.evaluation.compare import RSUM, OverSeeds
from sfumato.metrics.retrieval import RANK_METRICS
from sfumato.reports.tables import MISSING, Table, column_decimals, latex, mean_and_deviation, short_name, tex
from sfumato.workflows.table import LEVEL, TESTED, RunsTable

_ALSO = 6
"""Number of further keys that a note names."""


def print_runs_table(table: RunsTable) -> None:
    """Print it; what is best has a star."""
    runs_table(table, lambda cell: f"{cell} *", "A star marks").show()


def write_runs_table(table: RunsTable, folder: Path) -> None:
    """Write table.json, table.md and table.tex."""
    shown = runs_table(table, lambda cell: f"**{cell}**", "Bold type marks")
    shown.write(folder, table.to_json(), runs_latex(table))


def runs_latex(table: RunsTable) -> str:
    """The table for LaTeX with the package booktabs."""
    shown = runs_table(table, lambda cell: rf"\textbf{{{cell}}}", "Bold type marks", tex)
    keys = max(1, len(table.keys))
    head = " & ".join(map(tex, shown.headings)) + r" \\"
    return latex("l" * keys + "r" * len(table.columns), head, shown.rows, " ".join([shown.title + ".", *shown.notes]))


def runs_table(
    table: RunsTable, best: Callable[[str], str], marks: str, text: Callable[[str], str] = lambda cell: cell
) -> Table:
    """The rows as texts; ``best`` marks a cell that is best and differs from all others."""
    rows = []
    for number, row in enumerate(table.rows):
        label = [MISSING if value is None else _value(value) for value in row.label] or ["all runs"]
        cells = [text(_cell(column, row.figures.get(column))) for column in table.columns]
        for k, column in enumerate(table.columns):
            if (found := table.best.get(column)) and found.row == number and found.differs:
                cells[k] = best(cells[k])
        rows.append([*map(text, label), *cells])
    headings = [*(table.keys or ("",)), *(short_name(column.replace(".", " ")) for column in table.columns)]
    return Table(_title(table), headings, rows, left=max(1, len(table.keys)), notes=_notes(table, marks))


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(column: str, value: OverSeeds | None) -> str:
    """Recalls, precisions and RSUM in per cent; other numbers as they are."""
    if value is None:
        return MISSING
    metric = column.partition(" by ")[0]
    if metric in TESTED or metric.rpartition(".")[2].startswith(("recall@", "map@", "r_precision")):
        return mean_and_deviation(100 * value.mean, value.deviation and 100 * value.deviation)
    decimals = 1 if metric.rpartition(".")[2] in RANK_METRICS else column_decimals((value.mean, value.deviation))
    return mean_and_deviation(value.mean, value.deviation, decimals)


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
