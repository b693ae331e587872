"""What commands print on standard output for a person to read."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from sfumato.evaluation.protocols import Evaluation, table_rows


def print_evaluation(evaluation: Evaluation, title: str) -> None:
    """A table of an evaluation on standard output, recalls and precisions in per cent."""
    table = Table(title=title, title_justify="left")
    table.add_column("direction")
    names = ["recall@1", "recall@5", "recall@10", "r_precision", "map@r"]
    for name in [*names, "median_rank", "n_queries"]:
        table.add_column(name, justify="right")
    for direction, metrics in table_rows(evaluation):
        shown = [f"{metrics[name]:.1%}" for name in names] + [
            f"{metrics['median_rank']:g}",
            f"{metrics['n_queries']:g}",
        ]
        table.add_row(direction, *shown)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"rsum {evaluation.rsum * 100:.1f} of 600 | images {evaluation.n_images}, texts {evaluation.n_texts}")
    variance = evaluation.total_variance
    print(f"mean total variance: images {variance['image']:.4g}, texts {variance['text']:.4g}")
    for direction, values in (evaluation.uncertainty or {}).items():
        print(
            f"{direction} recall@1 from the most certain tenth of the queries to the least: "
            + " ".join(f"{b['recall']:.0%}" for b in values["bins"])
        )
        print(
            f"{direction} correlation of bin and recall@1: {_number(values['correlation'])}, Spearman over queries: {_number(values['spearman'])}"
        )
    if evaluation.multiplicity:
        both = evaluation.multiplicity
        print(
            "Spearman of a text's total variance with its number of true pictures:"
            f" {_number(both['all'])} over all texts, {_number(both['balanced'])} balanced over powers of two"
        )


def print_search(result: dict[str, Any]) -> None:
    """One query and its hits as plain lines."""
    print(
        f"{result['query']}   uncertainty {result['uncertainty']:.3g}, about {result['expected_matches']:.1f} matches expected"
    )
    if not result["calibrated"]:
        print("  (probabilities not calibrated for such queries: trust their order, not their size)")
    for hit in result["hits"]:
        label = f"  {hit['label']}" if hit.get("label") else ""
        print(
            f"  {hit['match_probability']:7.1%}  {result['distance']} {hit['distance']:.4f}  uncertainty {hit['uncertainty']:.3g}  {hit['id']}{label}"
        )


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}"
