"""What `sfumato evaluate` prints for people."""

from collections.abc import Mapping
from typing import Any

from sfumato.evaluation.embedded_input import Measured
from sfumato.evaluation.protocols import Evaluation, table_rows
from sfumato.metrics.retrieval import RANK_METRICS
from sfumato.reports.tables import ARROWS, digits, in_words, percent, print_table, print_wrapped, signed

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
            *(metric_cell(name, one[direction].get(name)) for name in names),
            f"{one[direction]['n_queries']:g}",
        ]
        for ground_truth, one in measured.figures.items()
        for direction in ("i2t", "t2i")
    ]
    print_table(f"{title}, by {measured.score}", ["ground truth", "direction", *names, "queries"], rows, left=2)
    sums = [
        f"{ground_truth} RSUM {one['rsum'] * 100:.1f} of 600"
        for ground_truth, one in measured.figures.items()
        if "rsum" in one
    ]
    print_wrapped(" | ".join([*sums, f"images {measured.n_images}, texts {measured.n_texts}"]))
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


def metric_cell(name: str, value: float | None) -> str:
    """A metric for a table."""
    return digits(value, 6) if name in RANK_METRICS else percent(value)
