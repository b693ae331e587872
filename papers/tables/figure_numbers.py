"""The numbers of the papers' figures, from the runs of their rows; drawn.py draws them.

What a figure consists of is data, see :mod:`papers.tables.items`: its kind names an entry of KINDS here.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import torch

from papers.studies.analyse import AnalysisOptions, analyse_model
from papers.studies.crops import study_crops
from papers.studies.gradients import study_gradients
from papers.studies.labelled import emoji_labelled, read_class_folder, read_class_names
from papers.studies.prompts import read_templates
from papers.studies.toy import run_toy
from papers.studies.zeroshot import evaluate_zeroshot
from papers.tables.items import PaperItem
from papers.tables.paper_tables import Repeated, TableData, embed_item, plan_table, run_figures, train_planned
from sfumato.data.images import thumbnail
from sfumato.errors import UserError
from sfumato.evaluation.embedded_input import Measured, measure
from sfumato.evaluation.protocols import EmbeddedSplit, EvaluationOptions
from sfumato.ids import DIRECTION_OF, DIRECTIONS, OTHER_SIDE, Side
from sfumato.matching import MATCH_PROBABILITY
from sfumato.metrics.reliability import wilson_interval
from sfumato.models.embed import embed_split, file_endings, load_split
from sfumato.models.run import LOG, Run, load_model, load_run, read_log
from sfumato.search.exact import top_k

EXAMPLES, RESULTS = 4, 4
"""Number of queries of a side that are shown, and of results of each."""


@dataclass(frozen=True)
class Scene:
    """A figure's runs, by the label of their row, and the images that its numbers name."""

    item: PaperItem
    data: TableData
    runs: dict[str, tuple[Path, ...]]
    instances: tuple[Path, ...] = ()
    device: torch.device | str = "cpu"
    pictures: dict[str, bytes] = field(default_factory=dict)

    @property
    def options(self) -> Mapping[str, Any]:
        """Settings of the figure."""
        return self.item.options

    @property
    def only(self) -> Path:
        """The folder of the only row's first run."""
        ((_, (folder, *_)),) = self.runs.items()
        return folder

    def load(self, folder: Path) -> Run:
        """A run of a row."""
        return load_run(folder, device=self.device)

    def measure(
        self, folder: Path, options: EvaluationOptions | None = None, *, distance: str | None = None
    ) -> Measured:
        """Evaluate a run on the split of the figure, by a distance or its own."""
        run = self.load(folder)
        embedded = embed_item(run, self.item, self.data, annotated=False, instances=self.instances)
        return measure(embedded, run.ranking_distance(distance), options=options or EvaluationOptions())

    def study(self, folder: Path, name: str, options: AnalysisOptions) -> dict[str, Any]:
        """A study of `python -m papers analyse` on a run; its images become those of the figure."""
        run, split = self.load(folder), self.options.get("split", self.item.split)
        found = analyse_model(run, run.recipe.data, split, studies=(name,), options=options)
        self.pictures.update(found.images)
        return found.studies[name]


def _point(x: float, values: Sequence[float], interval: Sequence[float | None] = (None, None)) -> dict[str, Any]:
    """Mean and standard deviation of several runs at x; of one run its value, with its interval if it has one."""
    mean, (low, high) = statistics.mean(values), interval
    if len(values) > 1:
        deviation = statistics.stdev(values)
        low, high = mean - deviation, mean + deviation
    return {"x": x, "value": mean, "low": low, "high": high}


def _panel(
    name: str, x: str, y: str, series: Mapping[str, Sequence[Mapping[str, Any]]], look: str = ""
) -> dict[str, Any]:
    """look: "logarithmic" for the vertical axis, "marked" for ticks at the points."""
    return {"name": name, "x": x, "y": y, "series": {key: list(points) for key, points in series.items()}, "look": look}


def _of_runs(runs: Sequence[Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Points from (x, value) of each run; an x counts for the runs that have it."""
    at: dict[float, list[float]] = {}
    for x, value in (pair for run in runs for pair in run):
        at.setdefault(x, []).append(value)
    return [_point(x, values) for x, values in sorted(at.items())]


def _recall_by_uncertainty(scene: Scene) -> dict[str, Any]:
    panels = []
    for row, folders in scene.runs.items():
        measured = EvaluationOptions(uncertainty=scene.options["uncertainty"])
        found = [_bins(scene.measure(folder, measured), row) for folder in folders]
        for direction in DIRECTIONS:
            runs = [one[direction] for one in found]
            bins = []
            for k in range(len(runs[0]["bins"])):
                same = [run["bins"][k] for run in runs]
                interval = wilson_interval(same[0]["recall"], same[0]["count"])
                bins.append(_point(k + 1, [b["recall"] for b in same], interval) | {"count": same[0]["count"]})
                bins[-1]["uncertainty"] = statistics.mean(b["uncertainty"] for b in same)
            known = [run["correlation"] for run in runs if run["correlation"] is not None]
            correlation = statistics.mean(known) if known else None
            panels.append({"row": row, "name": direction, "bins": bins, "correlation": correlation})
    return {"uncertainty": scene.options["uncertainty"], "panels": panels}


def _bins(measured: Measured, row: str) -> dict[str, Any]:
    """By direction, on COCO 1K or the only ground truth."""
    if measured.uncertainty is None:
        raise UserError(f"{row}: its embeddings are points, without an uncertainty")
    found = measured.uncertainty
    return found.get("coco_1k", next(iter(found.values())))


def _map(scene: Scene) -> dict[str, Any]:
    options = AnalysisOptions(method=scene.options["method"], n_mapped=100)
    return {"maps": {row: scene.study(folders[0], "map", options) for row, folders in scene.runs.items()}}


def _corruption(scene: Scene) -> dict[str, Any]:
    uncertainty, panels = scene.options["uncertainty"], []
    options = AnalysisOptions(uncertainty=uncertainty)
    found = {
        row: [scene.study(folder, "corruption", options)["sides"] for folder in folders]
        for row, folders in scene.runs.items()
    }
    for side, name in zip(DIRECTION_OF, scene.options["of"], strict=True):
        series = {}
        for row, runs in found.items():
            curves = [run[side][name] for run in runs if name in run.get(side, {})]
            if not curves:
                continue
            points = []
            dim = scene.load(scene.runs[row][0]).recipe.model.dim
            scale = 1 / (2 * dim) if uncertainty == "log_det" else 1  # To the mean ln σ, as the paper draws it.
            for k, strength in enumerate(curves[0]["strengths"]):
                same = [curve["mean"][k] for curve in curves]
                bounds = [None if end is None else scale * end for end in (same[0]["low"], same[0]["high"])]
                points.append(_point(strength, [scale * m["value"] for m in same], bounds))
            series[row] = points
        if series:
            panels.append(_panel(name, "strength", "ln σ" if uncertainty == "log_det" else uncertainty, series))
    if not panels:
        raise UserError(f"{scene.item.id} damages images and words, but these runs read ready features alone")
    return {"panels": panels}


def _sorted_variances(scene: Scene) -> dict[str, Any]:
    series: dict[Side, dict[str, list[dict[str, Any]]]] = {side: {} for side in DIRECTION_OF}
    for row, folders in scene.runs.items():
        every = [embed_item(scene.load(folder), scene.item, scene.data, annotated=False) for folder in folders]
        for side, rows in series.items():
            var = [(e.images if side == "image" else e.texts).var.double().mean(0) for e in every]
            ordered = [values.sort(descending=True).values.tolist() for values in var]
            rows[row] = _of_runs([[(float(k), value) for k, value in enumerate(run, 1)] for run in ordered])
    about = "dimensions, by descending variance", "mean variance"
    return {"panels": [_panel(side, *about, rows, "logarithmic") for side, rows in series.items()]}


def _own(scene: Scene, row: str, metric: str) -> list[float]:
    """A figure of each run of a row, in per cent."""
    figures = [run_figures(folder, scene.item, scene.data, row, device=scene.device) for folder in scene.runs[row]]
    return [value for one in figures if (value := one.get(metric)) is not None]


def _by_value(scene: Scene) -> dict[str, Any]:
    """Rows are named SERIES, VALUE."""
    metric, series = scene.options["metric"], dict[str, list[dict[str, Any]]]()
    for row in scene.runs:
        name, _, value = row.rpartition(", ")
        series.setdefault(name, []).append(_point(float(value), _own(scene, row, metric)))
    return {"panels": [_panel("", scene.options["axis"], metric, series, "marked")]}


def _two_metrics(scene: Scene) -> dict[str, Any]:
    x, y = scene.options["metrics"]
    panels = []
    for direction in DIRECTIONS:
        points = [
            {"row": row, **{axis: _point(0, _own(scene, row, f"{direction} {m}")) for axis, m in (("x", x), ("y", y))}}
            for row in scene.runs
        ]
        panels.append({"name": direction, "x": x, "y": y, "points": points})
    return {"panels": panels}


def _r_precision(measured: Measured) -> float:
    """Mean of both directions, in per cent, of the only ground truth."""
    (figures,) = measured.figures.values()
    return 100 * statistics.mean(float(figures[direction]["r_precision"]) for direction in DIRECTIONS)


def _samples_at_test(scene: Scene) -> dict[str, Any]:
    series, counts = dict[str, list[dict[str, Any]]](), scene.options["samples"]
    for row, folders in scene.runs.items():
        sampled, without = [], []
        for folder in folders:
            found = [
                _r_precision(scene.measure(folder, EvaluationOptions(n), distance=MATCH_PROBABILITY)) for n in counts
            ]
            sampled.append(list(zip(map(float, counts), found, strict=True)))
            means = _r_precision(scene.measure(folder, distance="squared_l2"))
            without.append([(float(n), means) for n in counts])
        series |= {f"{row}, match probability": _of_runs(sampled), f"{row}, means alone": _of_runs(without)}
    return {"panels": [_panel("", "number of samples at test time", "r_precision", series, "marked")]}


def _pmrp_by_tolerance(scene: Scene) -> dict[str, Any]:
    series: dict[str, dict[str, list[dict[str, Any]]]] = {direction: {} for direction in DIRECTIONS}
    for row, folders in scene.runs.items():
        found = [scene.measure(folder).figures for folder in folders]
        for direction, rows in series.items():
            rows[row] = _of_runs([_pmrp(figures, direction) for figures in found])
    about = "tolerance ζ", "PMRP"
    return {"panels": [_panel(direction, *about, rows, "marked") for direction, rows in series.items()]}


def _pmrp(figures: Mapping[str, Mapping[str, Any]], direction: str) -> list[tuple[float, float]]:
    return [
        (float(name.rpartition("@")[2]), 100 * both[direction]["r_precision"])
        for name, both in figures.items()
        if name.startswith("pmrp_1k@")
    ]


def _pseudo_positives(scene: Scene) -> dict[str, Any]:
    score, number = dict[str, list[dict[str, Any]]](), dict[str, list[dict[str, Any]]]()
    keys = [f"pseudo_positives_{direction}" for direction in DIRECTIONS]
    for row, folders in scene.runs.items():
        logs = [read_log(folder / LOG) for folder in folders]
        score[row] = _of_runs([[(e["epoch"] + 1, 100 * e["val/rsum"]) for e in log if "val/rsum" in e] for log in logs])
        raised = [[(e["epoch"] + 1, statistics.mean(e[k] for k in keys)) for e in log if keys[0] in e] for log in logs]
        if any(raised):
            number[row] = _of_runs(raised)
    rsum = _panel("RSUM", "epoch", "RSUM on the validation split", score)
    count = _panel("pseudo-positives", "epoch", "labels raised in a batch and direction", number)
    return {"panels": [rsum, *([count] if number else [])]}


def _prompts_kept(scene: Scene) -> dict[str, Any]:
    run = scene.load(scene.only)
    if scene.data.name == "emoji":
        images, split = emoji_labelled(scene.options["emoji"]), "style"
    else:
        names = read_class_names(Path(scene.options["classes"]))
        images = read_class_folder(Path(scene.options["images"]), names, endings=file_endings(run.model))
        split = scene.options["images"]
    report = evaluate_zeroshot(run, images, read_templates(), filters=("oracle",), n_resamples=0)
    (kept,) = report["prompts_kept"]
    return {"split": split, "classes": len(report["classes"]), "n_images": report["n_images"], "kept": kept}


def _check_prompts(item: PaperItem, data: TableData, instances: Sequence[Path]) -> None:
    if data.name != "emoji" and any(not Path(item.options[key]).exists() for key in ("images", "classes")):
        raise UserError(
            f"{item.id} needs labelled images, a folder for each class in {item.options['images']}, and the names of"
            f" the classes in {item.options['classes']}. `python -m papers zeroshot RUN zeroshot.images=FOLDER"
            " zeroshot.classes=FILE zeroshot.filter=oracle` draws the same of any run; --data emoji needs no files"
        )


def _check_instances(item: PaperItem, data: TableData, instances: Sequence[Path]) -> None:
    if not instances:
        raise UserError(f"{item.id} needs COCO's instance annotations: add --instances instances_val2014.json")


def _examples(scene: Scene) -> dict[str, Any]:
    run, options = scene.load(scene.only), scene.options
    prepared = load_split(run.model, run.recipe.data, scene.item.split)
    relevance, data = prepared.data.relevance(), prepared.data
    embedded = EmbeddedSplit(*embed_split(run.model, prepared), relevance)
    sign = -1 if options["order"] == "most" else 1

    def shown(side: Side, index: int) -> dict[str, Any]:
        if side == "text":
            return {"text": data.texts[index]}
        name, small = f"image-{index}.webp", thumbnail(data.images[index])
        if small is not None:
            scene.pictures[name] = small
        own = relevance.indices[slice(*relevance.indptr[index : index + 2])]
        caption = data.texts[own[0]] if len(own) else ""
        return {"id": data.image_ids[index], "caption": caption, "picture": None if small is None else name}

    found = {}
    for side, direction in DIRECTION_OF.items():
        if options["side"] not in (side, "both"):
            continue
        q = embedded.query(direction)
        value = q.queries.uncertainty(options["uncertainty"]).double().cpu().numpy()
        chosen = np.argsort(sign * value, kind="stable")[:EXAMPLES]
        distance = run.ranking_distance().for_direction(direction)
        closest = top_k(q.queries[torch.from_numpy(chosen)], q.gallery, RESULTS, distance)[1].tolist()
        found[side] = [
            {
                "query": shown(side, int(query)),
                "uncertainty": float(value[query]),
                "results": [shown(OTHER_SIDE[side], i) | {"true": i in own} for i in items],
            }
            for query, items in zip(chosen, closest, strict=True)
            for own in [set(q.relevance.indices[slice(*q.relevance.indptr[query : query + 2])].tolist())]
        ]
    return {"uncertainty": options["uncertainty"], "order": options["order"], "sides": found}


def _crops(scene: Scene) -> dict[str, Any]:
    options = dict(scene.options)
    if missing := [key for key in ("model", "regions", "images") if not options[key]]:
        raise UserError(
            f"{scene.item.id} measures a model on boxes with phrases; add crops.{missing[0]}=..., of"
            " crops.model=RUN crops.regions=region_descriptions.json crops.images=FOLDER"
        )
    try:
        thresholds = [float(part) for part in options.pop("thresholds").split(",")]
    except ValueError:
        raise UserError("crops.thresholds: expected fractions with commas between, e.g. 0.1,0.3") from None
    model, n_resamples = load_model(options.pop("model"), device=scene.device), options.pop("bootstrap")
    study = study_crops(model, **options, thresholds=thresholds, n_resamples=n_resamples)
    found, about = study["thresholds"], "largest area of a box"

    def points(*keys: str) -> list[dict[str, Any]]:
        return [{"x": row["threshold"], **reduce(getitem, keys, row)} for row in found]

    panels = [
        _panel(side, about, study["uncertainty"], {role: points(side, role) for role in "AC"}, "marked")
        for side in ("crops", "captions")
        if found[0][side]
    ]
    for name, cells in found[0]["selection"].items():
        series = {cell: points("selection", name, cell) for cell in cells}
        panels.append(_panel(f"own partner closer by {name}", about, "fraction", series, "marked"))
    return study | {"model": scene.options["model"], "published": scene.item.rows, "panels": panels}


@dataclass(frozen=True)
class Kind:
    """A kind of figure: its numbers, whether it shows a single run of a row, and what is checked before training."""

    numbers: Callable[[Scene], dict[str, Any]]
    one_run: bool = False
    check: Callable[[PaperItem, TableData, Sequence[Path]], None] = lambda item, data, instances: None


KINDS: dict[str, Kind] = {
    "recall_by_uncertainty": Kind(_recall_by_uncertainty),
    "map": Kind(_map, one_run=True),
    "sets": Kind(lambda scene: scene.study(scene.only, "sets", AnalysisOptions()), one_run=True),
    "words": Kind(
        lambda scene: scene.study(scene.only, "words", AnalysisOptions(uncertainty=scene.options["uncertainty"])),
        one_run=True,
    ),
    "examples": Kind(_examples, one_run=True),
    "prompts_kept": Kind(_prompts_kept, one_run=True, check=_check_prompts),
    "corruption": Kind(_corruption),
    "sorted_variances": Kind(_sorted_variances),
    "by_value": Kind(_by_value),
    "two_metrics": Kind(_two_metrics),
    "samples_at_test": Kind(_samples_at_test),
    "pmrp_by_tolerance": Kind(_pmrp_by_tolerance, check=_check_instances),
    "pseudo_positives": Kind(_pseudo_positives),
    "gradients": Kind(lambda scene: study_gradients(**scene.options)),
    "crops": Kind(_crops),
    "toy": Kind(lambda scene: run_toy(seed=scene.options["seed"], updates=scene.options["updates"])),
}
"""The kinds by the name that a [[figure]] has as draw."""


@dataclass(frozen=True)
class Figure(Repeated):
    """The numbers of a repeated figure, the runs of its rows, and why rows are missing."""

    runs: dict[str, tuple[Path, ...]]
    numbers: dict[str, Any]
    pictures: dict[str, bytes]
    failed: tuple[str, ...] = ()

    @property
    def split(self) -> str:
        """The split that it shows."""
        return str(self.numbers.get("split", self.item.options.get("split", self.item.split)))

    def to_json(self) -> dict[str, Any]:
        """The figure as JSON values."""
        return self.about(self.split) | {
            "runs": {row: list(map(str, folders)) for row, folders in self.runs.items()},
            "failed": list(self.failed),
            "kind": self.item.draw,
            "numbers": self.numbers,
        }


def make_figure(
    item: PaperItem,
    data: TableData,
    runs: Path,
    *,
    n_seeds: int = 1,
    instances: Sequence[Path] = (),
    device: torch.device | str = "cpu",
) -> Figure:
    """Train the missing runs of a figure and compute its numbers; the arguments are those of a table."""
    kind, folders, failed = KINDS[item.draw], dict[str, tuple[Path, ...]](), list[str]()
    if n_seeds > 1 and (kind.one_run or not item.runs):
        raise UserError(f"{item.id} shows {'one run' if item.runs else 'no run'}; leave out --seeds {n_seeds}")
    if item.runs:
        planned = plan_table(item, data, n_seeds)
        kind.check(item, data, instances)
        for row, done, why in train_planned(item, planned, runs):
            failed += [f"{row.label}: {reason}" for reason in why]
            folders |= {row.label: tuple(done)} if done else {}
        if not folders:
            raise UserError(f"{item.id}: no run is left to draw; {'; '.join(failed)}")
    scene = Scene(item, data, folders, tuple(instances), device)
    return Figure(item, data, n_seeds, folders, kind.numbers(scene), scene.pictures, tuple(failed))
