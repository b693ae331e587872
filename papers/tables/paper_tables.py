"""A table of a paper repeated: the runs that are missing are trained, all are evaluated, and published figures stand
beside. What a table consists of is data, see :mod:`papers.tables.items`.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from papers.runs.grid import train_missing
from papers.runs.strategies import choose_strategies, evaluate_strategies
from papers.tables.items import PaperItem, data_sets, own_figures
from sfumato.data.sources import DataConfig
from sfumato.errors import UserError, say
from sfumato.evaluation.embedded_input import measure, read_ground_truths
from sfumato.evaluation.ground_truth import GroundTruth
from sfumato.evaluation.protocols import EmbeddedSet
from sfumato.files import MODEL, read_json, write_json
from sfumato.matching import MATCH_PROBABILITY
from sfumato.metrics.retrieval import chance_metrics
from sfumato.models.embed import embed_for_evaluation, load_split
from sfumato.models.recipe import Recipe, find_recipe, load_recipe
from sfumato.models.run import Run, load_run
from sfumato.workflows.evaluation import OverSeeds, over_seeds

_GALLERIES = ("coco_1k", "cub", "flickr30k", "cxc_1k", "coco_5k", "cxc", "eccv", "pmrp_1k", "rpc2_1k", "pmrp", "rpc2")
"""Ground truths of published figures, in the order in which one of them stands beside a figure of other data."""

_SIDES = ("i2t", "t2i", "image", "text")

_MANIFESTS = (".csv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class TableData:
    """The data that a table is repeated on."""

    name: str  # of :func:`~papers.tables.items.data_sets`; it chooses the recipes
    title: str  # as it is written above the figures
    overrides: tuple[str, ...] = ()  # of every recipe, e.g. where the data are


def with_settings(item: PaperItem, overrides: Sequence[str]) -> tuple[PaperItem, list[str]]:
    """An item with the settings STUDY.KEY=VALUE among the overrides, and the overrides of recipes."""
    start, options, rest = f"{item.draw}.", dict(item.options), list[str]()
    for override in overrides:
        key, equals, value = override.partition("=")
        name = key.removeprefix(start)
        if not (item.draw and key.startswith(start)):
            rest.append(override)
        elif name not in options or not equals:
            raise UserError(f"{override}: {item.id} has the settings {', '.join(start + k for k in options) or 'none'}")
        else:
            try:
                options[name] = type(options[name])(value)
            except ValueError:
                raise UserError(f"{override}: expected {options[name]!r} or another number") from None
    return replace(item, options=options), rest


def choose_data(item: PaperItem, given: str | None, overrides: Sequence[str]) -> TableData:
    """The data of --data: a name, a dataset_*.json, a manifest, or a folder; by default the paper's."""
    if item.draw and not item.runs:
        if given or overrides:
            own = "".join(f" {item.draw}.{key}=..." for key in item.options)
            raise UserError(f"{item.id} is made without data; leave out --data and overrides other than{own}")
        return TableData("", "no data")
    if given is None or given in data_sets():
        name = given or item.benchmark
        return TableData(name, data_sets()[name].title, tuple(overrides))
    path = Path(given)
    if not path.exists():
        raise UserError(f"--data {given}: neither a file or folder nor a data set; known: {', '.join(data_sets())}")
    if path.suffix == ".json":
        try:
            name = str(read_json(path)["dataset"])
        except (UserError, KeyError, TypeError) as error:
            raise UserError(f"--data {given}: not a dataset_*.json in Karpathy's layout") from error
        title = data_sets()[name].title if name in data_sets() else given
        if name != item.benchmark and name not in _with_recipes():
            name = "flickr8k"
        return TableData(name, title, (_set("data.path", given), *overrides))
    source = "folder" if path.is_dir() else "manifest"
    if source == "manifest" and path.suffix not in _MANIFESTS:
        raise UserError(f"--data {given}: expected {', '.join(_MANIFESTS)}, dataset_*.json or a folder of images")
    paths = (f"data.source={source}", _set("data.path", given), 'data.images=""')
    return TableData("flickr8k", given, (*paths, *overrides))


def _set(key: str, value: str) -> str:
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _with_recipes() -> list[str]:
    """The data on which other recipes stand for those of the papers."""
    return [name for name, one in data_sets().items() if one.instead]


@dataclass(frozen=True)
class PlannedRow:
    """A row before its runs: the recipes of its seeds and variants; none if it is not repeated on this data."""

    label: str
    recipes: tuple[Recipe, ...] = ()
    spec: str = ""
    missing: str = ""


def plan_table(item: PaperItem, data: TableData, n_seeds: int = 1) -> list[PlannedRow]:
    """The rows with their recipes."""
    if item.command or not item.repeatable:
        how = f"repeat it with `{item.command}`" if item.command else item.reason or "no recipe trains what it shows"
        shown = "; --published shows the paper's figures" if item.rows else ""
        raise UserError(f"{item.id} is not made by this command: {how.removesuffix('.')}{shown}")
    if data.name not in (item.benchmark, *_with_recipes()):
        raise UserError(f"{item.id} is about {item.benchmark}; --data {data.name} has no recipes for it")
    rows: list[PlannedRow] = []
    source = ""
    for label in item.labels:
        spec = item.run_of(label, data.name)
        if not spec:
            rows.append(PlannedRow(label))
            continue
        name, *changes = shlex.split(spec)
        read = load_recipe(find_recipe(name), changes, own=True).data
        source = source or read.source
        overrides = data.overrides
        if read.source != source:  # The paths that were given are those of the first row's kind of data.
            overrides = tuple(one for one in overrides if not one.startswith("data."))
            if _is_missing(read.path):
                rows.append(PlannedRow(label, spec=spec, missing=f"no {read.path} here, see `sfumato recipes {name}`"))
                continue
        recipes = []
        for variant in variants_on(item, data):
            recipe = load_recipe(find_recipe(name), [*changes, *shlex.split(variant), *overrides], own=True)
            for seed in range(recipe.train.seed, recipe.train.seed + n_seeds):
                recipes.append(recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})}))
        rows.append(PlannedRow(label, tuple(recipes), spec))
    _check_data(item, data, rows)
    if not any(row.recipes for row in rows):
        able = " or ".join(item.data_sets)
        where = f"give --data {able}" if able else "it has published figures only"
        raise UserError(f"{item.id}: none of its rows can be repeated on {data.title}; {where}")
    return rows


def variants_on(item: PaperItem, data: TableData) -> tuple[str, ...]:
    """The overrides that every row is run with in turn; a single empty one on other data than the paper's."""
    return item.variants if data.name == item.benchmark and item.variants else ("",)


def _is_missing(path: str) -> bool:
    """Whether a path is not there; a pattern of several files is not looked for."""
    return bool(path) and not Path(path).exists() and not any(character in path for character in "*?[{")


def _check_data(item: PaperItem, data: TableData, rows: Sequence[PlannedRow]) -> None:
    """Before anything is trained: the files that the first row reads are there."""
    path = next((row.recipes[0].data.path for row in rows if row.recipes), "")
    if not _is_missing(path):
        return
    others = [name for name in item.data_sets if name != data.name and not data_sets()[name].needs]
    here = f"; or give --data {' or '.join(others)}, which needs no files" if others else ""
    raise UserError(
        f"{item.id} on {data.title}: no {path} here. It needs {data_sets()[data.name].needs}. Say where they are, e.g."
        f" data.path={path}{here}"
    )


@dataclass(frozen=True)
class TableRow:
    """A row of a repeated table."""

    label: str  # backbone and method
    published: dict[str, float]  # the paper's figures by column
    own: dict[str, OverSeeds] = field(default_factory=dict)
    runs: tuple[str, ...] = ()  # folders of the runs
    spec: str = ""  # recipe and overrides
    failed: tuple[str, ...] = ()  # reasons of runs that diverged, and of data that are not there


@dataclass(frozen=True)
class Repeated:
    """What a repeated table and a repeated figure have."""

    item: PaperItem  # what was repeated
    data: TableData  # on which data
    n_seeds: int  # number of seeds

    @property
    def same_data(self) -> bool:
        """Whether it was repeated on the data of the paper."""
        return self.data.name == self.item.benchmark

    @property
    def n_variants(self) -> int:
        """Number of variants of every row, e.g. folds."""
        return len(variants_on(self.item, self.data))

    def about(self, split: str) -> dict[str, Any]:
        """What was repeated on what, as JSON values."""
        return {
            "id": self.item.id,
            "title": self.item.about,
            "source": self.item.source,
            "data": self.data.title,
            "same_data": self.same_data,
            "split": split,
            "seeds": self.n_seeds,
            "overrides": list(self.data.overrides),
        }


@dataclass(frozen=True)
class Table(Repeated):
    """A repeated table."""

    split: str  # on which split
    columns: tuple[str, ...]  # names of the figures, in the order of the paper
    rows: tuple[TableRow, ...]  # in the order of the paper

    def to_json(self) -> dict[str, Any]:
        """The table as JSON values; figures in per cent, rsum of 600."""
        return self.about(self.split) | {"columns": list(self.columns), "rows": [asdict(row) for row in self.rows]}


def train_planned(
    item: PaperItem, planned: Sequence[PlannedRow], runs: Path
) -> Iterator[tuple[PlannedRow, list[Path], list[str]]]:
    """Each row with the folders of its runs, trained if they are missing, and why there are no others."""
    for number, row in enumerate(planned):
        if row.recipes:
            say(f"{item.id}, row {number + 1} of {len(planned)}: {row.label}")
        folders, failed = train_missing(row.recipes, runs)
        yield row, folders, [*failed, *filter(None, [row.missing])]


def make_table(
    item: PaperItem,
    data: TableData,
    runs: Path,
    *,
    n_seeds: int = 1,
    instances: Sequence[Path] = (),
    device: torch.device | str = "cpu",
) -> Table:
    """Train the missing runs and evaluate all."""
    if item.split == "seen" and data.name != item.benchmark:  # Of classes, which other data have not.
        item = replace(item, split="test")
    planned = plan_table(item, data, n_seeds)
    _check_ground_truths(item, data, planned, instances)
    columns = table_columns(item, data)
    rows = []
    for row, folders, failed in train_planned(item, planned, runs):
        published = {own: item.rows.get(row.label, {}).get(name) for own, name in columns.items()}
        known = {name: value for name, value in published.items() if value is not None}
        name = item.name_on(row.label, data.name) if row.recipes else row.label
        figures = [run_figures(folder, item, data, row.label, instances=instances, device=device) for folder in folders]
        own = {name: value for name, value in over_seeds(figures).items() if name in columns}
        spec = row.spec if row.recipes else ""
        rows.append(TableRow(name, known, own, tuple(map(str, folders)), spec, tuple(failed)))
    first = next((Path(folder) for row in rows for folder in row.runs), None)
    if first and not data.name == item.benchmark == "coco":
        random = over_seeds([_by_chance(first, item.split)])
        rows.append(TableRow("by chance", {}, {name: value for name, value in random.items() if name in columns}))
    shown = tuple(name for name in columns if any(name in row.own or name in row.published for row in rows))
    return Table(item, data, n_seeds, item.split, shown, tuple(rows))


def _by_chance(folder: Path, split: str) -> dict[str, float | None]:
    """The figures of a random order of the split of a run."""
    run = load_run(folder)
    relevance = load_split(run.model, run.recipe.data, split).data.relevance()
    sides = {"i2t": chance_metrics(relevance), "t2i": chance_metrics(relevance.transpose())}
    rsum = sum(side[f"recall@{k}"] for side in sides.values() for k in (1, 5, 10))
    return _plain_figures(sides | {"rsum": rsum}, {}, None)


def _check_ground_truths(
    item: PaperItem, data: TableData, rows: Sequence[PlannedRow], instances: Sequence[Path]
) -> None:
    """Before anything is trained: the ground truths of COCO that the columns need can be read."""
    if not data.name == item.benchmark == "coco":
        return
    regions = any(row.recipes and row.recipes[0].data.source == "scan" for row in rows) and item.split == "test"
    if item.annotated or regions:
        read_ground_truths("coco", instances=instances, split=item.split)
    if item.plausible and not instances:
        say(f"note: {item.id} has PMRP, which needs --instances instances_val2014.json; its columns stay empty")


def table_columns(item: PaperItem, data: TableData) -> dict[str, str]:
    """Name of each own figure -> the published figure that stands beside it.

    On the paper's data these are the same. Other data have one ground truth: a metric is shown once, beside the
    published one whose gallery is nearest in size.
    """
    if data.name == item.benchmark == "coco":
        return {item.own_name(name): name for name in item.columns}
    found: dict[str, str] = {}
    for name in sorted(item.columns, key=_nearness):
        found.setdefault(_short(item.own_name(name)), name)
    order = [_short(item.own_name(name)) for name in item.columns]
    return {name: found[name] for name in dict.fromkeys(order)}


def _short(name: str) -> str:
    """The name of a figure without its ground truth."""
    words = name.split()
    return " ".join([words[0], words[-1]] if words[0] in _SIDES and len(words) > 1 else words[-1:])


def _nearness(name: str) -> int:
    words = [word for word in name.split() if word not in ("i2t", "t2i")]
    return _GALLERIES.index(words[0]) if words[0] in _GALLERIES else -1


def run_figures(
    folder: Path,
    item: PaperItem,
    data: TableData,
    label: str,
    *,
    instances: Sequence[Path] = (),
    device: torch.device | str = "cpu",
) -> dict[str, float | None]:
    """The figures of a run by the names of :func:`table_columns`; those computed before come from the run's folder."""
    coco = data.name == item.benchmark == "coco"
    truths = ("coco" if item.annotated else "coco-pairs") if coco else "own"
    path = folder / f"{'-'.join(filter(None, ['figures', truths, item.split, item.rank_by.get(label, '')]))}.json"
    if path.is_file() and path.stat().st_mtime_ns >= (folder / MODEL).stat().st_mtime_ns and not instances:
        figures: dict[str, float | None] = read_json(path)
    else:
        run = load_run(folder, device=device)
        embedded = embed_item(run, item, data, annotated=item.annotated, instances=instances)
        of_benchmark = coco and not _scan_without_ids(run.recipe.data, item.split)
        figures = _measured(run, embedded, item.rank_by.get(label, ""), of_benchmark=of_benchmark)
        write_json(path, figures)
    if coco:  # A split without ids has one ground truth, that of the columns.
        figures |= {
            name: figures[_short(name)] for name in item.columns if name not in figures and _short(name) in figures
        }
    return figures


def embed_item(
    run: Run, item: PaperItem, data: TableData, *, annotated: bool, instances: Sequence[Path] = ()
) -> EmbeddedSet:
    """Embed the split of an item; on the paper's COCO with its ground truths, on other data with that of the split."""
    config, split = run.recipe.data, item.split
    ground_truths: tuple[GroundTruth, ...] = ()
    if data.name == item.benchmark == "coco" and not _scan_without_ids(config, split):
        scan = config.source == "scan"
        own = None if scan or annotated else Path(config.path)
        truths = read_ground_truths("coco", annotations=own, instances=instances, split=split)
        split, ground_truths = "testall" if scan else split, truths
    return embed_for_evaluation(run, config, split, truths=ground_truths)


def _scan_without_ids(data: DataConfig, split: str) -> bool:
    """The validation part of SCAN's features has no ids of COCO, and so the ground truth of the split alone."""
    return data.source == "scan" and split != "test"


def _measured(run: Run, embedded: EmbeddedSet, strategy: str, *, of_benchmark: bool) -> dict[str, float | None]:
    """Figures of an embedded split, ranked by the run's distance or a search strategy."""
    if strategy:
        (chosen,) = choose_strategies(strategy)
        probability = run.ranking_distance(MATCH_PROBABILITY) if chosen.distance == MATCH_PROBABILITY else None
        result = evaluate_strategies(embedded, [chosen], match_probability=probability)[strategy]
        by_truth, uncertainty, variance = result.figures, None, None
    else:
        measured = measure(embedded, run.ranking_distance())
        by_truth, uncertainty, variance = measured.figures, measured.uncertainty, measured.total_variance
    if of_benchmark:
        return own_figures(by_truth, uncertainty, variance) | log_deviations(embedded)
    (only,) = by_truth.values()
    return _plain_figures(only, (uncertainty or {}).get(next(iter(by_truth)), {}), variance) | log_deviations(embedded)


def _plain_figures(
    both: Mapping[str, Any], uncertainty: Mapping[str, Any], variance: Mapping[str, float] | None
) -> dict[str, float | None]:
    """Figures of a single ground truth, in per cent: by direction, and the mean of both without one."""
    sides = {side: both[side] for side in ("i2t", "t2i")}
    figures: dict[str, float | None] = {
        f"{side} {name}": 100 * value for side, metrics in sides.items() for name, value in metrics.items()
    }
    for name in sides["i2t"].keys() & sides["t2i"].keys():
        figures[name] = 100 * sum(metrics[name] for metrics in sides.values()) / 2
    if "rsum" in both:
        figures["rsum"] = 100 * both["rsum"]
    correlations = [side["correlation"] for side in uncertainty.values()]
    if correlations and None not in correlations:
        figures["minus_rho"] = -sum(correlations) / len(correlations)
    if correlations and variance:
        figures["total_variance"] = sum(variance.values()) / len(variance)
    return figures


def log_deviations(embedded: EmbeddedSet) -> dict[str, float | None]:
    """Mean ln sigma over dimensions and items of images and texts; nothing for points."""
    sides = {"image": embedded.images, "text": embedded.texts}
    means = {name: float(side.log_var.double().mean()) / 2 for name, side in sides.items()}
    return {f"{name} log_sigma": value for name, value in means.items() if value > -1e4}
