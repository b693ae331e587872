"""What `sfumato evaluate`, `sfumato evaluate table` and `sfumato trust` print for people."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sfumato.errors import counted
from sfumato.evaluation.embedded_input import Measured
from sfumato.evaluation.hits import HitFigures
from sfumato.evaluation.protocols import Evaluation, table_rows
from sfumato.evaluation.trust import FIGURES, DirectionTrust, TrustReport
from sfumato.ids import DIRECTIONS
from sfumato.metrics.retrieval import RANK_METRICS
from sfumato.reports import tables
from sfumato.reports.tables import ARROWS, MISSING, compact_interval, compact_number, in_words, print_wrapped, signed

if TYPE_CHECKING:
    from sfumato.workflows.evaluation import OverSeeds, Row

_RSUM = "RSUM: sum of recall@1, @5 and @10 of both directions, in per cent"
_R_PRECISION = (
    "R-P, R-precision: fraction of matches among the first R, for a query with R matches; mAP@R: the first count more"
)
_CSD = "csd: closed-form sampled distance, the mean squared distance of one sample of each side"

NOT_ABOVE_CHANCE = (
    "Warning: the recalls are not above chance. The model has not learnt to match these data: check that images and"
    " texts belong together, and train longer, on more pairs, or from pre-trained features."
)
"""What evaluation and training say about a model that ranks no better than a random order."""


def print_evaluation(evaluation: Evaluation, title: str) -> None:
    """Print a table of an evaluation, recalls and precisions in per cent."""
    names = ["recall@1", "recall@5", "recall@10", "r_precision", "map@r"]
    rows = []
    for k, (direction, metrics) in enumerate(table_rows(evaluation)):
        shown = [f"{metrics[name]:.1%}" for name in names]
        rows.append([direction, *shown, f"{metrics['median_rank']:g}", f"{metrics['n_queries']:g}"])
        if k < len(evaluation.chance):
            by_chance = list(evaluation.chance.values())[k]
            shown = [f"{by_chance[name]:.1%}" if name in by_chance else "" for name in names]
            rows.append(["  by chance", *shown, "", ""])
    tables.print_table(title, ["direction", "recall@1", "@5", "@10", "R-P", "mAP@R", "median rank", "queries"], rows)
    rsum = f"RSUM {evaluation.rsum * 100:.1f} of 600, {evaluation.chance_rsum * 100:.1f} by chance"
    print_wrapped(f"{rsum} | images {evaluation.n_images}, texts {evaluation.n_texts}")
    for line in (_RSUM, _R_PRECISION, *([_CSD] if evaluation.distance == "csd" else [])):
        print_wrapped(f"  {line}", indent=4)
    if not evaluation.above_chance:
        print_wrapped(NOT_ABOVE_CHANCE)
    _print_uncertainty(evaluation.total_variance, evaluation.uncertainty or {}, evaluation.uncertainty_measure, "")
    if both := evaluation.multiplicity:
        what = f"Spearman of a text's {in_words(evaluation.uncertainty_measure)} with its number of true images"
        over = f"{signed(both['all'])} over all texts, {signed(both['balanced'])} balanced over powers of two"
        print_wrapped(f"{what}: {over}")


def _print_uncertainty(variance: Mapping[str, float], directions: Mapping[str, Any], measure: str, prefix: str) -> None:
    """The mean variances, and recall@1 in ten bins of uncertainty, as in figure 3 of PCME++."""
    print(f"mean total variance: images {variance['image']:.4g}, texts {variance['text']:.4g}")
    if directions:
        print_wrapped(
            f"recall@1 of ten groups of queries, from the most certain to the least (by {in_words(measure)})."
            " Correlation of group and recall@1: −1 is good, recall then falls evenly; 0 says nothing; +1 is the wrong"
            " way round. Spearman: the same over single queries"
        )
    for direction, found in directions.items():
        recalls = " ".join(f"{b['recall']:.0%}" for b in found["bins"])
        print_wrapped(f"  {prefix}{ARROWS[direction]}: {recalls}", indent=4)
        print_wrapped(f"    correlation {signed(found['correlation'])}, Spearman {signed(found['spearman'])}", indent=4)


def print_measured(measured: Measured, title: str) -> None:
    """Print a table of one or more ground truths in both directions, with all metrics that any of them reports."""
    both = {name: {key: one[key] for key in DIRECTIONS if key in one} for name, one in measured.figures.items()}
    metrics = dict.fromkeys(name for one in both.values() for found in one.values() for name in found)
    names = [name for name in metrics if name not in ("n_queries", "n_without_positives")]
    rows = []
    for ground_truth, one in both.items():
        for direction, found in one.items():
            cells = [metric_cell(name, found.get(name)) for name in names]
            rows.append([ground_truth, direction, *cells, f"{found['n_queries']:g}"])
    tables.print_table(f"{title}, by {measured.score}", ["ground truth", "direction", *names, "queries"], rows, left=2)
    rsums = {name: one["rsum"] for name, one in measured.figures.items() if "rsum" in one}
    sums = [f"{name} RSUM {rsum * 100:.1f} of 600" for name, rsum in rsums.items()]
    print_wrapped(" | ".join([*sums, f"images {measured.n_images}, texts {measured.n_texts}"]))
    if measured.ids is not None:
        print_wrapped(f"rows: images, {measured.ids['images']}; columns: texts, {measured.ids['texts']}")
    for line in (*([_RSUM] if sums else []), *([_CSD] if measured.score == "csd" else [])):
        print_wrapped(f"  {line}", indent=4)
    if measured.total_variance is not None:
        own = measured.uncertainty or {}
        name = "coco_1k" if "coco_1k" in own else next(iter(own), "")
        _print_uncertainty(measured.total_variance, own.get(name, {}), measured.uncertainty_measure, f"{name} ")


def metric_cell(name: str, value: float | None) -> str:
    """A metric for a table."""
    return tables.digits(value, 6) if name in RANK_METRICS else tables.percent(value)


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
    "misses": ("to foresee the precision at 10", "Spearman", 0.0),
    "out_of_gallery": ("to find queries without a match", "AUROC", 0.5),
    "multiplicity_balanced": ("to find queries with many matches", "balanced Spearman", 0.0),
}
"""Figure -> what the best estimator by it is for, its unit, and its value by chance; higher is better in all."""


def print_trust_summary(report: TrustReport, title: str) -> None:
    """Print what to do with the probabilities and the estimators of a model: a few lines for each direction."""
    print_wrapped(f"{title}: {counted(report.n_images, 'image')}, {counted(report.n_texts, 'text')}")
    for key, direction in report.directions.items():
        recall = f"recall@1 {compact_interval(direction.recall)} (chance {compact_number(direction.chance)})"
        print_wrapped(f"{ARROWS[key]}, {counted(direction.n_queries, 'query', 'queries')}: {recall}")
        if not direction.above_chance:
            way = "Train it further, or check that images and texts belong together"
            print_wrapped(f"  rely on nothing: the model does not rank better than chance here. {way}", indent=4)
            continue
        served = next((f for f in reversed(report.hits.get("served", [])) if f.direction == key and f.hits == 1), None)
        advice = _AT_CHANCE if _first_hits_at_chance(direction) else _advice(served, report)
        print_wrapped(f"  probability of the first hit: {advice}", indent=4)
        at = {name: of.value or 0.0 for name, of in direction.precision.items()}
        if report.calibrated and "predicted" in at and at["perfect"] > 0.1001:  # Else it is a tenth of recall@10.
            level = f"{compact_interval(direction.precision['true'])} (chance {compact_number(at['chance'])})"
            others = f"{compact_number(at['predicted'])} predicted, {compact_number(at['perfect'])} in a perfect order"
            print_wrapped(f"  precision at 10: {level}; {others}", indent=4)
        for figure, (use, unit, by_chance) in _USES.items():
            if best := _best(direction, figure, unit, by_chance):
                print_wrapped(f"  {use}: {best}", indent=4)


_AT_CHANCE = (
    "do not show it; the first hits are at chance. A random order has as many right ones, so the probability says"
    " nothing about a hit, however well it is calibrated. Train the model further, or search with another one"
)


def _first_hits_at_chance(direction: DirectionTrust) -> bool:
    """Whether recall@1 may be that of a random order, though further down the order is better than random."""
    recall = direction.recall
    low = recall.value if recall.low is None else recall.low
    return low is None or low <= direction.chance


def _advice(served: HitFigures | None, report: TrustReport) -> str:
    """What may be done with a probability."""
    if served is None:
        reason = next((note for note in report.notes if note.startswith("the probabilities of hits are left out")), "")
        return f"not measured: {reason.partition(': ')[2] or 'see --details'}"
    shown = f"{compact_number(served.mean_probability)} on average, {compact_number(served.rate)} are right"
    if served.verdict == "too few":
        few = f"{counted(served.n, 'query', 'queries')} are too few to exclude an error of 10 points"
        return f"{shown}; {few} ({_TELLING} nearly always can)"
    return f"{shown}; {_VERDICTS[served.verdict]}"


def _best(direction: DirectionTrust, figure: str, unit: str, by_chance: float) -> str:
    """The best estimator by a figure, and the figure; "" if it is unmeasured."""
    found = {name: of[figure] for name, of in direction.estimators.items() if figure in of}
    if not (values := {name: interval.value for name, interval in found.items() if interval.value is not None}):
        return ""
    name = max(values, key=lambda name: values[name])
    title, shown, low = in_words(name), f"{unit} {compact_interval(found[name])}", found[name].low
    if values[name] > by_chance and (low is None or low > by_chance):
        return f"{title} ({shown})"
    return f"no estimator is above chance here (best: {title}, {shown})"


def print_trust(report: TrustReport, title: str) -> None:
    """Print the summary, and tables of the figures of each estimator of uncertainty with confidence intervals."""
    print_trust_summary(report, title)
    if report.hits:
        _print_hit_table(report)
    shown = dict.fromkeys(name for direction in report.directions.values() for name in direction.estimators)
    figures: dict[str, None] = {}
    for key, direction in report.directions.items():
        columns = list(dict.fromkeys(name for values in direction.estimators.values() for name in values))
        figures |= dict.fromkeys(columns)
        print()
        perfect = f"AURC of a perfect order {compact_interval(direction.risk_best)}"
        pairs = f"match probability of true against random pairs, AUROC {compact_interval(direction.right_pairs)}"
        found = direction.estimators.items()
        rows = [[in_words(n), *(compact_interval(of.get(column)) for column in columns)] for n, of in found if of]
        tables.print_table(f"{ARROWS[key]}; {perfect}; {pairs}", ["estimator", *map(in_words, columns)], rows)
    print()
    about = [[in_words(name), f"{report.estimators[name]['estimates']} [{name}]"] for name in shown]
    about += [[in_words(name), f"{FIGURES[name]} [{name}]"] for name in figures]
    title = "What they are; in square brackets the key in the file"
    tables.print_table(title, ["name", "what it is"], about, running=(1,))
    intervals = f"{report.level:.0%} intervals from {report.n_resamples} bootstrap resamples of the queries"
    print_wrapped(f"Higher is less certain. In brackets: {intervals}.")
    for note in report.notes:
        print_wrapped(f"note: {note}", indent=2)


def _print_hit_table(report: TrustReport) -> None:
    """The probabilities of hits in galleries of several sizes."""
    labels = ("right", "mean probability", "ECE", "ECE, distance alone", "ECE, perfect", "Brier skill", "AUROC")
    rows = []
    for f, baseline in zip(report.hits["served"], report.hits["distance"], strict=True):
        cells = (f.rate, f.mean_probability, f.ece, baseline.ece, f.ece_by_chance, f.brier_skill, f.auroc)
        rows.append([f"{f.direction}, {f.n_gallery:,}, {f.hits}", *[compact_number(c) for c in cells]])
    print()
    tables.print_table("Are the probabilities of hits right?", ["queries, images, first hits", *labels], rows)


_FRACTIONS = ("recall@", "map@", "r_precision", "rsum")


def runs_table(
    rows: Sequence["Row"], keys: Sequence[str], title: str, text: Callable[[str], str] = lambda cell: cell
) -> tables.Table:
    """The rows of a table as texts."""
    metrics = list(dict.fromkeys(name for row in rows for name in row.figures))
    cells = [[*map(text, labels(row)), *(text(cell(name, row.figures.get(name))) for name in metrics)] for row in rows]
    headings = [*(keys or ("",)), *(tables.short_name(name.replace(".", " ")) for name in metrics)]
    n = sorted({len(row.runs) for row in rows})
    number = f"{n[0]} to {n[-1]}" if len(n) > 1 else f"{n[0]}"
    seeds = "one seed" if n == [1] else f"mean ± standard deviation over {number} seeds"
    return tables.Table(f"{title}; per cent, RSUM of 600; {seeds}", headings, cells, left=max(1, len(keys)))


def runs_latex(table: tables.Table) -> str:
    """A table of runs for LaTeX with the package booktabs; its cells are LaTeX."""
    columns = "l" * table.left + "r" * (len(table.headings) - table.left)
    head = " & ".join(map(tables.tex, table.headings)) + r" \\"
    return tables.latex(columns, head, table.rows, " ".join([table.title + ".", *table.notes]))


def labels(row: "Row") -> list[str]:
    """The values that name a row."""
    shown = [str(value).lower() if isinstance(value, bool) else str(value) for value in row.label]
    return [MISSING if value is None else text for value, text in zip(row.label, shown, strict=True)] or ["all runs"]


def cell(metric: str, value: "OverSeeds | None") -> str:
    """Recalls, precisions and RSUM in per cent; other numbers as they are."""
    if value is None:
        return MISSING
    last = metric.rpartition(".")[2]
    if last.startswith(_FRACTIONS):
        return tables.mean_and_deviation(100 * value.mean, value.deviation and 100 * value.deviation)
    decimals = 1 if last in RANK_METRICS else tables.column_decimals((value.mean, value.deviation))
    return tables.mean_and_deviation(value.mean, value.deviation, decimals)
