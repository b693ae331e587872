"""What the study of crops leaves behind: its figures, what was left out, and a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from sfumato.data.images import MemoryImage, thumbnail
from sfumato.data.problems import Problems
from sfumato.files import write_atomically, write_json
from sfumato.metrics.bootstrap import Interval
from sfumato.reports.drawing import Axes, clipped, data_address, round_steps
from sfumato.studies.crop_study import Example
from sfumato.studies.crops import CELLS, MEANS, PUBLISHED, ROLES, CropFigures, CropStudy

FIGURES, PAGE, LEFT_OUT = "crops.json", "crops.html", "problems.jsonl"

_COLOURS = {"A": "a", "C": "b"}


def write_crops(study: CropStudy, examples: Sequence[Example], problems: Problems, folder: Path, version: str) -> Path:
    """Write crops.json, problems.jsonl and crops.html into a folder, made if it is not there; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FIGURES, study.to_json())
    problems.write(folder / LEFT_OUT)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sfumato.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("crops.html.j2").render(
        study=study,
        version=version,
        charts=[
            _chart(study, side, name) for side, name in (("crops", "Crops"), ("captions", "Captions"))
            if all(getattr(figures, side).mean is not None for figures in study.thresholds)
        ],
        found=[{"threshold": f"{f.threshold:.0%}", "said": "; ".join(said(f))} for f in study.thresholds if said(f)],
        selection=_selection(study),
        cells=CELLS,
        published=[(name, [f"{row[cell]:.1%}" for cell in CELLS]) for name, row in PUBLISHED.items()],
        examples=[
            {
                "picture": clipped(example.picture, 60),
                "threshold": f"{example.threshold:.0%}",
                "crops": [
                    {"role": role, "src": data_address(small), "caption": clipped(caption)}
                    for role, file, caption in zip(ROLES, example.crops, example.captions, strict=True)
                    if (small := thumbnail(MemoryImage(role, file))) is not None
                ],
            }
            for example in examples
        ],
    )  # fmt: skip
    write_atomically(folder / PAGE, page)
    return folder / PAGE


def _chart(study: CropStudy, side: str, name: str) -> dict[str, Any]:
    """Mean uncertainty of A and C by threshold, with intervals."""
    rows, lines = [], {role: _means(study, side, role) for role in ROLES}
    ends = [e for role in _COLOURS for _, i in lines[role] for e in (i.low, i.high, i.value) if e is not None]
    thresholds = [figures.threshold for figures in study.thresholds]
    room = (max(ends) - min(ends)) * 0.08 or abs(max(ends)) * 0.1 or 1.0
    axes = Axes((min(thresholds) - 0.05, max(thresholds) + 0.05), (min(ends) - room, max(ends) + room))
    chart = axes.chart(
        x_ticks=[(t, f"{t:.0%}") for t in thresholds],
        y_ticks=[(v, f"{v:.4g}") for v in round_steps(min(ends) - room, max(ends) + room, 5)],
        x_label="area of a box at most",
        y_label=f"mean {study.uncertainty.replace('_', ' ')}",
        label=f"{name}: mean {study.uncertainty} of A and C by threshold",
    )
    for role, colour in _COLOURS.items():
        chart["lines"].append(axes.line([(t, i.value or 0.0) for t, i in lines[role]], colour))
        for t, i in lines[role]:
            if i.low is not None and i.high is not None:
                chart["whiskers"].append(axes.whisker(t, i.low, i.high) | {"colour": colour})
            chart["dots"].append(axes.dot(t, i.value or 0.0, 3.5, colour, f"{role}, below {t:.0%}: {_number(i)}"))
        chart["legend"].append({"colour": colour, "name": f"{role}: {_WHAT[side][role]}"})
    for figures in study.thresholds:
        found = getattr(figures, side)
        cells = [_number(found.mean[role]) for role in ROLES]
        rows.append(
            [f"{figures.threshold:.0%}", f"{figures.n:,}", *cells, _number(found.difference), _share(found.c_above_a)]
        )
    return {"name": name, "chart": chart, "rows": rows}


_WHAT = {
    "crops": {"A": "crop of one box", "C": "crop around two"},
    "captions": {"A": "phrase of one box", "C": "two phrases and “and”"},
}


def _means(study: CropStudy, side: str, role: str) -> list[tuple[float, Interval]]:
    return [(figures.threshold, getattr(figures, side).mean[role]) for figures in study.thresholds]


def _selection(study: CropStudy) -> list[dict[str, Any]]:
    """A row for every threshold and distance."""
    return [
        {
            "threshold": f"{figures.threshold:.0%}",
            "n": f"{figures.n:,}",
            "distance": f"{name} (means alone)" if name == MEANS else name,
            "cells": [_parts(row[cell]) for cell in CELLS],
        }
        for figures in study.thresholds
        for name, row in figures.selection.items()
    ]


def _parts(interval: Interval) -> dict[str, str]:
    between = "" if interval.low is None or interval.high is None else f"{interval.low:.1%} to {interval.high:.1%}"
    return {"value": "–" if interval.value is None else f"{interval.value:.1%}", "interval": between}


def _share(interval: Interval) -> str:
    parts = _parts(interval)
    return parts["value"] + (f" ({parts['interval']})" if parts["interval"] else "")


def _number(interval: Interval) -> str:
    if interval.value is None:
        return "–"
    between = "" if interval.low is None or interval.high is None else f" ({interval.low:.4g} to {interval.high:.4g})"
    return f"{interval.value:.4g}{between}"


def said(figures: CropFigures) -> list[str]:
    """In words: whether C is less certain than A, among crops and among captions; the interval of the mean difference decides."""
    sentences = []
    for side, name in ((figures.crops, "crops"), (figures.captions, "captions")):
        if side.difference is None or side.difference.low is None or side.difference.high is None:
            continue
        word = (
            "more uncertain than"
            if side.difference.low > 0
            else "less uncertain than"
            if side.difference.high < 0
            else "not clearly different from"
        )
        sentences.append(f"{name} C are {word} {name} A")
    return sentences
