"""The console output of `sfumato trust`: what to rely on in a few lines, and all figures on demand."""

import sys

from rich.console import Console
from rich.table import Table

from sfumato.evaluation.hits import HitFigures
from sfumato.evaluation.trust import DirectionTrust, TrustReport
from sfumato.metrics.bootstrap import Interval
from sfumato.reports.console import wide_console
from sfumato.reports.formatting import compact_interval, compact_number

_NAMES: dict[str, str] = {"t2i": "text -> image", "i2t": "image -> text"}

_CLOSE, _FAR = 0.03, 0.1
"""Calibration errors above the one by chance, up to which probabilities can be shown, and above which they mislead."""

_QUESTIONS = {
    "wrong_auroc": ("whether the first hit is wrong", "AUROC"),
    "multiplicity_balanced": ("how many items match", "balanced Spearman"),
    "caption_distance": ("how far an image's captions differ", "Spearman"),
    "out_of_gallery": ("whether nothing matches", "AUROC"),
}
"""Figure -> the question that it answers, and its unit; higher is better in all of them."""


def print_trust_summary(report: TrustReport, title: str) -> None:
    """Print what the probabilities and the estimators of a model are worth, a few lines for each direction.

    Args:
        report: the figures.
        title: what was measured.
    """
    print(f"{title}: {report.n_images:,} images, {report.n_texts:,} texts")
    for key, direction in report.directions.items():
        print(f"{_NAMES[key]}: {direction.n_queries:,} queries, recall@1 {compact_interval(direction.recall)}")
        served, baseline = (
            next((f for f in reversed(report.hits.get(kind, [])) if f.direction == key and f.hits == 1), None)
            for kind in ("served", "distance")
        )
        if served is not None and baseline is not None:
            _print_first_hits(served, baseline)
        for figure, (question, unit) in _QUESTIONS.items():
            _print_best(direction, figure, question, unit)
    for note in report.notes:
        print(f"note: {note}")


def _print_first_hits(served: HitFigures, baseline: HitFigures) -> None:
    print(
        f"  probability of the first hit: {served.mean_probability:.1%} on average, right in {served.rate:.1%};"
        f" calibration error {served.ece:.3f}"
    )
    print(f"    (by the distance alone {baseline.ece:.3f}, of perfect probabilities {served.ece_by_chance:.3f})")
    if served.auroc is not None and baseline.auroc is not None:
        print(
            f"    right against wrong first hits: AUROC {served.auroc:.2f} (distance alone {baseline.auroc:.2f},"
            " chance 0.50)"
        )
    excess = served.ece - served.ece_by_chance
    if excess <= _CLOSE:
        print("    -> show it: it holds for queries like these")
    elif excess <= _FAR:
        print("    -> show it in words only (likely, unlikely), or calibrate on queries like these")
    else:
        print("    -> do not show it before `sfumato calibrate` on queries like these")


def _print_best(direction: DirectionTrust, figure: str, question: str, unit: str) -> None:
    """The best estimator by one figure, beside total variance."""
    found: dict[str, Interval] = {
        name: values[figure] for name, values in direction.estimators.items() if figure in values
    }
    known = {name: each.value for name, each in found.items() if each.value is not None}
    if not known:
        return
    best = max(known, key=lambda name: known[name])
    other = "total_variance"
    beside = f"; {other} {compact_interval(found[other])}" if other in known and best != other else ""
    chance = " (chance .5)" if unit == "AUROC" else ""
    print(f"  {question}: best estimator {best}, {unit} {compact_interval(found[best])}{chance}{beside}")


def print_trust(report: TrustReport, title: str) -> None:
    """Print tables of the figures of each estimator of uncertainty, with confidence intervals.

    Args:
        report: the figures.
        title: start of each table's title.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    if report.hits:
        _print_hit_table(console, report, title)
    for key, direction in report.directions.items():
        found = {figure for values in direction.estimators.values() for figure in values}
        for heading, columns in _TRUST_TABLES.items():
            shown = {figure: label for figure, label in columns.items() if figure in found}
            if shown:
                table = Table(title=f"{title}, {_NAMES[key]}: {heading}", title_justify="left")
                table.add_column("estimator", no_wrap=True)
                for label in shown.values():
                    table.add_column(label, justify="right")
                for name, figures in direction.estimators.items():
                    table.add_row(name, *[compact_interval(figures.get(figure)) for figure in shown])
                console.print(table)
        if direction.corruptions:
            _print_corruptions(wide_console(), direction)
        chance = None if direction.recall.value is None else 1 - direction.recall.value
        print(
            f"{direction.n_queries} queries, {direction.n_gallery} items,"
            f" recall@1 {compact_interval(direction.recall)};"
            f" AURC of chance {compact_number(chance)}, of a perfect order {compact_interval(direction.risk_best)};"
            f" match probability of true against random pairs, AUROC {compact_interval(direction.right_pairs)}"
        )
    print(
        f"Higher is less certain. In brackets: {report.level:.0%} intervals"
        f" from {report.n_resamples} bootstrap resamples of the queries."
    )
    for note in report.notes:
        print(f"note: {note}")


def _print_hit_table(console: Console, report: TrustReport, title: str) -> None:
    """The probabilities of hits in galleries of several sizes."""
    table = Table(title=f"{title}: are the probabilities of hits right?", title_justify="left")
    table.add_column("queries, images, first hits", no_wrap=True)
    for label in ("right", "mean probability", "ECE", "distance alone", "perfect", "Brier skill", "AUROC"):
        table.add_column(label, justify="right")
    for f, baseline in zip(report.hits["served"], report.hits["distance"], strict=True):
        cells = (f.rate, f.mean_probability, f.ece, baseline.ece, f.ece_by_chance, f.brier_skill, f.auroc)
        table.add_row(f"{_NAMES[f.direction]}, {f.n_gallery:,}, {f.hits}", *[compact_number(c) for c in cells])
    console.print(table)


_TRUST_TABLES = {
    "is the best item wrong?": {
        "wrong_auroc": "AUROC",
        "wrong_aurc": "AURC",
        "wrong_gain": "PRR",
        "deciles": "deciles of recall",
    },
    "ambiguity and absence": {
        "multiplicity": "true number, Spearman",
        "multiplicity_balanced": "balanced",
        "caption_distance": "caption distance",
        "caption_words": "caption words",
        "out_of_gallery": "unanswerable, AUROC",
    },
}


def _print_corruptions(console: Console, direction: DirectionTrust) -> None:
    table = Table(
        title="do corrupted queries become less certain? Spearman with strength, fraction that rises",
        title_justify="left",
    )
    table.add_column("estimator", no_wrap=True)
    for name in direction.corruptions:
        table.add_column(f"{name}: Spearman", justify="right")
        table.add_column("rises", justify="right")
    for estimator in direction.estimators:
        cells = []
        for corruption in direction.corruptions.values():
            found = corruption.estimators.get(estimator, {})
            cells += [compact_interval(found.get("spearman")), compact_interval(found.get("rises"))]
        table.add_row(estimator, *cells)
    console.print(table)
    for name, corruption in direction.corruptions.items():
        recall = " ".join(f"{r:.0%}" for r in corruption.recall)
        strengths = " ".join(f"{s:g}" for s in corruption.strengths)
        print(f"{name}, {corruption.n} queries: recall@1 {recall} at strength {strengths}")
