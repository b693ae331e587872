"""The tables and figures of the papers as data: published figures, the runs that repeat them, and what they need.

One TOML file a paper beside this module; the README says what the keys mean. Nothing is trained or drawn here.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sfumato.errors import UserError
from sfumato.ids import DIRECTIONS

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure of a paper. The attributes are the keys of papers/tables/README.md."""

    paper: str
    source: str
    number: str
    about: str
    benchmark: str = ""
    direction: str = "both"
    columns: tuple[str, ...] = ()
    published: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    other: dict[str, dict[str, str]] = field(default_factory=dict)
    rank_by: dict[str, str] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    split: str = "test"
    draw: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    note: str = ""
    reason: str = ""
    row: str = ""
    test: str = ""
    results: str = ""
    ran: str = ""
    headline: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Paper and number, e.g. "PCME++ C.3" or "PCME++ Fig. 3"."""
        return f"{self.paper} {self.number}"

    @property
    def repeatable(self) -> bool:
        """Whether a command repeats it; the others are published figures only."""
        return bool(self.runs or self.draw or self.command)

    @property
    def needs(self) -> str:
        """What has to be there to repeat it on the paper's data; empty if nothing."""
        if not self.repeatable or not self.benchmark:
            return ""
        found = [data_sets()[self.benchmark].needs]
        if any("vsrn" in run for run in self.runs.values()):
            found.append("for VSRN the region features of SCAN")
        if self.annotated:
            found.append("the extra sfumato[benchmarks]")
        if self.plausible:
            found.append("for PMRP COCO's instances: --instances instances_val2014.json")
        return "; ".join(found)

    @property
    def annotated(self) -> bool:
        """Whether a column counts matches beside COCO's own pairs."""
        return self._has_column("cxc", "eccv", "rpc2")

    @property
    def plausible(self) -> bool:
        """Whether it shows PMRP, whose plausible matches come from COCO's instances."""
        return self._has_column("pmrp") or self.draw.startswith("pmrp")

    def own_name(self, name: str) -> str:
        """The name of a figure in :func:`own_figures`."""
        return f"{self.direction} {name}" if self.direction in DIRECTIONS else name

    def _has_column(self, *prefixes: str) -> bool:
        return any(word.startswith(prefixes) for column in self.columns for word in column.split())

    @property
    def rows(self) -> dict[str, dict[str, float]]:
        """The published figures of each row by its label, backbone and method."""
        return {" ".join(filter(None, key)): figures for key, figures in self.published.items()}

    @property
    def labels(self) -> list[str]:
        """The rows: those that were published, then those that only runs have."""
        return list(dict.fromkeys([*self.rows, *self.runs]))

    def name_on(self, label: str, data: str) -> str:
        """The label of a row; on other data than the paper's without the backbone, which is another one there."""
        (method,) = {key[1] for key in self.published if " ".join(filter(None, key)) == label} or {label}
        return label if data == self.benchmark else method

    def run_of(self, label: str, data: str) -> str:
        """The run of a row: a recipe and overrides, as on a command line; empty if it has none on this data."""
        if data in self.other and label in self.other[data]:
            return self.other[data][label]
        run = self.runs.get(label, "")
        recipe, _, changes = run.partition(" ")
        if data == self.benchmark or not recipe:
            return run
        instead = data_sets()[data].instead.get(recipe, "")
        if not instead or "weights=" in changes or "data.path=" in changes:
            return ""
        return f"{instead} {changes}".strip()

    @property
    def data_sets(self) -> list[str]:
        """The data on which at least one row can be repeated, the paper's first."""
        others = [name for name, one in data_sets().items() if one.instead and name != self.benchmark]
        return [n for n in (self.benchmark, *others) if n and any(self.run_of(label, n) for label in self.labels)]


@dataclass(frozen=True)
class DataSet:
    """Data that tables can be repeated on."""

    title: str  # as it is written, e.g. "Flickr8k"
    needs: str = ""  # what has to be there; empty if it comes with the package
    instead: dict[str, str] = field(default_factory=dict)


@cache
def data_sets() -> dict[str, DataSet]:
    """The data sets by name."""
    loaded = read_toml("data.toml")
    return {name: DataSet(**values) for name, values in loaded["data"].items()}


@cache
def paper_items() -> dict[str, PaperItem]:
    """All tables and figures by id, in the order of the papers."""
    items: dict[str, PaperItem] = {}
    for name in ("pcmepp.toml", "pcme.toml", "pvsepp.toml"):
        loaded = read_toml(name)
        for kind in ("table", "figure"):
            for values in loaded.get(kind, []):
                item = _item(loaded, kind, values, items)
                items[item.id] = item
    return dict(sorted(items.items(), key=lambda entry: _place(entry[1])))


def _place(item: PaperItem) -> tuple[int, bool, str, int]:
    """Where an item stands in a list: by paper, tables before figures, those of the body before the appendix."""
    papers = ("PCME++", "PCME", "PVSE++")
    figure, letter, number = re.fullmatch(r"(Fig\. )?(?:(\w+)[. ])?(\d+)", item.number).groups()  # type: ignore[union-attr]
    return papers.index(item.paper), figure is not None, letter or "", int(number)


def find_item(name: str) -> PaperItem:
    """The table or figure of a name, however it is spelt: "pcme++ 3", "PCME++ table 3", "PCME++ figure 3"."""
    known = {_folded(id): item for id, item in paper_items().items()}
    if (folded := _folded(name)) in known:
        return known[folded]
    paper, _, number = folded.rpartition(" ")
    figure = f"{paper} fig. {number}"
    near = [figure] if figure in known else difflib.get_close_matches(folded, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(repr(known[key].id) for key in near)}? " if near else ""
    raise UserError(f"no table or figure {name!r} in the papers; {hint}`python -m papers list` lists them")


def _folded(name: str) -> str:
    words = re.sub(r"\btable\b|\btab\.", " ", name.lower())
    return " ".join(re.sub(r"\bfig(ure)?\b\.?", " fig. ", words).split())


def _item(
    loaded: Mapping[str, Any], kind: str, values: Mapping[str, Any], before: Mapping[str, PaperItem]
) -> PaperItem:
    """An item from its TOML table; runs_of takes the runs of an earlier one of the same paper."""
    given = dict(values)
    number = given.pop("table") if kind == "table" else f"Fig. {given.pop('figure')}"
    columns = tuple(given.pop("columns", ()))
    published = {
        (backbone, method): {name: float(value) for name, value in zip(columns, figures, strict=True) if value != "-"}
        for backbone, method, *figures in given.pop("rows", ())
    }
    labels = {" ".join(filter(None, key)) for key in published}

    def kept(runs: Mapping[str, str]) -> dict[str, str]:
        return {label: run for label, run in runs.items() if not labels or label in labels}

    if of := given.pop("runs_of", ""):
        earlier = before[f"{loaded['paper']} {of}"]
        given["runs"] = kept(earlier.runs | given.get("runs", {}))
        given["other"] = {name: kept(runs) for name, runs in (earlier.other | given.get("other", {})).items()}
    variants = tuple(given.pop("variants", ()))
    return PaperItem(
        loaded["paper"], loaded["source"], number, columns=columns, published=published, variants=variants, **given
    )


def read_toml(name: str) -> dict[str, Any]:
    """A file of this folder."""
    return tomllib.loads((_HERE / name).read_text(encoding="utf-8"))


# ---------------------------------------------------------------- figures beside an evaluation
DEFAULT_TABLES = ("PCME++ 1", "PCME E.4", "PCME E.5", "PVSE++ 1", "PVSE++ 2", "PVSE++ 3", "PCME E.2", "PCME E.3")
"""Tables of methods, shown beside an evaluation that has some of their figures; the others are ablations."""


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table."""

    item: PaperItem
    backbone: str  # of the method; empty if the table names none
    method: str  # as printed; the paper marks figures from an official checkpoint or another paper with †
    figures: dict[str, float]


def published_rows(table: str | None = None) -> list[PublishedRow]:
    """All reference rows, or those of a table ("1", "C.7", or with the paper "PCME++ C.7")."""
    rows = _rows()
    if table is None:
        return list(rows)
    key = "id" if " " in table else "number"
    if chosen := [row for row in rows if getattr(row.item, key) == table]:
        return chosen
    known = dict.fromkeys(getattr(row.item, key) for row in rows)
    raise ValueError(f"published_rows: no figures for table {table!r}; known: {', '.join(known)}")


def common_figures(figures: Mapping[str, Mapping[str, Any]], direction: str = "both") -> dict[str, float]:
    """Convert the figures of an evaluation to the form of the published ones."""
    found = {}
    for name in dict.fromkeys(name for row in _rows() if row.item.direction == direction for name in row.figures):
        first, _, rest = name.partition(" ")
        both_or_one = DIRECTIONS if direction == "both" else (direction,)
        sides, key = ((first,), rest) if direction == "each" and rest else (both_or_one, name)
        ground_truth, _, metric = key.rpartition(" ")
        both = figures.get(ground_truth or "coco_1k", {})
        if metric == "rsum" and "rsum" in both:
            found[name] = 100 * both["rsum"]
        elif all(metric in both.get(side, {}) for side in sides):
            found[name] = 100 * sum(both[side][metric] for side in sides) / len(sides)
    return found


def own_figures(
    figures: Mapping[str, Mapping[str, Any]],
    uncertainty: Mapping[str, Mapping[str, Any]] | None = None,
    total_variance: Mapping[str, float] | None = None,
    *,
    measure: str = "total_variance",
) -> dict[str, float]:
    """All figures of an evaluation that some published table has."""
    found = common_figures(figures, "both") | common_figures(figures, "each")
    for side in DIRECTIONS:
        found |= {f"{side} {name}": value for name, value in common_figures(figures, side).items()}
    both = (uncertainty or {}).get("coco_1k", {})
    values = [side["correlation"] for side in both.values()]
    if values and None not in values and measure == "total_variance":
        found["minus_rho"] = -sum(values) / len(values)
    if values and total_variance:
        found["total_variance"] = sum(total_variance.values()) / len(total_variance)
    return found


@cache
def _rows() -> tuple[PublishedRow, ...]:
    return tuple(
        PublishedRow(item, backbone, method, figures)
        for item in paper_items().values()
        for (backbone, method), figures in item.published.items()
    )
