"""Figures of published tables as reference rows beside one's own; published.toml holds them with their source.

Nothing here was computed or measured with this package. The tables of a paper may disagree: for four rows of PCME++,
the recalls of table 1 are not the means of tables C.10 and C.11. Every figure is as printed.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table.

    Attributes:
        paper: short name, as in docs/concepts/index.md.
        source: author, title, venue and number.
        table: number of the table in that paper.
        about: subject of the table.
        benchmark: "coco" for COCO 1K and 5K, CxC and ECCV Caption.
        direction: "i2t", "t2i", or "both" for the mean of the two.
        backbone: of the method; empty if the table names none.
        method: as printed; the paper marks figures from an official checkpoint or another paper with †.
        figures: by "GROUND_TRUTH METRIC", e.g. "eccv map@r", and "rsum"; in per cent as printed, rsum of 600.
    """

    paper: str
    source: str
    table: str
    about: str
    benchmark: str
    direction: str
    backbone: str
    method: str
    figures: dict[str, float]


def published_rows(
    benchmark: str | None = None, *, table: str | None = None, direction: str | None = None
) -> list[PublishedRow]:
    """Choose reference rows.

    Args:
        benchmark: only rows of this benchmark; None for all.
        table: only rows of this table, e.g. "1" or "C.7"; None for all.
        direction: only rows of "i2t", "t2i" or "both"; None for all.

    Returns:
        The rows in the order of the tables.

    Raises:
        ValueError: no row is left; the message lists the known values.

    Example:
        >>> [row.figures["rsum"] for row in published_rows(table="C.7") if row.method == "CSD (ours)"]
        [537.3]
    """
    rows: Sequence[PublishedRow] = _rows()
    for name, wanted in (("benchmark", benchmark), ("table", table), ("direction", direction)):
        known = dict.fromkeys(getattr(row, name) for row in rows)
        rows = [row for row in rows if wanted is None or getattr(row, name) == wanted]
        if not rows:
            raise ValueError(f"published_rows: no figures for {name} {wanted!r}; known: {', '.join(known)}")
    return list(rows)


def common_figures(figures: Mapping[str, Mapping[str, Any]], direction: str = "both") -> dict[str, float]:
    """Convert the figures of an evaluation to the form of the published ones.

    Args:
        figures: {ground truth: {"i2t": {metric: fraction}, "t2i": ..., "rsum": ...}} of
            :func:`~sfumato.evaluation.benchmarks.evaluate_benchmarks`.
        direction: "i2t", "t2i", or "both" for the mean of the two.

    Returns:
        Per cent by "GROUND_TRUTH METRIC", and the rsum of COCO 1K; only figures that a published table has.

    Example:
        >>> common_figures({"cxc": {"i2t": {"recall@1": 0.5}, "t2i": {"recall@1": 0.25}}})
        {'cxc recall@1': 37.5}
    """
    sides = ("i2t", "t2i") if direction == "both" else (direction,)
    known = dict.fromkeys(name for row in _rows() if row.direction == direction for name in row.figures)
    found = {}
    for name in known:
        ground_truth, _, metric = name.partition(" ")
        both = figures.get(ground_truth, {})
        if all(metric in both.get(side, {}) for side in sides):
            found[name] = 100 * sum(both[side][metric] for side in sides) / len(sides)
    if "rsum" in known and "rsum" in figures.get("coco_1k", {}):
        found["rsum"] = 100 * figures["coco_1k"]["rsum"]
    return found


@cache
def _rows() -> tuple[PublishedRow, ...]:
    loaded = tomllib.loads(files("sfumato.evaluation").joinpath("published.toml").read_text(encoding="utf-8"))
    rows = []
    for table in loaded["table"]:
        common: dict[str, Any] = {key: value for key, value in table.items() if key not in ("columns", "rows")}
        for backbone, method, *values in table["rows"]:
            pairs = zip(table["columns"], values, strict=True)
            figures = {name: float(value) for name, value in pairs if value != "-"}
            rows.append(PublishedRow(**common, backbone=backbone, method=method, figures=figures))
    return tuple(rows)
