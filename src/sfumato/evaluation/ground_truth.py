"""The ground truth of an evaluation: the ids of images and texts, which of them match, and which metrics are reported.

This module reads id lists and annotations, never images, captions or embeddings. docs/concepts/evaluation.md names
sources and definitions.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.coco import coco_captions, json_kind
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.errors import UserError, expected_columns
from sfumato.files import read_json, read_utf8
from sfumato.ids import first_twice
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import ALL_METRICS, check_metric


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The ground truth of an evaluation: its images, its texts, and their matches.

    Queries without a relevant item are not evaluated. A benchmark with few queries can therefore have a large gallery.

    Attributes:
        name: of the benchmark.
        image_ids: n distinct ids; the images are queries, and the gallery of the texts.
        text_ids: m distinct ids; the texts are queries, and the gallery of the images.
        i2t: image -> true texts, n by m.
        t2i: text -> true images, m by n; need not be the transpose of i2t.
        metrics: metrics to report, named as in :func:`~sfumato.metrics.retrieval.retrieval_metrics`.
        folds: (image positions, text positions) of each fold; the folds are evaluated separately and their metrics
            averaged. Empty for a single evaluation of all items.
        averaged_as: ground truths with the same value are averaged under this name, like the three thresholds of PMRP.
        source: the file or package that it was read from.

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

    def __repr__(self) -> str:
        return f"GroundTruth({self.name!r}, {len(self.image_ids)} images, {len(self.text_ids)} texts)"

    def __post_init__(self) -> None:
        n, m = len(self.image_ids), len(self.text_ids)
        for what, relevance, size in (("i2t", self.i2t, (n, m)), ("t2i", self.t2i, (m, n))):
            if (relevance.n_queries, relevance.n_gallery) != size:
                found = f"{what} is {relevance.n_queries} by {relevance.n_gallery}"
                there = f"there are {n} images and {m} texts; expected {size[0]} by {size[1]}"
                raise ValueError(f"GroundTruth {self.name}: {found}, but {there}")
        for what, ids in (("image", self.image_ids), ("text", self.text_ids)):
            if (twice := first_twice(ids)) is not None:
                found = f"{what} id {twice!r} occurs more than once"
                raise ValueError(f"GroundTruth {self.name}: {found}; give distinct ids")
        for metric in self.metrics:
            check_metric(metric)
        for f, fold in enumerate(self.folds):
            for what, index, count in zip(("image", "text"), fold, (n, m), strict=True):
                if len(np.unique(index)) != len(index) or (len(index) and not (min(index) >= 0 and max(index) < count)):
                    raise ValueError(f"GroundTruth {self.name}: fold {f} needs distinct {what} positions below {count}")

    def with_metrics(self, *metrics: str) -> "GroundTruth":
        """Replace the reported metrics.

        Args:
            metrics: names of metrics.

        Returns:
            The same ground truth that reports these metrics.

        Raises:
            ValueError: a metric is unknown.
        """
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
    """Make a ground truth from ids and the pairs that match, the same in both directions. pairs (image id, text id)."""
    images, texts = tuple(map(str, image_ids)), tuple(map(str, text_ids))
    positions = ({x: i for i, x in enumerate(images)}, {x: i for i, x in enumerate(texts)})
    rows = []
    for number, (image, text) in enumerate(pairs):
        for what, identity, known in zip(("image", "text"), (image, text), positions, strict=True):
            if str(identity) not in known:
                raise ValueError(f"{name}: pair {number} names {what} {identity!r}, which is not among the {what} ids")
        rows.append((positions[0][str(image)], positions[1][str(text)]))
    index = np.array(rows, np.int64).reshape(-1, 2)
    i2t = Relevance.from_pairs(index[:, 0], index[:, 1], n_queries=len(images), n_gallery=len(texts))
    return GroundTruth(name, images, texts, i2t, i2t.transpose(), tuple(metrics), source=source)


def ground_truth_from_data(data: PairData, *, name: str, metrics: Sequence[str] = ALL_METRICS) -> GroundTruth:
    """Make the ground truth of a split of any data set that the package reads."""
    i2t = data.relevance()
    return GroundTruth(name, tuple(data.image_ids), tuple(data.text_ids), i2t, i2t.transpose(), tuple(metrics))


def ids_by_order(own: GroundTruth, benchmark: GroundTruth) -> GroundTruth:
    """The same data with a benchmark's ids: of images by their own ids, or all by order; of an image's texts by order.

    Files of features as SCAN's name no captions. They list them in the order of the annotations.
    """
    if (len(own.image_ids), len(own.text_ids)) != (len(benchmark.image_ids), len(benchmark.text_ids)):
        return own
    place = {identity: i for i, identity in enumerate(benchmark.image_ids)}
    known = [place[identity] for identity in own.image_ids if identity in place]
    of_image = known if len(known) == len(own.image_ids) else list(range(len(own.image_ids))) if not known else None
    if of_image is None or (own.i2t.counts != benchmark.i2t.counts[of_image]).any() or own.t2i.counts.max() > 1:
        return own
    texts = [""] * len(own.text_ids)
    for i, j in enumerate(of_image):
        mine, theirs = (np.sort(t.i2t.indices[slice(*t.i2t.indptr[k : k + 2])]) for t, k in ((own, i), (benchmark, j)))
        for a, b in zip(mine, theirs, strict=True):
            texts[a] = benchmark.text_ids[b]
    return replace(own, image_ids=tuple(benchmark.image_ids[j] for j in of_image), text_ids=tuple(texts))


def in_folds(ground_truth: GroundTruth, n_folds: int = 5, *, name: str) -> GroundTruth:
    """Divide a ground truth into folds of consecutive images, each with the texts of its images."""
    n = len(ground_truth.image_ids)
    if n_folds < 1 or n % n_folds:
        raise ValueError(f"{name}: {n} images cannot be divided into {n_folds} equal folds")
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


def in_folds_of(folded: GroundTruth, truth: GroundTruth, *, name: str, averaged_as: str | None = None) -> GroundTruth:
    """Divide a ground truth into the folds of another one, such as CxC into the folds of COCO 1K.

    A query's relevant items outside of its fold do not count there.
    """
    images = {identity: i for i, identity in enumerate(truth.image_ids)}
    texts = {identity: i for i, identity in enumerate(truth.text_ids)}
    folds = tuple(
        (_places(folded.image_ids, some_images, images), _places(folded.text_ids, some_texts, texts))
        for some_images, some_texts in folded.folds
    )
    return replace(truth, name=name, folds=folds, averaged_as=averaged_as)


def _places(ids: Sequence[str], chosen: np.ndarray, place: Mapping[str, int]) -> np.ndarray:
    """(k,) positions of the chosen ids that have one."""
    return np.array([place[ids[i]] for i in chosen.tolist() if ids[i] in place], np.int64)


def relevance_from_table(match: np.ndarray) -> Relevance:
    """Make a relevance from a dense table. match (n, m)."""
    rows, columns = np.nonzero(match)
    return Relevance(np.searchsorted(rows, np.arange(len(match) + 1)), columns, match.shape[1])


# ---------------------------------------------------------------- files


def read_ground_truth(
    path: str | Path, *, name: str | None = None, metrics: Sequence[str] = ALL_METRICS
) -> GroundTruth:
    """Read a user's ground truth.

    Args:
        path: JSON, either {"images": [ids], "texts": [ids], "pairs": [[image, text], ...]} or {image: [texts], ...}, or
            COCO's own captions, with the numbers of images and annotations as ids; or CSV with the columns image and
            text and one match per row. Without lists of ids, the ids are those of the matches, in the order of the
            file.
        name: of the ground truth; the name of the file if None.
        metrics: metrics to report.

    Returns:
        The ground truth.

    Raises:
        UserError: the file is missing or malformed, repeats an id, or a pair names an unknown id.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv":
        images, texts, pairs = _read_csv(path)
    elif path.suffix.lower() == ".json":
        images, texts, pairs = _read_pairs(path)
    else:
        raise UserError(f"{path}: a ground truth must be a .json or .csv file, got {path.suffix!r}")
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
    loaded = read_json(path, hook=distinct_keys)
    if json_kind(loaded) == "coco":
        return _of_coco(path)
    if not isinstance(loaded, dict):
        expected = "expected an object with images, texts, pairs, or lists"
        raise UserError(f"{path}: found {type(loaded).__name__}; {expected}")
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


def _of_coco(path: Path) -> _Ids:
    problems = Problems()
    files, captions = coco_captions(path, problems)
    if not problems.is_empty:
        raise UserError(f"{path}: some entries cannot be used:\n{problems.summary()}")
    pairs = [(image, text) for text, image, _ in captions]
    return list(files), [text for _, text in pairs], pairs


def _read_csv(path: Path) -> _Ids:
    pairs = []
    try:
        reader = csv.DictReader(io.StringIO(read_utf8(path), newline=""), strict=True)
        if not {"image", "text"} <= set(reader.fieldnames or ()):
            raise UserError(f"{path}:1: {expected_columns(list(reader.fieldnames or ()), ['image', 'text'])}")
        for row in reader:
            if not row["image"] or not row["text"]:
                raise UserError(f"{path}:{reader.line_num}: image or text is empty")
            if None in row:
                raise UserError(f"{path}:{reader.line_num}: more values than columns; quote ids that hold commas")
            pairs.append((row["image"], row["text"]))
    except csv.Error as error:
        raise UserError(f"{path}: not CSV in UTF-8: {error}") from error
    return list(dict.fromkeys(i for i, _ in pairs)), list(dict.fromkeys(t for _, t in pairs)), pairs


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with distinct keys; the standard reader would silently keep the last of equal keys."""
    loaded = dict(pairs)
    if len(loaded) != len(pairs):
        raise ValueError(f"key {first_twice([key for key, _ in pairs])!r} occurs more than once in one object")
    return loaded


def read_lists(path: Path) -> dict[str, list[str]]:
    """Read a JSON file that lists the matches of each query."""
    return _lists_of(path, read_json(path, hook=distinct_keys))


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
