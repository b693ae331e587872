"""The benchmarks' truths: which images and texts, which of them match in each direction, and which figures are reported.

It reads id lists and annotations, never pictures, captions or embeddings. Sources and definitions: docs/concepts/evaluation.md.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.pairs import PairData
from sfumato.errors import UserError
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import check_metric

RECALLS = ("recall@1", "recall@5", "recall@10")
"""What every benchmark of captions reports."""

ALL_METRICS = (*RECALLS, "r_precision", "map@r", "median_rank", "mean_rank")
"""What is reported where a benchmark does not say."""


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """What an evaluation is measured against.

    Queries without a relevant item are not evaluated, so that a benchmark with fewer queries has the whole gallery all the same.

    Attributes:
        name: of the benchmark.
        image_ids, text_ids: the n images and m texts, distinct; each side is the other's gallery.
        i2t: image -> true texts, (n by m).
        t2i: text -> true images, (m by n); need not be the other way round of i2t.
        metrics: those to report, in the names of ``retrieval_metrics``.
        folds: (image positions, text positions) of each part that is evaluated by itself, the figures averaged; none is the whole.
        averaged_as: truths that share this name are averaged under it, as PMRP's three thresholds are.
        source: where it came from.

    Raises:
        ValueError: sizes do not fit, an id occurs twice, a metric is unknown, or a fold points outside.
    """

    name: str
    image_ids: tuple[str, ...]
    text_ids: tuple[str, ...]
    i2t: Relevance
    t2i: Relevance
    metrics: tuple[str, ...] = ALL_METRICS
    folds: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    averaged_as: str | None = None
    source: str = ""

    def __post_init__(self) -> None:
        n, m = len(self.image_ids), len(self.text_ids)
        for what, relevance, size in (("i2t", self.i2t, (n, m)), ("t2i", self.t2i, (m, n))):
            if (relevance.n_queries, relevance.n_gallery) != size:
                raise ValueError(
                    f"GroundTruth {self.name}: {what} is {relevance.n_queries} by {relevance.n_gallery}, but there are"
                    f" {n} images and {m} texts; expected {size[0]} by {size[1]}"
                )
        for what, ids in (("image", self.image_ids), ("text", self.text_ids)):
            if (twice := first_twice(ids)) is not None:
                raise ValueError(
                    f"GroundTruth {self.name}: {what} id {twice!r} occurs more than once; ids must be distinct"
                )
        for metric in self.metrics:
            check_metric(metric)
        for f, fold in enumerate(self.folds):
            for what, index, count in zip(("image", "text"), fold, (n, m), strict=True):
                if len(np.unique(index)) != len(index) or (len(index) and not (min(index) >= 0 and max(index) < count)):
                    raise ValueError(
                        f"GroundTruth {self.name}: fold {f} needs distinct {what} positions in 0..{count - 1}"
                    )

    def with_metrics(self, *metrics: str) -> "GroundTruth":
        """The same truth, reporting these metrics."""
        return replace(self, metrics=metrics)


def ground_truth_from_pairs(
    name: str,
    image_ids: Sequence[str | int],
    text_ids: Sequence[str | int],
    pairs: Iterable[tuple[str | int, str | int]],
    *,
    metrics: Sequence[str] = ALL_METRICS,
    source: str = "",
) -> GroundTruth:
    """A truth from ids and the pairs that match, the same in both directions.

    Args:
        name: of the truth.
        image_ids, text_ids: distinct; numbers are taken as their decimal strings.
        pairs: (image id, text id) of each match.
        metrics: those to report.
        source: where it came from.

    Raises:
        ValueError: a pair names an unknown id, or an id occurs twice.

    Example:
        >>> truth = ground_truth_from_pairs("mine", ["a", "b"], [1, 2, 3], [("a", 1), ("a", 2), ("b", 3)])
        >>> truth.i2t.counts
        array([2, 1])
    """
    images, texts = tuple(map(str, image_ids)), tuple(map(str, text_ids))
    places = ({x: i for i, x in enumerate(images)}, {x: i for i, x in enumerate(texts)})
    rows = []
    for number, (image, text) in enumerate(pairs):
        for what, identity, place in zip(("image", "text"), (image, text), places, strict=True):
            if str(identity) not in place:
                raise ValueError(f"{name}: pair {number} names {what} {identity!r}, which is not among the {what} ids")
        rows.append((places[0][str(image)], places[1][str(text)]))
    index = np.array(rows, np.int64).reshape(-1, 2)
    i2t = Relevance.from_pairs(index[:, 0], index[:, 1], n_queries=len(images), n_gallery=len(texts))
    return GroundTruth(name, images, texts, i2t, i2t.transpose(), tuple(metrics), source=source)


def ground_truth_from_data(data: PairData, *, name: str, metrics: Sequence[str] = ALL_METRICS) -> GroundTruth:
    """The truth of a split of any data set that the package reads."""
    i2t = data.relevance()
    return GroundTruth(name, tuple(data.image_ids), tuple(data.text_ids), i2t, i2t.transpose(), tuple(metrics))


def in_folds(ground_truth: GroundTruth, n_folds: int = 5, *, name: str) -> GroundTruth:
    """The same truth in equal parts of consecutive images, each with the texts of its images.

    Args:
        truth: whose texts each belong to the images of one part.
        n_folds: number of parts.
        name: of the result.

    Raises:
        ValueError: the images do not make equal parts, or a text matches images of two parts or of none.
    """
    n = len(ground_truth.image_ids)
    if n_folds < 1 or n % n_folds:
        raise ValueError(f"{name}: {n} images do not make {n_folds} equal folds")
    first, last = np.full(len(ground_truth.text_ids), n_folds), np.full(len(ground_truth.text_ids), -1)
    fold = ground_truth.t2i.indices // max(n // n_folds, 1)
    np.minimum.at(first, ground_truth.t2i.query_of_item, fold)
    np.maximum.at(last, ground_truth.t2i.query_of_item, fold)
    if (first != last).any():
        text = ground_truth.text_ids[int(np.flatnonzero(first != last)[0])]
        raise ValueError(f"{name}: text {text!r} does not belong to the images of exactly one fold")
    size = n // n_folds
    folds = tuple((np.arange(f * size, (f + 1) * size), np.flatnonzero(first == f)) for f in range(n_folds))
    return replace(ground_truth, name=name, folds=folds)


# ---------------------------------------------------------------- a user's own


def read_ground_truth(
    path: str | Path, *, name: str | None = None, metrics: Sequence[str] = ALL_METRICS
) -> GroundTruth:
    """A truth of one's own.

    Args:
        path: JSON, either {"images": [ids], "texts": [ids], "pairs": [[image, text], ...]} or {image: [texts], ...}; or CSV with
            the columns image and text, one match a row. Where no lists of ids are given, they are those of the matches in the
            order in which they are met.
        name: of the truth; the file's name if None.
        metrics: those to report.

    Raises:
        UserError: the file is missing or malformed, repeats an id, or a pair names an unknown one; with line or number.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        images, texts, pairs = _read_csv(path)
    elif path.suffix.lower() == ".json":
        images, texts, pairs = _read_pairs(path)
    else:
        raise UserError(f"{path}: unknown kind of truth {path.suffix!r}; expected .json or .csv")
    for what, ids in (("image", images), ("text", texts)):
        if (twice := first_twice(ids)) is not None:
            raise UserError(f"{path}: {what} {twice!r} is listed more than once")
    if not pairs:
        raise UserError(f"{path}: no image matches any text")
    try:
        return ground_truth_from_pairs(name or path.stem, images, texts, pairs, metrics=metrics, source=str(path))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


_Ids = tuple[list[str], list[str], list[tuple[str, str]]]


def _read_pairs(path: Path) -> _Ids:
    loaded = read_json(path)
    if not isinstance(loaded, dict):
        raise UserError(
            f"{path}: found {type(loaded).__name__}; expected an object of images, texts and pairs, or of lists"
        )
    if set(loaded) != {"images", "texts", "pairs"}:
        listed = _lists_of(path, loaded)
        pairs = [(image, text) for image, texts in listed.items() for text in texts]
        return list(listed), list(dict.fromkeys(text for _, text in pairs)), pairs
    ids = {}
    for what in ("images", "texts"):
        if not isinstance(loaded[what], list) or not all(_is_id(x) for x in loaded[what]):
            raise UserError(f"{path}: {what} must be a list of strings or whole numbers")
        ids[what] = [str(x) for x in loaded[what]]
    if not isinstance(loaded["pairs"], list):
        raise UserError(f"{path}: pairs must be a list of [image, text]")
    for number, pair in enumerate(loaded["pairs"]):
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_id, pair)):
            raise UserError(f"{path}:pairs[{number}]: found {pair!r}; expected [image, text]")
    return ids["images"], ids["texts"], [(str(image), str(text)) for image, text in loaded["pairs"]]


def _read_csv(path: Path) -> _Ids:
    pairs = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if not {"image", "text"} <= set(reader.fieldnames or ()):
                found = ", ".join(reader.fieldnames or ()) or "(none)"
                raise UserError(f"{path}:1: the columns are {found}; expected image and text among them")
            for row in reader:
                if not row["image"] or not row["text"]:
                    raise UserError(f"{path}:{reader.line_num}: image or text is empty")
                if None in row:
                    raise UserError(f"{path}:{reader.line_num}: more values than columns; quote ids that hold commas")
                pairs.append((row["image"], row["text"]))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not CSV in UTF-8: {error}") from error
    return list(dict.fromkeys(i for i, _ in pairs)), list(dict.fromkeys(t for _, t in pairs)), pairs


def read_json(path: Path) -> Any:
    """The content of a JSON file, after checks that no key stands twice."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_distinct)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not usable JSON: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are distinct: the standard reader keeps the last of equal ones in silence."""
    loaded = dict(pairs)
    if len(loaded) != len(pairs):
        raise ValueError(f"key {first_twice([key for key, _ in pairs])!r} occurs more than once in one object")
    return loaded


def read_lists(path: Path) -> dict[str, list[str]]:
    """A JSON file that lists, for each query id, the ids of its matches."""
    return _lists_of(path, read_json(path))


def _lists_of(path: Path, loaded: Any) -> dict[str, list[str]]:
    """{id: [ids]} with all ids as strings."""
    if not isinstance(loaded, Mapping):
        raise UserError(f"{path}: found {type(loaded).__name__}; expected an object of id: [ids]")
    for key, items in loaded.items():
        if not isinstance(items, list) or not all(map(_is_id, items)):
            raise UserError(f"{path}: {key!r} holds {str(items)[:60]}; expected a list of strings or whole numbers")
    return {key: [str(item) for item in items] for key, items in loaded.items()}


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def first_twice(ids: Sequence[str]) -> str | None:
    """The first id that stands more than once; None if all differ."""
    if len(set(ids)) == len(ids):
        return None
    return next(_repeated(ids))


def _repeated(ids: Iterable[str]) -> Iterator[str]:
    seen = set()
    for identity in ids:
        if identity in seen:
            yield identity
        seen.add(identity)
