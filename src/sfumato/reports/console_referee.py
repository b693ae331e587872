"""The console output of `sfumato referee`: the figures that decide, in words; the others are in its files."""

from collections.abc import Sequence
from typing import Any

from sfumato.reports.formatting import in_words
from sfumato.reports.referee_tables import DIRECTION_NAMES, Cells, corruption_cells, referee_cells, tested
from sfumato.reports.tables import print_table, print_wrapped

_COLUMNS = ("log_loss", "ece", "wrong_auroc", "absent_auroc", "ambiguity")

_LEGEND = (
    "log loss: of the probability that the first hit is right, in nats; lower is better",
    "ECE: calibration error of this probability, in groups of equally many queries; 0 is perfect",
    "wrong, AUROC: how often a wrong first hit is less certain than a right one; .5 is chance, 1 perfect",
    "absent, AUROC: the same for queries whose matches are taken out of the gallery",
    "ambiguity: correlation with the true number of matches",
    "damaged queries: AUROC of the most damaged against the clean ones; Spearman of damage and uncertainty",
)


def print_referee(report: dict[str, Any], methods: Sequence[str]) -> None:
    """Print a report of one model and seed, and what its words mean."""
    shown = {name: report["methods"][name] for name in methods if name in report["methods"]}
    reports = [report | {"methods": shown}]
    for split, direction in tested(reports):
        _print_cells(referee_cells(reports, split, direction, _COLUMNS))
    for direction in DIRECTION_NAMES:
        if (found := corruption_cells(reports, direction)) is not None:
            _print_cells(found)
    print_table(
        "What the methods take for uncertainty; in square brackets the name for --methods and in the files",
        ["method", "what it is"],
        [[_title(name), f"{m['summary']} [{name}]"] for name, m in shown.items() if "summary" in m], running=(1,),
    )  # fmt: skip
    print("\n*: the best of its column. In brackets: 95% intervals over queries")
    for line in _LEGEND:
        print_wrapped(line, indent=2)
    for note in report["notes"]:
        print_wrapped(f"note: {note}", indent=2)
    for name, why in report["not_built"].items():
        print_wrapped(f"not built: {name}. {why}", indent=2)


def _print_cells(table: Cells) -> None:
    rows = [[_title(row[0]), *(_marked(cell) for cell in row[1:])] for row in table.rows]
    print_table(table.heading, [in_words(title) for title in table.titles], rows)
    for note in table.notes:
        print_wrapped(note, indent=2)
    print()


_TITLES = {"match_entropy": "match entropy", "margin": "margin", "recall@1, clean to damaged": "recall@1 falls"}


def _title(name: str) -> str:
    """The name of a method in words."""
    return _TITLES.get(name) or in_words(name)


def _marked(cell: str) -> str:
    """A cell with one asterisk before the best, instead of Markdown's bold."""
    return f"*{cell[2:].replace('**', '', 1)}" if cell.startswith("**") else cell
