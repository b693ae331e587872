"""What `sfumato analyse` has found, made ready to be drawn: plots, tables and words for templates.

It reads the plain values that the studies write, so that their page and the report show the same; it computes nothing anew.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sfumato.reports.drawing import (
    Axes,
    Ellipse,
    Plane,
    clipped,
    data_address,
    magnification,
    place_marks,
    round_steps,
)
from sfumato.studies.analyse import NAMES

DRAWN_SIGMAS = 2
"""Standard deviations of the ellipses of set algebra."""

CORRUPTIONS: dict[str, tuple[str, str]] = {
    "erased": ("erased pictures", "share of the picture under grey squares"),
    "blurred": ("blurred pictures", "deviation of the blur, as a share of the shorter side"),
    "dropped_words": ("texts with words left out", "share of the words"),
    "unknown_words": ("texts with unknown words", "share of the words"),
    "wrong_letters": ("misspelt texts", "share of the letters"),
}
"""What each corruption is called, and what its strength is."""

_LETTERS = {"first": "A", "second": "B", "mixup": "M", "cutmix": "C", "erased_first": "A′", "erased_second": "B′"}
_MADE = {
    "first": "first",
    "second": "second",
    "mixup": "half of either (Mixup)",
    "cutmix": "halves side by side (CutMix)",
    "erased_first": "first, a part erased",
    "erased_second": "second, a part erased",
}
_MIXED = {"mixup": "Mixup", "cutmix": "CutMix", "other": "another picture"}
_SPELT = {
    "more_uncertain": "more uncertain",
    "variance_ratio": "ratio of total variances",
    "between": "lies between its parts",
    "off_line": "distance off the line",
    "covers": "covers a part",
    "includes": "includes a part",
    "moved": "has moved by",
}


def analysis_views(
    found: Mapping[str, Mapping[str, Any]], picture: Callable[[str], bytes | None]
) -> dict[str, dict[str, Any]]:
    """What the templates draw, by the name of the study.

    Args:
        found: by name, what `sfumato analyse` wrote.
        picture: the bytes of a picture that a study names; None where it is gone.
    """
    makers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "corruption": _corruption,
        "sets": lambda study: _sets(study, picture),
        "words": _words,
        "map": _map,
    }
    return {name: makers[name](found[name]) for name in NAMES if name in found}


def spelt(name: str) -> str:
    """A name of an estimator or a figure in words."""
    return _SPELT.get(name, name.replace("_", " "))


def _corruption(study: Mapping[str, Any]) -> dict[str, Any]:
    charts, rows = [], []
    of = spelt(study["uncertainty"])
    for side, curves in study["sides"].items():
        for name, curve in curves.items():
            title, strength = CORRUPTIONS[name]
            strengths, mean = curve["strengths"], curve["mean"]
            rows.append(
                [title, f"{curve['n']:,}", *(interval(curve[f], 2) for f in ("spearman", "rises", "monotone", "auroc"))]
            )
            digits = _decimals(m["value"] for m in mean)
            numbers = [
                [f"{s:g}", interval(m, digits)["text"], f"{r:.1%}"]
                for s, m, r in zip(strengths, mean, curve["recall"], strict=True)
            ]
            known = [(s, m) for s, m in zip(strengths, mean, strict=True) if m["value"] is not None]
            if known:
                charts.append(
                    {"name": title, "chart": _curve(known, strength, of, title, side), "n": f"{curve['n']:,}", "rows": numbers}
                )  # fmt: skip
    return {"of": of, "charts": charts, "rows": rows}


def _curve(
    points: Sequence[tuple[float, Mapping[str, Any]]], strength: str, of: str, title: str, side: str
) -> dict[str, Any]:
    values = [v for _, m in points for v in (m["value"], m["low"], m["high"]) if v is not None]
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or abs(high) or 1.0
    low, high = low - pad, high + pad
    if 0 < low < 0.5 * high or (low < 0 <= min(values)):
        low = 0.0
    axes = Axes((0.0, 1.04 * points[-1][0] or 1.0), (low, high))
    chart = axes.chart(
        x_ticks=[(v, f"{v:g}") for v in round_steps(0.0, points[-1][0], 5)],
        y_ticks=[(v, f"{v:.4g}") for v in axes.y_steps()],
        x_label=strength,
        y_label=f"mean {of}",
        label=f"Mean {of} of {title} by strength: " + ", ".join(f"{m['value']:.3g} at {s:g}" for s, m in points),
    )
    colour = "a" if side == "image" else "b"
    chart["lines"].append(axes.line([(s, m["value"]) for s, m in points], colour))
    for s, m in points:
        if m["low"] is not None:
            chart["whiskers"].append(axes.whisker(s, m["low"], m["high"]))
        chart["dots"].append(axes.dot(s, m["value"], 3.5, colour, f"strength {s:g}: {interval(m)['text']}"))
    return chart


def _sets(study: Mapping[str, Any], picture: Callable[[str], bytes | None]) -> dict[str, Any]:
    mixes = [name for name in _MIXED if name in study["mixes"]]
    told = study["definitions"]
    shown = []
    for pair in study["shown"]:
        ellipses = _ellipses(pair)
        times = magnification(ellipses, 0.14 / DRAWN_SIGMAS)
        plane = Plane(ellipses, width=380, height=300, reach=DRAWN_SIGMAS * times, margin=24)
        drawn = [plane.ellipse(e) for e in ellipses]
        marks = place_marks(drawn, plane.width, plane.height)
        items = []
        for item, ellipse, mark in zip(pair["items"], drawn, marks, strict=True):
            name = item["name"]
            content = picture(item["picture"])
            items.append(
                {
                    **ellipse,
                    "mark": mark,
                    "class": name,
                    "letter": _LETTERS[name],
                    "about": _MADE[name],
                    "src": data_address(content) if content else None,
                    "alt": f"picture {_LETTERS[name]}, {_MADE[name]}",
                    "name": _LETTERS[name],
                    "variance": f"{item['total_variance']:.3g}",
                }
            )
        shown.append(
            {
                "items": items,
                "plane": plane,
                "captions": [clipped(text, 60) for text in pair["captions"]],
                "explained": f"{sum(pair['explained']):.0%}",
                "times": f"{times:g}",
                "label": "Six Gaussians in a plane: "
                + ", ".join(f"{_LETTERS[i['name']]} total variance {i['total_variance']:.3g}" for i in pair["items"]),
            }
        )
    return {
        "n": f"{study['n']:,}",
        "erased_share": f"{study['erased_share']:.0%}",
        "columns": [_MIXED[name] for name in mixes],
        "rows": [
            {"name": spelt(f), "about": about, "cells": [interval(study["mixes"][name][f], 2) for name in mixes]}
            for f, about in told["mixes"].items()
        ],
        "erased": [
            {"name": spelt(f), "about": about, "cells": [interval(study["erased"][f], 2)]} for f, about in told["erased"].items()
        ],
        "shown": shown,
        "sigmas": DRAWN_SIGMAS,
    }  # fmt: skip


def _words(study: Mapping[str, Any]) -> dict[str, Any]:
    tables = []
    for side, bins in study["sides"].items():
        rows = [
            {
                "bin": str(k),
                "uncertainty": f"{one['mean']:.3g}",
                "captions": f"{one['n_captions']:,}",
                "length": f"{one['words_per_caption']:.1f}",
                "words": [
                    {"word": w["word"], "n": f"{w['n']:,}", "weight": f"{w['weight']:.2f}"} for w in one["words"]
                ],
            }
            for k, one in enumerate(bins, 1)
        ]
        tables.append({"name": "images, by their captions" if side == "image" else "texts", "rows": rows})
    return {"of": spelt(study["uncertainty"]), "corpus": study["corpus"], "tables": tables}


def _map(study: Mapping[str, Any]) -> dict[str, Any]:
    ellipses, tsne = _ellipses(study), study["method"] == "tsne"
    times = 1.0 if tsne else magnification(ellipses, 0.035)
    plane = Plane(ellipses, reach=times)
    items, families = [], {}
    for item, ellipse in zip(study["items"], ellipses, strict=True):
        image, family = item["side"] == "image", item["family"]
        items.append(
            {
                **plane.ellipse(ellipse),
                "class": ("a" if image else "b") if family is None else f"f{family} {'whole' if image else 'dashed'}",
                "family": family,
                "title": f"{'picture of' if image else 'text'} “{clipped(item['label'], 120)}”, total variance"
                f" {item['total_variance']:.3g}",
            }
        )
        if family is not None and image:
            families[family] = clipped(item["label"], 48)
    counts = [sum(item["side"] == side for item in study["items"]) for side in ("image", "text")]
    return {
        "tsne": tsne,
        "plane": plane,
        "times": f"{times:g}",
        # Those of a family on top of the others.
        "items": sorted(items, key=lambda item: item["family"] is not None),
        "families": [{"class": f"f{k}", "name": name} for k, name in sorted(families.items())],
        "counts": [f"{n:,}" for n in counts],
        "explained": None if study["explained"] is None else f"{sum(study['explained']):.0%}",
        "label": f"Map of {counts[0]} images and {counts[1]} texts by {'t-SNE' if tsne else 'PCA'}; the colours of"
        f" {len(families)} images and their texts stand out",
    }


def _ellipses(study: Mapping[str, Any]) -> list[Ellipse]:
    return [(item["x"], item["y"], item["a"], item["b"], item["angle"]) for item in study["items"]]


def interval(value: Mapping[str, float | None], decimals: int | None = None) -> dict[str, str]:
    """{"value", "low", "high"} as texts: the value, the interval, and both together; with as many decimals as its column has."""
    number, low, high = (value.get(k) for k in ("value", "low", "high"))
    if number is None:
        return {"value": "–", "interval": "", "text": "–"}
    said = _plain(number, decimals)
    span = "" if low is None or high is None else f"{_plain(low, decimals)} to {_plain(high, decimals)}"
    return {"value": said, "interval": span, "text": f"{said} ({span})" if span else said}


def _decimals(values: Iterable[float | None]) -> int:
    """Decimals of a column that give its largest number three digits; two at least."""
    largest = max((abs(v) for v in values if v), default=1.0)
    return max(2, 2 - math.floor(math.log10(largest)))


def _plain(value: float, decimals: int | None) -> str:
    """As many decimals; without a number of them two, and of small or large numbers three digits."""
    if decimals is not None:
        return f"{value:.{decimals}f}".replace("-", "−")
    text = f"{value:.2f}" if 0.1 <= abs(value) < 100 or value == 0 else f"{value:.3g}"
    return text.replace("-", "−")
