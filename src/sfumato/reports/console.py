"""The console output of commands for human readers."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sfumato.evaluation.compare import MoreResults, OverSeeds
from sfumato.evaluation.embedded_input import Measured
from sfumato.evaluation.protocols import Evaluation, table_rows
from sfumato.evaluation.published import common_figures
from sfumato.metrics.bootstrap import Interval
from sfumato.metrics.retrieval import RANK_METRICS
from sfumato.models.adopt import METHODS, AdoptedModel
from sfumato.reports.formatting import (
    MISSING,
    compact_interval,
    digits,
    interval,
    number,
    percent,
    signed,
)


def print_over_seeds(summary: Mapping[str, OverSeeds], title: str) -> None:
    """Print figures of several runs, mean ± standard deviation.

    Args:
        summary: by name, the figures.
        title: a line above them.
    """
    print(title)
    for name, value in summary.items():
        print(f"  {name:<24}{value!s:>16}")


def print_ablation(cells: Mapping[str, Mapping[str, Mapping[str, OverSeeds]]], title: str) -> None:
    """Print a table with a row for each distance of training and a column for each of ranking: rsum above recall@1.

    Args:
        cells: by the distance of training and that of ranking, the figures.
        title: start of the table's title.
    """
    table = Table(
        title=f"{title}: rsum of 600, text -> image recall@1 in per cent", title_justify="left", show_lines=True
    )
    table.add_column("trained with", no_wrap=True)
    for name in dict.fromkeys(by for row in cells.values() for by in row):
        table.add_column(f"by {name}", justify="right", no_wrap=True)
    for name, row in cells.items():
        shown = [f"{found['rsum']}\n{found['t2i recall@1']}" for found in row.values()]
        table.add_row(name, *(shown or ["diverged"]))
    wide_console().print(table)


NOT_ABOVE_CHANCE = (
    "Warning: recall@10 is not above chance. The model has not learnt to match these data: check that images and texts"
    " belong together, and train longer, on more pairs, or from pre-trained features."
)
"""What evaluation and training say about a model that ranks no better than a random order."""


def print_evaluation(evaluation: Evaluation, title: str) -> None:
    """Print a table of an evaluation, recalls and precisions in per cent.

    Args:
        evaluation: the figures.
        title: of the table.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("direction")
    names = ["recall@1", "recall@5", "recall@10", "r_precision", "map@r"]
    for heading in ("recall@1", "@5", "@10", "R-P", "mAP@R", "median", "queries"):
        table.add_column(heading, justify="right", no_wrap=True)
    for k, (direction, metrics) in enumerate(table_rows(evaluation)):
        shown = [f"{metrics[name]:.1%}" for name in names]
        table.add_row(direction, *shown, f"{metrics['median_rank']:g}", f"{metrics['n_queries']:g}")
        if k < len(evaluation.chance):
            by_chance = list(evaluation.chance.values())[k]
            table.add_row("  by chance", *(f"{by_chance[name]:.1%}" if name in by_chance else "" for name in names))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(
        f"rsum {evaluation.rsum * 100:.1f} of 600, {evaluation.chance_rsum * 100:.1f} by chance"
        f" | images {evaluation.n_images}, texts {evaluation.n_texts}"
    )
    if not evaluation.above_chance:
        print(NOT_ABOVE_CHANCE)
    variance = evaluation.total_variance
    print(f"mean total variance: images {variance['image']:.4g}, texts {variance['text']:.4g}")
    _print_uncertainty(evaluation.uncertainty or {})
    if evaluation.multiplicity:
        both = evaluation.multiplicity
        print(
            "Spearman of a text's total variance with its number of true images:"
            f" {signed(both['all'])} over all texts, {signed(both['balanced'])} balanced over powers of two"
        )


def _print_uncertainty(directions: Mapping[str, Any], prefix: str = "") -> None:
    """Recall@1 in ten bins of uncertainty, as in figure 3 of PCME++."""
    for direction, values in directions.items():
        print(
            f"{prefix}{direction} recall@1 from the most certain tenth of the queries to the least: "
            + " ".join(f"{b['recall']:.0%}" for b in values["bins"])
        )
        print(
            f"{prefix}{direction} correlation of bin and recall@1: {signed(values['correlation'])},"
            f" Spearman over queries: {signed(values['spearman'])}"
        )


def print_measured(measured: Measured, title: str) -> None:
    """Print a table of one or more ground truths in both directions, with all metrics that any of them reports.

    Args:
        measured: the figures; fractions are printed in per cent.
        title: of the table.
    """
    metrics = dict.fromkeys(name for one in measured.figures.values() for name in one["i2t"])
    names = [name for name in metrics if name not in ("n_queries", "n_without_positives")]
    table = Table(title=f"{title}, by {measured.score}", title_justify="left")
    table.add_column("ground truth")
    table.add_column("direction")
    for name in [*names, "n_queries"]:
        table.add_column(name, justify="right")
    for ground_truth, one in measured.figures.items():
        for direction in ("i2t", "t2i"):
            shown = [_metric(name, one[direction].get(name)) for name in names]
            table.add_row(ground_truth, direction, *shown, f"{one[direction]['n_queries']:g}")
    wide_console().print(table)
    sums = [
        f"{ground_truth} rsum {one['rsum'] * 100:.1f} of 600"
        for ground_truth, one in measured.figures.items()
        if "rsum" in one
    ]
    print(" | ".join([*sums, f"images {measured.n_images}, texts {measured.n_texts}"]))
    if measured.total_variance is not None:
        variance = measured.total_variance
        print(f"mean total variance: images {variance['image']:.4g}, texts {variance['text']:.4g}")
    if measured.uncertainty:
        name = "coco_1k" if "coco_1k" in measured.uncertainty else next(iter(measured.uncertainty))
        _print_uncertainty(measured.uncertainty[name], f"{name} ")


def print_more(more: MoreResults) -> None:
    """Print strategies, a comparison and published rows, if they were requested.

    Args:
        more: the results.
    """
    if more.strategies:
        _print_strategies(more)
    if more.compared_with:
        _print_differences(more)
    if more.published:
        _print_published(more)
    for source in dict.fromkeys(row.source for row in more.published):
        print(f"published figures: {source}")
    if more.per_query:
        print(f"single queries written to {more.per_query}")


def _print_strategies(more: MoreResults) -> None:
    """COCO in the columns of PCME++'s table C.7; anything else by ground truth and direction."""
    own = {name: common_figures(result.figures) for name, result in more.strategies.items()}
    names = list(dict.fromkeys(name for figures in own.values() for name in figures))
    if names:
        table = Table(title="strategies: mean of both directions, per cent", title_justify="left")
        for name in ("strategy", *names, "seconds"):
            table.add_column(name, justify="left" if name == "strategy" else "right")
        for key, result in more.strategies.items():
            shown = [number(own[key].get(name), 1) for name in names]
            table.add_row(result.strategy.label, *shown, f"{result.seconds:.2f}")
    else:
        figures = [one for result in more.strategies.values() for one in result.figures.values()]
        metrics = list(dict.fromkeys(name for one in figures for name in one["i2t"] if not name.startswith("n_")))
        table = Table(title="strategies", title_justify="left")
        for name in ("strategy", "ground truth", "direction", *metrics, "seconds"):
            table.add_column(name, justify="left" if name in ("strategy", "ground truth", "direction") else "right")
        for result in more.strategies.values():
            for ground_truth, one in result.figures.items():
                for direction in ("i2t", "t2i"):
                    shown = [_metric(name, one[direction].get(name)) for name in metrics]
                    table.add_row(result.strategy.label, ground_truth, direction, *shown, f"{result.seconds:.2f}")
    wide_console().print(table)


def _print_differences(more: MoreResults) -> None:
    table = Table(
        title=f"compared with {more.compared_with}, query by query; 95 per cent intervals, p by random swaps",
        title_justify="left",
    )
    for name in ("ground truth", "direction", "metric"):
        table.add_column(name)
    for name in ("other", "this", "difference", "interval", "p", "n_queries"):
        table.add_column(name, justify="right")
    for d in more.differences:
        own = d.difference
        interval = MISSING if own.low is None or own.high is None else f"{100 * own.low:+.2f} .. {100 * own.high:+.2f}"
        table.add_row(
            d.ground_truth, d.direction, d.metric, f"{100 * d.first:.2f}", f"{100 * d.second:.2f}",
            f"{100 * (own.value or 0):+.2f}", interval, f"{d.p_value:.4f}", str(d.n_queries),
        )  # fmt: skip
    wide_console().print(table)


def _print_published(more: MoreResults) -> None:
    """Each published table with this evaluation below it, in the columns that both have."""
    for full_table in dict.fromkeys(row.full_table for row in more.published):
        rows = [row for row in more.published if row.full_table == full_table]
        names = {name: row.own_name(name) for row in rows for name in row.figures if row.own_name(name) in more.own}
        first = rows[0]
        sides = {"both": "mean of both directions", "each": "by direction"}.get(first.direction, first.direction)
        table = Table(
            title=f"beside {first.paper}, table {first.table} ({first.about}): {sides}, per cent", title_justify="left"
        )
        named = any(row.backbone for row in rows)
        for column in ("backbone", "method") if named else ("method",):
            table.add_column(column)
        places = {name: _decimals([row.figures[name] for row in rows if name in row.figures]) for name in names}
        for name in names:
            table.add_column(_heading(name), justify="right", no_wrap=True)
        for row in rows:
            shown = [number(row.figures.get(name), places[name]) for name in names]
            table.add_row(*([row.backbone] if named else []), row.method, *shown)
        own = [number(more.own[key], places[name]) for name, key in names.items()]
        table.add_row(*([""] if named else []), "this", *own)
        wide_console().print(table)


def _decimals(printed: Sequence[float]) -> int:
    """Number of decimals of a column, 1 or 2, as the paper prints most of it."""
    return 2 if sum(round(value, 1) != value for value in printed) > len(printed) / 2 else 1


def _heading(name: str) -> str:
    """The name of a published figure, one word below the other."""
    for long, short in (("r_precision", "R-P"), ("recall@", "R@"), ("map@r", "mAP@R"), ("_", " ")):
        name = name.replace(long, short)
    return name.replace(" ", "\n")


def _metric(name: str, value: float | None) -> str:
    return digits(value, 6) if name in RANK_METRICS else percent(value)


def wide_console() -> Console:
    """A console for wide tables: 160 columns where the output is no terminal.

    Returns:
        The console.
    """
    return Console(width=None if sys.stdout.isatty() else 160)


def print_search(result: dict[str, Any]) -> None:
    """Print one query and its results.

    Args:
        result: of :meth:`~sfumato.api.answers.SearchAnswer.to_json`.
    """
    calibrated = result["calibrated"]
    if calibrated:
        print(f"{result['query']}   about {result['expected_matches']:.1f} matches expected")
        print(f"  {result['verdict']}")
    else:
        print(f"{result['query']}   (by distance: match probabilities are not calibrated for such queries)")
    _print_hits(result["hits"], result["distance"], calibrated)
    if not result["hits"]:
        print("  no item reaches this probability")
    if (found := result["conformal_set"]) is not None:
        print(f"  conformal set of the requested coverage: {len(found)} items")
        _print_hits(found[:_SET_SHOWN], result["distance"], calibrated)
        if len(found) > _SET_SHOWN:
            print(f"  ... and {len(found) - _SET_SHOWN} more; --json prints all")


def _print_hits(hits: list[dict[str, Any]], distance: str, calibrated: bool) -> None:
    for hit in hits:
        label = f"  {hit['label']}" if hit.get("label") else ""
        probability = f"  {hit['match_probability']:7.1%}" if calibrated else ""
        print(f"{probability}  {distance} {hit['distance']:.4f}  {hit['id']}{label}")


_SET_SHOWN = 20


def print_calibration(result: dict[str, Any]) -> None:
    """Print the guarantees of a calibration.

    Args:
        result: of :func:`~sfumato.models.calibrate.describe_calibration`.
    """
    print(f"{result['method']} on {result['pairs']} pairs of split {result['split']}, {result['queries']} queries")
    for key, name in (("t2i", "text -> image"), ("i2t", "image -> text")):
        if (found := result.get(key)) is None:
            continue
        print(
            f"{name}: {found['n_queries']} queries, {found['n_gallery']} items,"
            f" {found['matches_per_query']:.2f} matches per query,"
            f" growing with the gallery to the power {found['growth']:.2f}"
        )
        if (first := found.get("first_hit")) is not None:
            print(
                f"  first hit: {first['mean_probability']:.1%} probable on average, right in {first['rate']:.1%};"
                f" calibration error {first['ece']:.3f}, by chance {first['ece_by_chance']:.3f}"
            )
            if first["auroc"] is not None:
                print(
                    f"    right against wrong first hits: AUROC {first['auroc']:.3f}, by the distance alone"
                    f" {first['auroc_of_distance']:.3f}"
                )
        for level, threshold in found["precision"].items():
            print(f"  precision {float(level):.0%}: " + _or_none(threshold, "report above a probability of {:.3f}"))
        for level, values in found["risk"].items():
            answered = "" if values["answered"] is None else f"; {values['answered']:.0%} of the queries are answered"
            limit = _or_none(values["abstain_below"], "abstain up to a probability of {:.3f}")
            print(f"  risk {float(level):.0%}: {limit}{answered}")
        for level, values in found["coverage"].items():
            size = "" if values["size"] is None else f"; half of the queries have at most {values['size']:.0f} items"
            within = _or_none(values["radius"], "all within a distance of {:.4f}")
            print(f"  coverage {float(level):.0%}: {within}{size}")


_ENOUGH = 100
"""Number of images that calibrate, below which an adoption warns."""


def print_adopted(adopted: AdoptedModel) -> None:
    """Print what an adoption gave, and what its probabilities are worth beside their baselines.

    Args:
        adopted: the adopted model.
    """
    images, texts = sum(adopted.n_images.values()), sum(adopted.n_texts.values())
    channels = adopted.run.recipe.model.dim
    left_out = f"; {adopted.n_left_out} left out, see problems.jsonl" if adopted.n_left_out else ""
    print(f"adopted {images:,} images and {texts:,} texts of {channels} channels in {adopted.seconds:.0f} s{left_out}")
    if adopted.comparison:
        print(
            "log loss of first hits (lower is better), fitted on half of the calibrating images, measured on the other"
            " half;\nin brackets 95 % intervals:"
        )
        for name, found in adopted.comparison.items():
            worse = "kept" if name == adopted.method else f"{compact_interval(found.worse)} more"
            print(f"  {name:<10} {found.log_loss:.3f}  {worse:<24} {METHODS[name]}")
    if (n := adopted.n_images["val"]) < _ENOUGH:
        print(f"warning: only {n} images calibrate; with fewer than {_ENOUGH} all of these figures are rough")
    if adopted.retrieval is None:
        print("no split 'test': the probabilities are not measured; `sfumato trust` measures them on other pairs")
        return
    retrieval = adopted.retrieval
    print(f"on {retrieval.n_images:,} other images and {retrieval.n_texts:,} texts:")
    for key, name, metrics in (("t2i", "text -> image", retrieval.t2i), ("i2t", "image -> text", retrieval.i2t)):
        served, alone = (
            next(f for f in adopted.hits[kind] if f.direction == key and f.hits == 1) for kind in ("served", "distance")
        )
        chance = retrieval.chance[key]["recall@1"]
        print(f"  {name}: recall@1 {metrics['recall@1']:.1%}, as the frozen model has it (chance {chance:.2%})")
        print(
            f"    first hit {served.mean_probability:.1%} probable on average, right in {served.rate:.1%};"
            f" calibration error {served.ece:.3f}"
        )
        print(f"    (by the distance alone {alone.ece:.3f}, of perfect probabilities {served.ece_by_chance:.3f})")


def _or_none(value: float | None, text: str) -> str:
    return "no value can be guaranteed from these queries" if value is None else text.format(value)


def print_crops(study: Mapping[str, Any]) -> None:
    """Print two tables about crops: uncertainties, and binary selection beside the published figures.

    Args:
        study: of :meth:`~sfumato.studies.crops.CropStudy.to_json`.
    """
    title = f"{study['model']}: mean {study['uncertainty']} of {study['n_pictures']:,} images' crops and captions"
    rows = [(row, side) for row in study["thresholds"] for side in ("crops", "captions") if row[side]["mean"]]
    if rows:
        table = Table(title=title, title_justify="left")
        for name in ("area below", "n", "of", "A", "B", "C", "C above A"):
            table.add_column(name, justify="left" if name == "of" else "right")
        for row, side in rows:
            means, errors = row[side]["mean"], row[side]["standard_error"]
            cells = [_with_error(means[r]["value"], errors[r]) for r in means]
            table.add_row(
                f"{row['threshold']:.0%}", f"{row['n']:,}", side, *cells, str(interval(row[side]["c_above_a"], percent))
            )
        wide_console().print(table)
        brackets = f"; in brackets: {study['level']:.0%} intervals, as below" if study["n_resamples"] else ""
        print(f"±: one standard error of the mean{brackets}")
    else:
        print(f"{study['model']} embeds points, which have no uncertainty: no means are shown")
    table = Table(title="fraction that chooses its own partner", title_justify="left")
    first = next(iter(study["published"].values()))
    for name in ("area below", "by", *first):
        table.add_column(name, justify="left" if name == "by" else "right")
    for row in study["thresholds"]:
        for distance, cells in row["selection"].items():
            table.add_row(f"{row['threshold']:.0%}", distance, *(str(interval(cells[cell], percent)) for cell in first))
    for name, cells in study["published"].items():
        table.add_row("published", name, *(percent(cells[cell]) for cell in first))
    wide_console().print(table)
    if study["n_resamples"]:
        print(
            f"In brackets: {study['level']:.0%} intervals"
            f" from {study['n_resamples']:,} bootstrap resamples of the images."
        )
    for reason, count in study["problems"].items():
        print(f"{count:,}: {reason}")


def _with_error(value: float | None, error: float | None) -> str:
    return MISSING if value is None else f"{digits(value)} ± {digits(error, 2)}"


def print_analyses(found: Mapping[str, Any]) -> None:
    """Print tables of the results of studies.

    Args:
        found: results in the form of `sfumato analyse --json`.
    """
    console, title = wide_console(), f"{found['model']} on {found['split']}"
    if study := found.get("corruption"):
        _print_curves(console, study, title)
    if study := found.get("sets"):
        _print_sets(console, study, title)
    if study := found.get("words"):
        _print_words(console, study, title)
    if study := found.get("map"):
        method = "t-SNE"
        if study["explained"] is not None:
            explained = percent(sum(study["explained"]), 0)
            method = f"the first two principal components, which explain {explained} of the variance of their means"
        print(f"map: {len(study['items'])} images and texts by {method}")


def _print_curves(console: Console, study: Mapping[str, Any], title: str) -> None:
    table = Table(title=f"{title}: does damage raise {study['uncertainty']}?", title_justify="left")
    for name in ("corrupted", "items", "mean at each strength", "Spearman within an item", "rises", "AUROC"):
        table.add_column(name, justify="left" if name in ("corrupted", "mean at each strength") else "right")
    for curves in study["sides"].values():
        for name, curve in curves.items():
            steps = [
                f"{strength:g}: " + digits(mean["value"], 3)
                for strength, mean in zip(curve["strengths"], curve["mean"], strict=True)
            ]
            figures = [compact_interval(Interval(**curve[figure])) for figure in ("spearman", "rises", "auroc")]
            table.add_row(name, str(curve["n"]), "  ".join(steps), *figures)
    console.print(table)


def _print_sets(console: Console, study: Mapping[str, Any], title: str) -> None:
    names = {"mixup": "Mixup", "cutmix": "CutMix", "other": "another image"}
    table = Table(title=f"{title}: mixtures of two images, {study['n']} pairs", title_justify="left")
    table.add_column("figure", no_wrap=True)
    for name in study["mixes"]:
        table.add_column(names[name], justify="right")
    for figure in study["definitions"]["mixes"]:
        table.add_row(figure, *(compact_interval(Interval(**values[figure])) for values in study["mixes"].values()))
    console.print(table)
    erased = "  ".join(f"{figure} {compact_interval(Interval(**value))}" for figure, value in study["erased"].items())
    print(f"the same images with {percent(study['erased_share'], 0)} erased: {erased}")
    for figure, about in study["definitions"]["mixes"].items():
        print(f"  {figure}: {about}")


def _print_words(console: Console, study: Mapping[str, Any], title: str) -> None:
    for side, bins in study["sides"].items():
        table = Table(title=f"{title}: words of {side}s by {study['uncertainty']}", title_justify="left")
        for name in ("bin", "mean", "captions", "words"):
            table.add_column(name, justify="left" if name == "words" else "right")
        for k, one in enumerate(bins, 1):
            words = ", ".join(word["word"] for word in one["words"])
            table.add_row(str(k), digits(one["mean"], 3), str(one["n_captions"]), words)
        console.print(table)


def print_toy(result: Mapping[str, Any], title: str) -> None:
    """Print the table of the 2-D study and the location of its images.

    Args:
        result: of :func:`~sfumato.studies.toy.run_toy`.
        title: a line above the table.
    """
    print(title)
    print(f"{'method':<18}{'certain':>9}{'uncertain':>11}{'ratio':>8}{'published':>11}")
    for method in result["ratio"]:
        values = (result[key][method] for key in ("certain", "uncertain", "ratio", "published_ratio"))
        cells = [number(value, 2) for value in values]
        print(f"{method:<18}{cells[0]:>9}{cells[1]:>11}{cells[2]:>8}{cells[3]:>11}")
    for reading in result["readings"]:
        ratios = ", ".join(f"{method} {ratio}" for method, ratio in reading["ratio"].items())
        print(f'"500 epochs" read as {reading["as"]} ({reading["updates"]} updates), seeds 0 to 4: {ratios}')
    print(f"image: {result['picture']}\nanimation: {result['animation']}")
