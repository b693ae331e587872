"""Published figures of the papers beside the own ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from papers.tables.items import DEFAULT_TABLES, PublishedRow, own_figures, published_rows
from sfumato.errors import UserError
from sfumato.files import read_json
from sfumato.reports.tables import number, print_table, print_wrapped, short_name


def beside_published(file: Path, tables: Sequence[str] | None = None) -> tuple[list[PublishedRow], dict[str, float]]:
    """Rows of published tables that share figures with an evaluation against a benchmark, and its figures."""
    values = read_json(file)
    truths = values.get("truths") if isinstance(values, dict) else None
    if not isinstance(truths, dict):
        raise UserError(f"{file} has no figures of a benchmark; write it with `sfumato evaluate ... --benchmark NAME`")
    of_variance = (values.get(name) for name in ("uncertainty", "total_variance"))
    own = own_figures(truths, *of_variance, measure=values.get("uncertainty_measure", "total_variance"))
    chosen = DEFAULT_TABLES if tables is None else tuple(tables)
    every = [row for table in chosen for row in published_rows(table)]
    rows = [row for row in every if any(row.item.own_name(name) in own for name in row.figures)]
    if not rows:
        raise UserError(
            f"no published table has figures of {', '.join(truths)} (looked in {', '.join(chosen)}); published figures"
            " can stand beside --benchmark coco, flickr30k and cub"
        )
    return rows, own


def to_json(published: Sequence[PublishedRow], own: dict[str, float]) -> dict[str, Any]:
    """Both as JSON values."""
    about = ("paper", "source", "about", "benchmark", "direction")
    rows = [vars(r) | {"table": r.item.number} | {key: getattr(r.item, key) for key in about} for r in published]
    return {"own": own, "rows": [{key: value for key, value in row.items() if key != "item"} for row in rows]}


def print_published(published: Sequence[PublishedRow], figures: dict[str, float]) -> None:
    """Print each published table with the evaluation below it, in the columns that both have."""
    for id, item in {row.item.id: row.item for row in published}.items():
        rows = [row for row in published if row.item.id == id]
        names = {name: own for row in rows for name in row.figures if (own := item.own_name(name)) in figures}
        sides = {"both": "mean of both directions", "each": "by direction"}.get(item.direction, item.direction)
        skipped = 0 if any(row.backbone for row in rows) else 1  # The column of backbones, where a table has none.
        places = {name: _decimals([row.figures[name] for row in rows if name in row.figures]) for name in names}
        cells = [[row.backbone, row.method, *(number(row.figures.get(n), places[n]) for n in names)] for row in rows]
        cells.append(["", "this", *(number(figures[key], places[name]) for name, key in names.items())])
        print_table(
            f"beside {item.paper}, table {item.number} ({item.about}): {sides}, per cent",
            ["backbone", "method", *map(short_name, names)][skipped:],
            [row[skipped:] for row in cells],
            left=2 - skipped,
        )
    for source in dict.fromkeys(row.item.source for row in published):
        print_wrapped(f"published figures: {source}")


def _decimals(printed: Sequence[float]) -> int:
    """Number of decimals of a column, 1 or 2, as the paper prints most of it."""
    return 2 if sum(round(value, 1) != value for value in printed) > len(printed) / 2 else 1
