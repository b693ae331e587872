"""Figures of published tables, and the figures of an evaluation in the same form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sfumato.evaluation.papers import paper_items

DEFAULT_TABLES = ("PCME++ 1", "PCME E.4", "PCME E.5", "PVSE++ 1", "PVSE++ 2", "PVSE++ 3", "PCME E.2", "PCME E.3")
"""Tables of methods, shown beside an evaluation that has some of their figures; the others are ablations."""

STRATEGY_TABLES = ("PCME++ C.7", "PCME E.1")
"""Tables of retrieval strategies."""


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table."""

    paper: str  # short name, as in docs/concepts/index.md
    source: str  # author, title, venue and number
    table: str  # number of the table in that paper
    about: str  # subject of the table
    benchmark: str  # "coco" for COCO 1K and 5K, CxC, RPC2, PMRP and ECCV Caption; "cub", "flickr30k" or "imagenet"
    direction: str
    backbone: str  # of the method; empty if the table names none
    method: str  # as printed; the paper marks figures from an official checkpoint or another paper with †
    figures: dict[str, float]

    @property
    def full_table(self) -> str:
        """Paper and table, e.g. "PCME++ C.3"."""
        return f"{self.paper} {self.table}"

    def own_name(self, name: str) -> str:
        """The name of a figure in :func:`own_figures`."""
        return f"{self.direction} {name}" if self.direction in ("i2t", "t2i") else name


def published_rows(
    benchmark: str | None = None,
    *,
    table: str | None = None,
    direction: str | None = None,
    paper: str | None = None,
) -> list[PublishedRow]:
    """Choose reference rows.

    Args:
        benchmark: only rows of this benchmark; None for all.
        table: only rows of this table, e.g. "1", "C.7", or with the paper "PCME++ C.7"; None for all.
        direction: only rows of "i2t", "t2i", "both" or "each"; None for all.
        paper: only rows of "PCME++", "PCME" or "PVSE++"; None for all.

    Returns:
        The rows in the order of the tables.

    Raises:
        ValueError: no row is left; the message lists the known values.

    Example:
        >>> [row.figures["rsum"] for row in published_rows(table="C.7") if row.method == "CSD (ours)"]
        [537.3]
    """
    rows: Sequence[PublishedRow] = _rows()
    of_table = "full_table" if table is not None and " " in table else "table"
    chosen = (("benchmark", benchmark), ("paper", paper), (of_table, table), ("direction", direction))
    for name, wanted in chosen:
        known = dict.fromkeys(getattr(row, name) for row in rows)
        rows = [row for row in rows if wanted is None or getattr(row, name) == wanted]
        if not rows:
            what = "table" if name == "full_table" else name
            raise ValueError(f"published_rows: no figures for {what} {wanted!r}; known: {', '.join(known)}")
    return list(rows)


def common_figures(figures: Mapping[str, Mapping[str, Any]], direction: str = "both") -> dict[str, float]:
    """Convert the figures of an evaluation to the form of the published ones."""
    found = {}
    for name in dict.fromkeys(name for row in _rows() if row.direction == direction for name in row.figures):
        first, _, rest = name.partition(" ")
        sides, key = ((first,), rest) if direction == "each" and rest else (_SIDES.get(direction, (direction,)), name)
        ground_truth, _, metric = key.rpartition(" ")
        both = figures.get(ground_truth or "coco_1k", {})
        if metric == "rsum" and "rsum" in both:
            found[name] = 100 * both["rsum"]
        elif all(metric in both.get(side, {}) for side in sides):
            found[name] = 100 * sum(both[side][metric] for side in sides) / len(sides)
    return found


def own_figures(
    figures: Mapping[str, Mapping[str, Any]],
    uncertainty: Mapping[str, Mapping[str, Any]] | None = None,
    total_variance: Mapping[str, float] | None = None,
    *,
    measure: str = "total_variance",
) -> dict[str, float]:
    """All figures of an evaluation that some published table has."""
    found = common_figures(figures, "both") | common_figures(figures, "each")
    for side in ("i2t", "t2i"):
        found |= {f"{side} {name}": value for name, value in common_figures(figures, side).items()}
    both = (uncertainty or {}).get("coco_1k", {})
    values = [side["correlation"] for side in both.values()]
    if values and None not in values and measure == "total_variance":
        found["minus_rho"] = -sum(values) / len(values)
    if values and total_variance:
        found["total_variance"] = sum(total_variance.values()) / len(total_variance)
    return found


_SIDES = {"both": ("i2t", "t2i")}


@cache
def _rows() -> tuple[PublishedRow, ...]:
    return tuple(
        PublishedRow(
            item.paper, item.source, item.number, item.about, item.benchmark, item.direction, backbone, method, figures
        )
        for item in paper_items().values()
        for (backbone, method), figures in item.published.items()
    )
