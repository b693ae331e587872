"""The commands that measure: the group `evaluate` and trust; and score, which makes scores probabilities."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from sfumato.cli.common import (
    TIMEOUT_MINUTES,
    UNCERTAINTY,
    AsJson,
    ModelOnData,
    OnData,
    app,
    check_out_file,
    check_out_folder,
    command,
    flag,
    open_model_on_data,
    parse_names,
    print_result,
    rare,
    word,
    writing,
)
from sfumato.errors import UserError

if TYPE_CHECKING:
    from sfumato.evaluation.embedded_input import Benchmark, Measured
    from sfumato.evaluation.protocols import Evaluation, EvaluationOptions
    from sfumato.gaussian import ScalarUncertainty
    from sfumato.models.process_group import ProcessGroup


class _Verbs(TyperGroup):
    """Names the verbs in one line where one is missing."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise UserError(
                f"evaluate {args[0]}: write sfumato evaluate VERB ..., where VERB is {', '.join(self.commands)}"
            )
        return super().resolve_command(ctx, args)


evaluate = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Evaluate a run or a model, embedding files, or an index.",
)
app.add_typer(evaluate, name="evaluate")

Distance = Annotated[
    str | None,
    flag(..., "Distance to rank by, or match_probability, with the run's logits. Default: the model's."),
]

PerQueryFile = Annotated[
    Path | None, flag(..., "File to write the results of single queries to: .parquet or .csv.", metavar="FILE")
]


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

    def read(self, split: str) -> "Benchmark | None":
        """The ground truths that a model is to be evaluated against; None for those of its split."""
        from sfumato.evaluation.embedded_input import Benchmark, read_ground_truths, told_apart

        given: dict[str, Any] = {"--annotations": self.annotations, "--metrics": self.metrics}
        given |= {"--benchmark-split": self.benchmark_split}
        if self.benchmark is None:
            if extra := next((name for name, value in given.items() if value), None):
                raise UserError(f"{extra} belongs to a benchmark; add --benchmark NAME, or leave it out")
            return None
        found = read_ground_truths(
            self.benchmark, split=self.benchmark_split or split, metrics=parse_names(self.metrics or ""),
            **told_apart(self.benchmark, self.annotations or ()),
        )  # fmt: skip
        return Benchmark(self.benchmark, found)


@dataclass(frozen=True)
class MeasureFlags:
    """What is measured of a model."""

    distance: Distance = None
    per_query: PerQueryFile = None
    uncertainty: str = rare("total_variance", UNCERTAINTY)
    samples: int | None = rare(
        None,
        "Samples of an embedding for average_l2 (8) and match_probability (as in training).",
        min=1,
    )
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
        check_out_file(path, option="--per-query")


@command(evaluate)
def run(*, on: OnData, benchmark: BenchmarkFlags, measured: MeasureFlags, as_json: AsJson = False) -> None:
    """Evaluate a run on its own data, or any model on the data of --data.

    Writes evaluation-SPLIT-DISTANCE.json into the folder of a run on its own data. With --benchmark, joins its ground
    truths to the split by the ids of images and texts, and writes benchmark-NAME-SPLIT-DISTANCE.json instead. Started
    by torchrun, several processes share the work. `sfumato table RUN...` has means over seeds.
    """
    _evaluate_and_print(on, benchmark.read(on.split), measured, as_json)


@command(evaluate)
def files(
    *,
    images: str | None = flag(None, "Image embeddings: .npy, .parquet, .safetensors or FILE.safetensors:TENSOR."),
    texts: str | None = flag(None, "Text embeddings, in the same formats."),
    image_ids: Path | None = rare(None, "Ids of the images: .txt, .json or .npy. Default: as the ground truth."),
    text_ids: Path | None = rare(None, "Ids of the texts, with the same formats and default."),
    ranked: Path | None = flag(
        None, 'Or ranked lists instead of embeddings, JSON: {"i2t": {image: [texts]}, "t2i": {text: [images]}}.'
    ),
    scores: Path | None = flag(
        None, "Or a matrix of scores, images by texts: .npy. With --scores-are.", metavar="FILE"
    ),
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
    from sfumato.progress import say

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
    from sfumato.reports.judging import print_judged
    from sfumato.workflows.judgements import evaluate_index

    found = evaluate_index(folder, judgements, k=k, run=run, store=store)
    if as_json:
        return print(json.dumps(found.to_json()))
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


def _evaluate_and_print(on: OnData, benchmark: "Benchmark | None", flags: MeasureFlags, as_json: bool) -> None:
    """Evaluate one model and print the result in the first process."""
    from sfumato.models.process_group import join_process_group
    from sfumato.models.run import choose_device

    options = flags.options()
    with join_process_group(partial(choose_device, "auto"), TIMEOUT_MINUTES) as group:
        opened = open_model_on_data(on.model, on.data, on.overrides, on.split, group.device, purpose="evaluate it on")
        split = opened.split
        opened = replace(opened, split=_split_of_fold(opened, split))
        check_results(opened)
        result, path, beside = _evaluate(opened, benchmark, flags, options, group)
    if group.main and result is not None:
        _print_figures(result, f"{on.model} on {split}", as_json, beside, path)


def _split_of_fold(opened: ModelOnData, split: str) -> str:
    """The split of a run on a fold of CUB that a benchmark names with the number of the fold, e.g. val1."""
    fold = opened.data.options.get("fold") if opened.data.source == "cub" else None
    return split.removesuffix(str(fold)) if fold and split in (f"train{fold}", f"val{fold}") else split


def check_results(opened: ModelOnData) -> None:
    """Check, before the work, that the results of a run can be written into its folder."""
    if opened.own_run is not None:
        check_out_folder(opened.own_run.folder, option="results in")


def _evaluate(
    opened: ModelOnData,
    benchmark: "Benchmark | None",
    flags: MeasureFlags,
    options: "EvaluationOptions",
    group: "ProcessGroup",
) -> "tuple[Evaluation | Measured | None, Path | None, dict[str, Any]]":
    """The figures, the file that they are written to, and the file of single queries as a part of the JSON."""
    from sfumato.evaluation.embedded_input import measure
    from sfumato.models.evaluate import embed_for_evaluation, evaluate_model, write_figures

    chosen, embedded = opened.model.ranking_distance(flags.distance), None
    options.check_samples(chosen)
    if flags.per_query or benchmark:
        embedded = embed_for_evaluation(
            opened.model, opened.data, opened.split, ground_truths=benchmark.ground_truths if benchmark else (),
            process_group=group,
        )  # fmt: skip
    result: Evaluation | Measured | None = None
    name = f"evaluation-{opened.split}-{chosen.name}"
    if benchmark is None:
        result = evaluate_model(
            opened.model, opened.data, opened.split, flags.distance, process_group=group, embedded=embedded,
            options=options,
        )  # fmt: skip
    if not group.main:
        return result, None, {}
    beside: dict[str, Any] = {}
    if embedded is not None:
        measured = measure(embedded, chosen, options=options)
        if benchmark is not None:
            result, name = measured, f"benchmark-{benchmark.name}-{opened.split}-{measured.score}"
        if flags.per_query is not None:
            beside = _write_per_query(measured, embedded, flags.per_query)
    assert result is not None
    path = None if opened.own_run is None else write_figures(opened.own_run, name, result.to_json())
    return result, path, beside


@command()
def trust(
    on: OnData,
    details: bool = flag(False, "After the summary, print the tables of all figures.", "--details"),
    as_json: AsJson = False,
) -> None:
    """Measure what probabilities and uncertainties are worth.

    The summary says what to do: show the probabilities beside hits or not, and which estimator of uncertainty finds
    wrong first hits and queries without a match. The tables of --details have the figures of all estimators. For a run
    on its own data, writes trust-SPLIT.json into its folder.
    """
    from sfumato.data.splits import WORDINGS
    from sfumato.models.evaluate import write_figures
    from sfumato.reports.trust import print_trust, print_trust_summary
    from sfumato.workflows.trust import trust_model

    opened = on.open("measure it on")
    split = opened.split
    check_results(opened)
    path = None
    report = trust_model(opened.model, opened.data, split)
    if opened.own_run is not None:
        path = write_figures(opened.own_run, f"trust-{split}", report.to_json())
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
def score(
    run: Path = flag(..., "The hits of another search engine: a TREC run.", metavar="FILE"),
    calibrator: Path = flag(..., "What sfumato calibrate --run has written.", metavar="FILE"),
    out: Path = flag(
        ...,
        "File of the results: the run with the probabilities as its scores, or all figures of a query on each line if"
        " its name ends with .jsonl.",
        metavar="FILE",
    ),
    as_json: AsJson = False,
) -> None:
    """Give the hits of any search engine their probabilities. It needs no model and no index."""
    from sfumato.calibration.score_lists import ScoreCalibrator
    from sfumato.errors import counted
    from sfumato.workflows.ranked_lists import score_lists

    check_out_file(out)
    if out.exists() and any(one.exists() and out.samefile(one) for one in (run, calibrator)):
        raise UserError(f"--out {out} is one of the other files; give another name")
    with writing(out):
        queries, n, expected = score_lists(run, ScoreCalibrator.load(calibrator), out)
    result = {"out": str(out), "queries": queries, "n": n, "expected_matches": expected}
    line = f"{counted(n, 'hit')} of {counted(queries, 'query', 'queries')} scored, about {expected:,.0f} of them match"
    form = "JSON lines" if out.suffix == ".jsonl" else "a TREC run"
    print_result(result, as_json, f"{line}: {out}, {form}")
