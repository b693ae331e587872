"""The tables of the referee: all figures in Markdown for its files, and those that decide on the screen."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

from papers.posthoc import METHODS
from papers.shown import markdown
from sfumato.reports.tables import ARROWS, MISSING, Table, in_words, print_table, print_wrapped

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

_SHOWN = ("log_loss", "ece", "wrong_auroc", "absent_auroc", "ambiguity")
"""The figures on the screen."""

_LEGEND = (
    "log loss: of the probability that the first hit is right, in nats; lower is better",
    "ECE: calibration error of this probability, in groups of equally many queries; 0 is perfect",
    "wrong, AUROC: how often a wrong first hit is less certain than a right one; .5 is chance, 1 perfect",
    "absent, AUROC: the same for queries whose matches are taken out of the gallery",
    "ambiguity: correlation with the true number of matches",
    "damaged queries: AUROC of the most damaged against the clean ones; Spearman of damage and uncertainty",
)

_TITLES = {"match_entropy": "match entropy", "margin": "margin", "recall@1, clean to damaged": "recall@1 falls"}
"""Names of rows on the screen that differ from those of figures."""


def print_referee(report: dict[str, Any], methods: Sequence[str]) -> None:
    """Print a report of one model and seed, and what its words mean."""
    report = _only(report, methods)
    damaged = [table for direction in ARROWS if (table := corruption_table([report], direction))]
    for table in [*(referee_table([report], *place, _SHOWN) for place in _measured([report])), *damaged]:
        rows = [[_title(row[0]), *map(_starred, row[1:])] for row in table.rows]
        replace(table, headings=[in_words(heading) for heading in table.headings], rows=rows).show(indent=2)
        print()
    meant = {
        _title(_label([report], name)): method["summary"] + ("" if method.get("added") else f" [{name}]")
        for name, method in report["methods"].items()
        if "summary" in method
    }
    print_table(
        "What the methods take for uncertainty; in square brackets the name for --methods and in the files",
        ["method", "what it is"],
        [*map(list, meant.items())], running=(1,),
    )  # fmt: skip
    print("\n*: the best of its column. In brackets: 95% intervals over queries")
    notes = [f"note: {note}" for note in report["notes"]]
    if METHODS.keys() <= report["methods"].keys():
        notes += [f"not built: {name}. {why}" for name, why in report["not_built"].items()]
    for line in (*_LEGEND, *notes):
        print_wrapped(line, indent=2)


def _title(name: str) -> str:
    """The name of a method in words; that of one that was added stays, with its file."""
    return name if name.endswith(")") else _TITLES.get(name) or in_words(name)


def _label(reports: Sequence[dict[str, Any]], name: str) -> str:
    """The name of a method in tables: with the file, if it was added."""
    added = reports[0]["methods"].get(name, {}).get("added")
    return f"{name} ({Path(added).name})" if added else name


def _starred(cell: str) -> str:
    """A cell with one asterisk before the best, instead of Markdown's bold."""
    return f"*{cell[2:].replace('**', '', 1)}" if cell.startswith("**") else cell


def referee_tables(reports: Sequence[dict[str, Any]], methods: Sequence[str] = (), columns: Sequence[str] = ()) -> str:
    """All tables of a model in Markdown, each below its heading."""
    reports = [_only(report, methods) if methods else report for report in reports]
    tables = [referee_table(reports, split, direction, columns) for split, direction in _measured(reports)]
    tables += [table for direction in ARROWS if (table := corruption_table(reports, direction))]
    notes = [f"Note: {note}." for note in reports[0]["notes"]]
    notes += [fill(f"Not built: {name}. {why}.", _WIDTH) for name, why in reports[0].get("not_built", {}).items()]
    shown = [
        "\n".join([markdown(table), *([""] if table.notes else []), *(fill(note, _WIDTH) for note in table.notes)])
        for table in tables
    ]
    return "\n".join([*(f"**{table.title}**\n\n{text}\n" for table, text in zip(tables, shown, strict=True)), *notes])


def _only(report: dict[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    return report | {"methods": {name: report["methods"][name] for name in methods if name in report["methods"]}}


def _measured(reports: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(split, direction) of what was measured."""
    return [
        (split, direction)
        for split in reports[0]["sizes"]
        for direction in ARROWS
        if split not in ("train", "val") and any(_known(report, split, direction) for report in reports)
    ]


def corruption_table(reports: Sequence[dict[str, Any]], direction: str) -> Table | None:
    """How contestants respond to corrupted queries, the best mean AUROC first; None if none was corrupted."""
    found = [
        {
            name: {kind: f for kind, f in method.get("corruptions", {}).items() if f["direction"] == direction}
            for name, method in report["methods"].items()
        }
        for report in reports
    ]
    measured = [name for name in found[0] if all(report.get(name) for report in found)]
    rows = {name: [report[name] for report in found] for name in measured}
    if not rows:
        return None
    first = next(iter(rows.values()))
    keys = [(kind, figure) for kind in first[0] for figure in ("auroc", "spearman")]
    recalls = [
        cell
        for kind, known in first[0].items()
        if "recall" in known  # Compact reports leave it out.
        for cell in (" to ".join(f"{fmean(r[kind]['recall'][end] for r in first):.1%}" for end in (0, -1)), "")
    ]
    values = {
        name: {(kind, figure): [_triple(report[kind][figure]) for report in row] for kind, figure in keys}
        for name, row in rows.items()
    }
    best = {key: max(fmean(v[0] for v in row[key]) for row in values.values()) for key in keys}
    mean = {name: fmean(v[0] for key in keys if key[1] == "auroc" for v in row[key]) for name, row in values.items()}
    lines = [
        [name, *(_cell(values[name][key], best[key]) for key in keys)]
        for name in sorted(values, key=lambda name: -mean[name])
    ]
    n = next(iter(first[0].values()))["n_queries"]
    added = [_label(reports, name) for name, method in reports[0]["methods"].items() if method.get("added")]
    return Table(
        f"{reports[0]['model']}, {ARROWS[direction]}: {n} corrupted queries",
        ["method", *(f"{kind}: {'AUROC' if figure == 'auroc' else 'Spearman'}" for kind, figure in keys)],
        [*([["recall@1, clean to damaged", *recalls]] if recalls else []), *lines],
        notes=[f"Not measured: {', '.join(added)} (a file has no uncertainties of damaged queries)."] if added else (),
    )


def _triple(interval: dict[str, Any]) -> list[Any]:
    return [interval[key] for key in ("value", "low", "high")]


def referee_summary(models: Sequence[Sequence[dict[str, Any]]], figure: str) -> str:
    """One figure of every contestant on several models, split test, in Markdown; the best mean first."""
    places = [(reports, direction) for direction in ARROWS for reports in models]
    names = list(dict.fromkeys(name for reports in models for name in reports[0]["methods"]))
    rows = {name: [_mean_of(reports, name, direction, figure) for reports, direction in places] for name in names}
    means = {name: fmean(known) for name, row in rows.items() if (known := [v for v in row if v is not None])}
    sign = 1 if figure != "skill" and COLUMNS[figure][1] is _LOWER else -1
    best = [
        min((sign * v for name in names if (v := rows[name][k]) is not None), default=0) for k in range(len(places))
    ]
    lines = [
        [
            next(_label(reports, name) for reports in models if name in reports[0]["methods"]),
            *(
                MISSING if v is None else f"**{_number(v)}**" if sign * v == low else _number(v)
                for v, low in zip(rows[name], best, strict=True)
            ),
            _number(means[name]),
        ]
        for name in sorted(means, key=lambda name: sign * means[name])
    ]
    titles = [f"{reports[0]['model']} {direction}" for reports, direction in places]
    return markdown(Table("", ["method", *titles, "mean"], lines))


def _mean_of(reports: Sequence[dict[str, Any]], name: str, direction: str, figure: str) -> float | None:
    """The mean of a figure over the reports of a model that have it; None where none has."""
    reports = [report for report in reports if name in report["methods"]]
    found = _row(reports, name, "test", direction)["log_loss" if figure == "skill" else figure]
    if not found:
        return None
    values = [v[0] for v in found]
    if figure == "skill":
        constant = _row(reports, "constant", "test", direction)["log_loss"]
        values = [1 - v / c[0] for v, c in zip(values, constant, strict=True)]
    return fmean(values)


def referee_table(reports: Sequence[dict[str, Any]], split: str, direction: str, columns: Sequence[str] = ()) -> Table:
    """Contestants by rows, ascending log loss of the first hit; the best of each column is bold."""
    rows = {name: _row(reports, name, split, direction) for name in reports[0]["methods"]}
    known = {name: row for name, row in rows.items() if row["log_loss"]}
    shown = [key for key in columns or COLUMNS if any(row[key] for row in known.values())]
    best = {
        key: COLUMNS[key][1](fmean(v[0] for v in row[key]) for row in known.values() if row[key])
        for key in shown
        if COLUMNS[key][1] is not None
    }
    lines = [
        [_label(reports, name), *(_cell(row[key], best.get(key)) for key in shown)]
        for name, row in sorted(known.items(), key=lambda item: fmean(v[0] for v in item[1]["log_loss"]))
    ]
    notes = [
        f"Not available: {_label(reports, name)} ({_reason(reports, name, direction)})."
        for name in rows
        if name not in known
    ]
    titles = ["method", *(COLUMNS[key][0] for key in shown)]
    return Table(_heading(reports, split, direction), titles, lines, notes=notes)


def _heading(reports: Sequence[dict[str, Any]], split: str, direction: str) -> str:
    """What a table is about."""
    first, sizes = reports[0], reports[0]["sizes"][split]
    known = [figures[0] for report in reports if (figures := _known(report, split, direction))]
    recall, n_galleries = fmean(f["recall"]["value"] for f in known), known[0]["n_galleries"]
    parts = f" in {n_galleries} galleries" if n_galleries > 1 else ""
    seeds = f", {len(reports)} seeds" if len(reports) > 1 else ""
    return (
        f"{first['model']}, split {split}, {ARROWS[direction]}: {sizes['images']:,} images,"
        f" {sizes['texts']:,} texts{parts}, recall@1 {recall:.1%}{seeds}"
    )


def _known(report: dict[str, Any], split: str, direction: str) -> list[dict[str, Any]]:
    """The figures of all available contestants."""
    tests = [method.get("tests", {}).get(split, {}) for method in report["methods"].values()]
    return [found[direction] for found in tests if direction in found]


def _row(reports: Sequence[dict[str, Any]], name: str, split: str, direction: str) -> dict[str, list[list[float]]]:
    """By column, (value, low, high) or (value,) of each report; empty where a report lacks it."""
    found: dict[str, list[list[float]]] = {key: [] for key in COLUMNS}
    for report in reports:
        method = report["methods"].get(name, {})
        figures = method.get("tests", {}).get(split, {}).get(direction)
        if figures is None:
            continue
        values = figures | {
            "fit_seconds": method["fit_seconds"],
            "fit_megabytes": method.get("fit_megabytes"),  # Reports of format 1 have no memory.
            "megabytes": None if method["bytes"] is None else method["bytes"] / 1e6,
            **{binning: binned["score"] for binning, binned in figures["minus_s_r2"].items()},
        }
        for key, so_far in found.items():
            value = values.get(key)
            triple = _triple(value) if isinstance(value, dict) else [value]
            if triple[0] is not None:
                so_far.append(triple)
    return {key: values if len(values) == len(reports) else [] for key, values in found.items()}


def _cell(values: list[list[float]], best: float | None) -> str:
    if not values:
        return MISSING
    mean = fmean(v[0] for v in values)
    text = _number(mean)
    if best is not None and text == _number(best):
        text = f"**{text}**"
    if len(values) > 1:
        return text if best is None else f"{text} ± {_number(stdev(v[0] for v in values))}"
    if len(values[0]) == 3 and values[0][1] is not None:
        return f"{text} [{_number(values[0][1])}, {_number(values[0][2])}]"
    return text


def _number(value: float) -> str:
    if abs(value) >= 10:
        return f"{value:.0f}"
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"


def _reason(reports: Sequence[dict[str, Any]], name: str, direction: str) -> str:
    for report in reports:
        if reason := report["methods"].get(name, {}).get("unavailable"):
            return str(reason)
    if any(name not in report["methods"] for report in reports):
        return "not measured with every seed"
    return f"no uncertainty of {'images' if direction == 'i2t' else 'texts'}"
