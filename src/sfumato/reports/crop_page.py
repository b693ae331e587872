"""The output of the crop study: its figures, the items left out, and a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfumato.data.images import MemoryImage, thumbnail
from sfumato.data.problems import Problems
from sfumato.files import write_atomically, write_json
from sfumato.reports.charts import FIRST, SECOND, Chart
from sfumato.reports.formatting import clipped, digits, in_words, interval, percent
from sfumato.reports.page_files import data_url, render_page
from sfumato.studies.crop_study import Example
from sfumato.studies.crops import CELLS, MEANS, PUBLISHED, ROLES, CropFigures, CropStudy

FIGURES, PAGE, LEFT_OUT = "crops.json", "crops.html", "problems.jsonl"

_DRAWN = {"A": FIRST, "C": SECOND}
_WHAT = {
    "crops": {"A": "crop of one box", "C": "crop around two"},
    "captions": {"A": "phrase of one box", "C": "two phrases and “and”"},
}


def write_crops(study: CropStudy, examples: Sequence[Example], problems: Problems, folder: Path, version: str) -> Path:
    """Write crops.json, problems.jsonl and crops.html.

    Args:
        study: the figures.
        examples: crops to show.
        problems: the items left out.
        folder: where to write; made if it does not exist.
        version: of the program, for the page.

    Returns:
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FIGURES, study.to_json())
    problems.write(folder / LEFT_OUT)
    drawn = all(getattr(figures, side).mean is not None for figures in study.thresholds for side in _WHAT)
    values = {
        "study": study,
        "version": version,
        "charts": [_panel(study, side) for side in _WHAT] if drawn else [],
        "found": [
            {"threshold": f"{f.threshold:.0%}", "text": "; ".join(differences(f))}
            for f in study.thresholds
            if differences(f)
        ],
        "selection": _selection(study),
        "cells": CELLS,
        "published": [(name, [percent(row[cell]) for cell in CELLS]) for name, row in PUBLISHED.items()],
        "examples": [_shown_example(example) for example in examples],
    }
    write_atomically(folder / PAGE, render_page("crops.html.j2", values))
    return folder / PAGE


def _shown_example(example: Example) -> dict[str, Any]:
    return {
        "picture": clipped(example.picture, 60),
        "threshold": f"{example.threshold:.0%}",
        "crops": [
            {"role": role, "src": data_url(small), "caption": clipped(caption)}
            for role, file, caption in zip(ROLES, example.crops, example.captions, strict=True)
            if (small := thumbnail(MemoryImage(role, file))) is not None
        ],
    }


def _panel(study: CropStudy, side: str) -> dict[str, Any]:
    """Mean uncertainty of A and C by threshold, with intervals, as a chart and a table."""
    name, estimator = side.capitalize(), in_words(study.uncertainty)
    chart = Chart(f"{name}: mean {estimator} of A and C by threshold")
    for role, colour in _DRAWN.items():
        points = [(figures.threshold, getattr(figures, side).mean[role]) for figures in study.thresholds]
        thresholds, values = [t for t, _ in points], [i.value or 0.0 for _, i in points]
        chart.axes.plot(thresholds, values, color=colour, linewidth=2, label=f"{role}: {_WHAT[side][role]}")
        for t, i in points:
            if i.low is not None and i.high is not None:
                chart.axes.vlines(t, i.low, i.high, color=colour, linewidth=1.2)
            (dot,) = chart.axes.plot([t], [i.value or 0.0], "o", color=colour, markersize=6)
            chart.hover(dot, f"{role}, below {t:.0%}: {interval(i, digits)}")
    chart.axes.set_xticks([f.threshold for f in study.thresholds], [f"{f.threshold:.0%}" for f in study.thresholds])
    chart.axes.set_xlabel("largest area of a box")
    chart.axes.set_ylabel(f"mean {estimator}")
    chart.legend()
    rows = []
    for figures in study.thresholds:
        found = getattr(figures, side)
        cells = [str(interval(value, digits)) for value in (*(found.mean[role] for role in ROLES), found.difference)]
        rows.append([f"{figures.threshold:.0%}", f"{figures.n:,}", *cells, str(interval(found.c_above_a, percent))])
    return {"name": name, "chart": chart.svg(), "rows": rows}


def _selection(study: CropStudy) -> list[dict[str, Any]]:
    """A row for every threshold and distance."""
    return [
        {
            "threshold": f"{figures.threshold:.0%}",
            "n": f"{figures.n:,}",
            "distance": f"{name} (means alone)" if name == MEANS else name,
            "cells": [interval(row[cell], percent) for cell in CELLS],
        }
        for figures in study.thresholds
        for name, row in figures.selection.items()
    ]


def differences(figures: CropFigures) -> list[str]:
    """A sentence on whether C is less certain than A, among crops and among captions.

    Args:
        figures: of one threshold.

    Returns:
        A clause for each side with an interval of the mean difference; the interval decides the wording.
    """
    clauses = []
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
        clauses.append(f"{name} C are {word} {name} A")
    return clauses
