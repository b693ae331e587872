"""The console output of commands for human readers."""

from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.errors import counted
from sfumato.evaluation.compare import MoreResults, OverSeeds
from sfumato.evaluation.embedded_input import Measured
from sfumato.evaluation.papers import common_figures
from sfumato.evaluation.protocols import Evaluation, table_rows
from sfumato.metrics.bootstrap import Interval
from sfumato.metrics.retrieval import RANK_METRICS
from sfumato.reports.formatting import (
    MISSING,
    compact_interval,
    digits,
    in_words,
    interval,
    number,
    percent,
    signed,
)
from sfumato.reports.tables import print_table, print_wrapped
from sfumato.studies.zeroshot import PromptsKept, ZeroShotReport, points
from sfumato.workflows.adopt import METHODS, AdoptedModel


def print_over_seeds(summary: Mapping[str, OverSeeds], title: str) -> None:
    """Print figures of several runs, mean ± standard deviation."""
    print_table(title, ["figure", "mean ± deviation"], [[name, str(value)] for name, value in summary.items()])


def print_ablation(cells: Mapping[str, Mapping[str, Mapping[str, OverSeeds]]], title: str) -> None:
    """Print a table with a row for each distance of training and a column for each of ranking: rsum above recall@1."""
    names = list(dict.fromkeys(by for row in cells.values() for by in row))
    rows = []
    for name, row in cells.items():
        shown = [f"{row[by]['rsum']}\n{row[by]['t2i recall@1']}" if by in row else MISSING for by in names]
        rows.append([name, *(shown if row else ["diverged"] * len(names))])
    print_table(
        f"{title}: RSUM (recall@1, @5 and @10 of both directions, of 600), below it text -> image recall@1 in per cent",
        ["trained with", *(f"by {name}" for name in names)], rows,
    )  # fmt: skip


_RSUM = "RSUM: sum of recall@1, @5 and @10 of both directions, in per cent"
_R_PRECISION = (
    "R-P, R-precision: fraction of matches among the first R, for a query with R matches; mAP@R: the first count more"
)
_CSD = "csd: closed-form sampled distance, the mean squared distance of one sample of each side"
_SIDES = {"i2t": "image -> text", "t2i": "text -> image"}

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
    print_table(
        title, ["direction", "recall@1", "@5", "@10", "R-P", "mAP@R", "median rank", "queries"], rows
    )  # fmt: skip
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
            f"  {prefix}{_SIDES[direction]}: " + " ".join(f"{b['recall']:.0%}" for b in values["bins"]), indent=4
        )
        print_wrapped(
            f"    correlation {signed(values['correlation'])}, Spearman {signed(values['spearman'])}",
            indent=4,
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
    print_table(f"{title}, by {measured.score}", ["ground truth", "direction", *names, "queries"], rows, left=2)
    sums = [
        f"{ground_truth} RSUM {one['rsum'] * 100:.1f} of 600"
        for ground_truth, one in measured.figures.items()
        if "rsum" in one
    ]
    print_wrapped(" | ".join([*sums, f"images {measured.n_images}, texts {measured.n_texts}"]))
    for line in (*([_RSUM] if sums else []), *([_CSD] if measured.score == "csd" else [])):
        print_wrapped(f"  {line}", indent=4)
    if measured.total_variance is not None:
        variance = measured.total_variance
        print(f"mean total variance: images {variance['image']:.4g}, texts {variance['text']:.4g}")
    if measured.uncertainty:
        name = "coco_1k" if "coco_1k" in measured.uncertainty else next(iter(measured.uncertainty))
        _print_uncertainty(measured.uncertainty[name], measured.uncertainty_measure, f"{name} ")


def print_more(more: MoreResults) -> None:
    """Print strategies, a comparison and published rows, if they were requested."""
    if more.strategies:
        _print_strategies(more)
    if more.compared_with:
        _print_differences(more)
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
                [
                    result.strategy.label,
                    *(number(own[key].get(name), 1) for name in names),
                    f"{result.seconds:.2f}",
                ]
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


def _print_differences(more: MoreResults) -> None:
    rows = []
    for d in more.differences:
        own = d.difference
        interval = MISSING if own.low is None or own.high is None else f"{100 * own.low:+.2f} .. {100 * own.high:+.2f}"
        rows.append([
            d.ground_truth, d.direction, d.metric, f"{100 * d.first:.2f}", f"{100 * d.second:.2f}",
            f"{100 * (own.value or 0):+.2f}", interval, f"{d.p_value:.4f}", str(d.n_queries),
        ])  # fmt: skip
    print_table(
        f"compared with {more.compared_with}, query by query, in per cent; 95 % intervals, p by random swaps",
        ["ground truth", "direction", "metric", "other", "this", "difference", "interval", "p", "queries"],
        rows, left=3,
    )  # fmt: skip


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
            [*(["backbone"] if named else []), "method", *map(_heading, names)],
            [*cells, [*([""] if named else []), "this", *own]],
            left=2 if named else 1,
        )


def _decimals(printed: Sequence[float]) -> int:
    """Number of decimals of a column, 1 or 2, as the paper prints most of it."""
    return 2 if sum(round(value, 1) != value for value in printed) > len(printed) / 2 else 1


def _heading(name: str) -> str:
    """The name of a published figure in short words."""
    for long, short in (("r_precision", "R-P"), ("recall@", "R@"), ("map@r", "mAP@R"), ("_", " ")):
        name = name.replace(long, short)
    return name


def _metric(name: str, value: float | None) -> str:
    return digits(value, 6) if name in RANK_METRICS else percent(value)


def print_search(result: dict[str, Any]) -> None:
    """Print one query and its results."""
    calibrated = result["calibrated"]
    if calibrated:
        print(f"{result['query']}   about {result['expected_matches']:.1f} matches expected")
    else:
        print(f"{result['query']}   (by distance: match probabilities are not calibrated for such queries)")
    if result["verdict"] is not None:
        print(f"  {result['verdict']}")
    _print_hits(result["hits"], result["distance"], calibrated)
    if not result["hits"]:
        print("  no item reaches this probability")
    if (found := result["conformal_set"]) is not None:
        print(f"  conformal set of the requested coverage: {counted(len(found), 'item')}")
        _print_hits(found[:_SET_SHOWN], result["distance"], calibrated)
        if len(found) > _SET_SHOWN:
            print(f"  ... and {len(found) - _SET_SHOWN} more; --json prints all")


def print_match_meaning(results: Sequence[Mapping[str, Any]]) -> None:
    """Print what "right" and "match" mean below calibrated results."""
    if any(result["calibrated"] for result in results):
        print_wrapped("right: a match, a pair like those that the data list (a photo and its caption)")


def _print_hits(hits: list[dict[str, Any]], distance: str, calibrated: bool) -> None:
    for hit in hits:
        label = f"  {hit['label']}" if hit.get("label") else ""
        probability = f"  {hit['match_probability']:7.1%}" if calibrated else ""
        print(f"{probability}  {distance} {hit['distance']:.4f}  {hit['id']}{label}")


_SET_SHOWN = 20


def print_calibration(result: dict[str, Any]) -> None:
    """Print the guarantees of a calibration."""
    population = {"planted": "every query has a match", "independent": "some queries have no match"}[result["queries"]]
    print_wrapped(
        f"calibrated by {result['method']} on {counted(result['pairs'], 'pair')} of the split {result['split']};"
        f" {result['queries']} queries: {population}"
    )
    for key, name in (("t2i", "text -> image"), ("i2t", "image -> text")):
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
    for key, name, metrics in (("t2i", "text -> image", retrieval.t2i), ("i2t", "image -> text", retrieval.i2t)):
        served, alone = (
            next(f for f in adopted.hits[kind] if f.direction == key and f.hits == 1) for kind in ("served", "distance")
        )
        print_wrapped(f"  {name}: recall@1 {metrics['recall@1']:.1%}, chance {retrieval.chance[key]['recall@1']:.2%}")
        print_wrapped(
            f"    first hit {served.mean_probability:.1%} probable on average, right in {served.rate:.1%}; calibration"
            f" error {served.ece:.3f}, by the distance alone {alone.ece:.3f}, of perfect probabilities"
            f" {served.ece_by_chance:.3f}",
            indent=4,
        )


def print_crops(study: Mapping[str, Any]) -> None:
    """Print two tables about crops: uncertainties, and binary selection beside the published figures."""
    title = f"{study['model']}: mean {study['uncertainty']} of {study['n_pictures']:,} images' crops and captions"
    rows = [(row, side) for row in study["thresholds"] for side in ("crops", "captions") if row[side]["mean"]]
    if rows:
        cells = []
        for row, side in rows:
            means, errors = row[side]["mean"], row[side]["standard_error"]
            shown = [_with_error(means[r]["value"], errors[r]) for r in means]
            above = str(interval(row[side]["c_above_a"], percent))
            cells.append([f"{row['threshold']:.0%}", side, f"{row['n']:,}", *shown, above])
        print_table(title, ["area below", "of", "n", "A", "B", "C", "C above A"], cells, left=2)
        brackets = f"; in brackets: {study['level']:.0%} intervals, as below" if study["n_resamples"] else ""
        print(f"±: one standard error of the mean{brackets}")
    else:
        print(f"{study['model']} embeds points, which have no uncertainty: no means are shown")
    first = next(iter(study["published"].values()))
    cells = [
        [f"{row['threshold']:.0%}", distance, *(str(interval(found[cell], percent)) for cell in first)]
        for row in study["thresholds"]
        for distance, found in row["selection"].items()
    ]
    cells += [
        ["published", name, *(percent(found[cell]) for cell in first)] for name, found in study["published"].items()
    ]
    print_table("fraction that chooses its own partner", ["area below", "by", *first], cells, left=2)
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
    """Print tables of the results of studies."""
    title = f"{found['model']} on {found['split']}"
    if study := found.get("corruption"):
        _print_curves(study, title)
    if study := found.get("sets"):
        _print_sets(study, title)
    if study := found.get("words"):
        _print_words(study, title)
    if study := found.get("map"):
        method = "t-SNE"
        if study["explained"] is not None:
            explained = percent(sum(study["explained"]), 0)
            method = f"the first two principal components, which explain {explained} of the variance of their means"
        print_wrapped(f"map: {len(study['items'])} images and texts by {method}")


def _print_curves(study: Mapping[str, Any], title: str) -> None:
    rows, means = [], []
    for curves in study["sides"].values():
        for name, curve in curves.items():
            steps = [
                f"{strength:g}: {digits(mean['value'], 3)}"
                for strength, mean in zip(curve["strengths"], curve["mean"], strict=True)
            ]
            figures = [compact_interval(Interval(**curve[figure])) for figure in ("spearman", "rises", "auroc")]
            rows.append([name, str(curve["n"]), *figures])
            means.append(f"{name}, mean at each strength: {', '.join(steps)}")
    headings = ["damage", "items", "Spearman within an item", "rises", "AUROC"]
    print_table(f"{title}: does damage raise {study['uncertainty']}?", headings, rows)
    for line in means:
        print_wrapped(line, indent=2)


def _print_sets(study: Mapping[str, Any], title: str) -> None:
    names = {"mixup": "Mixup", "cutmix": "CutMix", "other": "another image"}
    rows = [
        [figure, *(compact_interval(Interval(**values[figure])) for values in study["mixes"].values())]
        for figure in study["definitions"]["mixes"]
    ]
    headings = ["figure", *(names[name] for name in study["mixes"])]
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


def print_zeroshot(report: ZeroShotReport) -> None:
    """Print the accuracies of the methods of a zero-shot classification, and whether filtering prompts helps."""
    chosen = f", K chosen on {counted(report.n_chosen_on, 'other')}" if report.n_chosen_on else ""
    rows = [
        [
            m.name,
            MISSING if m.k is None else f"{m.k[0]}" if len(set(m.k)) == 1 else f"{min(m.k)} to {max(m.k)}",
            _accuracy(m.top1),
            _accuracy(m.top5),
            points(m.against_all),
            points(m.against_random),
            points(m.against_random_order),
        ]
        for m in report.methods
    ]
    rows.append(["always the most frequent class", MISSING, f"{100 * report.chance:.1f}", *[MISSING] * 4])
    print_table(
        f"{counted(report.n_images, 'image')} of {counted(len(report.classes), 'class', 'classes')}{chosen}; by"
        f" {report.distance}, pooling {report.pooling}; per cent, and differences in percentage points",
        ["method", "K", "top-1", "top-5", "against all", "against random", "against a random order"], rows,
    )  # fmt: skip
    for kept in report.prompts_kept:
        _print_prompts_kept(kept)
    if report.best_alone is not None:
        print_wrapped(
            f"each image at the best K of its own class, which a classifier cannot know: {100 * report.best_alone:.1f}"
        )
    if report.certain_is_right is not None:
        print_wrapped(
            f"templates: Spearman of mean total variance and top-1 of each alone {report.certain_is_right:+.2f}"
        )
    if report.n_empty:
        print_wrapped(f"classes without an image, which can only be wrong answers: {report.n_empty}")
    if report.left_out:
        print("\n  ".join([f"{len(report.left_out):,} left out:", *report.left_out[:10]]))
    for line in report.verdict().splitlines():
        print_wrapped(line, indent=2)


def print_zeroshot_published(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print :func:`~sfumato.studies.zeroshot.published_beside`."""
    cells = [[row["method"], percent(row["top1"], 2), percent(row["own_top1"], 2)] for row in rows]
    print_table(
        f"beside PCME++, table 5, {rows[0]['backbone']}: top-1 on ImageNet's validation images, where K was chosen",
        ["method", "paper", "this model"], cells,
    )  # fmt: skip


def _print_prompts_kept(kept: PromptsKept) -> None:
    """Top-1 at some numbers of prompts, and how many prompts the classes would keep for their own images."""
    p = len(kept.top1)
    shown = sorted({*range(1, min(p, 3) + 1), *(round(p * part / 8) for part in range(1, 9))} - {0})
    which = "the images K was chosen on" if kept.images == "others" else "the reported images"
    rows = [[str(k), percent(kept.top1[k - 1]), percent(kept.random_top1[k - 1])] for k in shown]
    print_table(f"top-1 on {which} by the number of prompts kept", ["K", "most certain", "random order"], rows)
    best = [k for k in kept.best_k if k is not None]
    print_wrapped(
        f"best K of a class for its own images: all {p} for {counted(best.count(p), 'class', 'classes')}, fewer for"
        f" {len(best) - best.count(p):,}, no image right for {len(kept.best_k) - len(best):,}"
    )


def _accuracy(value: Interval | None) -> str:
    return points(value).replace("+", "")


def print_toy(result: Mapping[str, Any], title: str) -> None:
    """Print the table of the 2-D study and the location of its images."""
    keys = ("certain", "uncertain", "ratio", "published_ratio")
    rows = [[method, *(number(result[key][method], 2) for key in keys)] for method in result["ratio"]]
    print_table(title, ["method", "certain", "uncertain", "ratio", "published ratio"], rows)
    for reading in result["readings"]:
        ratios = ", ".join(f"{method} {ratio}" for method, ratio in reading["ratio"].items())
        print_wrapped(f'"500 epochs" read as {reading["as"]} ({reading["updates"]} updates), seeds 0 to 4: {ratios}')
    print(f"image: {result['picture']}\nanimation: {result['animation']}")
