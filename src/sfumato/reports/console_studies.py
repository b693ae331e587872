"""The console output of the studies for human readers."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from sfumato.metrics.bootstrap import Interval
from sfumato.reports.console import wide_console
from sfumato.reports.formatting import MISSING, compact_interval, digits, interval, number, percent


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
    print(f"image: {result['picture']}\nanimation: {result['animation']}")
