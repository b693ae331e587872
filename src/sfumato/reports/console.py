"""What commands print for people: evaluations, searches, calibrations, adoptions and trust."""

from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.errors import counted
from sfumato.evaluation.compare import MoreResults, OverSeeds
from sfumato.evaluation.embedded_input import Measured
from sfumato.evaluation.hits import FAR, HitFigures
from sfumato.evaluation.papers import common_figures
from sfumato.evaluation.protocols import Evaluation, table_rows
from sfumato.evaluation.trust import DirectionTrust, TrustReport
from sfumato.metrics.bootstrap import Interval
from sfumato.metrics.retrieval import RANK_METRICS
from sfumato.reports.tables import (
    ARROWS,
    MISSING,
    compact_interval,
    compact_number,
    digits,
    in_words,
    number,
    percent,
    print_table,
    print_wrapped,
    short_name,
    signed,
)
from sfumato.workflows.adopt import METHODS, AdoptedModel
from sfumato.workflows.ranked_lists import FittedLists


def print_over_seeds(summary: Mapping[str, OverSeeds], title: str, runs: Sequence[str]) -> None:
    """Print figures of several runs: mean ± standard deviation, and the value of each run where all have one."""
    few = len(runs) <= _RUNS_SHOWN
    rows = []
    for name, value in summary.items():
        all_there = few and len(value.values) == len(runs)
        each = [f"{one:.2f}" for one in value.values] if all_there else [MISSING] * few * len(runs)
        rows.append([name, str(value), *each])
    print_table(title, ["figure", "mean ± deviation", *(runs if few else ())], rows, left=2)
    if not few:
        print_wrapped(f"runs: {', '.join(runs)}")


_RUNS_SHOWN = 5
"""Largest number of runs that have a column each."""


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
    print_table(title, ["direction", "recall@1", "@5", "@10", "R-P", "mAP@R", "median rank", "queries"], rows)
    print_wrapped(
        f"RSUM {evaluation.rsum * 100:.1f} of 600, {evaluation.chance_rsum * 100:.1f} by chance"
        f" | images {evaluation.n_images}, texts {evaluation.n_texts}"
    )
    for line in (_RSUM, _R_PRECISION, *([_CSD] if evaluation.distance == "csd" else [])):
        print_wrapped(f"  {line}", indent=4)
    if not evaluation.above_chance:
        print_wrapped(NOT_ABOVE_CHANCE)
    variance = evaluation.total_variance
    print(f"mean total variance: images {variance['image']:.4g}, texts {variance['text']:.4g}")
    _print_uncertainty(evaluation.uncertainty or {}, evaluation.uncertainty_measure)
    if evaluation.multiplicity:
        both = evaluation.multiplicity
        print_wrapped(
            f"Spearman of a text's {in_words(evaluation.uncertainty_measure)} with its number of true images:"
            f" {signed(both['all'])} over all texts, {signed(both['balanced'])} balanced over powers of two"
        )


def _print_uncertainty(directions: Mapping[str, Any], measure: str, prefix: str = "") -> None:
    """Recall@1 in ten bins of uncertainty, as in figure 3 of PCME++."""
    if directions:
        print_wrapped(
            f"recall@1 of ten groups of queries, from the most certain to the least (by {in_words(measure)})."
            " Correlation of group and recall@1: −1 is good, recall then falls evenly; 0 says nothing; +1 is the wrong"
            " way round. Spearman: the same over single queries"
        )
    for direction, values in directions.items():
        print_wrapped(
            f"  {prefix}{ARROWS[direction]}: " + " ".join(f"{b['recall']:.0%}" for b in values["bins"]), indent=4
        )
        print_wrapped(
            f"    correlation {signed(values['correlation'])}, Spearman {signed(values['spearman'])}", indent=4
        )


def print_measured(measured: Measured, title: str) -> None:
    """Print a table of one or more ground truths in both directions, with all metrics that any of them reports."""
    metrics = dict.fromkeys(name for one in measured.figures.values() for name in one["i2t"])
    names = [name for name in metrics if name not in ("n_queries", "n_without_positives")]
    rows = [
        [
            ground_truth,
            direction,
            *(_metric(name, one[direction].get(name)) for name in names),
            f"{one[direction]['n_queries']:g}",
        ]
        for ground_truth, one in measured.figures.items()
        for direction in ("i2t", "t2i")
    ]
    title = f"{title}, by {measured.score}"
    if measured.subset is not None:
        title = f"SMOKE TEST on a part of the benchmark: {title}"
    print_table(title, ["ground truth", "direction", *names, "queries"], rows, left=2)
    sums = [
        f"{ground_truth} RSUM {one['rsum'] * 100:.1f} of 600"
        for ground_truth, one in measured.figures.items()
        if "rsum" in one
    ]
    print_wrapped(" | ".join([*sums, f"images {measured.n_images}, texts {measured.n_texts}"]))
    if measured.subset is not None:
        same: dict[str, list[str]] = {}
        for name, of in measured.subset.items():
            there = (
                f"{of['images']:,} of {counted(of['of_images'], 'image')} and {of['texts']:,} of"
                f" {counted(of['of_texts'], 'text')} are there"
            )
            same.setdefault(there, []).append(name)
        for there, names in same.items():
            print_wrapped(f"{', '.join(names)}: {there}")
        print_wrapped(
            "These are not figures of the benchmark: recall is higher in a smaller gallery. Compare them with nothing"
            " that was published."
        )
    if measured.ids is not None:
        print_wrapped(f"rows: images, {measured.ids['images']}; columns: texts, {measured.ids['texts']}")
    for line in (*([_RSUM] if sums else []), *([_CSD] if measured.score == "csd" else [])):
        print_wrapped(f"  {line}", indent=4)
    if measured.total_variance is not None:
        variance = measured.total_variance
        print(f"mean total variance: images {variance['image']:.4g}, texts {variance['text']:.4g}")
    if measured.uncertainty:
        name = "coco_1k" if "coco_1k" in measured.uncertainty else next(iter(measured.uncertainty))
        _print_uncertainty(measured.uncertainty[name], measured.uncertainty_measure, f"{name} ")


def print_more(more: MoreResults) -> None:
    """Print strategies and published rows, if they were requested."""
    if more.strategies:
        _print_strategies(more)
    if more.published:
        _print_published(more)
    for source in dict.fromkeys(row.source for row in more.published):
        print_wrapped(f"published figures: {source}")
    if more.per_query:
        print(f"single queries written to {more.per_query}")


def _print_strategies(more: MoreResults) -> None:
    """COCO in the columns of PCME++'s table C.7; anything else by ground truth and direction."""
    own = {name: common_figures(result.figures) for name, result in more.strategies.items()}
    names = list(dict.fromkeys(name for figures in own.values() for name in figures))
    if names:
        print_table(
            "strategies: mean of both directions, per cent",
            ["strategy", *names, "seconds"],
            [
                [result.strategy.label, *(number(own[key].get(name), 1) for name in names), f"{result.seconds:.2f}"]
                for key, result in more.strategies.items()
            ],
        )
        return
    figures = [one for result in more.strategies.values() for one in result.figures.values()]
    metrics = list(dict.fromkeys(name for one in figures for name in one["i2t"] if not name.startswith("n_")))
    rows = [
        [
            result.strategy.label,
            ground_truth,
            direction,
            *(_metric(name, one[direction].get(name)) for name in metrics),
            f"{result.seconds:.2f}",
        ]
        for result in more.strategies.values()
        for ground_truth, one in result.figures.items()
        for direction in ("i2t", "t2i")
    ]
    print_table("strategies", ["strategy", "ground truth", "direction", *metrics, "seconds"], rows, left=3)


def print_differences(more: MoreResults, title: str) -> None:
    """Print a comparison with another run as one table; what all rows share stands above it."""
    rows, names = [], list(dict.fromkeys(d.ground_truth for d in more.differences))
    for d in more.differences:
        own = d.difference
        interval = MISSING if own.low is None or own.high is None else f"{100 * own.low:+.2f} .. {100 * own.high:+.2f}"
        rows.append([
            *([d.ground_truth] if len(names) > 1 else []), d.direction, d.metric, f"{100 * d.first:.2f}",
            f"{100 * d.second:.2f}", f"{100 * (own.value or 0):+.2f}", interval, f"{d.p_value:.4f}",
        ])  # fmt: skip
    sizes = dict.fromkeys(f"{d.n_queries:,} {d.direction} queries in {d.n_groups:,} groups" for d in more.differences)
    first = ["ground truth"] if len(names) > 1 else []
    print_table(
        f"{title}, compared with {more.compared_with} (other), query by query, in per cent; 95 % intervals, p by random"
        " swaps of groups with the same matches",
        [*first, "direction", "metric", "other", "this", "difference", "interval", "p"],
        rows, left=2 + len(first),
    )  # fmt: skip
    if len(names) == 1:
        print_wrapped("; ".join(sizes))


def _print_published(more: MoreResults) -> None:
    """Each published table with this evaluation below it, in the columns that both have."""
    for full_table in dict.fromkeys(row.full_table for row in more.published):
        rows = [row for row in more.published if row.full_table == full_table]
        names = {name: row.own_name(name) for row in rows for name in row.figures if row.own_name(name) in more.own}
        first = rows[0]
        sides = {"both": "mean of both directions", "each": "by direction"}.get(first.direction, first.direction)
        named = any(row.backbone for row in rows)
        places = {name: _decimals([row.figures[name] for row in rows if name in row.figures]) for name in names}
        cells = [
            [
                *([row.backbone] if named else []),
                row.method,
                *(number(row.figures.get(name), places[name]) for name in names),
            ]
            for row in rows
        ]
        own = [number(more.own[key], places[name]) for name, key in names.items()]
        print_table(
            f"beside {first.paper}, table {first.table} ({first.about}): {sides}, per cent",
            [*(["backbone"] if named else []), "method", *map(short_name, names)],
            [*cells, [*([""] if named else []), "this", *own]],
            left=2 if named else 1,
        )


def _decimals(printed: Sequence[float]) -> int:
    """Number of decimals of a column, 1 or 2, as the paper prints most of it."""
    return 2 if sum(round(value, 1) != value for value in printed) > len(printed) / 2 else 1


def _metric(name: str, value: float | None) -> str:
    return digits(value, 6) if name in RANK_METRICS else percent(value)


def print_calibration(result: dict[str, Any]) -> None:
    """Print the guarantees of a calibration."""
    population = {"planted": "every query has a match", "independent": "some queries have no match"}[result["queries"]]
    print_wrapped(
        f"calibrated by {result['method']} on {counted(result['pairs'], 'pair')} of the split {result['split']};"
        f" {result['queries']} queries: {population}"
    )
    for key, name in ARROWS.items():
        if (found := result.get(key)) is None:
            continue
        print()
        print_wrapped(
            f"{name}: {counted(found['n_queries'], 'query', 'queries')}, {counted(found['n_gallery'], 'item')},"
            f" {found['matches_per_query']:.2f} matches per query; a gallery of twice the size has"
            f" {2 ** found['growth']:.2f} times as many",
            indent=2,
        )
        if (first := found.get("first_hit")) is not None:
            print_wrapped(
                f"  first hit: {first['mean_probability']:.1%} probable on average, right in {first['rate']:.1%};"
                f" calibration error {first['ece']:.3f}, of perfect probabilities {first['ece_by_chance']:.3f}",
                indent=4,
            )
            if first["auroc"] is not None:
                print_wrapped(
                    f"  right against wrong first hits: AUROC {first['auroc']:.3f}, by the distance alone"
                    f" {first['auroc_of_distance']:.3f}",
                    indent=4,
                )
        else:
            print_wrapped(
                "  too few queries for probabilities of hits (about 100 are needed): they are those of random pairs,"
                " whatever --queries says",
                indent=4,
            )
        if rows := _guarantees(found):
            print_table("", ["guarantee", "limit of the probability", "what it costs"], rows, running=(1, 2))
        for kind in ("precision", "risk", "coverage"):
            missing = [f"{float(level):.0%}" for level, values in found[kind].items() if _rule(kind, values) is None]
            if missing:
                print_wrapped(f"  {kind} {', '.join(missing)}: cannot be guaranteed from these queries", indent=4)


def _rule(kind: str, values: Any) -> float | None:
    """The threshold, the limit or the radius of a guarantee; None if there is none."""
    value: float | None = values if kind == "precision" else values["abstain_below" if kind == "risk" else "radius"]
    return value


def _guarantees(found: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the guarantees that hold."""
    rows = []
    for level, threshold in found["precision"].items():
        if threshold is not None:
            rows.append([f"precision {float(level):.0%}", f"report above {threshold:.3f}", MISSING])
    for level, values in found["risk"].items():
        if values["abstain_below"] is not None:
            answered = MISSING if values["answered"] is None else f"{values['answered']:.0%} of the queries answered"
            rows.append([f"risk {float(level):.0%}", f"answer above {values['abstain_below']:.3f}", answered])
    for level, values in found["coverage"].items():
        if values["radius"] is not None:
            size = MISSING
            if values["size"] is not None:
                size = f"at most {counted(round(values['size']), 'item')} for half of them"
            rows.append([f"coverage {float(level):.0%}", f"all within distance {values['radius']:.4f}", size])
    return rows


_ENOUGH = 100
"""Number of images that calibrate, below which an adoption warns."""


def print_adopted(adopted: AdoptedModel) -> None:
    """Print what an adoption gave, and what its probabilities are worth beside their baselines."""
    images, texts = sum(adopted.n_images.values()), sum(adopted.n_texts.values())
    channels = adopted.run.recipe.model.dim
    left_out = f"; {adopted.n_left_out:,} left out, see problems.jsonl" if adopted.n_left_out else ""
    print_wrapped(
        f"adopted {counted(images, 'image')} and {counted(texts, 'text')} of {counted(channels, 'channel')} in"
        f" {adopted.seconds:.0f} s{left_out}"
    )
    asking = (
        (adopted.n_queries.get("t2i", 0), adopted.n_texts["val"], "text"),
        (adopted.n_queries.get("i2t", 0), adopted.n_images["val"], "image"),
    )
    used = [f"{n:,} of {counted(of, noun)}" for n, of, noun in asking]
    more = "; --max-queries takes more" if any(n < of for n, of, _ in asking) else ""
    print_wrapped(f"the probabilities are fitted on {' and '.join(used)} of the split val{more}")
    if adopted.comparison:
        rows = [
            [
                f"{name}, kept" if name == adopted.method else name,
                f"{found.log_loss:.3f}",
                MISSING if name == adopted.method else compact_interval(found.worse),
                METHODS[name],
            ]
            for name, found in adopted.comparison.items()
        ]
        print_table(
            "log loss of first hits (lower is better), fitted on half of the calibrating images and measured on the"
            " other half; in brackets 95 % intervals",
            ["method", "log loss", "more", "computed from"], rows, running=(3,),
        )  # fmt: skip
    if (n := adopted.n_images["val"]) < _ENOUGH:
        print_wrapped(
            f"warning: only {counted(n, 'image')} calibrate; with fewer than {_ENOUGH} all of these figures are rough"
        )
    if adopted.retrieval is None:
        print_wrapped(
            "no split 'test': the probabilities are not measured; `sfumato trust` measures them on other pairs"
        )
        return
    retrieval = adopted.retrieval
    print_wrapped(
        f"on {counted(retrieval.n_images, 'other image')} and {counted(retrieval.n_texts, 'text')}, with the frozen"
        " model's own ranking:"
    )
    for key, name in ARROWS.items():
        served, alone = (
            next(f for f in adopted.hits[kind] if f.direction == key and f.hits == 1) for kind in ("served", "distance")
        )
        recall, chance = getattr(retrieval, key)["recall@1"], retrieval.chance[key]["recall@1"]
        print_wrapped(f"  {name}: recall@1 {recall:.1%}, chance {chance:.2%}")
        print_wrapped(
            f"    first hit {served.mean_probability:.1%} probable on average, right in {served.rate:.1%}; calibration"
            f" error {served.ece:.3f}, by the distance alone {alone.ece:.3f}, of perfect probabilities"
            f" {served.ece_by_chance:.3f}",
            indent=4,
        )


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
        if direction.corruptions:
            _print_corruptions(ARROWS[key], direction)
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


def _print_corruptions(title: str, direction: DirectionTrust) -> None:
    names = direction.corruptions
    rows = []
    for estimator in direction.estimators:
        if not any(estimator in corruption.estimators for corruption in direction.corruptions.values()):
            continue  # A constant estimator has no figures.
        cells = []
        for corruption in direction.corruptions.values():
            found = corruption.estimators.get(estimator, {})
            cells += [compact_interval(found.get("spearman")), compact_interval(found.get("rises"))]
        rows.append([in_words(estimator), *cells])
    print()
    print_table(
        f"{title}: do corrupted queries become less certain? Spearman with strength, fraction that rises",
        ["estimator", *(f"{in_words(name)}: {figure}" for name in names for figure in ("Spearman", "rises"))],
        rows,
    )
    for name, corruption in direction.corruptions.items():
        recall = " ".join(f"{r:.0%}" for r in corruption.recall)
        strengths = " ".join(f"{s:g}" for s in corruption.strengths)
        print_wrapped(
            f"{in_words(name)}, {counted(corruption.n, 'query', 'queries')}: recall@1 {recall} at strength {strengths}"
        )


def print_fitted_lists(found: FittedLists, name: object) -> None:
    """Print what a calibrator of lists was fitted on, and what its probabilities are worth."""
    title = f"{name}: {counted(found.queries, 'query', 'queries')}, {counted(found.judged, 'judged hit')}"
    rows = [
        [
            "first hit" if one.hits == 1 else f"first {one.hits} hits",
            *(f"{value:.3f}" for value in (one.mean_probability, one.rate, one.ece, one.ece_by_chance)),
            "undefined" if one.auroc is None else f"{one.auroc:.3f}",
        ]
        for one in found.figures
    ]
    if rows:
        print_table(title, ["", "said", "right", "calibration error", "of perfect probabilities", "AUROC"], rows)
        print_wrapped("Each fifth of the queries by a fit on the others.")
        if found.queries < 30:
            print_wrapped("These queries are few, so figures and probabilities are rough. Judge thirty or more.")
    else:
        print_wrapped(f"{title}. They are too few to measure the probabilities.")
    print_wrapped(
        "Scores of different queries seem comparable, by held-out queries, and are used as such."
        if found.comparable
        else "Scores of different queries do not seem comparable: only the shape of each list counts."
    )
