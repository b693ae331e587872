"""The commands that measure: the group `evaluate`, trust, audit and report."""

import json
import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from sfumato.cli import common
from sfumato.cli.common import AsJson, ModelOnData, OnData, Split, command, flag, parse_names, rare, word
from sfumato.errors import UserError, say

if TYPE_CHECKING:
    from sfumato.evaluation.embedded_input import Measured
    from sfumato.evaluation.ground_truth import GroundTruth
    from sfumato.evaluation.protocols import Evaluation, EvaluationOptions
    from sfumato.gaussian import ScalarUncertainty


evaluate = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Evaluate a run or a model, embedding files, or an index."
)
common.app.add_typer(evaluate, name="evaluate")

TIMEOUT_MINUTES = 30.0
"""Longest time that one process of an evaluation waits for another one, in minutes."""

PerQueryFile = Annotated[Path | None, flag(..., "File for results by query: .parquet or .csv.", metavar="FILE")]


@dataclass(frozen=True)
class BenchmarkFlags:
    """A benchmark and its ground truths."""

    benchmark: str | None = flag(None, "Benchmark: coco, flickr30k, flickr8k, cub or emoji.")
    annotations: list[Path] | None = flag(
        None,
        "File or folder with the benchmark's annotations; repeatable: COCO's instances_*.json add PMRP; CUB needs its"
        " captions, and the folder of testclasses.txt and others or a file of names.",
        metavar="PATH",
    )
    metrics: str | None = rare(None, "Metrics, with commas, e.g. recall@1,map@r. Default: those of the ground truth.")
    benchmark_split: str | None = rare(
        None,
        "Split of the benchmark, where the data name theirs otherwise: COCO's own val2014 holds the benchmark's test."
        " Default: that of --split, or test.",
        metavar="SPLIT",
    )

    def read(self, split: str) -> "tuple[GroundTruth, ...]":
        """The ground truths that a model is to be evaluated against; none for those of its split."""
        from sfumato.evaluation.embedded_input import read_ground_truths, told_apart

        if self.benchmark is None:
            names = ("annotations", "metrics", "benchmark_split")
            if extra := [name.replace("_", "-") for name in names if getattr(self, name)]:
                raise UserError(f"--{extra[0]} belongs to a benchmark; add --benchmark NAME, or leave it out")
            return ()
        return read_ground_truths(
            self.benchmark, split=self.benchmark_split or split, metrics=parse_names(self.metrics or ""),
            **told_apart(self.benchmark, self.annotations or ()),
        )  # fmt: skip


@dataclass(frozen=True)
class MeasureFlags:
    """What is measured of a model."""

    distance: str | None = flag(None, "Distance to rank by, or match_probability. Default: the model's.")
    per_query: PerQueryFile = None
    uncertainty: str = rare(
        "total_variance", "Of queries: total_variance (PCME++), geometric_std (PCME) or log_det (probabilistic VSE++)."
    )
    samples: int | None = rare(None, "Samples for average_l2 (8) and match_probability (as in training).", min=1)
    seed: int = rare(0, "Seed of these samples.", min=0)

    def options(self) -> "EvaluationOptions":
        """The options of the evaluation; checks the file for single queries before the work."""
        from sfumato.evaluation.protocols import EvaluationOptions

        _check_per_query(self.per_query)
        return EvaluationOptions(self.samples, self.seed, cast("ScalarUncertainty", self.uncertainty))


def _check_per_query(path: Path | None) -> None:
    from sfumato.evaluation.benchmarks import check_per_query_path

    if path is not None:
        check_per_query_path(path)
        common.check_out_file(path, option="--per-query")


@command(evaluate)
def run(*, on: OnData, benchmark: BenchmarkFlags, measured: MeasureFlags, as_json: AsJson = False) -> None:
    """Evaluate a run on its own data, or any model on the data of --data.

    Writes evaluation-SPLIT-DISTANCE.json into the folder of a run on its own data. With --benchmark, joins its ground
    truths to the split by the ids of images and texts, and writes benchmark-NAME-SPLIT-DISTANCE.json instead. Started
    by torchrun, several processes share the work. `sfumato evaluate table RUN...` has means over seeds.
    """
    from sfumato.evaluation.embedded_input import measure
    from sfumato.models.embed import embed_for_evaluation, evaluate_model, write_figures
    from sfumato.models.process_group import join_process_group
    from sfumato.models.run import choose_device

    truths, options, beside = benchmark.read(on.split), measured.options(), dict[str, Any]()
    several = "WORLD_SIZE" in os.environ  # A single process chooses when the model turns out to need torch.
    device_of = partial(choose_device, "auto") if several else lambda _: "auto"
    with join_process_group(device_of, TIMEOUT_MINUTES) as group:
        opened = on.open("evaluate it on", device=group.device)
        split = opened.split
        opened = replace(opened, split=_split_of_fold(opened, split))
        check_results(opened)
        chosen, embedded = opened.model.ranking_distance(measured.distance), None
        options.check_samples(chosen)
        data = opened.model, opened.data, opened.split
        if measured.per_query or truths:
            embedded = embed_for_evaluation(*data, truths=truths, group=group)
        result: Evaluation | Measured | None = None
        name = f"evaluation-{opened.split}-{chosen.name}"
        if benchmark.benchmark is None:
            result = evaluate_model(*data, measured.distance, process_group=group, embedded=embedded, options=options)
        if not group.main:
            return
        if embedded is not None:
            figures = measure(embedded, chosen, options=options)
            if benchmark.benchmark is not None:
                result, name = figures, f"benchmark-{benchmark.benchmark}-{opened.split}-{figures.score}"
            if measured.per_query is not None:
                beside = _write_per_query(figures, embedded, measured.per_query)
        assert result is not None
        path = None if opened.own_run is None else write_figures(opened.own_run, name, result.to_json())
    _print_figures(result, f"{on.model} on {split}", as_json, beside, path)


@command(evaluate)
def files(
    *,
    images: str | None = flag(None, "Image embeddings: .npy, .parquet, .safetensors or FILE.safetensors:TENSOR."),
    texts: str | None = flag(None, "Text embeddings, in the same formats."),
    image_ids: Path | None = rare(None, "Ids of the images: .txt, .json or .npy. Default: as the ground truth."),
    text_ids: Path | None = rare(None, "Ids of the texts, with the same formats and default."),
    ranked: Path | None = flag(None, 'Or ranked lists, JSON: {"i2t": {image: [texts]}, "t2i": {text: [images]}}.'),
    scores: Path | None = flag(None, "Or a matrix of scores, images by texts: .npy. See --scores-are.", metavar="FILE"),
    scores_are: str | None = flag(
        None, "What the scores are: similarity (larger is closer) or distance (smaller is closer).", metavar="KIND"
    ),
    truth: Path | None = flag(None, "Ground truth: .csv of image,text or .json of {image: [texts]}."),
    given: BenchmarkFlags,
    score: str | None = flag(None, "What to rank by: a distance (csd), cosine or dot."),
    per_query: PerQueryFile = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate embeddings, ranked lists or a matrix of scores from files.

    They may come from any program; --truth or --benchmark gives the ground truth.
    """
    from sfumato.evaluation.embedded_input import Files, measure_files

    _check_per_query(per_query)
    chosen = Files(
        images, texts, image_ids, text_ids, ranked, truth, given.benchmark, tuple(given.annotations or ()),
        given.metrics, scores, scores_are,
    )  # fmt: skip
    measured, embedded = measure_files(chosen, score, split=given.benchmark_split or "test")
    if ranked is None and not (image_ids and text_ids):
        what = "embeddings" if scores is None else "rows or columns"
        say(f"note: no ids were given for some {what}; they get the ids of the ground truth, in its order")
    beside = {} if per_query is None else _write_per_query(measured, embedded, per_query)
    _print_figures(measured, str(ranked or scores or f"{images}, {texts}"), as_json, beside)


@command(evaluate)
def index(
    folder: Path = word(..., "Folder of an index or a collection.", "INDEX"),
    judgements: Path = flag(..., "File of people's verdicts, of sfumato serve or TREC qrels.", metavar="FILE"),
    k: int = flag(10, "Number of hits per query.", "-k", min=1),
    run: str | None = flag(None, "Folder or name of the model. Default: where it was for the index.", metavar="MODEL"),
    store: str | None = flag(None, "URL of the store. Default: the one it was built with.", metavar="URL"),
    as_json: AsJson = False,
) -> None:
    """Evaluate an index by people's verdicts on its hits.

    Precision, nDCG, the judged fraction and the calibration of the probabilities. Hits that nobody judged are unknown.
    """
    from sfumato.reports.calibration import print_judged
    from sfumato.workflows.judgements import evaluate_index

    found = evaluate_index(folder, judgements, k=k, run=run, store=store)
    if as_json:
        return print(json.dumps(asdict(found)))
    print_judged(found, str(folder))


def _write_per_query(measured: "Measured", embedded: Any, path: Path) -> dict[str, Any]:
    """Write the results of single queries; the part of the JSON that names the file."""
    from sfumato.evaluation.benchmarks import per_query_table, write_per_query

    uncertainty = None if embedded is None else embedded.uncertainty(measured.uncertainty_measure)
    write_per_query(path, per_query_table(measured.ranks, uncertainty))
    return {"per_query": str(path)}


def _print_figures(
    result: "Evaluation | Measured", title: str, as_json: bool, beside: dict[str, Any], path: Path | None = None
) -> None:
    """Print an evaluation, and the files that were written."""
    from sfumato.evaluation.embedded_input import Measured
    from sfumato.reports.evaluation import print_evaluation, print_measured

    if as_json:
        return print(json.dumps(result.to_json() | beside))
    if isinstance(result, Measured):
        print_measured(result, title)
    else:
        print_evaluation(result, f"{title}, by {result.distance}")
    if beside:
        print(f"single queries written to {beside['per_query']}")
    if path is not None:
        print(f"written to {path}")


def _split_of_fold(opened: ModelOnData, split: str) -> str:
    """The split of a run on a fold of CUB that a benchmark names with the number of the fold, e.g. val1."""
    fold = opened.data.options.get("fold") if opened.data.source == "cub" else None
    return split.removesuffix(str(fold)) if fold and split in (f"train{fold}", f"val{fold}") else split


def check_results(opened: ModelOnData) -> None:
    """Check, before the work, that the results of a run can be written into its folder."""
    if opened.own_run is not None:
        common.check_out_folder(opened.own_run.folder, option="results in")


@command()
def trust(
    on: OnData,
    details: bool = flag(False, "After the summary, print the tables of all figures.", "--details"),
    as_json: AsJson = False,
) -> None:
    """Measure what probabilities and uncertainties are worth.

    The summary says what to do: show the probabilities beside hits or not, and which estimator of uncertainty finds
    wrong first hits, foresees the precision at 10, and finds queries without a match. The tables of --details have the
    figures of all estimators. For a run on its own data, writes trust-SPLIT.json into its folder.
    """
    from sfumato.data.splits import WORDINGS
    from sfumato.models.embed import write_figures
    from sfumato.reports.evaluation import print_trust, print_trust_summary
    from sfumato.workflows.evaluation import trust_model

    opened = on.open("measure it on")
    split = opened.split
    check_results(opened)
    report = trust_model(opened.model, opened.data, split)
    path = None if opened.own_run is None else write_figures(opened.own_run, f"trust-{split}", report.to_json())
    if as_json:
        return print(json.dumps(report.to_json()))
    (print_trust if details else print_trust_summary)(report, f"{on.model} on {split}, by {report.distance}")
    if not details:
        print("AUROC: .5 is chance, 1 perfect. Brackets are 95 % intervals. --details prints")
        print("all figures, and what each estimator is.")
    if path is not None:
        print(f"written to {path}")
    if opened.own_run is not None and opened.own_run.training_calibration is not None and split != WORDINGS:
        print(f"An index of the training images has other probabilities; for these: --split {WORDINGS}")


@command()
def audit(
    on: OnData,
    parts: int = flag(
        0, "Audit train in K parts, each by a model trained on the rest; 0: by the model.", "--cross-fit", metavar="K"
    ),
    top: int = flag(100, "Number of pairs of each kind on the page and in audit.json.", min=0),
    out: Path | None = flag(None, "Folder to write. Default: audit-SPLIT in the run's folder, with --data here."),
    as_json: AsJson = False,
) -> None:
    """Find pairs of a data set that may be wrong or missing.

    Writes listed pairs that are probably wrong, and unlisted pairs that probably match, to tables and a page.
    """
    from sfumato import __version__
    from sfumato.reports.report import AUDIT_PAGE, print_audit, write_audit
    from sfumato.workflows.audit import audit_model, cross_fit

    if parts and not common.is_run(on.model):
        raise UserError(f"--cross-fit needs a run folder, whose recipe it trains with; {on.model} is not a run folder")
    opened = on.open("audit", split="train" if parts else "")
    split = opened.split
    folder = opened.folder(out, f"audit-{split}")
    common.check_out_folder(folder)
    if parts and opened.run is not None:
        result = cross_fit(opened.run, opened.data, parts, folder)
    else:
        name = Path(on.model).resolve().name if opened.run is not None else opened.name
        result = audit_model(opened.model, opened.data, split, name=name, seen=opened.same_data and split == "train")
    figures = write_audit(result, folder, top, __version__)
    if as_json:
        return print(json.dumps(figures | {"out": str(folder)}))
    print_audit(figures)
    print(f"page: {folder / AUDIT_PAGE}")


@command()
def report(
    on: OnData,
    out: Path | None = flag(None, "HTML file. Default: report-SPLIT.html in the run's folder, with --data here."),
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about a model.

    It shows figures, uncertainty, calibration, and right and wrong results with their images.
    """
    from sfumato.charts import require_matplotlib
    from sfumato.reports.report import report_model

    require_matplotlib()
    opened = on.open("report on")
    path = opened.folder(out, f"report-{opened.split}.html")
    common.check_out_file(path)
    page = report_model(opened.model, opened.data, opened.split, path, name=opened.name, run=opened.own_run)
    size = path.stat().st_size
    result: dict[str, Any] = {"out": str(path), "bytes": size, **page.to_json()}
    common.print_result(result, as_json, f"a page of {size / 1e6:.1f} MB: {path}")


@command(evaluate)
def table(
    runs: list[Path] = word(..., "Folders of runs, e.g. runs/*.", "RUN"),
    group: str = flag("", "Keys of the recipe, with commas, whose values name the rows.", metavar="KEYS"),
    metrics: str = flag("", "Columns by commas. A wrong one lists all.", show_default="rsum,t2i.recall@1,i2t.recall@1"),
    split: Split = "test",
    latex: bool = flag(False, "Print the table as LaTeX, for the package booktabs.", "--latex"),
    as_json: AsJson = False,
) -> None:
    """Make a table of runs: mean and standard deviation over seeds.

    The runs of a row may differ in their seed alone; --group KEYS gives each value its row. Runs that were not
    evaluated on this split are evaluated first.
    """
    from sfumato.reports.evaluation import runs_latex, runs_table
    from sfumato.reports.tables import tex
    from sfumato.workflows.evaluation import METRICS, table_of_runs

    keys, columns = parse_names(group), parse_names(metrics) or METRICS
    rows = table_of_runs(runs, keys, columns, split=split)
    if as_json:
        return print(json.dumps([row.to_json(keys) for row in rows], ensure_ascii=False))
    if latex:
        return print(runs_latex(runs_table(rows, keys, f"Split {split}", tex)), end="")
    runs_table(rows, keys, f"split {split}").show()
