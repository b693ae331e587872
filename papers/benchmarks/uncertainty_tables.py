"""The tables and the picture of papers/docs/uncertainty.md, from the report of uncertainty_multiplicity."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from papers.benchmarks.uncertainty_scenes import NEIGHBOURS
from papers.shown import markdown
from sfumato.reports.tables import Table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "uncertainty.md"

Figure = Literal["all", "balanced", "beside words", "beside neighbours"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""Spearman correlations with the number of matches: over all queries, over sets balanced over powers of two, and over
all queries with the ranks of a baseline, few words or NEIGHBOURS, taken out of both (partial correlation)."""

TAKEN_OUT: dict[Figure, str] = {"beside words": "baseline: few words", "beside neighbours": f"baseline: {NEIGHBOURS}"}

GALLERY = ("expected_matches", "match_entropy", "top1_mismatch", "margin", "nearest_mean")
POSTHOC_SHOWN = ("laplace", "probvlm", "asymvlm", "pfe", "pcmepp", "prolip")
ROWS = {
    **{
        f"*baseline:* {name}": f"baseline: {name}"
        for name in (
            "few words", "common words", "bytes of the file", "edges", "similar to training", "similar training items",
            NEIGHBOURS, "nearest texts", "lookup", "pairs asked about", "random",
        )
    },
    "PCME++: total variance": "FAMILY-pcmepp: total_variance",
    "PCME++: ln det": "FAMILY-pcmepp: log_det",
    "PCME++ with pseudo-positives: total variance": "FAMILY-pcmepp-pseudo: total_variance",
    "PCME: geometric mean of sigma": "FAMILY-pcme: geometric_std",
    "probabilistic VSE++: ln det": "FAMILY-probabilistic-vsepp: log_det",
    "taught by expected matches: total variance": "FAMILY-taught: total_variance",
    **{f"gallery: `{name}`": f"FAMILY-pcmepp: {name}" for name in GALLERY},
    **{f"post-hoc: `{name}`": f"FAMILY-pcmepp + post-hoc: {name}" for name in POSTHOC_SHOWN},
}  # fmt: skip
"""Label of a row -> name of its scores."""

COLUMNS: dict[str, list[tuple[str, str, Figure]]] = {
    "texts": [
        ("emoji: balanced", "emoji texts", "balanced"),
        ("emoji: all", "emoji texts", "all"),
        ("Flickr8k: people", "flickr8k captions", "all"),
        ("share", "flickr8k captions, share", "all"),
        ("ECCV Caption", "coco captions, eccv", "all"),
        ("CxC", "coco captions, cxc", "all"),
    ],
    "texts, a baseline taken out": [
        (f"{head}: {figure.removeprefix('beside ')}", scene, figure)
        for head, scene in (
            ("emoji", "emoji texts"),
            ("Flickr8k", "flickr8k captions"),
            ("ECCV Caption", "coco captions, eccv"),
        )
        for figure in TAKEN_OUT
    ],
    "images": [
        ("emoji: balanced", "emoji images", "balanced"),
        ("emoji: all", "emoji images", "all"),
        ("Flickr8k: people", "flickr8k images", "all"),
        ("share", "flickr8k images, share", "all"),
    ],
}
"""Table -> its columns: heading, scene, figure."""


def cell(interval: Mapping[str, float | None] | None) -> str:
    if interval is None or interval["value"] is None:
        return "–"
    return f"{short(interval['value'])} [{short(interval['low'])}, {short(interval['high'])}]"


def short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}".replace("0.", ".", 1).replace("-", "−")


def family_of(name: str) -> str:
    return "emoji" if name.startswith("emoji") else "flickr8k"


def table(heads: list[str], rows: Mapping[str, list[str]]) -> str:
    """A table in Markdown, without rows that have nothing."""
    return markdown(Table("", heads, [[row, *cells] for row, cells in rows.items() if set(cells) != {"–"}]))


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The tables of papers/docs/uncertainty.md by their titles."""
    found, scores = {}, {scene: measured["scores"] for scene, measured in report["scenes"].items()}
    for title, columns in COLUMNS.items():
        rows = {
            label: [
                cell(scores.get(scene, {}).get(name.replace("FAMILY", family_of(scene)), {}).get(figure))
                for _, scene, figure in columns
            ]
            for label, name in ROWS.items()
            if not ("taken out" in title and "baseline" in name)
        }
        found[title] = table(["number of the query", *(head for head, _, _ in columns)], rows)
    for kind in ("text", "image"):
        models = [f"emoji-pcmepp, {kind}", f"flickr8k-pcmepp, {kind}"]
        rows = {}
        for label, name in ROWS.items():
            own = [report["recall"].get(model, {}).get(name.replace("FAMILY-pcmepp: ", "")) for model in models]
            rows[label] = [cell(f and f[figure]) for f in own for figure in ("bins", "auroc")]
        heads = [f"{data}: {figure}" for data in ("emoji", "Flickr8k") for figure in ("bins", "AUROC")]
        found[f"recall@1 of {kind}s"] = table(["number of the query", *heads], rows)
    rows = {
        scene: [str(found["n"]), f"{found['mean']:.2f}", f"{found['largest']:g}", str(found["none"])]
        for scene, found in report["scenes"].items()
        if "share" not in scene
    }
    found["queries"] = table(["queries", "number", "matches on average", "at most", "without any"], rows)
    return found


def page(report: Mapping[str, Any], text: str) -> str:
    """The page with those tables of a report for which it has comments."""
    for title, lines in tables(report).items():
        before, begin, rest = text.partition(f"<!-- table: {title} -->")
        if not begin:
            continue
        _, end, after = rest.partition("<!-- end of the table -->")
        assert end, title
        text = f"{before}{begin}\n\n{lines}\n\n{end}{after}"
    return text


LINES = {
    "learnt variance (PCME++)": "PCMEPP: total_variance",
    "variance taught by expected matches": "TAUGHT: total_variance",
    "gallery: expected matches": "PCMEPP: expected_matches",
    "gallery: first hit wrong?": "PCMEPP: top1_mismatch",
    "baseline: few words, or bytes of the file": "baseline: few words|bytes of the file",
    f"baseline: {NEIGHBOURS}": f"baseline: {NEIGHBOURS}",
}
"""Label -> name of the scores; PCMEPP and TAUGHT are those of the family."""

UPPER = ("emoji texts", "flickr8k captions", "coco captions, eccv", "coco captions, cxc")
LOWER = ("emoji-pcmepp, text", "emoji-pcmepp, image", "flickr8k-pcmepp, text", "flickr8k-pcmepp, image")


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Ten bins: the mean number of matches above, recall@1 below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(15, 6.6))
    shown: dict[str, Any] = {}
    for axis, name in zip(axes.flat, (*UPPER, *LOWER), strict=True):
        below = name in LOWER
        family = family_of(name)
        scores = report["recall"][name] if below else report["scenes"][name]["scores"]
        for k, (label, wanted) in enumerate(LINES.items()):
            wanted = wanted.replace("PCMEPP", f"{family}-pcmepp").replace("TAUGHT", f"{family}-taught")
            model, _, ends = wanted.partition(": ")
            keys = [end if below and model != "baseline" else f"{model}: {end}" for end in ends.split("|")]
            for key in [key for key in keys if key in scores and not (below and "taught" in model)]:
                values = scores[key]["recall" if below else "deciles"]
                style = "--" if "baseline" in label else "-"
                [shown[label]] = axis.plot(range(1, 11), values, style, marker=".", color=f"C{k}")
        axis.set_title(f"{'recall@1' if below else 'matches'}: {name}", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("decile, most certain first", fontsize=9)
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=3, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=90)
