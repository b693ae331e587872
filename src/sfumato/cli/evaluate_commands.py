"""The commands that measure: the group `evaluate` and trust; and score, which makes scores probabilities."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from sfumato.cli.common import (
    INSTANCES,
    TIMEOUT_MINUTES,
    UNCERTAINTY,
    AsJson,
    Bootstrap,
    Device,
    ModelOnData,
    OnData,
    Seed,
    Split,
    Verbs,
    app,
    check_out_file,
    check_out_folder,
    command,
    flag,
    is_run,
    open_model_on_data,
    parse_names,
    print_result,
    rare,
    word,
    writing,
)
from sfumato.errors import UserError, as_typed

if TYPE_CHECKING:
    from sfumato.evaluation.benchmark_ground_truths import Rpc2
    from sfumato.evaluation.compare import More, MoreResults, PerQuery
    from sfumato.evaluation.embedded_input import Benchmark, Measured
    from sfumato.evaluation.ground_truth import GroundTruth
    from sfumato.evaluation.protocols import Evaluation
    from sfumato.gaussian import ScalarUncertainty
    from sfumato.models.process_group import ProcessGroup

_FILE_OPTIONS = (
    "--images", "--texts", "--image-ids", "--text-ids", "--image-log-var", "--text-log-var", "--ranked", "--truth",
    "--scores", "--scores-are",
)  # fmt: skip
"""Options that belong to embedding files alone."""

_TO_EVALUATE = (
    "say what to evaluate: sfumato evaluate run RUN (a run on its own data), sfumato evaluate model MODEL --data RECIPE"
    " (any model on other data), sfumato evaluate files --images FILE --texts FILE --truth FILE (embeddings of any"
    " program), or sfumato evaluate index INDEX --judgements FILE (people's verdicts on hits)"
)


class _EvaluateGroup(Verbs):
    """Says by what lies at a path whether it is a run, a model or embeddings."""

    def meant(self, command: str, arguments: list[str]) -> str:
        """See :class:`Verbs`."""
        names = [argument.partition("=")[0] for argument in arguments]
        of_files = next((name for name in names if name in _FILE_OPTIONS), None)
        path = next(iter(self.values(arguments)), None)
        if of_files and path is not None:
            return f"{of_files} is an option for embedding files; leave it out, or leave {path} out"
        if of_files and "--data" in names:
            return "--data needs a model; for embedding files give --truth or --benchmark"
        write = partial(as_typed, "sfumato", command)
        if of_files:
            return f"{of_files} is an option for embedding files: {write('files', *arguments)}"
        if path is None:
            return _TO_EVALUATE
        what, verb = _kind(path)
        if not verb:
            return f"{path} is {what}; {_TO_EVALUATE}"
        if verb == "files":
            others = [argument for argument in arguments if argument != path]
            return f"{path} is {what}: {write(verb, *_embedding_files(path), *others)}"
        if verb == "index":
            others = [] if "--judgements" in names else ["--judgements", "FILE"]
            return f"{path} is {what}: {write(verb, *arguments, *others)}"
        if verb == "train":
            return f"{path} is {what}: {as_typed('sfumato', verb, path, '--out', 'RUN')}; then {write('run', 'RUN')}"
        if verb == "model" or "--data" in names:
            return (
                f"{path} is {what}: {write('model', *arguments, *([] if '--data' in names else ['--data', 'RECIPE']))}"
            )
        return f"{path} is {what}: {write(verb, *arguments)}"


def _kind(path: str) -> tuple[str, str]:
    """(what lies at a path, the verb of evaluate that takes it; "train" for a recipe, "" for none)."""
    from sfumato.models.pretrained import CONFIG
    from sfumato.models.recipe import recipe_files
    from sfumato.search.collection import GaussianCollection
    from sfumato.workflows.index import is_gallery

    file = Path(path.partition(".safetensors:")[0] + ".safetensors" if ".safetensors:" in path else path)
    if is_run(file):
        return "a run folder", "run"
    if file.suffix == ".toml" or (path in recipe_files() and not file.exists()):
        return "a recipe, which has to be trained first", "train"
    if file.is_dir():
        if (file / CONFIG).is_file():
            return "an exported or published model", "model"
        if GaussianCollection.is_one(file) or is_gallery(file):
            return "an index, which people's verdicts evaluate", "index"
        if any(_of_embeddings(f) for f in file.iterdir()):
            return "a folder of embeddings", "files"
        return "a folder that holds neither a run, nor a model, nor embeddings", ""
    if file.exists():
        if file.suffix == ".json":
            return "a file of ranked lists", "files"
        return ("a file of embeddings", "files") if _of_embeddings(file) else ("the file of a model", "model")
    if path.count("/") == 1 and not path.startswith(("/", ".")) and not file.parent.is_dir():
        return "no path here; a model of this name on the Hugging Face hub is evaluated by", "model"
    return "neither a file nor a folder", ""


def _of_embeddings(file: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    from sfumato.data.feature_tables import MEAN_NAMES

    if file.suffix != ".safetensors":
        return file.suffix in (".npy", ".parquet")
    try:
        with safe_open(file, framework="pt") as tensors:
            return any(name in MEAN_NAMES for name in tensors.keys())  # noqa: SIM118
    except SafetensorError:
        return False


def _embedding_files(path: str) -> list[str]:
    """The options that name the embeddings at a path; in capitals what it does not tell."""
    file = Path(path)
    if file.suffix == ".json":
        return ["--ranked", path, "--truth", "TRUTH"]
    inside = sorted(f for f in file.iterdir() if _of_embeddings(f)) if file.is_dir() else [file]
    texts = next((str(f) for f in inside if re.search("text|capt", f.name.lower())), "TEXTS")
    images = next((str(f) for f in inside if re.search("im(age|g)", f.name.lower())), "IMAGES")
    if not file.is_dir() and texts != path:
        images = path
    return ["--images", images, "--texts", texts, "--truth", "TRUTH"]


evaluate = typer.Typer(
    cls=_EvaluateGroup,
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Evaluate a run, a model, embedding files, or an index.",
)
app.add_typer(evaluate, name="evaluate")

Distance = Annotated[
    str | None,
    flag(
        ...,
        "Distance to rank by, or match_probability, with the run's logits. Default: the model's.",
        "--distance",
        "--score",
    ),
]


@dataclass(frozen=True)
class BenchmarkFlags:
    """A benchmark and its ground truths."""

    benchmark: str | None = flag(None, "Benchmark: coco, flickr30k, flickr8k, cub or emoji.")
    annotations: Path | None = flag(None, "File or folder with the benchmark's annotations.")
    instances: list[Path] | None = rare(None, INSTANCES)
    classes: Path | None = rare(
        None,
        "CUB: folder of testclasses.txt and others, for --split (test, seen, train1, val1, ...), or a file of names.",
    )
    metrics: str | None = rare(None, "Metrics, with commas, e.g. recall@1,map@r. Default: those of the ground truth.")
    rpc2: str = rare(
        "union",
        "COCO: matches of RPC²: union, of CxC and COCO's own, as in the paper, or cxc. The other stands beside.",
    )
    benchmark_split: str | None = rare(
        None,
        "Split of the benchmark, where the data name theirs otherwise: COCO's own val2014 holds the benchmark's test."
        " Default: that of --split.",
        metavar="SPLIT",
    )
    subset: bool = rare(
        False,
        "A smoke test where a part of the benchmark is there alone: evaluate on that, marked everywhere. The figures"
        " are not those of the benchmark.",
        "--subset",
    )

    def read(self, split: str) -> "Benchmark | None":
        """The ground truths that a model is to be evaluated against; None for those of its split."""
        from sfumato.evaluation.embedded_input import Benchmark, read_ground_truths

        given = {f"--{name}": getattr(self, name) for name in ("annotations", "instances", "classes", "metrics")}
        given |= {"--rpc2": None if self.rpc2 == "union" else self.rpc2, "--subset": self.subset}
        given |= {"--benchmark-split": self.benchmark_split}
        if self.benchmark is None:
            if extra := next((name for name, value in given.items() if value), None):
                raise UserError(f"{extra} belongs to a benchmark; add --benchmark NAME, or leave it out")
            return None
        found = read_ground_truths(
            self.benchmark, annotations=self.annotations, instances=tuple(self.instances or ()), classes=self.classes,
            split=self.benchmark_split or split, metrics=parse_names(self.metrics or ""), rpc2=cast("Rpc2", self.rpc2),
        )  # fmt: skip
        return Benchmark(self.benchmark, found, self.subset)


@dataclass(frozen=True)
class MoreFlags:
    """What an evaluation measures beside the distance."""

    strategies: str | None = rare(
        None,
        "Search strategies to compare: all (those for large galleries), pcme (those of PCME's table E.1), or some"
        " of mean, wasserstein2, csd, faiss_mean, faiss_rerank, faiss_lifted, kl, js, elk, bhattacharyya,"
        " average_l2, match_probability, separated by commas.",
    )
    engine: str = rare("ivf", "Engine of the FAISS strategies: ivf, hnsw or exact.")
    candidates: int = rare(100, "Number of candidates that FAISS returns to be re-ranked.", min=1)
    per_query: Path | None = rare(None, "File to write the results of single queries to: .parquet or .csv.")
    compare: str | None = flag(
        None,
        "Print a comparison, query by query, with a file of results by query or, for a model, another run.",
        metavar="RUN_OR_FILE",
    )
    published: bool = rare(False, "Show the papers' figures for this data beside the own ones.", "--published")
    published_tables: str | None = rare(None, "Published tables to show, with commas, e.g. 'PCME++ C.3,PCME E.4'.")
    uncertainty: str = rare("total_variance", UNCERTAINTY)
    samples: int | None = rare(
        None,
        "Samples of an embedding for average_l2 (8) and match_probability (as in training; 7 for a released PCME).",
        min=1,
    )
    seed: int = rare(0, "Seed of these samples.", min=0)

    def more(self, of: BenchmarkFlags) -> "More":
        """The extras of an evaluation; published figures do not stand beside those of a part of a benchmark."""
        from sfumato.evaluation.compare import More
        from sfumato.evaluation.protocols import EvaluationOptions

        more = More(
            self.strategies, self.engine, self.candidates, self.per_query, self.compare, self.published,
            self.published_tables,
            options=EvaluationOptions(self.samples, self.seed, cast("ScalarUncertainty", self.uncertainty)),
        )  # fmt: skip
        if of.subset:
            more.check_subset()
        return more


@command(evaluate)
def run(
    *,
    run: str = word(..., "Folder of a run.", "RUN"),
    overrides: list[str] | None = word(
        None, "Where the run's data are now, e.g. data.path=my.jsonl.", "DATA.KEY=VALUE"
    ),
    split: Split = "test",
    distance: Distance = None,
    seeds: list[Path] | None = flag(
        None,
        "Run of the same recipe with another train.seed; repeatable. Prints mean ± standard deviation.",
        metavar="RUN",
    ),
    benchmark: BenchmarkFlags,
    beside: MoreFlags,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Evaluate a run on its own data.

    Writes evaluation-SPLIT-DISTANCE.json into the folder of the run. With --benchmark, joins its ground truths to the
    split by the ids of images and texts, and writes benchmark-NAME-SPLIT-DISTANCE.json instead. Started by torchrun,
    several processes share the work.
    """
    more, chosen = beside.more(benchmark), benchmark.read(split)
    on = OnData(run, overrides, None, split, device)
    if not is_run(run):
        on.open("evaluate it on")
    if seeds and benchmark.subset:
        raise UserError("--subset is a smoke test of one run; leave --seeds out, or evaluate on the whole benchmark")
    if not seeds:
        _evaluate_and_print(on, distance, chosen, more, as_json)
        return
    if more.anything or overrides:
        raise UserError(
            "--seeds needs runs on their own data, and no other model or --data; write sfumato evaluate"
            " run RUN --seeds RUN --seeds RUN"
        )
    _evaluate_seeds([run, *map(str, seeds)], split, distance, chosen, more, device, as_json)


@command(evaluate)
def model(
    *, on: OnData, distance: Distance = None, benchmark: BenchmarkFlags, beside: MoreFlags, as_json: AsJson = False
) -> None:
    """Evaluate any model on the data of a recipe.

    The model may be exported or published, or a run that is evaluated on other data. Started by torchrun, several
    processes share the work.
    """
    more, chosen = beside.more(benchmark), benchmark.read(on.split)
    _evaluate_and_print(on, distance, chosen, more, as_json)


@command(evaluate)
def files(
    *,
    images: str | None = flag(None, "Image embeddings: .npy, .parquet, .safetensors or FILE.safetensors:TENSOR."),
    texts: str | None = flag(None, "Text embeddings, in the same formats."),
    image_ids: Path | None = flag(None, "Ids of the images: .txt, .json or .npy. Default: as the ground truth."),
    text_ids: Path | None = flag(None, "Ids of the texts, with the same formats and default."),
    image_log_var: Path | None = rare(None, "Log variances of the images: .npy. Default: none; the images are points."),
    text_log_var: Path | None = rare(None, "Log variances of the texts: .npy. Default: none; the texts are points."),
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
    split: str = rare("test", "Split of a benchmark that has several."),
    score: str | None = flag(
        None, "What to rank by: a distance (csd), match_probability, cosine or dot.", "--score", "--distance"
    ),
    beside: MoreFlags,
    logit_scale: float | None = rare(None, "For match_probability: scale of the match logits."),
    logit_bias: float = rare(0.0, "For match_probability: bias of the match logits."),
    device: str = rare("auto", "Where to compute: auto, cpu, cuda or mps."),
    as_json: AsJson = False,
) -> None:
    """Evaluate embeddings, ranked lists or a matrix of scores from files.

    They may come from any program; --truth or --benchmark gives the ground truth.
    """
    from sfumato.evaluation.compare import more_results
    from sfumato.evaluation.embedded_input import Files, measure_files
    from sfumato.matching import match_probability_distance
    from sfumato.models.run import choose_device
    from sfumato.progress import say

    more = beside.more(given)
    if ranked or scores:
        _refuse_what_needs_embeddings(beside, "--ranked" if ranked else "--scores")
    probability = None if logit_scale is None else match_probability_distance(logit_scale, logit_bias)
    other = _read_compared(more.compared_with)
    more.check_samples(score or "csd")
    chosen = Files(
        images, texts, image_ids, text_ids, image_log_var, text_log_var, ranked, truth, given.benchmark,
        given.annotations, tuple(given.instances or ()), given.classes, given.metrics, cast("Rpc2", given.rpc2),
        scores, scores_are, given.subset,
    )  # fmt: skip
    where = None if device == "auto" else choose_device(device)
    measured, embedded = measure_files(
        chosen, score, split=given.benchmark_split or split, match_probability=probability, device=where,
        options=more.options,
    )  # fmt: skip
    if ranked is None and not (image_ids and text_ids):
        what = "embeddings" if scores is None else "rows or columns"
        say(f"note: no ids were given for some {what}; they get the ids of the ground truth, in its order")
    extra = more_results(measured, embedded, more, other, match_probability=probability)
    _print_figures(measured, extra, str(ranked or scores or f"{images}, {texts}"), as_json)


def _refuse_what_needs_embeddings(beside: MoreFlags, kind: str) -> None:
    """Raise an error for the first option that a ranking alone cannot answer."""
    given = {
        "--strategies": beside.strategies, "--samples": beside.samples,
        "--uncertainty": None if beside.uncertainty == "total_variance" else beside.uncertainty,
    }  # fmt: skip
    if needs := next((name for name, value in given.items() if value is not None), None):
        raise UserError(f"{needs} needs embeddings; leave it out with {kind}, or give --images and --texts")


@command(evaluate)
def index(
    folder: Path = word(..., "Folder of an index or a collection.", "INDEX"),
    judgements: Path = flag(..., "File of people's verdicts, of sfumato serve or TREC qrels.", metavar="FILE"),
    k: int = flag(10, "Number of hits per query.", "-k", min=1),
    run: str | None = flag(None, "Folder or name of the model. Default: where it was for the index.", metavar="MODEL"),
    store: str | None = flag(None, "URL of the store. Default: the one it was built with.", metavar="URL"),
    bootstrap: Bootstrap = 1000,
    as_json: AsJson = False,
) -> None:
    """Evaluate an index by people's verdicts on its hits.

    Precision, nDCG, the judged fraction and the calibration of the probabilities. Hits that nobody judged are unknown.
    """
    from sfumato.reports.judging import print_judged
    from sfumato.workflows.judgements import evaluate_index

    found = evaluate_index(folder, judgements, k=k, run=run, store=store, n_resamples=bootstrap)
    if as_json:
        return print(json.dumps(found.to_json()))
    print_judged(found, str(folder))


def _print_figures(
    result: "Evaluation | Measured", beside: "MoreResults | None", title: str, as_json: bool, path: Path | None = None
) -> None:
    """Print an evaluation, what was asked for beside it, and the file that it was written to."""
    from sfumato.evaluation.embedded_input import Measured
    from sfumato.reports.console import print_differences, print_evaluation, print_measured, print_more

    if as_json:
        return print(json.dumps(result.to_json() | (beside.to_json() if beside else {})))
    if beside is not None and beside.compared_with:
        print_differences(beside, title)
    elif isinstance(result, Measured):
        print_measured(result, title)
    else:
        print_evaluation(result, f"{title}, by {result.distance}")
    if beside is not None:
        print_more(beside)
    if path is not None:
        print(f"written to {path}")


def _read_compared(compare: str | None) -> "PerQuery | None":
    """The file of single queries to compare with; None if there is none."""
    from sfumato.evaluation.compare import PER_QUERY_ENDINGS, read_per_query

    if compare is None:
        return None
    if Path(compare).suffix not in PER_QUERY_ENDINGS:
        endings = " or ".join(PER_QUERY_ENDINGS)
        raise UserError(f"--compare {compare}: embedding files are compared with a file of single queries, {endings}")
    return read_per_query(compare)


def _evaluate_and_print(
    on: OnData, distance: str | None, benchmark: "Benchmark | None", more: "More", as_json: bool
) -> None:
    """Evaluate one model and print the result in the first process."""
    from sfumato.models.process_group import join_process_group
    from sfumato.models.run import choose_device

    with join_process_group(partial(choose_device, on.device), TIMEOUT_MINUTES) as group:
        opened = open_model_on_data(on.model, on.data, on.overrides, on.split, group.device, purpose="evaluate it on")
        split = opened.split
        opened = replace(opened, split=_split_of_fold(opened, split))
        check_results(opened, more.per_query)
        result, path, beside = _evaluate(opened, distance, benchmark, more, group)
    if group.main and result is not None:
        _print_figures(result, beside, f"{on.model} on {split}", as_json, path)


def _split_of_fold(opened: ModelOnData, split: str) -> str:
    """The split of a run on a fold of CUB that a benchmark names with the number of the fold, e.g. val1."""
    fold = opened.data.options.get("fold") if opened.data.source == "cub" else None
    return split.removesuffix(str(fold)) if fold and split in (f"train{fold}", f"val{fold}") else split


def check_results(opened: ModelOnData, file: Path | None = None) -> None:
    """Check, before the work, that the results of a run can be written into its folder, and others into a file."""
    if file is not None:
        check_out_file(file, option="--per-query")
    if opened.own_run is not None:
        check_out_folder(opened.own_run.folder, option="results in")


def _evaluate(
    opened: ModelOnData, distance: str | None, benchmark: "Benchmark | None", more: "More", group: "ProcessGroup"
) -> "tuple[Evaluation | Measured | None, Path | None, MoreResults | None]":
    """The figures, the file that they are written to, and what else was asked for."""
    from sfumato.evaluation.compare import more_results
    from sfumato.evaluation.embedded_input import measure
    from sfumato.matching import MATCH_PROBABILITY
    from sfumato.models.evaluate import embed_for_evaluation, evaluate_model, write_figures

    truths, options = benchmark.ground_truths if benchmark else (), more.options
    chosen = opened.model.ranking_distance(distance)
    needed = more.needs_match_probability
    probability = opened.model.ranking_distance(MATCH_PROBABILITY) if needed else None
    more.check_samples(chosen)
    subset = benchmark is not None and benchmark.subset
    other = _per_query_of_compared(more, opened, distance, truths, group, subset)
    embedded = None
    if more.anything or benchmark:
        embedded = embed_for_evaluation(
            opened.model, opened.data, opened.split, ground_truths=truths, process_group=group, subset=subset
        )
    result: Evaluation | Measured | None = None
    path = None
    if benchmark is None:
        result = evaluate_model(
            opened.model, opened.data, opened.split, distance, process_group=group, embedded=embedded, options=options
        )
        if opened.own_run is not None and group.main:
            name = f"evaluation-{opened.split}-{result.distance}"
            path = write_figures(opened.own_run, name, result.to_json())
    if embedded is None or not group.main:
        return result, path, None
    measured = measure(embedded, chosen, options=options)
    if benchmark is not None:
        result = measured
        if opened.own_run is not None:
            part = "" if measured.subset is None else "subset-"
            name = f"benchmark-{benchmark.name}-{part}{opened.split}-{measured.score}"
            path = write_figures(opened.own_run, name, measured.to_json())
    return result, path, more_results(measured, embedded, more, other, match_probability=probability)


def _per_query_of_compared(
    more: "More",
    opened: ModelOnData,
    distance: str | None,
    truths: "Sequence[GroundTruth]",
    group: "ProcessGroup",
    subset: bool,
) -> "PerQuery | None":
    """Single queries of the run or file to compare with; None without one, and in all processes but the first."""
    from sfumato.evaluation.compare import PER_QUERY_ENDINGS, per_query_table
    from sfumato.evaluation.embedded_input import measure
    from sfumato.models.evaluate import embed_for_evaluation
    from sfumato.models.run import load_run

    if more.compared_with is None:
        return None
    if Path(more.compared_with).suffix in PER_QUERY_ENDINGS:
        return _read_compared(more.compared_with)
    if not is_run(more.compared_with):
        raise UserError(f"--compare {more.compared_with}: neither a run folder nor a file of single queries")
    compared = load_run(more.compared_with, device=group.device)
    embedded = embed_for_evaluation(
        compared, compared.recipe.data, opened.split, ground_truths=truths, process_group=group, subset=subset
    )
    if not group.main:
        return None
    theirs = measure(embedded, compared.ranking_distance(distance), options=more.options)
    return per_query_table(theirs.ranks, embedded.uncertainty(more.options.uncertainty))


def _evaluate_seeds(
    runs: list[str],
    split: str,
    distance: str | None,
    benchmark: "Benchmark | None",
    more: "More",
    device: str,
    as_json: bool,
) -> None:
    """Evaluate runs of several seeds and print mean ± standard deviation."""
    from sfumato.evaluation.compare import main_figures, over_seeds
    from sfumato.evaluation.papers import own_figures
    from sfumato.models.process_group import join_process_group
    from sfumato.models.run import choose_device, load_run
    from sfumato.models.seeds import check_seeds, read_runs
    from sfumato.reports.console import print_over_seeds

    check_seeds(read_runs(runs))
    results: list[dict[str, float | None]] = []
    with join_process_group(partial(choose_device, device), TIMEOUT_MINUTES) as group:
        for folder in runs:
            run = load_run(folder, device=group.device)
            name = run.ranking_distance(distance).name
            opened = ModelOnData(run, run.recipe.data, split, folder, run, own_data=True)
            result, _, _ = _evaluate(opened, distance, benchmark, more, group)
            if result is not None and group.main:
                found = result.to_json()
                if benchmark:
                    parts = (found[name] for name in ("truths", "uncertainty", "total_variance"))
                    results.append({**own_figures(*parts, measure=more.options.uncertainty)})
                else:
                    results.append(main_figures(found))
    if not group.main:
        return
    summary = over_seeds(results)
    if as_json:
        print(json.dumps({"runs": runs} | {name: asdict(value) for name, value in summary.items()}))
    else:
        print_over_seeds(summary, f"{name}, {split}, {len(results)} runs", runs)


@command()
def trust(
    on: OnData,
    queries: str = flag("both", "Queries whose uncertainty is measured: text, image or both."),
    bootstrap: Bootstrap = 1000,
    corrupted: int | None = flag(
        None,
        "Number of queries to corrupt and embed again in each way; 0 for none.",
        min=0,
        show_default="200 with --details or --json, else 0",
    ),
    seed: Seed = 0,
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
    from sfumato.reports.console import print_trust, print_trust_summary
    from sfumato.workflows.trust import trust_model

    opened = on.open("measure it on")
    split = opened.split
    check_results(opened)
    path = None
    if corrupted is None:  # The summary says nothing of corruptions, and embedding them takes most of the time.
        corrupted = 200 if details or as_json else 0
    report = trust_model(
        opened.model, opened.data, split, queries=queries, n_resamples=bootstrap, n_corrupted=corrupted, seed=seed
    )
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
