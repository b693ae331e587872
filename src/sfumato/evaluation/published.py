"""Figures of published tables as reference rows beside one's own: facts with their source, in published.toml.

Nothing here is computed, and nothing was measured with this package. A paper's tables do not agree everywhere: of four of PCME++'s rows
the recalls of table 1 are not the means of tables C.10 and C.11. Each stands here as it is printed.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table.

    Attributes:
        paper: its short name, as in docs/math.md.
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
