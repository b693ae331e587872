"""Tables of runs, methods by metrics: on the screen and as LaTeX."""

from collections.abc import Callable, Sequence

from sfumato.metrics.retrieval import RANK_METRICS
from sfumato.reports.tables import MISSING, Table, column_decimals, latex, mean_and_deviation, short_name, tex
from sfumato.workflows.table import OverSeeds, Row

_FRACTIONS = ("recall@", "map@", "r_precision", "rsum")


def runs_table(
    rows: Sequence[Row], keys: Sequence[str], title: str, text: Callable[[str], str] = lambda cell: cell
) -> Table:
    """The rows of a table as texts."""
    metrics = list(dict.fromkeys(name for row in rows for name in row.figures))
    cells = [[*map(text, labels(row)), *(text(cell(name, row.figures.get(name))) for name in metrics)] for row in rows]
    headings = [*(keys or ("",)), *(short_name(name.replace(".", " ")) for name in metrics)]
    n = sorted({len(row.runs) for row in rows})
    number = f"{n[0]} to {n[-1]}" if len(n) > 1 else f"{n[0]}"
    seeds = "one seed" if n == [1] else f"mean ± standard deviation over {number} seeds"
    return Table(f"{title}; per cent, RSUM of 600; {seeds}", headings, cells, left=max(1, len(keys)))


def runs_latex(table: Table) -> str:
    """A table of runs for LaTeX with the package booktabs; its cells are LaTeX."""
    columns = "l" * table.left + "r" * (len(table.headings) - table.left)
    head = " & ".join(map(tex, table.headings)) + r" \\"
    return latex(columns, head, table.rows, " ".join([table.title + ".", *table.notes]))


def labels(row: Row) -> list[str]:
    """The values that name a row."""
    shown = [str(value).lower() if isinstance(value, bool) else str(value) for value in row.label]
    return [MISSING if value is None else text for value, text in zip(row.label, shown, strict=True)] or ["all runs"]


def cell(metric: str, value: OverSeeds | None) -> str:
    """Recalls, precisions and RSUM in per cent; other numbers as they are."""
    if value is None:
        return MISSING
    last = metric.rpartition(".")[2]
    if last.startswith(_FRACTIONS):
        return mean_and_deviation(100 * value.mean, value.deviation and 100 * value.deviation)
    decimals = 1 if last in RANK_METRICS else column_decimals((value.mean, value.deviation))
    return mean_and_deviation(value.mean, value.deviation, decimals)
