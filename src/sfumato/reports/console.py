"""What commands print on standard output for a person to read."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from sfumato.evaluation.compare import OverSeeds
from sfumato.evaluation.embedded_input import Measured
from sfumato.evaluation.more_results import MoreResults
from sfumato.evaluation.protocols import Evaluation, table_rows
from sfumato.evaluation.published import common_figures
from sfumato.evaluation.trust_report import DirectionTrust, TrustReport
from sfumato.metrics.bootstrap import Interval
from sfumato.metrics.retrieval import RANK_METRICS


def print_over_seeds(summary: Mapping[str, OverSeeds], title: str) -> None:
    """Figures of several runs, mean ± standard deviation."""
    print(title)
    for name, value in summary.items():
        print(f"  {name:<24}{value!s:>16}")


def print_ablation(cells: Mapping[str, Mapping[str, Mapping[str, OverSeeds]]], title: str) -> None:
    """One table: a row for each distance that was trained with, a column for each that is ranked by; rsum above recall@1."""
    table = Table(
        title=f"{title}: rsum of 600, text -> image recall@1 in per cent", title_justify="left", show_lines=True
    )
    table.add_column("trained with", no_wrap=True)
    for name in dict.fromkeys(by for row in cells.values() for by in row):
        table.add_column(f"by {name}", justify="right", no_wrap=True)
    for name, row in cells.items():
        shown = [f"{found['rsum']}\n{found['t2i recall@1']}" for found in row.values()]
        table.add_row(name, *(shown or ["diverged"]))
    _wide().print(table)


def print_evaluation(evaluation: Evaluation, title: str) -> None:
    """A table of an evaluation on standard output, recalls and precisions in per cent."""
    table = Table(title=title, title_justify="left")
    table.add_column("direction")
    names = ["recall@1", "recall@5", "recall@10", "r_precision", "map@r"]
    for name in [*names, "median_rank", "n_queries"]:
        table.add_column(name, justify="right")
    for direction, metrics in table_rows(evaluation):
        shown = [f"{metrics[name]:.1%}" for name in names] + [
            f"{metrics['median_rank']:g}",
            f"{metrics['n_queries']:g}",
        ]
        table.add_row(direction, *shown)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"rsum {evaluation.rsum * 100:.1f} of 600 | images {evaluation.n_images}, texts {evaluation.n_texts}")
    variance = evaluation.total_variance
    print(f"mean total variance: images {variance['image']:.4g}, texts {variance['text']:.4g}")
    for direction, values in (evaluation.uncertainty or {}).items():
        print(
            f"{direction} recall@1 from the most certain tenth of the queries to the least: "
            + " ".join(f"{b['recall']:.0%}" for b in values["bins"])
        )
        print(
            f"{direction} correlation of bin and recall@1: {_number(values['correlation'])}, Spearman over queries: {_number(values['spearman'])}"
        )
    if evaluation.multiplicity:
        both = evaluation.multiplicity
        print(
            "Spearman of a text's total variance with its number of true pictures:"
            f" {_number(both['all'])} over all texts, {_number(both['balanced'])} balanced over powers of two"
        )


def print_crops(study: Mapping[str, Any]) -> None:
    """Two tables of what :meth:`CropStudy.to_json` holds: uncertainties, and binary selection beside what was published."""
    title = f"{study['model']}: mean {study['uncertainty']} of {study['n_pictures']:,} pictures' crops and captions"
    rows = [(row, side) for row in study["thresholds"] for side in ("crops", "captions") if row[side]["mean"]]
    if rows:
        table = Table(title=title, title_justify="left")
        for name in ("area below", "n", "of", "A", "B", "C", "C above A"):
            table.add_column(name, justify="left" if name == "of" else "right")
        for row, side in rows:
            means, errors = row[side]["mean"], row[side]["standard_error"]
            cells = [_with_error(means[r]["value"], errors[r]) for r in means]
            table.add_row(f"{row['threshold']:.0%}", f"{row['n']:,}", side, *cells, _bounded(row[side]["c_above_a"]))
        _wide().print(table)
        brackets = f"; in brackets: {study['level']:.0%} intervals, as below" if study["n_resamples"] else ""
        print(f"±: one standard error of the mean{brackets}")
    else:
        print(f"{study['model']} embeds points, which have no uncertainty: there are no means of it")
    table = Table(title="share that chooses its own partner", title_justify="left")
    first = next(iter(study["published"].values()))
    for name in ("area below", "by", *first):
        table.add_column(name, justify="left" if name == "by" else "right")
    for row in study["thresholds"]:
        for distance, cells in row["selection"].items():
            table.add_row(f"{row['threshold']:.0%}", distance, *(_bounded(cells[cell]) for cell in first))
    for name, cells in study["published"].items():
        table.add_row("published", name, *(f"{cells[cell]:.1%}" for cell in first))
    _wide().print(table)
    if study["n_resamples"]:
        print(
            f"In brackets: {study['level']:.0%} intervals from {study['n_resamples']:,} bootstrap resamples of the pictures."
        )
    for reason, count in study["problems"].items():
        print(f"{count:,}: {reason}")


def _with_error(value: float | None, error: float | None) -> str:
    return "-" if value is None else f"{value:.4g} ± " + ("-" if error is None else f"{error:.2g}")


def _bounded(interval: Mapping[str, Any] | None) -> str:
    """A share with its interval, in per cent."""
    if interval is None or interval["value"] is None:
        return "-"
    low, high = interval["low"], interval["high"]
    return f"{interval['value']:.1%}" + ("" if low is None or high is None else f" ({low:.0%} to {high:.0%})")


def print_measured(measured: Measured, title: str) -> None:
    """A table of several truths, both directions; fractions in per cent, of the metrics that any of them reports."""
    metrics = dict.fromkeys(name for one in measured.figures.values() for name in one["i2t"])
    names = [name for name in metrics if name not in ("n_queries", "n_without_positives")]
    table = Table(title=f"{title}, by {measured.score}", title_justify="left")
    table.add_column("truth")
    table.add_column("direction")
    for name in [*names, "n_queries"]:
        table.add_column(name, justify="right")
    for ground_truth, one in measured.figures.items():
        for direction in ("i2t", "t2i"):
            shown = [_metric(name, one[direction].get(name)) for name in names]
            table.add_row(ground_truth, direction, *shown, f"{one[direction]['n_queries']:g}")
    _wide().print(table)
    sums = [
        f"{ground_truth} rsum {one['rsum'] * 100:.1f} of 600"
        for ground_truth, one in measured.figures.items()
        if "rsum" in one
    ]
    print(" | ".join([*sums, f"images {measured.n_images}, texts {measured.n_texts}"]))


def print_more(more: MoreResults) -> None:
    """Strategies, comparison and published rows, as far as they were asked for."""
    if more.strategies:
        _print_strategies(more)
    if more.compared_with:
        _print_differences(more)
    if more.published and not more.strategies:
        _print_published(more)
    for source in dict.fromkeys(row.source for row in more.published):
        print(f"published figures: {source}")
    if more.per_query:
        print(f"single queries written to {more.per_query}")


def _print_strategies(more: MoreResults) -> None:
    """COCO in the columns of table C.7, beside its rows if they were asked for; anything else by truth and direction."""
    own = {name: common_figures(result.figures) for name, result in more.strategies.items()}
    names = list(dict.fromkeys(name for figures in own.values() for name in figures))
    if names:
        table = Table(title="strategies: mean of both directions, per cent", title_justify="left")
        for name in ("strategy", *names, "seconds"):
            table.add_column(name, justify="left" if name == "strategy" else "right")
        for row in more.published:
            shown = [_one_decimal(row.figures.get(name)) for name in names]
            table.add_row(f"{row.method}, {row.paper} table {row.table}", *shown, "-")
        for key, result in more.strategies.items():
            shown = [_one_decimal(own[key].get(name)) for name in names]
            table.add_row(result.strategy.label, *shown, f"{result.seconds:.2f}")
    else:
        figures = [one for result in more.strategies.values() for one in result.figures.values()]
        metrics = list(dict.fromkeys(name for one in figures for name in one["i2t"] if not name.startswith("n_")))
        table = Table(title="strategies", title_justify="left")
        for name in ("strategy", "truth", "direction", *metrics, "seconds"):
            table.add_column(name, justify="left" if name in ("strategy", "truth", "direction") else "right")
        for result in more.strategies.values():
            for ground_truth, one in result.figures.items():
                for direction in ("i2t", "t2i"):
                    shown = [_metric(name, one[direction].get(name)) for name in metrics]
                    table.add_row(result.strategy.label, ground_truth, direction, *shown, f"{result.seconds:.2f}")
    _wide().print(table)


def _print_differences(more: MoreResults) -> None:
    table = Table(
        title=f"compared with {more.compared_with}, query by query; 95 per cent intervals, p by random swaps",
        title_justify="left",
    )
    for name in ("truth", "direction", "metric"):
        table.add_column(name)
    for name in ("other", "this", "difference", "interval", "p", "n_queries"):
        table.add_column(name, justify="right")
    for d in more.differences:
        own = d.difference
        interval = "-" if own.low is None or own.high is None else f"{100 * own.low:+.2f} .. {100 * own.high:+.2f}"
        table.add_row(
            d.ground_truth, d.direction, d.metric, f"{100 * d.first:.2f}", f"{100 * d.second:.2f}",
            f"{100 * (own.value or 0):+.2f}", interval, f"{d.p_value:.4f}", str(d.n_queries),
        )  # fmt: skip
    _wide().print(table)


def _print_published(more: MoreResults) -> None:
    tables = sorted({f"{row.paper}, table {row.table}" for row in more.published})
    table = Table(title=f"beside {'; '.join(tables)}: mean of both directions, per cent", title_justify="left")
    table.add_column("backbone")
    table.add_column("method")
    names = list(dict.fromkeys(name for row in more.published for name in row.figures))
    for name in names:
        table.add_column(name, justify="right")
    for row in more.published:
        table.add_row(row.backbone, row.method, *(_one_decimal(row.figures.get(name)) for name in names))
    table.add_row("", "this", *(_one_decimal(more.own.get(name)) for name in names))
    _wide().print(table)


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if name in RANK_METRICS else f"{value:.1%}"


def _one_decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _wide() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def print_search(result: dict[str, Any]) -> None:
    """One query and its hits as plain lines."""
    print(
        f"{result['query']}   uncertainty {result['uncertainty']:.3g}, about {result['expected_matches']:.1f} matches expected"
    )
    if not result["calibrated"]:
        print("  (probabilities not calibrated for such queries: trust their order, not their size)")
    print(f"  {result['verdict']}")
    _print_hits(result["hits"], result["distance"])
    if not result["hits"]:
        print("  nothing is that likely")
    if (found := result["conformal_set"]) is not None:
        print(f"  the set that holds a match as often as asked for: {len(found)} items")
        _print_hits(found[:_SET_SHOWN], result["distance"])
        if len(found) > _SET_SHOWN:
            print(f"  ... and {len(found) - _SET_SHOWN} more; --json has all")


def _print_hits(hits: list[dict[str, Any]], distance: str) -> None:
    for hit in hits:
        label = f"  {hit['label']}" if hit.get("label") else ""
        print(
            f"  {hit['match_probability']:7.1%}  {distance} {hit['distance']:.4f}  uncertainty {hit['uncertainty']:.3g}  {hit['id']}{label}"
        )


_SET_SHOWN = 20


def print_calibration(result: dict[str, Any]) -> None:
    """What a calibration promises, for a person to read."""
    before = result.get("expected_calibration_error_before")
    print(
        f"{result['method']} on {result['pairs']} pairs of split {result['split']}: expected calibration error"
        f" {result['expected_calibration_error']:.5f}" + (f", before {before:.5f}" if before is not None else "")
    )
    for key, name in (("t2i", "text -> image"), ("i2t", "image -> text")):
        if (found := result.get(key)) is None:
            continue
        print(
            f"{name}, {found['n_queries']} queries among {found['n_gallery']} items, {found['matches_per_query']:.2f} matches each,"
            f" growing with the gallery to the power {found['growth']:.2f}"
        )
        for level, threshold in found["precision"].items():
            print(f"  precision {float(level):.0%}: " + _or_nothing(threshold, "report above a probability of {:.3f}"))
        for level, values in found["risk"].items():
            told = "" if values["answered"] is None else f"; {values['answered']:.0%} are answered"
            print(f"  risk {float(level):.0%}: " + _or_nothing(values["abstain_below"], "abstain up to {:.3f}") + told)
        for level, radius in found["coverage"].items():
            print(f"  coverage {float(level):.0%}: " + _or_nothing(radius, "all within a distance of {:.4f}"))


def _or_nothing(value: float | None, text: str) -> str:
    return "nothing that these queries could vouch for" if value is None else text.format(value)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}"


def print_trust(report: TrustReport, title: str) -> None:
    """Tables of what each estimator of uncertainty is worth, with confidence intervals, on standard output."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    names = {"t2i": "text -> image", "i2t": "image -> text"}
    for key, direction in report.directions.items():
        found = {figure for values in direction.estimators.values() for figure in values}
        for heading, columns in _TRUST_TABLES.items():
            shown = {figure: label for figure, label in columns.items() if figure in found}
            if shown:
                table = Table(title=f"{title}, {names[key]}: {heading}", title_justify="left")
                table.add_column("estimator", no_wrap=True)
                for label in shown.values():
                    table.add_column(label, justify="right")
                for name, figures in direction.estimators.items():
                    table.add_row(name, *[_interval(figures.get(figure)) for figure in shown])
                console.print(table)
        if direction.corruptions:
            _print_corruptions(_wide(), direction)
        chance = None if direction.recall.value is None else 1 - direction.recall.value
        print(
            f"{direction.n_queries} queries, {direction.n_gallery} items, recall@1 {_interval(direction.recall)};"
            f" AURC of chance {_short(chance)}, of a perfect order {_interval(direction.risk_best)};"
            f" match probability of true against random pairs, AUROC {_interval(direction.right_pairs)}"
        )
    print(
        f"Higher is less certain. In brackets: {report.level:.0%} intervals from {report.n_resamples} bootstrap resamples of the queries."
    )
    for note in report.notes:
        print(f"note: {note}")


_TRUST_TABLES = {
    "is the best item wrong?": {
        "wrong_auroc": "AUROC",
        "wrong_aurc": "AURC",
        "wrong_gain": "gain",
        "deciles": "deciles of recall",
    },
    "ambiguity and absence": {
        "multiplicity": "true number, Spearman",
        "multiplicity_balanced": "balanced",
        "caption_distance": "caption distance",
        "caption_words": "caption words",
        "out_of_gallery": "out of gallery, AUROC",
    },
}


def _print_corruptions(console: Console, direction: DirectionTrust) -> None:
    table = Table(
        title="do corrupted queries become less certain? Spearman with strength, share that rises", title_justify="left"
    )
    table.add_column("estimator", no_wrap=True)
    for name in direction.corruptions:
        table.add_column(f"{name}: Spearman", justify="right")
        table.add_column("rises", justify="right")
    for estimator in direction.estimators:
        cells = []
        for corruption in direction.corruptions.values():
            found = corruption.estimators.get(estimator, {})
            cells += [_interval(found.get("spearman")), _interval(found.get("rises"))]
        table.add_row(estimator, *cells)
    console.print(table)
    for name, corruption in direction.corruptions.items():
        recall = " ".join(f"{r:.0%}" for r in corruption.recall)
        strengths = " ".join(f"{s:g}" for s in corruption.strengths)
        print(f"{name}, {corruption.n} queries: recall@1 {recall} at strength {strengths}")


def print_analyses(found: Mapping[str, Any]) -> None:
    """Tables of what studies found, as `sfumato analyse --json` prints it, on standard output."""
    console, title = _wide(), f"{found['model']} on {found['split']}"
    if study := found.get("corruption"):
        _print_curves(console, study, title)
    if study := found.get("sets"):
        _print_sets(console, study, title)
    if study := found.get("words"):
        _print_words(console, study, title)
    if study := found.get("map"):
        held = (
            ""
            if study["explained"] is None
            else f", which hold {sum(study['explained']):.0%} of how their means differ"
        )
        what = "t-SNE" if study["explained"] is None else "the first two principal components"
        print(f"map: {len(study['items'])} images and texts by {what}{held}")


def _print_curves(console: Console, study: Mapping[str, Any], title: str) -> None:
    table = Table(title=f"{title}: does damage raise {study['uncertainty']}?", title_justify="left")
    for name in ("corrupted", "items", "mean at each strength", "Spearman within an item", "rises", "AUROC"):
        table.add_column(name, justify="left" if name in ("corrupted", "mean at each strength") else "right")
    for curves in study["sides"].values():
        for name, curve in curves.items():
            steps = [
                f"{strength:g}: " + ("-" if mean["value"] is None else f"{mean['value']:.3g}")
                for strength, mean in zip(curve["strengths"], curve["mean"], strict=True)
            ]
            figures = [_interval(Interval(**curve[figure])) for figure in ("spearman", "rises", "auroc")]
            table.add_row(name, str(curve["n"]), "  ".join(steps), *figures)
    console.print(table)


def _print_sets(console: Console, study: Mapping[str, Any], title: str) -> None:
    names = {"mixup": "Mixup", "cutmix": "CutMix", "other": "another picture"}
    table = Table(title=f"{title}: mixtures of two pictures, {study['n']} pairs", title_justify="left")
    table.add_column("figure", no_wrap=True)
    for name in study["mixes"]:
        table.add_column(names[name], justify="right")
    for figure in study["definitions"]["mixes"]:
        table.add_row(figure, *(_interval(Interval(**values[figure])) for values in study["mixes"].values()))
    console.print(table)
    erased = "  ".join(f"{figure} {_interval(Interval(**value))}" for figure, value in study["erased"].items())
    print(f"the same pictures with {study['erased_share']:.0%} erased: {erased}")
    for figure, about in study["definitions"]["mixes"].items():
        print(f"  {figure}: {about}")


def _print_words(console: Console, study: Mapping[str, Any], title: str) -> None:
    for side, bins in study["sides"].items():
        table = Table(title=f"{title}: words of {side}s by {study['uncertainty']}", title_justify="left")
        for name in ("bin", "mean", "captions", "words"):
            table.add_column(name, justify="left" if name == "words" else "right")
        for k, one in enumerate(bins, 1):
            words = ", ".join(word["word"] for word in one["words"])
            table.add_row(str(k), f"{one['mean']:.3g}", str(one["n_captions"]), words)
        console.print(table)


def _interval(interval: Interval | None) -> str:
    if interval is None or interval.value is None:
        return "-"
    if interval.low is None or interval.high is None:
        return _short(interval.value)
    return f"{_short(interval.value)} [{_short(interval.low)}, {_short(interval.high)}]"


def _short(value: float | None) -> str:
    """Two decimals without the leading zero: tables of intervals are wide enough."""
    if value is None:
        return "-"
    return re.sub(r"^(-?)0\.", r"\1.", f"{value:.2f}")
