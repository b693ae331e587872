"""The tables of the referee, one for each direction, as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

from sfumato.files import write_atomically

DIRECTION_NAMES = {"t2i": "text -> image", "i2t": "image -> text"}

_LOWER, _HIGHER = min, max

_WIDTH = 120

COLUMNS: dict[str, tuple[str, Any]] = {
    "log_loss": ("log loss", _LOWER),
    "ece": ("ECE", _LOWER),
    "wrong_auroc": ("wrong: AUROC", _HIGHER),
    "wrong_aurc": ("AURC", _LOWER),
    "wrong_excess_aurc": ("E-AURC", _LOWER),
    "wrong_gain": ("PRR", _HIGHER),
    "count": ("-S·R² count", _HIGHER),
    "width": ("-S·R² width", _HIGHER),
    "absent_auroc": ("absent: AUROC", _HIGHER),
    "ambiguity": ("ambiguity", _HIGHER),
    "recall_csd": ("recall@1 by csd", _HIGHER),
    "fit_seconds": ("fit, s", None),
    "fit_megabytes": ("fit, MB", None),
    "ms_per_query": ("ms a query", None),
    "query_megabytes": ("query, MB", None),
    "megabytes": ("stored, MB", None),
}
"""Figure -> its title, and which value is best; None for costs, whose best is not marked."""


@dataclass(frozen=True)
class Cells:
    """A table before it is Markdown, or columns of a terminal."""

    heading: str  # what it is about
    titles: list[str]  # of its columns
    rows: list[list[str]]  # texts, as many as titles; the best of a column stands between two pairs of asterisks
    notes: Sequence[str] = ()  # sentences below it

    def markdown(self) -> str:
        """The table without its heading and its notes."""
        lines = ["| " + " | ".join(self.titles) + " |", "| --- |" + " ---: |" * (len(self.titles) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines).replace("|  |", "| |")


def tested(reports: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """What was measured."""
    return [
        (split, direction)
        for split in reports[0]["sizes"]
        for direction in DIRECTION_NAMES
        if split not in ("train", "val") and any(_known(report, split, direction) for report in reports)
    ]


def referee_tables(reports: Sequence[dict[str, Any]], methods: Sequence[str] = (), columns: Sequence[str] = ()) -> str:
    """All tables of a model, each below its heading."""
    if methods:
        reports = [r | {"methods": {n: r["methods"][n] for n in methods if n in r["methods"]}} for r in reports]
    parts = []
    for split, direction in tested(reports):
        heading = referee_heading(reports, split, direction)
        parts.append(f"**{heading}**\n\n{referee_table(reports, split, direction, columns)}\n")
    for direction in DIRECTION_NAMES:
        if table := corruption_table(reports, direction):
            parts.append(f"{table}\n")
    notes = [f"Note: {note}." for note in reports[0]["notes"]]
    notes += [fill(f"Not built: {name}. {why}.", _WIDTH) for name, why in reports[0].get("not_built", {}).items()]
    return "\n".join([*parts, *notes])


def write_referee_tables(report: dict[str, Any], methods: Sequence[str], path: Path) -> None:
    """Write all tables of a report as Markdown."""
    write_atomically(path, f"{referee_tables([report], methods)}\n")


def corruption_table(reports: Sequence[dict[str, Any]], direction: str) -> str:
    """How contestants respond to corrupted queries, the best mean AUROC first."""
    found = corruption_cells(reports, direction)
    return f"**{found.heading}**\n\n{found.markdown()}" if found else ""


def corruption_cells(reports: Sequence[dict[str, Any]], direction: str) -> "Cells | None":
    """How contestants respond to corrupted queries, the best mean AUROC first."""
    found = [
        {name: {c: f for c, f in m.get("corruptions", {}).items() if f["direction"] == direction} for name, m in items}
        for items in (report["methods"].items() for report in reports)
    ]
    rows = {name: [report[name] for report in found] for name, own in found[0].items() if own}
    if not rows:
        return None
    first = next(iter(rows.values()))
    kinds = list(first[0])
    recalls = [
        cell
        for kind in kinds
        if "recall" in first[0][kind]  # Compact reports leave it out.
        for cell in (
            f"{fmean(r[kind]['recall'][0] for r in first):.1%} to {fmean(r[kind]['recall'][-1] for r in first):.1%}",
            "",
        )
    ]
    keys = [(kind, figure) for kind in kinds for figure in ("auroc", "spearman")]
    values = {
        name: {(kind, figure): [_triple(report[kind][figure]) for report in row] for kind, figure in keys}
        for name, row in rows.items()
    }
    best = {key: max(fmean(v[0] for v in row[key]) for row in values.values()) for key in keys}
    titles = [f"{kind}: {'AUROC' if figure == 'auroc' else 'Spearman'}" for kind, figure in keys]
    lines = [["recall@1, clean to damaged", *recalls]] if recalls else []
    mean = {name: fmean(v[0] for key in keys if key[1] == "auroc" for v in row[key]) for name, row in values.items()}
    for name in sorted(values, key=lambda name: -mean[name]):
        lines.append([name, *(_cell(values[name][key], best[key]) for key in keys)])
    n, models = first[0][kinds[0]]["n_queries"], reports[0]["model"]
    return Cells(f"{models}, {DIRECTION_NAMES[direction]}: {n} corrupted queries", ["method", *titles], lines)


def _triple(interval: dict[str, Any]) -> list[Any]:
    return [interval[key] for key in ("value", "low", "high")]


def referee_summary(models: Sequence[Sequence[dict[str, Any]]], figure: str) -> str:
    """One figure of every contestant on several models, split test; the best mean first."""
    places = [(reports, direction) for direction in DIRECTION_NAMES for reports in models]
    names = list(dict.fromkeys(name for reports in models for name in reports[0]["methods"]))
    rows = {name: [_mean_of(reports, name, direction, figure) for reports, direction in places] for name in names}
    means = {name: fmean(known) for name, row in rows.items() if (known := [v for v in row if v is not None])}
    sign = 1 if figure != "skill" and COLUMNS[figure][1] is _LOWER else -1
    titles = [f"{reports[0]['model']} {direction}" for reports, direction in places]
    best = [
        min((sign * v for name in names if (v := rows[name][k]) is not None), default=0) for k in range(len(places))
    ]
    lines = ["| method | " + " | ".join(titles) + " | mean |", "| --- |" + " ---: |" * (len(titles) + 1)]
    for name in sorted(means, key=lambda name: sign * means[name]):
        cells = [
            "–" if v is None else f"**{_number(v)}**" if sign * v == low else _number(v)
            for v, low in zip(rows[name], best, strict=True)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {_number(means[name])} |")
    return "\n".join(lines)


def _mean_of(reports: Sequence[dict[str, Any]], name: str, direction: str, figure: str) -> float | None:
    """The mean of a figure over the reports of a model; None where one lacks it."""
    found = _row(reports, name, "test", direction)["log_loss" if figure == "skill" else figure]
    if not found:
        return None
    values = [v[0] for v in found]
    if figure == "skill":
        constant = _row(reports, "constant", "test", direction)["log_loss"]
        values = [1 - v / c[0] for v, c in zip(values, constant, strict=True)]
    return fmean(values)


def referee_table(reports: Sequence[dict[str, Any]], split: str, direction: str, columns: Sequence[str] = ()) -> str:
    """One table: contestants by rows, ascending log loss of the first hit; the best of each column is bold."""
    found = referee_cells(reports, split, direction, columns)
    notes = [fill(note, _WIDTH) for note in found.notes]
    return "\n".join([found.markdown(), *([""] if notes else []), *notes])


def referee_cells(
    reports: Sequence[dict[str, Any]], split: str, direction: str, columns: Sequence[str] = ()
) -> "Cells":
    """The cells of :func:`referee_table`."""
    rows = {name: _row(reports, name, split, direction) for name in reports[0]["methods"]}
    known = {name: row for name, row in rows.items() if row["log_loss"]}
    shown = [key for key in columns or COLUMNS if any(row[key] for row in known.values())]
    best = {
        key: COLUMNS[key][1](fmean(v[0] for v in row[key]) for row in known.values() if row[key])
        for key in shown
        if COLUMNS[key][1] is not None
    }
    lines = [
        [name, *(_cell(row[key], best.get(key)) for key in shown)]
        for name, row in sorted(known.items(), key=lambda item: fmean(v[0] for v in item[1]["log_loss"]))
    ]
    missing = {name: _reason(reports, name, direction) for name in rows if name not in known}
    notes = [f"Not available: {name} ({reason})." for name, reason in missing.items()]
    titles = ["method", *(COLUMNS[key][0] for key in shown)]
    return Cells(referee_heading(reports, split, direction), titles, lines, notes)


def referee_heading(reports: Sequence[dict[str, Any]], split: str, direction: str) -> str:
    """What a table is about."""
    first, sizes = reports[0], reports[0]["sizes"][split]
    known = [figures[0] for report in reports if (figures := _known(report, split, direction))]
    recall, n_galleries = fmean(f["recall"]["value"] for f in known), known[0]["n_galleries"]
    parts = f" in {n_galleries} galleries" if n_galleries > 1 else ""
    seeds = f", {len(reports)} seeds" if len(reports) > 1 else ""
    return (
        f"{first['model']}, split {split}, {DIRECTION_NAMES[direction]}: {sizes['images']:,} images,"
        f" {sizes['texts']:,} texts{parts}, recall@1 {recall:.1%}{seeds}"
    )


def _known(report: dict[str, Any], split: str, direction: str) -> list[dict[str, Any]]:
    """The figures of all available contestants."""
    return [m["tests"][split][direction] for m in report["methods"].values() if direction in _tests(m, split)]


def _tests(method: dict[str, Any], split: str) -> dict[str, Any]:
    found: dict[str, Any] = method.get("tests", {}).get(split, {})
    return found


def _row(reports: Sequence[dict[str, Any]], name: str, split: str, direction: str) -> dict[str, list[list[float]]]:
    """By column, (value, low, high) or (value,) of each report; empty where a report lacks it."""
    found: dict[str, list[list[float]]] = {key: [] for key in COLUMNS}
    for report in reports:
        method = report["methods"].get(name, {})
        figures = _tests(method, split).get(direction)
        if figures is None:
            continue
        values = figures | {
            "fit_seconds": method["fit_seconds"],
            "fit_megabytes": method.get("fit_megabytes"),  # Reports of format 1 have no memory.
            "megabytes": method["bytes"] / 1e6,
            **{binning: binned["score"] for binning, binned in figures["minus_s_r2"].items()},
        }
        for key, so_far in found.items():
            value = values.get(key)
            if isinstance(value, dict):
                value = None if value["value"] is None else _triple(value)
            elif value is not None:
                value = [value]
            if value is not None:
                so_far.append(value)
    return {key: values if len(values) == len(reports) else [] for key, values in found.items()}


def _cell(values: list[list[float]], best: float | None) -> str:
    if not values:
        return "–"
    mean = fmean(v[0] for v in values)
    text = _number(mean)
    if best is not None and text == _number(best):
        text = f"**{text}**"
    if len(values) > 1:
        spread = stdev(v[0] for v in values)
        return text if best is None else f"{text} ± {_number(spread)}"
    if len(values[0]) == 3 and values[0][1] is not None:
        return f"{text} [{_number(values[0][1])}, {_number(values[0][2])}]"
    return text


def _number(value: float) -> str:
    if abs(value) >= 10:
        return f"{value:.0f}"
    text = f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"


def _reason(reports: Sequence[dict[str, Any]], name: str, direction: str) -> str:
    for report in reports:
        if reason := report["methods"].get(name, {}).get("unavailable"):
            return str(reason)
    return f"no uncertainty of {'images' if direction == 'i2t' else 'texts'}"
