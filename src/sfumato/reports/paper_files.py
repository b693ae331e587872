"""A repeated table of a paper on the screen, in Markdown and in LaTeX: ours beside published."""

import re
from collections.abc import Mapping
from pathlib import Path

from sfumato.errors import UserError
from sfumato.evaluation.compare import OverSeeds
from sfumato.evaluation.papers import PaperItem, data_sets
from sfumato.files import write_atomically, write_json
from sfumato.reports.formatting import MISSING, number
from sfumato.reports.tables import print_table, print_wrapped
from sfumato.studies.paper_tables import Table, table_columns

_SHORT = (("r_precision", "R-P"), ("recall@", "R@"), ("map@r", "mAP@R"), ("rsum", "RSUM"), ("_", " "))

_TEX = {character: f"\\{character}" for character in "%&#_${}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "×": r"$\times$",
    "²": "$^2$",
    "→": r"$\rightarrow$",
    "∞": r"$\infty$",
    "†": r"$\dagger$",
    "α": r"$\alpha$",
    "μ": r"$\mu$",
    "σ": r"$\sigma$",
    "ζ": r"$\zeta$",
}


def print_published(item: PaperItem) -> None:
    """Print the paper's figures alone."""
    if not item.rows:
        raise UserError(f"{item.id} has no published figures that could be shown; {item.note or item.about}")
    cells = [[label, *(_published(figures.get(name)) for name in item.columns)] for label, figures in item.rows.items()]
    print_table(f"{item.id}: {item.about}; per cent", ["", *map(heading, item.columns)], cells, left=1)
    for line in filter(None, (f"{item.source}.", item.note)):
        print_wrapped(line)


def write_table(table: Table, folder: Path) -> list[Path]:
    """Write table.json, table.md and table.tex; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", table.to_json())
    write_atomically(folder / "table.md", table_markdown(table))
    write_atomically(folder / "table.tex", table_latex(table))
    return [folder / f"table.{ending}" for ending in ("json", "md", "tex")]


def print_paper_table(table: Table) -> None:
    """Print a table; one wider than the screen is continued below."""
    lines = _cells(table)
    print_table(_title(table), lines[0], lines[1:], left=1)
    for line in notes(table):
        print_wrapped(line)


def print_items(items: Mapping[str, PaperItem]) -> None:
    """Print the list of all tables and figures."""
    rows = [[item.id, item.about, "\n".join(item.data_sets) or MISSING, item.state] for item in items.values()]
    print_table("", ["id", "title", "data", "state"], rows, left=3, running=(1,))
    print_wrapped(
        "run: repeated, docs/results has the figures. no data: its parts are tested, the paper's data were not"
        " available. published only: no recipe trains it. data: what it can be repeated on, the paper's first, by"
        ' `sfumato table "ID" --data NAME`; emoji comes with the package. --json has the commands and what they need.'
    )


def table_markdown(table: Table) -> str:
    """The table in Markdown, with its title above and its notes below."""
    head, *rows = _cells(table)
    rule = ["---"] + ["---:"] * (len(head) - 1)
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, rule, *rows)]
    return "\n".join([_title(table), "", *lines, "", *notes(table), ""])


def table_latex(table: Table) -> str:
    """The table for the package booktabs: each figure has a column of ours and one of the paper."""
    pairs = len(table.columns)
    names = " & ".join(rf"\multicolumn{{2}}{{c}}{{{tex(heading(name))}}}" for name in table.columns)
    rules = "".join(rf"\cmidrule(lr){{{2 * k + 2}-{2 * k + 3}}}" for k in range(pairs))
    second = " & ".join(["ours & published"] * pairs)
    body = [" & ".join(tex(cell) for cell in row) + r" \\" for row in _cells(table)[1:]]
    caption = tex(" ".join([_title(table) + ".", *notes(table)]))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{l{'rr' * pairs}}}",
            r"\toprule",
            rf" & {names} \\",
            rules,
            rf" & {second} \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{caption}}}",
            r"\end{table}",
            "",
        ]
    )


def heading(name: str) -> str:
    """The name of a figure in short words."""
    for long, short in _SHORT:
        name = name.replace(long, short)
    return name


def notes(table: Table) -> list[str]:
    """What a reader has to know beside the figures."""
    found = [f"Published: {table.item.source}."]
    if not table.same_data:
        found.append(f"The published figures are of other data, {_benchmark(table)}: only the order can be compared.")
        if beside := _beside(table):
            found.append(f"Of several published figures these stand beside ours: {beside}.")
    if table.data.overrides:
        found.append(f"Changed in all recipes: {', '.join(table.data.overrides)}.")
    found += [f"{row.label}: {reason}." for row in table.rows for reason in row.failed]
    if left := [row.label for row in table.rows if not row.runs and not row.failed]:
        found.append(f"Not repeated, because no recipe trains them on this data: {'; '.join(left)}.")
    if table.item.note:
        found.append(table.item.note)
    return found


def _beside(table: Table) -> str:
    """Which published figure stands beside each of ours, where the names differ."""
    names = {own: published for own, published in table_columns(table.item, table.data).items() if own in table.columns}
    pairs = [[heading(re.sub(r"^(i2t|t2i) ", "", name)) for name in pair] for pair in names.items()]
    return "; ".join(dict.fromkeys(f"{own}: {published}" for own, published in pairs if own != published))


def averaged_over(n_seeds: int, n_variants: int) -> str:
    """What a figure is the mean of."""
    if n_variants > 1:
        return f"mean ± standard deviation over {n_variants} folds with {n_seeds} {'seeds' if n_seeds > 1 else 'seed'}"
    return f"mean ± standard deviation over {n_seeds} seeds" if n_seeds > 1 else "one seed"


def _benchmark(table: Table) -> str:
    return data_sets()[table.item.benchmark].title


def _title(table: Table) -> str:
    averaged = averaged_over(table.n_seeds, table.n_variants)
    return f"{table.item.id}: {table.item.about}. Ours: {table.data.title}, split {table.split}, {averaged}; per cent"


def _cells(table: Table) -> list[list[str]]:
    """Headings and rows of texts: label, then ours and published of each figure."""
    head = [""]
    for name in table.columns:
        head += [heading(name), "published"]
    rows = []
    for row in table.rows:
        cells = [row.label]
        for name in table.columns:
            cells += [_ours(row.own.get(name)), _published(row.published.get(name))]
        rows.append(cells)
    return [head, *rows]


def _published(value: float | None) -> str:
    return "–" if value is None else number(value, 1 if round(value, 1) == value else 2)


def _ours(value: OverSeeds | None) -> str:
    if value is None:
        return "–"
    return number(value.mean, 1) + ("" if value.deviation is None else f" ± {value.deviation:.1f}")


def tex(text: str) -> str:
    """The text for LaTeX."""
    return "".join(_TEX.get(character, character) for character in text)
