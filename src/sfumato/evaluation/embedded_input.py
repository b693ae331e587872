"""Evaluation of embeddings or ranked lists of any model, read from files, against ground truths."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.feature_tables import read_embeddings, read_ids
from sfumato.distances.distance import Distance
from sfumato.errors import UserError, say
from sfumato.evaluation import benchmark_ground_truths, protocols
from sfumato.evaluation.benchmarks import BenchmarkRanks, Source, figures, rank
from sfumato.evaluation.ground_truth import GroundTruth, read_ground_truth
from sfumato.files import read_json
from sfumato.gaussian import ScalarUncertainty, accumulation_dtype
from sfumato.matching import MATCH_PROBABILITY
from sfumato.metrics.reliability import RecallByUncertainty
from sfumato.metrics.retrieval import Better, ShortListError

BENCHMARKS = ("coco", "flickr30k", "flickr8k", "cub", "emoji")
"""Names of the benchmarks that can be read."""


def read_ground_truths(
    benchmark: str | None = None,
    *,
    ground_truth: Path | None = None,
    annotations: Path | None = None,
    instances: Sequence[Path] = (),
    classes: Path | None = None,
    split: str = "test",
    metrics: Sequence[str] = (),
) -> tuple[GroundTruth, ...]:
    """Read the ground truths of a benchmark, or a user's own.

    Args:
        benchmark: "coco", "flickr30k", "flickr8k", "cub" or "emoji"; None for a user's own.
        ground_truth: a user's own, see :func:`read_ground_truth`.
        annotations: coco: Karpathy's dataset_coco.json for COCO 5K and 1K, or the folder of the id lists of the package
            eccv_caption for CxC, RPC2 and ECCV Caption too; None for the installed package. flickr30k, flickr8k:
            Karpathy's JSON. cub: the folder of captions.
        instances: coco: instances_*.json, to add PMRP.
        classes: cub: the folder of the public lists of classes, or a file of class names.
        split: of the benchmark.
        metrics: metrics to report; those of each ground truth if empty.

    Returns:
        One or several ground truths with distinct names. The ids of COCO are the numbers of images and annotations.

    Raises:
        UserError: both or neither of benchmark and ground_truth were given, an option belongs to another benchmark, or
            a file is missing or malformed.

    Example:
        >>> truth, = read_ground_truths("emoji")
        >>> truth
        GroundTruth('emoji', 1496 images, 4488 texts)
    """
    if (benchmark is None) == (ground_truth is None):
        raise UserError(f"name the ground truth: either --truth FILE or --benchmark NAME ({', '.join(BENCHMARKS)})")
    for option, of, given in (("instances", "coco", instances), ("classes", "cub", classes)):
        if given and benchmark != of:
            raise UserError(f"{option} belongs to the benchmark {of}; leave it out")
    if ground_truth is not None:
        found = [read_ground_truth(ground_truth)]
    elif benchmark == "coco":
        found = _read_coco(annotations, instances, split)
    elif benchmark == "emoji":
        found = [benchmark_ground_truths.emoji(split)]
    elif benchmark in ("flickr30k", "flickr8k", "cub"):
        if annotations is None:
            wanted = "the folder of captions" if benchmark == "cub" else f"dataset_{benchmark}.json"
            raise UserError(f"--benchmark {benchmark} is read from {wanted}; name it with --annotations")
        if benchmark == "cub":
            found = [_read_cub(annotations, classes, split)]
        else:
            found = [benchmark_ground_truths.read_karpathy_ground_truth(annotations, split=split, name=benchmark)]
    else:
        raise UserError(f"unknown benchmark {benchmark!r}; known: {', '.join(BENCHMARKS)}")
    return tuple(one.with_metrics(*metrics) if metrics else one for one in found)


def told_apart(benchmark: str | None, annotations: Sequence[Path]) -> dict[str, Any]:
    """The arguments of :func:`read_ground_truths` for annotations of a benchmark that were named in any order."""
    found: dict[str, Any] = {"annotations": None}
    for path in annotations:
        if benchmark == "coco" and path.name.startswith("instances"):
            found["instances"] = (*found.get("instances", ()), path)
        elif benchmark == "cub" and (path.is_file() or any(path.glob("*classes*.txt"))):
            found["classes"] = path
        elif found["annotations"] is None:
            found["annotations"] = path
        else:
            raise UserError(f"--annotations {found['annotations']} and {path} are of one kind; give one of them")
    return found


def _read_coco(annotations: Path | None, instances: Sequence[Path], split: str) -> list[GroundTruth]:
    if annotations is not None and annotations.is_file():
        by_name = benchmark_ground_truths.read_coco(annotations, split=split)
    elif split not in ("test", "testall"):  # The second name is that of SCAN's features.
        way = f"for --split {split} name Karpathy's file with --annotations dataset_coco.json"
        more = "or --benchmark-split test if the split holds the benchmark's images, as COCO's own val2014 does"
        raise UserError(f"CxC and ECCV Caption are of the test split; {way}, {more}")
    else:
        by_name = benchmark_ground_truths.eccv_caption(annotations)
    if instances:
        by_name |= benchmark_ground_truths.pmrp(instances, by_name["coco_5k"], by_name["coco_1k"])
    return list(by_name.values())


def _read_cub(captions: Path, classes: Path | None, split: str) -> GroundTruth:
    if classes is None:
        lists = "the folder of the public lists (testclasses.txt, trainvalclasses.txt, ...)"
        splits = ", ".join(benchmark_ground_truths.CUB_SPLITS)
        ways = f"{lists}, from which --split chooses ({splits}), or a file with the names of the classes"
        found = "CUB's 200 classes are divided into classes to train on and classes to test on"
        raise UserError(f"{found}; name with a further --annotations {ways}")
    if classes.is_dir():
        return benchmark_ground_truths.cub_split(captions, classes, split)
    if split != "test":
        raise UserError(f"--split {split} of CUB needs the folder of the class lists; {classes} is a file")
    return benchmark_ground_truths.cub_captions(captions, classes=classes)


@dataclass(frozen=True)
class Files:
    """The options of the command line for an evaluation without a model."""

    images: str | None = None
    texts: str | None = None
    image_ids: Path | None = None
    text_ids: Path | None = None
    ranked: Path | None = None  # a file of ranked lists instead, see :func:`measure_lists`
    ground_truth: Path | None = None
    benchmark: str | None = None
    annotations: tuple[Path, ...] = ()  # see :func:`told_apart`
    metrics: str | None = None  # names of metrics with commas between them
    scores: Path | None = None  # a matrix of scores instead, see :func:`measure_scores`
    scores_are: str | None = None  # a name in SCORES_ARE


def read_embedded_set(files: Files, truths: Sequence[GroundTruth]) -> protocols.EmbeddedSet:
    """Read embeddings of any model for these ground truths."""
    sides, ids = [], []
    for what, path, own in (("image", files.images, files.image_ids), ("text", files.texts, files.text_ids)):
        embeddings, found = read_embeddings(path or "", ids=own)
        sides.append(embeddings.numpy())
        ids.append(_ids_of_ground_truths(truths, what, embeddings.n) if found is None else tuple(found))
    if sides[0].d != sides[1].d:
        both = f"{files.images} has {sides[0].d} dimensions, {files.texts} has {sides[1].d}"
        raise ValueError(f"{both}; the numbers must be equal")
    dtype = np.promote_types(*(accumulation_dtype(e.dtype) for e in sides))
    first, second = (e.to(dtype) for e in sides)
    return protocols.EmbeddedSet(first, second, ids[0], ids[1], tuple(truths))


def _ids_of_ground_truths(ground_truths: Sequence[GroundTruth], what: str, n: int | None = None) -> tuple[str, ...]:
    """The ids of one side, which all ground truths must share; n of them if n is given."""
    lists = {one.name: one.image_ids if what == "image" else one.text_ids for one in ground_truths}
    first = next(iter(lists.values()))
    if any(own != first for own in lists.values()):
        raise UserError(f"the ground truths {', '.join(lists)} have different {what}s; give --{what}-ids")
    if n is not None and len(first) != n:
        truth = f"a ground truth ({', '.join(lists)}) of {len(first)} {what}s"
        raise UserError(f"{n} {what} embeddings without ids for {truth}; give --{what}-ids")
    return first


@dataclass(frozen=True, eq=False)
class Measured:
    """The result of an evaluation against several ground truths."""

    score: str  # name of the score used for ranking; "lists" for ranked lists
    n_images: int  # number of images
    n_texts: int  # number of texts
    figures: dict[str, dict[str, Any]]  # of :func:`~sfumato.evaluation.benchmarks.figures`
    ranks: BenchmarkRanks  # the ranks from which the figures were computed
    uncertainty: dict[str, dict[str, Any]] | None = None
    total_variance: dict[str, float] | None = None  # means of "image" and "text"; None for points and lists
    uncertainty_measure: ScalarUncertainty = "total_variance"  # the scalar uncertainty of "uncertainty"
    samples: dict[str, int] | None = None  # see :class:`~sfumato.evaluation.protocols.Evaluation`
    ids: dict[str, str] | None = None  # of a matrix: where the ids of "images" (rows) and "texts" (columns) are from

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "ranks"}
        if self.ids is None:
            del found["ids"]
        return {"truths" if name == "figures" else name: value for name, value in found.items()}


def measure(
    embedded: protocols.EmbeddedSet,
    score: str | Distance = "csd",
    *,
    options: protocols.EvaluationOptions = protocols.EvaluationOptions(),
) -> Measured:
    """Evaluate embeddings."""
    distance = protocols.distance_of_score(score)
    sampled = None if distance is None else options.sampled(distance)
    source = protocols.ranked_by(sampled or score, embedded.images, embedded.texts)
    ranks = rank(source, embedded.image_ids, embedded.text_ids, embedded.ground_truths)
    values, variances = embedded.uncertainty(options.uncertainty), None
    if values is not None:
        sides = {"image": embedded.images, "text": embedded.texts}
        variances = {name: float(side.total_variance.mean()) for name, side in sides.items()}
    return Measured(
        score if isinstance(score, str) else score.name, embedded.images.n, embedded.texts.n, figures(ranks), ranks,
        None if values is None else _recall_by_uncertainty(ranks, values), variances, options.uncertainty,
        None if sampled is None else protocols.samples_of(sampled),
    )  # fmt: skip


def _recall_by_uncertainty(ranks: BenchmarkRanks, values: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, both in ranks.items():
        for direction, of in both.items():
            if "recall@1" in of.ground_truth.metrics:
                ids, single = of.per_query(["recall@1"])
                uncertainty = np.array([values[direction][i] for i in ids])
                found.setdefault(name, {})[direction] = vars(RecallByUncertainty.of(uncertainty, single["recall@1"]))
    return found


def measure_lists(path: Path, files: Files, ground_truths: Sequence[GroundTruth]) -> Measured:
    """Evaluate ranked lists from a JSON file {"i2t": {image: [texts]}, "t2i": {text: [images]}}, best first.

    Metrics that lists of these lengths do not determine are left out with a note. One direction may be missing.
    """
    loaded = read_json(path)
    form = 'expected {"i2t": {image: [texts]}, "t2i": {text: [images]}}'
    if not isinstance(loaded, dict) or not loaded or not {"i2t", "t2i"}.issuperset(loaded):
        found = ", ".join(loaded) if isinstance(loaded, dict) else type(loaded).__name__
        raise UserError(f"{path}: {form}, found {found}")
    for direction, lists in loaded.items():
        if not isinstance(lists, dict) or not all(isinstance(items, list) for items in lists.values()):
            raise UserError(f"{path}: {direction} is not an object of lists; {form}")
    ids = _ids(files, ground_truths)
    return _measured("lists", protocols.Lists(loaded.get("i2t"), loaded.get("t2i")), ids, ground_truths)


def _determined(ranks: BenchmarkRanks) -> BenchmarkRanks:
    """What lists of these lengths determine; a note for each ground truth says what they do not."""
    found: BenchmarkRanks = {}
    for name, both in ranks.items():
        truth, short = next(iter(both.values())).ground_truth, dict[str, ValueError]()
        for metric in truth.metrics:
            try:
                for of in both.values():
                    of.metrics([metric])
            except ValueError as error:
                if not isinstance(error.__cause__, ShortListError):
                    raise
                short[metric] = error
        if kept := [metric for metric in truth.metrics if metric not in short]:
            one = truth.with_metrics(*kept)
            found[name] = {direction: replace(of, ground_truth=one) for direction, of in both.items()}
        if short and (found or len(ranks) > 1):
            say(f"note: {name} is without {', '.join(short)}: {next(iter(short.values()))}")
    if not found:
        raise next(iter(short.values()))
    return found


_BothIds = tuple[tuple[str, ...], tuple[str, ...]]


def _ids(files: Files, ground_truths: Sequence[GroundTruth]) -> _BothIds:
    """The ids of images and texts, from files or as all ground truths have them."""
    images = tuple(read_ids(files.image_ids)) if files.image_ids else _ids_of_ground_truths(ground_truths, "image")
    return images, tuple(read_ids(files.text_ids)) if files.text_ids else _ids_of_ground_truths(ground_truths, "text")


def _measured(score: str, source: Source, ids: _BothIds, ground_truths: Sequence[GroundTruth]) -> Measured:
    """The figures of what is no embedding."""
    ranks = _determined(rank(source, *ids, ground_truths))
    return Measured(score, len(ids[0]), len(ids[1]), figures(ranks), ranks)


def measure_scores(path: Path, files: Files, ground_truths: Sequence[GroundTruth]) -> Measured:
    """Evaluate a matrix of scores, images by texts, which is read from the disk block by block."""
    scores_are = files.scores_are
    if scores_are not in SCORES_ARE:
        given = "nothing" if scores_are is None else repr(scores_are)
        kinds = "similarity (larger is closer) or --scores-are distance (smaller is closer)"
        raise UserError(f"say what the scores of {path} are: --scores-are {kinds}; found {given}")
    try:
        scores = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read {path} as a matrix: {error}; expected a .npy file of images by texts") from error
    if not isinstance(scores, np.ndarray) or scores.ndim != 2 or scores.dtype.kind not in "fiu":
        what = f"shape {scores.shape} and type {scores.dtype}" if isinstance(scores, np.ndarray) else "several arrays"
        raise UserError(f"{path} has {what}; expected a matrix of numbers, images by texts")
    images, texts = ids = _ids(files, ground_truths)
    if scores.shape != (len(images), len(texts)):
        turned = scores.shape == (len(texts), len(images))
        of = [path or "those of the ground truth" for path in (files.image_ids, files.text_ids)]
        there = f"{len(images)} images ({of[0]}) and {len(texts)} texts ({of[1]})"
        found = f"{path} is {scores.shape[0]} by {scores.shape[1]}, but there are {there}"
        way = ". The matrix is texts by images: write it transposed, np.save(FILE, scores.T)" if turned else ""
        raise UserError(f"{found}; expected {len(images)} by {len(texts)}, images by texts{way}")
    check_finite(path, scores)
    measured = _measured(f"{scores_are} matrix", protocols.Scores(scores, SCORES_ARE[scores_are]), ids, ground_truths)
    if (place := _mean_place(measured.ranks)) > _BACKWARDS:
        other = next(kind for kind in SCORES_ARE if kind != scores_are)
        found = f"matches stand at {place:.0%} of the ranking on average, where a random order has 50%"
        say(f"note: {found}: are the scores a {other}? --scores-are {other} ranks the other way round")
    own = {"images": files.image_ids, "texts": files.text_ids}
    return replace(measured, ids={side: str(path or "in the order of the ground truth") for side, path in own.items()})


_BACKWARDS = 0.6
"""Mean place of the matches, from 0 to 1, above which a ranking seems to be the wrong way round."""


def _mean_place(ranks: BenchmarkRanks) -> float:
    """Where the matches stand: 0 is the first place of a ranking, 1 the last one."""
    parts = [part for both in ranks.values() for of in both.values() for part in of.parts if len(part.ranks)]
    return float(np.mean([part.ranks.mean() / max(1, part.relevance.n_gallery - 1) for part in parts]))


SCORES_ARE: dict[str, Better] = {"similarity": "larger", "distance": "smaller"}
"""What a matrix of scores may be, and which of its scores are better."""


def check_finite(path: Path, scores: np.ndarray) -> None:
    """Raise an error for NaN in a matrix; infinities have a rank."""
    rows = max(1, 2**24 // max(scores.shape[1], 1))
    for start in range(0, len(scores) if scores.dtype.kind == "f" else 0, rows):
        if (wrong := np.isnan(scores[start : start + rows])).any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise UserError(f"{path}: the score of image {start + row} and text {column} is NaN; it has no rank")


def _check_files(files: Files, score: str | None) -> None:
    """Check that the files are embeddings, ranked lists or a matrix of scores, with no option of another kind."""
    pair = files.images is not None and files.texts is not None
    kinds = (pair, files.ranked is not None, files.scores is not None)
    ways = "give a model, or --images and --texts, or --ranked, or --scores"
    if sum(kinds) > 1:
        raise UserError(f"{ways}; not several of them")
    if not any(kinds) or (files.images is None) != (files.texts is None):
        raise UserError(f"nothing to evaluate: {ways}")
    if files.scores_are is not None and files.scores is None:
        raise UserError("--scores-are belongs to a matrix of scores; add --scores FILE, or leave it out")
    if not pair and score is not None:
        ranked = files.ranked is not None
        what = "ranked lists are already ranked" if ranked else "a matrix of scores is ranked as it is"
        raise UserError(f"{what}; leave out --score")


def measure_files(files: Files, score: str | None, *, split: str) -> tuple[Measured, protocols.EmbeddedSet | None]:
    """Evaluate embeddings or ranked lists from files.

    Returns (the evaluation, the embeddings or None for ranked lists).
    """
    _check_files(files, score)
    if score == MATCH_PROBABILITY:
        raise UserError(f"--score {score} needs the logits of a model: sfumato evaluate run MODEL --distance {score}")
    metrics = [name.strip() for name in files.metrics.split(",")] if files.metrics else []
    given = {"ground_truth": files.ground_truth, **told_apart(files.benchmark, files.annotations)}
    ground_truths = read_ground_truths(files.benchmark, split=split, metrics=metrics, **given)
    if files.ranked is not None:
        return measure_lists(files.ranked, files, ground_truths), None
    if files.scores is not None:
        return measure_scores(files.scores, files, ground_truths), None
    embedded = read_embedded_set(files, ground_truths)
    return measure(embedded, score or "csd"), embedded
