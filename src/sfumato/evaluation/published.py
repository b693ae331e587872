"""Figures of published tables as reference rows beside one's own: facts with their source, in published.toml.

Nothing here is computed, and nothing was measured with this package. A paper's tables do not agree everywhere: of four of PCME++'s rows
the recalls of table 1 are not the means of tables C.10 and C.11. Each stands here as it is printed.
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
        paper: its short name, as in docs/concepts/index.md.
        source: author, title, venue and number.
        table: of that paper.
        about: what the table is about.
        benchmark: what was measured on, "coco" for COCO 1K and 5K, CxC and ECCV Caption.
        direction: "i2t", "t2i", or "both": the mean of the two.
        backbone: of the method; empty where the table has none.
        method: as printed; † is the paper's own mark of figures from an official checkpoint or another paper.
        figures: by "TRUTH METRIC", e.g. "eccv map@r", and "rsum", in per cent as printed; rsum is of 600.
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
    """The reference rows, in the order of the tables.

    Args:
        benchmark: only those of this benchmark.
        table: only those of the table of this number, e.g. "1" or "C.7".
        direction: only those of "i2t", "t2i" or "both".

    Raises:
        ValueError: no row is left; the message says what there is.

    Example:
        >>> [row.figures["rsum"] for row in published_rows(table="C.7") if row.method == "CSD (ours)"]
        [537.3]
    """
    rows: Sequence[PublishedRow] = _rows()
    for name, wanted in (("benchmark", benchmark), ("table", table), ("direction", direction)):
        known = dict.fromkeys(getattr(row, name) for row in rows)
        rows = [row for row in rows if wanted is None or getattr(row, name) == wanted]
        if not rows:
            raise ValueError(f"published_rows: no figures for {name} {wanted!r}; there are {', '.join(known)}")
    return list(rows)


def common_figures(figures: Mapping[str, Mapping[str, Any]], direction: str = "both") -> dict[str, float]:
    """Figures of an evaluation in the form of the published ones: per cent by "TRUTH METRIC", and the rsum of COCO 1K.

    Args:
        figures: {truth: {"i2t": {metric: fraction}, "t2i": ..., "rsum": ...}}, of evaluate_benchmarks.
        direction: "i2t", "t2i", or "both" for the mean of the two.

    Returns:
        Only figures that a published table has.

    Example:
        >>> common_figures({"cxc": {"i2t": {"recall@1": 0.4}, "t2i": {"recall@1": 0.2}}})
        {'cxc recall@1': 30.0}
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
