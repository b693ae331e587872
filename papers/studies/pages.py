"""The page of the studies, their files, and what their commands print."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.drawing import Ellipse, ellipse_chart, magnification
from papers.shown import interval
from papers.studies.analyse import NAMES, Analyses, same_model_and_data
from papers.studies.prompts import points
from sfumato.charts import FAMILIES, FIRST, SECOND, Chart, data_url, draw_curve, render_page
from sfumato.errors import UserError, counted
from sfumato.files import read_json, write_atomically, write_json
from sfumato.metrics.bootstrap import Interval
from sfumato.reports.tables import (
    MISSING,
    Table,
    clipped,
    column_decimals,
    compact_interval,
    digits,
    in_words,
    number,
    percent,
    print_table,
    print_wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN_SIGMAS = 2
"""Standard deviations of the ellipses of set algebra."""

CORRUPTIONS: dict[str, tuple[str, str]] = {
    "erased": ("erased images", "fraction of the image under grey squares"),
    "blurred": ("blurred images", "deviation of the blur, as a fraction of the shorter side"),
    "dropped_words": ("texts with words left out", "fraction of the words"),
    "unknown_words": ("texts with unknown words", "fraction of the words"),
    "wrong_letters": ("misspelt texts", "fraction of the letters"),
}
"""What each corruption is called, and what its strength is."""

MADE: dict[str, tuple[str, str, str]] = {
    "first": ("A", FIRST, "first"),
    "second": ("B", SECOND, "second"),
    "mixup": ("M", FAMILIES[2], "half of each (Mixup)"),
    "cutmix": ("C", FAMILIES[1], "halves side by side (CutMix)"),
    "erased_first": ("A′", FIRST, "first, erased in part"),
    "erased_second": ("B′", SECOND, "second, erased in part"),
}
"""Letter, colour and words of each image of a pair."""

_MIXED = {"mixup": "Mixup", "cutmix": "CutMix", "other": "another image"}


def analysis_views(
    found: Mapping[str, Mapping[str, Any]], picture: Callable[[str], bytes | None]
) -> dict[str, dict[str, Any]]:
    """The values for the templates, by the name of the study."""
    makers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "corruption": _corruption,
        "sets": lambda study: _sets(study, picture),
        "words": _words,
        "map": _map,
        "zeroshot": _zeroshot,
    }
    return {name: makers[name](found[name]) for name in NAMES if name in found}


def _corruption(study: Mapping[str, Any]) -> dict[str, Any]:
    charts, rows = [], []
    estimator = in_words(study["uncertainty"])
    two = partial(number, decimals=2)
    for side, curves in study["sides"].items():
        for name, curve in curves.items():
            title, strength = CORRUPTIONS[name]
            mean = curve["mean"]
            figures = [interval(curve[f], two) for f in ("spearman", "rises", "monotone", "auroc")]
            rows.append([title, f"{curve['n']:,}", *figures])
            show = partial(number, decimals=column_decimals(m["value"] for m in mean))
            numbers = [
                [f"{s:g}", str(interval(m, show)), percent(r)]
                for s, m, r in zip(curve["strengths"], mean, curve["recall"], strict=True)
            ]
            known = [(s, m) for s, m in zip(curve["strengths"], mean, strict=True) if m["value"] is not None]
            if known:
                chart = _curve(known, strength, estimator, title, FIRST if side == "image" else SECOND)
                charts.append({"name": title, "chart": chart.svg(), "rows": numbers})
    return {"of": estimator, "charts": charts, "rows": rows}


def _curve(
    points: Sequence[tuple[float, Mapping[str, Any]]], strength: str, estimator: str, title: str, colour: str
) -> Chart:
    """Mean uncertainty by the strength of a corruption."""
    label = f"Mean {estimator} of {title} by strength: "
    chart = Chart(label + ", ".join(f"{digits(m['value'], 3)} at {s:g}" for s, m in points))
    axes = chart.axes
    dots = draw_curve(axes, [{"x": s, **m} for s, m in points], colour)
    for dot, (s, m) in zip(dots, points, strict=True):
        chart.hover(dot, f"strength {s:g}: {interval(m)}")
    low, high = axes.get_ylim()
    if 0 < low < 0.5 * high:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=strength, ylabel=f"mean {estimator}")
    return chart


def _sets(study: Mapping[str, Any], picture: Callable[[str], bytes | None]) -> dict[str, Any]:
    mixes = [name for name in _MIXED if name in study["mixes"]]
    definitions, two = study["definitions"], partial(number, decimals=2)
    return {
        "n": f"{study['n']:,}",
        "erased_fraction": percent(study["erased_share"], 0),
        "columns": [_MIXED[name] for name in mixes],
        "rows": [
            {"name": in_words(f), "about": about, "cells": [interval(study["mixes"][name][f], two) for name in mixes]}
            for f, about in definitions["mixes"].items()
        ],
        "erased": [
            {"name": in_words(f), "about": about, "cells": [interval(study["erased"][f], two)]}
            for f, about in definitions["erased"].items()
        ],
        "shown": [_shown_pair(pair, picture) for pair in study["shown"]],
        "sigmas": DRAWN_SIGMAS,
    }


def _shown_pair(pair: Mapping[str, Any], picture: Callable[[str], bytes | None]) -> dict[str, Any]:
    """The view of two images, their combinations and their ellipses."""
    items = []
    for item in pair["items"]:
        letter, _, about = MADE[item["name"]]
        content = picture(item["picture"])
        shown = {
            "letter": letter,
            "src": data_url(content) if content else None,
            "alt": f"image {letter}, {about}",
            "name": letter,
            "variance": digits(item["total_variance"], 3),
        }
        items.append(shown)
    ellipses, times = pair_ellipses(pair)
    label = "Six Gaussians in a plane: " + ", ".join(f"{i['letter']} total variance {i['variance']}" for i in items)
    chart = ellipse_chart(ellipses, label, times=DRAWN_SIGMAS * times, width=380, height=300)
    return {
        "items": items,
        "chart": chart.svg(),
        "captions": [clipped(text, 60) for text in pair["captions"]],
        "explained": percent(sum(pair["explained"]), 0),
        "times": f"{times:g}",
    }


def _shape(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item[key] for key in ("x", "y", "a", "b", "angle")}


def pair_ellipses(pair: Mapping[str, Any]) -> tuple[list[Ellipse], float]:
    """The ellipses of a pair's six images, and the factor beside DRAWN_SIGMAS by which they are drawn larger."""
    ellipses = []
    for item in pair["items"]:
        letter, colour, about = MADE[item["name"]]
        dashed, title = item["name"].startswith("erased"), f"{letter}: {about}"
        ellipses.append(Ellipse(**_shape(item), colour=colour, letter=letter, dashed=dashed, title=title))
    return ellipses, magnification(ellipses, 0.14 / DRAWN_SIGMAS)


def _words(study: Mapping[str, Any]) -> dict[str, Any]:
    tables = []
    for side, bins in study["sides"].items():
        rows = [
            {
                "bin": str(k),
                "uncertainty": digits(one["mean"], 3),
                "captions": f"{one['n_captions']:,}",
                "length": number(one["words_per_caption"], 1),
                "words": [
                    {"word": w["word"], "n": f"{w['n']:,}", "weight": number(w["weight"], 2)} for w in one["words"]
                ],
            }
            for k, one in enumerate(bins, 1)
        ]
        tables.append({"name": "images, by their captions" if side == "image" else "texts", "rows": rows})
    return {"of": in_words(study["uncertainty"]), "corpus": study["corpus"], "tables": tables}


def map_ellipses(study: Mapping[str, Any]) -> tuple[list[Ellipse], float]:
    """The ellipses of a map, highlighted ones over the others, and the factor by which they are drawn larger."""
    ellipses = []
    for item in sorted(study["items"], key=lambda item: item["family"] is not None):
        image, family = item["side"] == "image", item["family"]
        colour = FAMILIES[family] if family is not None else FIRST if image else SECOND
        kind, label = "image of" if image else "text", clipped(item["label"], 120)
        title = f"{kind} “{label}”, total variance {digits(item['total_variance'], 3)}"
        strong = family is not None
        ellipses.append(Ellipse(**_shape(item), colour=colour, title=title, dashed=strong and not image, strong=strong))
    return ellipses, 1.0 if study["method"] == "tsne" else magnification(ellipses, 0.035)


def family_names(study: Mapping[str, Any], most: int) -> dict[int, str]:
    """The captions of the images of a map that stand out, with at most some letters, by the number of their family."""
    items = (item for item in study["items"] if item["family"] is not None and item["side"] == "image")
    return dict(sorted((item["family"], clipped(item["label"], most)) for item in items))


def _map(study: Mapping[str, Any]) -> dict[str, Any]:
    tsne, (ellipses, times) = study["method"] == "tsne", map_ellipses(study)
    families = family_names(study, 48)
    counts = [sum(item["side"] == side for item in study["items"]) for side in ("image", "text")]
    label = (
        f"Map of {counts[0]} images and {counts[1]} texts by {'t-SNE' if tsne else 'PCA'}; the colours of"
        f" {len(families)} images and their texts stand out"
    )
    return {
        "tsne": tsne,
        "times": f"{times:g}",
        "chart": ellipse_chart(ellipses, label, times=times).svg(),
        "families": [{"class": f"f{k}", "name": name} for k, name in families.items()],
        "counts": [f"{n:,}" for n in counts],
        "explained": None if study["explained"] is None else percent(sum(study["explained"]), 0),
    }


ANALYSIS_PAGE = "analysis.html"


def write_analyses(analyses: Analyses, folder: Path, version: str) -> Path:
    """Write STUDY.json and images of each study, and analysis.html with these and earlier studies in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in analyses.images.items():
        write_atomically(folder / name, content)
    for name in analyses.studies:
        write_json(folder / f"{name}.json", analyses.to_json(name))
    earlier = {
        name: study
        for name, study in read_studies(folder).items()
        if name not in analyses.studies and same_model_and_data(study, analyses.metadata)
    }
    found = {name: analyses.to_json(name) for name in analyses.studies} | earlier

    def picture(name: str) -> bytes | None:
        path = folder / Path(name).name
        return path.read_bytes() if path.is_file() else None

    values: dict[str, Any] = {
        "about": analyses.metadata,
        "notes": list(analyses.notes),
        "version": version,
        "views": analysis_views(found, picture),
    }
    write_atomically(folder / ANALYSIS_PAGE, render_page("analysis.html.j2", values, Path(__file__).parent))
    return folder / ANALYSIS_PAGE


def print_analyses(found: Mapping[str, Any]) -> None:
    """Print tables of the results of studies."""
    title = f"{found['model']} on {found['split']}"
    for name, show in (("corruption", _print_curves), ("sets", _print_sets), ("words", _print_words)):
        if study := found.get(name):
            show(study, title)
    if study := found.get("map"):
        method = "t-SNE"
        if study["explained"] is not None:
            explained = percent(sum(study["explained"]), 0)
            method = f"the first two principal components, which explain {explained} of the variance of their means"
        print_wrapped(f"map: {len(study['items'])} images and texts by {method}")
    if study := found.get("zeroshot"):
        report = study["report"]
        for table in (zeroshot_table(report), *map(kept_table, report["prompts_kept"])):
            table.show(indent=2)


def _print_curves(study: Mapping[str, Any], title: str) -> None:
    rows, means = [], []
    for curves in study["sides"].values():
        for name, curve in curves.items():
            at_each = zip(curve["strengths"], curve["mean"], strict=True)
            steps = ", ".join(f"{strength:g}: {digits(mean['value'], 3)}" for strength, mean in at_each)
            figures = [compact_interval(Interval(**curve[figure])) for figure in ("spearman", "rises", "auroc")]
            rows.append([name, str(curve["n"]), *figures])
            means.append(f"{name}, mean at each strength: {steps}")
    headings = ["damage", "items", "Spearman within an item", "rises", "AUROC"]
    print_table(f"{title}: does damage raise {study['uncertainty']}?", headings, rows)
    for line in means:
        print_wrapped(line, indent=2)


def _print_sets(study: Mapping[str, Any], title: str) -> None:
    rows = [
        [figure, *(compact_interval(Interval(**values[figure])) for values in study["mixes"].values())]
        for figure in study["definitions"]["mixes"]
    ]
    headings = ["figure", *(_MIXED[name] for name in study["mixes"])]
    print_table(f"{title}: mixtures of two images, {counted(study['n'], 'pair')}", headings, rows)
    erased = ", ".join(f"{figure} {compact_interval(Interval(**value))}" for figure, value in study["erased"].items())
    print_wrapped(f"the same images with {percent(study['erased_share'], 0)} erased: {erased}")
    for figure, about in study["definitions"]["mixes"].items():
        print_wrapped(f"  {figure}: {about}", indent=4)


def _print_words(study: Mapping[str, Any], title: str) -> None:
    for side, bins in study["sides"].items():
        rows = [
            [str(k), digits(one["mean"], 3), str(one["n_captions"]), ", ".join(word["word"] for word in one["words"])]
            for k, one in enumerate(bins, 1)
        ]
        heading = f"{title}: words of {side}s by {study['uncertainty']}, from the most certain bin to the least"
        print_table(heading, ["bin", "mean", "captions", "words"], rows, running=(3,))


def zeroshot_table(report: Mapping[str, Any]) -> Table:
    """The accuracies of the methods of a zero-shot classification, and below whether filtering prompts helps."""
    chosen = f", K chosen on {counted(report['n_chosen_on'], 'other')}" if report["n_chosen_on"] else ""
    columns = ("against_all", "against_random", "against_random_order")
    rows = []
    for m in report["methods"]:
        k = m["k"]
        kept = MISSING if k is None else f"{k[0]}" if len(set(k)) == 1 else f"{min(k)} to {max(k)}"
        shown = {name: points(m[name]) for name in ("top1", "top5", *columns)}
        accuracies = [shown[name].replace("+", "") for name in ("top1", "top5")]
        rows.append([m["name"], kept, *accuracies, *(shown[name] for name in columns)])
    rows.append(["always the most frequent class", MISSING, f"{100 * report['chance']:.1f}", *[MISSING] * 4])
    notes = report["verdict"].splitlines()
    if report["best_alone"] is not None:
        best = f"{100 * report['best_alone']:.1f}"
        notes.append(f"each image at the best K of its own class, which a classifier cannot know: {best}")
    if (rho := report["certain_is_right"]) is not None:
        notes.append(f"templates: Spearman of mean total variance and top-1 of each alone {rho:+.2f}")
    if report["n_empty"]:
        notes.append(f"classes without an image, which can only be wrong answers: {report['n_empty']}")
    if left := report["left_out"]:
        notes.append("; ".join([f"{len(left):,} left out: {left[0]}", *left[1:10]]))
    return Table(
        f"{counted(report['n_images'], 'image')} of {counted(len(report['classes']), 'class', 'classes')}{chosen}; by"
        f" {report['distance']}, pooling {report['pooling']}; per cent, and differences in percentage points",
        ["method", "K", "top-1", "top-5", "against all", "against random", "against a random order"], rows, notes=notes,
    )  # fmt: skip


def kept_table(kept: Mapping[str, Any]) -> Table:
    """Top-1 at some numbers of prompts, and how many prompts the classes would keep for their own images."""
    p = len(kept["top1"])
    shown = sorted({*range(1, min(p, 3) + 1), *(round(p * part / 8) for part in range(1, 9))} - {0})
    which = "the images K was chosen on" if kept["images"] == "others" else "the reported images"
    rows = [[str(k), percent(kept["top1"][k - 1]), percent(kept["random_top1"][k - 1])] for k in shown]
    best = [k for k in kept["best_k"] if k is not None]
    note = (
        f"best K of a class for its own images: all {p} for {counted(best.count(p), 'class', 'classes')}, fewer for"
        f" {len(best) - best.count(p):,}, no image right for {len(kept['best_k']) - len(best):,}"
    )
    title = f"top-1 on {which} by the number of prompts kept"
    return Table(title, ["K", "most certain", "random order"], rows, notes=[note])


def _zeroshot(study: Mapping[str, Any]) -> dict[str, Any]:
    """The tables, and two charts for each choice of K."""
    report = study["report"]
    kept = report["prompts_kept"]
    charts = []
    for one in kept:
        for draw, about in ((draw_accuracy_by_k, "top-1 by prompts kept"), (draw_best_k, "best number of prompts")):
            chart = Chart(name := f"{about}, {one['images']} images")
            draw(chart.axes, one)
            charts.append({"name": name, "chart": chart.svg()})
    return {"tables": [zeroshot_table(report), *map(kept_table, kept)], "charts": charts}


def draw_accuracy_by_k(axes: "Axes", kept: Mapping[str, Any]) -> None:
    """Top-1 in per cent by the number of prompts that every class keeps, beside prompts in a random order."""
    ks = range(1, len(kept["top1"]) + 1)
    axes.plot(ks, [100 * value for value in kept["top1"]], color=FIRST, linewidth=2, label="most certain")
    axes.plot(ks, [100 * value for value in kept["random_top1"]], color=SECOND, linewidth=2, label="random order")
    axes.set(xlabel="prompts kept", ylabel="top-1, %")
    axes.legend()


def draw_best_k(axes: "Axes", kept: Mapping[str, Any]) -> None:
    """Number of classes by the number of prompts that is best for their own images."""
    from matplotlib.ticker import MaxNLocator

    p = len(kept["top1"])
    best = [k for k in kept["best_k"] if k is not None]
    axes.bar(range(1, p + 1), [best.count(k) for k in range(1, p + 1)], color=FIRST)
    axes.set(xlabel="best number of prompts of a class", ylabel="classes")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def read_studies(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the results of earlier calls of `python -m papers analyse` in a folder; damaged files count as none."""
    found = {}
    for name in NAMES:
        with suppress(UserError):
            found[name] = read_json(folder / f"{name}.json")
    return {name: study for name, study in found.items() if isinstance(study, dict)}
