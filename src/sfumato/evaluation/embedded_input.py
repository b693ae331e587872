"""Evaluation of what is already embedded or ranked, by any model: embeddings with their ids, or ranked lists, against truths.

What the command `evaluate` does beyond a table of figures is here too: strategies side by side, results of single queries, comparison
with another run, published rows.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from sfumato.data.embedding_files import read_embeddings, read_ids
from sfumato.errors import UserError
from sfumato.evaluation.benchmark_ground_truths import cub_captions, emoji, flickr8k, flickr30k
from sfumato.evaluation.benchmarks import benchmark_metrics, rank_ground_truths_by_lists
from sfumato.evaluation.coco_ground_truths import coco_image_id, eccv_caption, pmrp, read_coco
from sfumato.evaluation.compare import (
    Difference,
    PerQuery,
    check_per_query_path,
    compare_per_query,
    per_query_table,
    write_per_query,
)
from sfumato.evaluation.ground_truth import GroundTruth, read_ground_truth
from sfumato.evaluation.published import PublishedRow, common_figures, published_rows
from sfumato.evaluation.rank_plan import BenchmarkRanks
from sfumato.evaluation.strategies import StrategyResult, choose_strategies, evaluate_strategies, rank_ground_truths_by
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype

BENCHMARKS = ("coco", "flickr30k", "flickr8k", "cub", "emoji")
"""Benchmarks that have a name."""


@dataclass(frozen=True, eq=False)
class EmbeddedSet:
    """Embedded images and texts, and what they are measured against.

    Attributes:
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        image_ids, text_ids: n and m distinct ids.
        truths: with distinct names.
        text_kinds: (m,) kinds of the texts, if they have any.
    """

    images: GaussianEmbedding
    texts: GaussianEmbedding
    image_ids: tuple[str, ...]
    text_ids: tuple[str, ...]
    ground_truths: tuple[GroundTruth, ...]
    text_kinds: tuple[str, ...] | None = None

    def to(self, device: torch.device) -> "EmbeddedSet":
        """The same on another device."""
        return replace(self, images=self.images.to(device), texts=self.texts.to(device))

    def uncertainty(self) -> dict[str, dict[str, float]] | None:
        """Total variances as :func:`~sfumato.evaluation.compare.per_query_table` takes them; None for points."""
        sides = {"i2t": (self.image_ids, self.images), "t2i": (self.text_ids, self.texts)}
        found = {name: dict(zip(ids, e.total_variance.tolist(), strict=True)) for name, (ids, e) in sides.items()}
        if not any(value for side in found.values() for value in side.values()):
            return None
        return {name: {coco_image_id(i): v for i, v in side.items()} | side for name, side in found.items()}


def read_ground_truths(
    benchmark: str | None = None,
    *,
    ground_truth: Path | None = None,
    annotations: Path | None = None,
    instances: Sequence[Path] = (),
    split: str = "test",
    metrics: Sequence[str] = (),
) -> tuple[GroundTruth, ...]:
    """Truths by the name of a benchmark, or from a file of one's own.

    Args:
        benchmark: one of BENCHMARKS.
        truth: a file of :func:`~sfumato.evaluation.ground_truth.read_ground_truth` instead.
        annotations: what the benchmark is read from. coco: dataset_coco.json, or a folder with the files of eccv_caption, by default
            those of the installed package, which add CxC and ECCV Caption; flickr30k and flickr8k: their dataset_*.json; cub: the
            folder of captions.
        instances: coco: instances_*.json, which add PMRP.
        split: of a dataset_*.json, or of emoji.
        metrics: to report instead of those of each truth.

    Raises:
        UserError: neither or both are given, the name is unknown, annotations are missing, or as the readers.
        ValueError: a metric is unknown.
    """
    if (benchmark is None) == (ground_truth is None):
        raise UserError(f"say what is true: either --truth FILE or --benchmark NAME ({', '.join(BENCHMARKS)})")
    if ground_truth is not None:
        found = [read_ground_truth(ground_truth)]
    elif benchmark == "coco":
        from_file = annotations is not None and annotations.is_file()
        by_name = read_coco(annotations, split=split) if annotations and from_file else eccv_caption(annotations)
        if instances:
            by_name |= pmrp(list(instances), by_name["coco_5k"])
        found = list(by_name.values())
    elif benchmark == "emoji":
        found = [emoji(split)]
    elif benchmark in ("flickr30k", "flickr8k", "cub"):
        if annotations is None:
            wanted = "the folder of captions" if benchmark == "cub" else f"dataset_{benchmark}.json"
            raise UserError(f"--benchmark {benchmark} is read from {wanted}; name it with --annotations")
        found = [
            cub_captions(annotations) if benchmark == "cub"
            else (flickr30k if benchmark == "flickr30k" else flickr8k)(annotations, split=split)
        ]  # fmt: skip
    else:
        raise UserError(f"unknown benchmark {benchmark!r}; known: {', '.join(BENCHMARKS)}")
    if instances and benchmark != "coco":
        raise UserError("instances are COCO's; give them with --benchmark coco")
    return tuple(one.with_metrics(*metrics) if metrics else one for one in found)


def read_embedded_set(
    images: str,
    texts: str,
    ground_truths: Sequence[GroundTruth],
    *,
    image_ids: Path | None = None,
    text_ids: Path | None = None,
    image_log_var: Path | None = None,
    text_log_var: Path | None = None,
) -> EmbeddedSet:
    """Read embeddings of any model for these truths.

    Args:
        images, texts: files of :func:`~sfumato.data.embedding_files.read_embeddings`.
        truths: what they are measured against.
        image_ids, text_ids: files of ids; without them, and where the files bring none, rows are in the order of the truths' ids.
        image_log_var, text_log_var: files of log variances.

    Raises:
        UserError: there are no ids, and as many rows as the truths have ids there are not.
        ValueError: as read_embeddings, or d differs.
    """
    sides, ids = [], []
    for what, path, own, log_var in (
        ("image", images, image_ids, image_log_var),
        ("text", texts, text_ids, text_log_var),
    ):
        embeddings, found = read_embeddings(path, ids=own, log_var=log_var)
        sides.append(embeddings)
        ids.append(_ids_of_ground_truths(ground_truths, what, embeddings.n) if found is None else tuple(found))
    if sides[0].d != sides[1].d:
        raise ValueError(f"{images} has {sides[0].d} dimensions, {texts} has {sides[1].d}; they must have as many")
    dtype = torch.promote_types(*(accumulation_dtype(e.dtype) for e in sides))
    first, second = (e if e.dtype == dtype else e.to(dtype) for e in sides)
    return EmbeddedSet(first, second, ids[0], ids[1], tuple(ground_truths))


def _ids_of_ground_truths(ground_truths: Sequence[GroundTruth], what: str, n: int | None = None) -> tuple[str, ...]:
    """The ids of one side where all truths have the same, n of them if n is given."""
    lists = {
        ground_truth.name: ground_truth.image_ids if what == "image" else ground_truth.text_ids
        for ground_truth in ground_truths
    }
    first = next(iter(lists.values()))
    if any(own != first for own in lists.values()):
        raise UserError(f"the truths {', '.join(lists)} have different {what}s; give --{what}-ids")
    if n is not None and len(first) != n:
        raise UserError(
            f"{n} {what} embeddings without ids for a truth ({', '.join(lists)}) of {len(first)} {what}s; give --{what}-ids"
        )
    return first


@dataclass(frozen=True, eq=False)
class Measured:
    """Figures of all truths, and what belongs to them.

    Attributes:
        score: what was ranked by; "lists" for ranked lists.
        n_images, n_texts: sizes.
        figures: of :func:`~sfumato.evaluation.benchmarks.evaluate_benchmarks`.
        ranks: where they come from.
    """

    score: str
    n_images: int
    n_texts: int
    figures: dict[str, dict[str, Any]]
    ranks: BenchmarkRanks

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and dictionaries."""
        return {"score": self.score, "n_images": self.n_images, "n_texts": self.n_texts, "truths": self.figures}


def measure(embedded: EmbeddedSet, score: str = "csd") -> Measured:
    """Evaluate embeddings by any of SCORES."""
    ranks = rank_ground_truths_by(
        score, embedded.images, embedded.texts, embedded.image_ids, embedded.text_ids, embedded.ground_truths
    )
    return Measured(score, embedded.images.n, embedded.texts.n, benchmark_metrics(ranks), ranks)


def measure_lists(
    path: Path, ground_truths: Sequence[GroundTruth], *, image_ids: Path | None = None, text_ids: Path | None = None
) -> Measured:
    """Evaluate ranked lists from a JSON file {"i2t": {image: [texts]}, "t2i": {text: [images]}}, best first.

    Args:
        path: the file; lists may be cut, as long as they determine the metrics that the truths report.
        truths: what they are measured against.
        image_ids, text_ids: files of what was searched, if it was not exactly what the truths have.

    Raises:
        UserError: the file is missing or of another form.
        ValueError: a list is missing, too short, or holds an unknown or repeated item.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not usable JSON: {error}") from error
    form = 'expected {"i2t": {image: [texts]}, "t2i": {text: [images]}}'
    if not isinstance(loaded, dict) or set(loaded) != {"i2t", "t2i"}:
        raise UserError(
            f"{path}: {form}, found {', '.join(loaded) if isinstance(loaded, dict) else type(loaded).__name__}"
        )
    for direction, lists in loaded.items():
        if not isinstance(lists, dict) or not all(isinstance(items, list) for items in lists.values()):
            raise UserError(f"{path}: {direction} is no object of lists; {form}")
    images = _ids_of_ground_truths(ground_truths, "image") if image_ids is None else tuple(read_ids(image_ids))
    texts = _ids_of_ground_truths(ground_truths, "text") if text_ids is None else tuple(read_ids(text_ids))
    ranks = rank_ground_truths_by_lists(loaded["i2t"], loaded["t2i"], images, texts, ground_truths)
    return Measured("lists", len(images), len(texts), benchmark_metrics(ranks), ranks)


@dataclass(frozen=True)
class Files:
    """What to evaluate without a model, as the command line names it.

    Attributes:
        images, texts, image_ids, text_ids, image_log_var, text_log_var: see :func:`read_embedded_set`.
        ranked: a file of ranked lists instead, see :func:`measure_lists`.
        truth, benchmark, annotations, instances: see :func:`read_ground_truths`.
        metrics: names with commas between them.
    """

    images: str | None = None
    texts: str | None = None
    image_ids: Path | None = None
    text_ids: Path | None = None
    image_log_var: Path | None = None
    text_log_var: Path | None = None
    ranked: Path | None = None
    ground_truth: Path | None = None
    benchmark: str | None = None
    annotations: Path | None = None
    instances: tuple[Path, ...] = ()
    metrics: str | None = None

    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name)]


def measure_files(
    files: Files, score: str | None = None, *, split: str = "test", device: torch.device | None = None
) -> tuple[Measured, EmbeddedSet | None]:
    """Evaluate embeddings or ranked lists from files.

    Args:
        files: which.
        score: one of SCORES to rank embeddings by, csd if None.
        split: of a benchmark that has several.
        device: where to compute; where the embeddings are if None.

    Returns:
        (the evaluation, the embeddings; None of ranked lists).

    Raises:
        UserError: it is not said what to evaluate, or options do not go together; and as the readers.
    """
    pair = files.images is not None and files.texts is not None
    if (files.ranked is not None) == pair or (files.images is None) != (files.texts is None):
        raise UserError("nothing to evaluate: give a model, or --images and --texts, or --ranked")
    metrics = [name.strip() for name in files.metrics.split(",")] if files.metrics else []
    ground_truths = read_ground_truths(
        files.benchmark, ground_truth=files.ground_truth, annotations=files.annotations, instances=files.instances, split=split,
        metrics=metrics,
    )  # fmt: skip
    if files.ranked is not None:
        if score is not None or files.image_log_var or files.text_log_var:
            raise UserError("ranked lists are ranked already: leave out --score and log variances")
        return measure_lists(files.ranked, ground_truths, image_ids=files.image_ids, text_ids=files.text_ids), None
    embedded = read_embedded_set(
        files.images or "", files.texts or "", ground_truths, image_ids=files.image_ids, text_ids=files.text_ids,
        image_log_var=files.image_log_var, text_log_var=files.text_log_var,
    )  # fmt: skip
    if device is not None:
        embedded = embedded.to(device)
    return measure(embedded, score or "csd"), embedded


@dataclass(frozen=True)
class More:
    """What is wanted beside the figures.

    Attributes:
        strategies: "all", or names of STRATEGIES with commas between them.
        engine, candidates: of the strategies with FAISS.
        per_query: file for the results of single queries.
        compared_with: name of the other run; None for no comparison.
        published: whether to bring the rows of published tables.
        n_resamples: of the comparison.

    Raises:
        ValueError: a strategy is unknown.
        UserError: single queries are wanted of several strategies at once, or their file has an unknown ending.
    """

    strategies: str | None = None
    engine: str = "ivf"
    candidates: int = 100
    per_query: Path | None = None
    compared_with: str | None = None
    published: bool = False
    n_resamples: int = 2000

    def __post_init__(self) -> None:
        chosen = choose_strategies(self.strategies) if self.strategies is not None else []
        if len(chosen) > 1 and (self.per_query or self.compared_with):
            raise UserError("single queries are written and compared of one ranking; name one strategy, or none")
        if self.per_query:
            check_per_query_path(self.per_query)
            if not self.per_query.parent.is_dir():
                raise UserError(f"cannot write {self.per_query}: the folder {self.per_query.parent} does not exist")

    @property
    def anything(self) -> bool:
        """Whether anything at all is wanted."""
        return bool(self.strategies is not None or self.per_query or self.compared_with or self.published)


@dataclass(frozen=True, eq=False)
class MoreResults:
    """What :class:`More` asked for.

    Attributes:
        strategies: by name.
        per_query: the file that was written.
        compared_with: name of the other run.
        differences: from the other run to this one, of the metrics that each truth reports; positive is better than the other.
        published: rows of published tables that have figures in common with this evaluation.
        own: this evaluation's figures in the form of the published ones.
    """

    strategies: dict[str, StrategyResult]
    per_query: Path | None
    compared_with: str | None
    differences: list[Difference]
    published: list[PublishedRow]
    own: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values; only what was asked for."""
        result: dict[str, Any] = {}
        if self.strategies:
            result["strategies"] = {
                name: {"label": one.strategy.label, "seconds": one.seconds, "truths": one.figures}
                for name, one in self.strategies.items()
            }
        if self.per_query:
            result["per_query"] = str(self.per_query)
        if self.compared_with:
            result["comparison"] = {"with": self.compared_with, "differences": [d.to_json() for d in self.differences]}
        if self.published:
            result["published"] = {"own": self.own, "rows": [asdict(row) for row in self.published]}
        return result


def more_results(
    measured: Measured, embedded: EmbeddedSet | None, more: More, other: PerQuery | None = None
) -> MoreResults:
    """Do what is wanted beside the figures.

    Args:
        measured: the evaluation.
        embedded: what was evaluated; None for ranked lists, which have no strategies.
        more: what is wanted.
        other: single queries of the run to compare with.

    Raises:
        UserError: strategies of ranked lists, or no published table has these figures.
        ValueError: the other run has different queries, and as the functions that do it.
    """
    strategies: dict[str, StrategyResult] = {}
    ranks, figures = measured.ranks, measured.figures
    if more.strategies is not None:
        if embedded is None:
            raise UserError("ranked lists are ranked already; strategies need embeddings")
        strategies = evaluate_strategies(
            embedded.images, embedded.texts, embedded.image_ids, embedded.text_ids, embedded.ground_truths,
            choose_strategies(more.strategies), engine=more.engine, candidates=more.candidates,
        )  # fmt: skip
        if len(strategies) == 1:
            (only,) = strategies.values()
            ranks, figures = only.ranks, only.figures
    differences: list[Difference] = []
    if more.per_query or other is not None:
        table = per_query_table(ranks, None if embedded is None else embedded.uncertainty())
        if more.per_query:
            write_per_query(more.per_query, table)
        if other is not None:
            differences = [
                d
                for d in compare_per_query(other, table, n_resamples=more.n_resamples)
                if d.metric in next(iter(ranks[d.truth].values())).ground_truth.metrics
            ]
    rows: list[PublishedRow] = []
    own: dict[str, float] = {}
    if more.published:
        own = common_figures(figures)
        tables = ("C.7",) if strategies else ("1",)
        rows = [row for table in tables for row in published_rows(table=table) if own.keys() & row.figures.keys()]
        if not rows:
            raise UserError(
                f"no published table has figures of {', '.join(figures)}; there are those of --benchmark coco, with CxC and ECCV Caption"
            )
    return MoreResults(strategies, more.per_query, more.compared_with, differences, rows, own)
