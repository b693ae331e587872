"""The most telling numbers of each kind of figure, in words."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from papers.shown import interval
from papers.studies import pages
from sfumato.reports.tables import DIRECTIONS, digits, in_words, number, percent, signed

SIDES = {"image": "images", "text": "texts"}

PARTS = DIRECTIONS | SIDES | {name: title for name, (title, _) in pages.CORRUPTIONS.items()}
"""Names of panels in words."""

METRICS = {"r_precision": "R-Precision, %", "recall@1": "recall@1, %", "PMRP": "PMRP, %"}


def words(name: str) -> str:
    """The name of a metric on an axis."""
    return METRICS.get(name, in_words(name))


def plain(value: float) -> str:
    """A number with three significant digits or more, never with a power of ten."""
    return f"{value:,.0f}".replace("-", "−") if abs(value) >= 1000 else digits(value, 3)


def _curve_lines(numbers: Mapping[str, Any]) -> list[str]:
    lines = []
    for panel in numbers["panels"]:
        for name, points in panel["series"].items():
            ends = [points[0], points[-1]] if len(points) > 1 else points
            values = " to ".join(f"{digits(p['value'], 3)} at {p['x']:g}" for p in ends)
            where = ", ".join(filter(None, (PARTS.get(panel["name"], panel["name"]), name)))
            lines.append(f"{where}: {words(panel['y'])} {values} ({panel['x']})")
    return lines


def _bar_lines(numbers: Mapping[str, Any]) -> list[str]:
    return [
        f"{p['row']}, {DIRECTIONS[p['name']]}: recall@1 {percent(p['bins'][0]['value'])} in the most certain tenth,"
        f" {percent(p['bins'][-1]['value'])} in the least; correlation of tenth and recall {signed(p['correlation'])}"
        for p in numbers["panels"]
    ]


def _map_lines(numbers: Mapping[str, Any]) -> list[str]:
    lines = []
    for row, study in numbers["maps"].items():
        images, texts = ([i["total_variance"] for i in study["items"] if i["side"] == side] for side in SIDES)
        mean = [sum(values) / max(len(values), 1) for values in (images, texts)]
        variance = f", mean total variance {digits(mean[0], 3)} and {digits(mean[1], 3)}" if any(mean) else ", points"
        lines.append(f"{row}: {len(images)} images, {len(texts)} texts{variance}")
    return lines


def _scatter_lines(numbers: Mapping[str, Any]) -> list[str]:
    return [
        f"{DIRECTIONS[panel['name']]}, {point['row']}: "
        + ", ".join(f"{words(panel[a])} {number(point[a]['value'], 1)}" for a in ("x", "y"))
        for panel in numbers["panels"]
        for point in panel["points"]
    ]


def _matrix_lines(numbers: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, rows in numbers["matrices"].items():
        n = len(rows)
        most = max(abs(value) for row in rows for value in row)
        others = [abs(rows[i][j]) for i in range(n) for j in range(n) if i != j]
        lines.append(
            f"{name}: {sum(v > 1e-14 * most for v in others)} of {len(others)} pairs that do not match contribute"
        )
    changed = ", ".join(f"{name} {count}" for name, count in numbers["disturbed"].items())
    return [*lines, f"pairs of other images whose derivative changes when one image is mixed: {changed}"]


def _prompt_lines(numbers: Mapping[str, Any]) -> list[str]:
    top1, random = numbers["kept"]["top1"], numbers["kept"]["random_top1"]
    best = max(range(len(top1)), key=lambda k: top1[k])
    few = sum(k is not None and k < 10 for k in numbers["kept"]["best_k"])
    return [
        f"top-1 of {numbers['n_images']:,} images in {numbers['classes']} classes: {percent(top1[-1])} with all"
        f" {len(top1)} prompts, at best {percent(top1[best])} with the {best + 1} most certain"
        f" ({percent(random[best])} with as many at random); {few} classes are best with fewer than 10"
    ]


def _set_lines(numbers: Mapping[str, Any]) -> list[str]:
    erased = numbers["erased"]
    lines = [
        f"{name}: less certain than both parts in {percent(numbers['mixes'][name]['more_uncertain']['value'])} of"
        f" {numbers['n']} pairs, between them in {percent(numbers['mixes'][name]['between']['value'])}"
        for name in ("mixup", "cutmix")
    ]
    return [*lines, f"erased in part: less certain in {percent(erased['more_uncertain']['value'])} of the images"]


def _word_lines(numbers: Mapping[str, Any]) -> list[str]:
    return [
        f"{SIDES[side]}, {end} certain tenth: {', '.join(word['word'] for word in bins[k]['words'][:6])}"
        for side, bins in numbers["sides"].items()
        for k, end in ((0, "most"), (-1, "least"))
    ]


def _example_lines(numbers: Mapping[str, Any]) -> list[str]:
    lines = []
    for side, found in numbers["sides"].items():
        right = sum(one["results"][0]["true"] for one in found)
        values = [one["uncertainty"] for one in found]
        lines.append(
            f"the {numbers['order']} uncertain {SIDES[side]}, {in_words(numbers['uncertainty'])}"
            f" {plain(values[0])} to {plain(values[-1])}: {right} of {len(found)} find a match first"
        )
    return lines


def _crop_lines(numbers: Mapping[str, Any]) -> list[str]:
    lines = [f"{numbers['model']}: {numbers['n_pictures']:,} images, mean {in_words(numbers['uncertainty'])}"]
    for row in numbers["thresholds"]:
        below = f"boxes below {row['threshold']:.0%}, {row['n']:,} images"
        for side in ("crops", "captions"):
            if values := row[side]:
                names = {role: role for role in "ABC"} | {"difference": "C - A"}
                means = ", ".join(f"{name} {interval(values[key], digits)}" for key, name in names.items())
                lines.append(f"{below}, {side}: {means}; C above A {interval(values['above'], percent)}")
            else:
                lines.append(f"{below}, {side}: points, which have no uncertainty")
        for name, cells in row["selection"].items():
            right = ", ".join(f"{cell} {interval(value, percent)}" for cell, value in cells.items())
            lines.append(f"{below}, own partner closer by {name}: {right}")
    for name, figures in numbers["published"].items():
        cells = ("image A", "image C", "text A", "text C")
        right = ", ".join(f"{cell} {value}%" for cell, value in zip(cells, figures.values(), strict=True))
        lines.append(f"published, {name}: {right}")
    return lines + [f"{count:,}: {reason}" for reason, count in numbers["problems"].items()]


def _toy_lines(numbers: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: mean variance {number(found['certain'], 2)} of certain, {number(found['uncertain'], 2)} of uncertain"
        f" samples, ratio {number(found['ratio'], 2)}, published {number(found['published_ratio'], 2)}"
        if "ratio" in found
        else f"{name}: points, which have no variance"
        for name, found in numbers["methods"].items()
    ]


LINES: dict[str, Callable[[Mapping[str, Any]], Sequence[str]]] = {
    "recall_by_uncertainty": _bar_lines,
    "map": _map_lines,
    "sets": _set_lines,
    "words": _word_lines,
    "examples": _example_lines,
    "prompts_kept": _prompt_lines,
    "two_metrics": _scatter_lines,
    "gradients": _matrix_lines,
    "crops": _crop_lines,
    "toy": _toy_lines,
}
"""What is said of the numbers of a kind; of curves if it is not here."""


def lines(kind: str, numbers: Mapping[str, Any]) -> Sequence[str]:
    """The most telling numbers of a kind of figure."""
    return LINES.get(kind, _curve_lines)(numbers)
