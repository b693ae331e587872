"""What `sfumato trust` prints for people."""

from sfumato.errors import counted
from sfumato.evaluation.hits import FAR, HitFigures
from sfumato.evaluation.trust import DirectionTrust, TrustReport
from sfumato.metrics.bootstrap import Interval
from sfumato.reports.tables import ARROWS, compact_interval, compact_number, in_words, print_table, print_wrapped

_TELLING = 500
"""Number of queries that nearly always tell perfect probabilities from those that are off by FAR."""

_MORE = "calibrate on more of them (more data, or more of it kept back)"

_VERDICTS = {
    "holds": "show it; it holds for queries like those of this split",
    "rough": f"show it in words only (likely, unlikely), or {_MORE}",
    "misleads": f"do not show it; {_MORE}",
}

_USES = {
    "wrong_auroc": ("to find wrong first hits", "AUROC", 0.5),
    "out_of_gallery": ("to find queries without a match", "AUROC", 0.5),
    "multiplicity_balanced": ("to find queries with many matches", "balanced Spearman", 0.0),
}
"""Figure -> what the best estimator by it is for, its unit, and its value by chance; higher is better in all."""


def print_trust_summary(report: TrustReport, title: str) -> None:
    """Print what to do with the probabilities and the estimators of a model: a few lines for each direction."""
    print_wrapped(f"{title}: {counted(report.n_images, 'image')}, {counted(report.n_texts, 'text')}")
    for key, direction in report.directions.items():
        print_wrapped(
            f"{ARROWS[key]}, {counted(direction.n_queries, 'query', 'queries')}:"
            f" recall@1 {compact_interval(direction.recall)} (chance {compact_number(direction.chance)})"
        )
        if not direction.above_chance:
            print_wrapped(
                "  rely on nothing: the model does not rank better than chance here. Train it further, or check that"
                " images and texts belong together",
                indent=4,
            )
            continue
        served, _ = _first_hits(report, key)
        advice = _AT_CHANCE if _first_hits_at_chance(direction) else _advice(served, report)
        print_wrapped(f"  probability of the first hit: {advice}", indent=4)
        for figure, (use, unit, by_chance) in _USES.items():
            if (best := _best(direction, figure, by_chance)) is not None:
                print_wrapped(f"  {use}: {_estimator(best, unit)}", indent=4)


_AT_CHANCE = (
    "do not show it; the first hits are at chance. A random order has as many right ones, so the probability says"
    " nothing about a hit, however well it is calibrated. Train the model further, or search with another one"
)


def _first_hits_at_chance(direction: DirectionTrust) -> bool:
    """Whether recall@1 may be that of a random order, though further down the order is better than random."""
    recall = direction.recall
    low = recall.value if recall.low is None else recall.low
    return low is None or low <= direction.chance


def _first_hits(report: TrustReport, direction: str) -> tuple[HitFigures | None, HitFigures | None]:
    """The figures of first hits in the whole gallery: as searches show them, and by the distance alone."""
    served, baseline = (
        next((f for f in reversed(report.hits.get(kind, [])) if f.direction == direction and f.hits == 1), None)
        for kind in ("served", "distance")
    )
    return served, baseline


def _advice(served: HitFigures | None, report: TrustReport) -> str:
    """What may be done with a probability."""
    if served is None:
        reason = next((note for note in report.notes if note.startswith("the probabilities of hits are left out")), "")
        return f"not measured: {reason.partition(': ')[2] or 'see --details'}"
    shown = f"{compact_number(served.mean_probability)} on average, {compact_number(served.rate)} are right"
    if served.verdict == "too few":
        return (
            f"{shown}; {counted(served.n, 'query', 'queries')} are too few to exclude an error of 10 points"
            f" ({_TELLING} nearly always can)"
        )
    return f"{shown}; {_VERDICTS[served.verdict]}"


def _best(direction: DirectionTrust, figure: str, by_chance: float) -> tuple[str, Interval, bool] | None:
    """The best estimator by a figure, the figure, and whether its interval lies above chance; None if unmeasured."""
    found = {
        name: values[figure]
        for name, values in direction.estimators.items()
        if figure in values and values[figure].value is not None
    }
    if not found:
        return None
    name = max(found, key=lambda name: found[name].value or 0.0)
    low = found[name].low
    return name, found[name], (found[name].value or 0.0) > by_chance and (low is None or low > by_chance)


def _estimator(best: tuple[str, Interval, bool], unit: str) -> str:
    name, figure, above = best
    shown = f"{unit} {compact_interval(figure)}"
    title = in_words(name)
    return f"{title} ({shown})" if above else f"no estimator is above chance here (best: {title}, {shown})"


def print_trust(report: TrustReport, title: str) -> None:
    """Print the summary, and tables of the figures of each estimator of uncertainty with confidence intervals."""
    print_trust_summary(report, title)
    print()
    for key, name in ARROWS.items():
        served, baseline = _first_hits(report, key)
        if served is not None and baseline is not None:
            _print_first_hits(name, served, baseline)
    if report.hits:
        _print_hit_table(report)
    for key, direction in report.directions.items():
        found = {figure for values in direction.estimators.values() for figure in values}
        for heading, columns in _TRUST_TABLES.items():
            shown = {figure: label for figure, label in columns.items() if figure in found}
            if shown:
                print()
                print_table(
                    f"{ARROWS[key]}: {heading}",
                    ["estimator", *shown.values()],
                    [
                        [in_words(name), *(compact_interval(figures.get(figure)) for figure in shown)]
                        for name, figures in direction.estimators.items()
                        if any(figure in figures for figure in shown)
                    ],
                )
        chance = None if direction.recall.value is None else 1 - direction.recall.value
        print()
        print_wrapped(
            f"{ARROWS[key]}: {counted(direction.n_queries, 'query', 'queries')},"
            f" {counted(direction.n_gallery, 'item')}, recall@1 {compact_interval(direction.recall)};"
            f" AURC of chance {compact_number(chance)}, of a perfect order {compact_interval(direction.risk_best)};"
            f" match probability of true against random pairs, AUROC {compact_interval(direction.right_pairs)}"
        )
    _print_legend(report)
    print_wrapped(
        f"Higher is less certain. In brackets: {report.level:.0%} intervals"
        f" from {report.n_resamples} bootstrap resamples of the queries."
    )
    for note in report.notes:
        print_wrapped(f"note: {note}", indent=2)


def _print_first_hits(name: str, served: HitFigures, baseline: HitFigures) -> None:
    print_wrapped(
        f"{name}, probability of the first hit: {served.mean_probability:.1%} on average, right in {served.rate:.1%};"
        f" calibration error {served.ece:.3f}, by the distance alone {baseline.ece:.3f}"
    )
    print_wrapped(
        f"  calibration error of perfect probabilities {served.ece_by_chance:.3f}, at most"
        f" {served.ece_perfect_most:.3f}; of probabilities off by {FAR:.0%} at least {served.ece_off_least:.3f}",
        indent=2,
    )
    if served.auroc is not None and baseline.auroc is not None:
        print_wrapped(
            f"  right against wrong first hits: AUROC {served.auroc:.2f} (distance alone {baseline.auroc:.2f}, chance"
            " 0.50)"
        )


def _print_hit_table(report: TrustReport) -> None:
    """The probabilities of hits in galleries of several sizes."""
    labels = ("right", "mean probability", "ECE", "ECE, distance alone", "ECE, perfect", "Brier skill", "AUROC")
    rows = []
    for f, baseline in zip(report.hits["served"], report.hits["distance"], strict=True):
        cells = (f.rate, f.mean_probability, f.ece, baseline.ece, f.ece_by_chance, f.brier_skill, f.auroc)
        rows.append([f"{f.direction}, {f.n_gallery:,}, {f.hits}", *[compact_number(c) for c in cells]])
    print_table("Are the probabilities of hits right?", ["queries, images, first hits", *labels], rows)


def _print_legend(report: TrustReport) -> None:
    """What the words of the tables mean, and the keys of the estimators in files and in Python."""
    print()
    shown = {name for direction in report.directions.values() for name in direction.estimators}
    rows = [
        [in_words(name), f"{about['estimates']} [{name}]"] for name, about in report.estimators.items() if name in shown
    ]
    print_table(
        "The estimators of uncertainty; in square brackets the key in the JSON file and in Python",
        ["estimator", "what it is"], rows, running=(1,),
    )  # fmt: skip
    for line in _LEGEND:
        print_wrapped(line, indent=2)


_LEGEND = (
    "AUROC: how often a wrong first hit is less certain than a right one; .5 is chance, 1 perfect",
    "AURC: mean error rate of first hits if the least certain queries are left out one by one; lower is better",
    "PRR: what that order gains, as a fraction of what a perfect order gains; 0 is chance, 1 perfect",
    "recall@1 of ten groups, from the most certain to the least: correlation of group and recall; -1 is good",
    "ECE: mean difference between probability and fraction of matches, in groups of hits; 0 is perfect",
    "Brier skill: 0 is a constant probability, 1 perfect",
)

_TRUST_TABLES = {
    "is the best item wrong?": {
        "wrong_auroc": "AUROC",
        "wrong_aurc": "AURC",
        "wrong_gain": "PRR",
        "deciles": "recall@1 of ten groups, Pearson",
    },
    "ambiguity and absence": {
        "multiplicity": "true number, Spearman",
        "multiplicity_balanced": "balanced",
        "caption_distance": "caption distance",
        "caption_words": "caption words",
        "out_of_gallery": "unanswerable, AUROC",
    },
}
