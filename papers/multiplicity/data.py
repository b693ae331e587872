"""PQPP (CVPR 2025): people's relevant COCO images of captions, and how well CLIP and BLIP-2 search by them."""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic

from sfumato.errors import UserError
from sfumato.evaluation.benchmark_ground_truths import eccv_caption
from sfumato.metrics.bootstrap import Interval, Statistic, bootstrap, spearman_statistic
from sfumato.models.embed import read_lines

MEASURED = ("clip_p10", "blip2_p10", "clip_rr", "blip2_rr")
"""Precision at 10 and reciprocal rank of two models, as the files name them."""

LABELS = ("log_relevant", "p10_mean", "rr_mean", *MEASURED)
"""What is predicted: the log of the number of relevant images, means over both models, and MEASURED."""

PUBLISHED: dict[str, dict[str, tuple[float, str]]] = {
    "p10_mean": {"pearson": (0.508, "fine-tuned BERT"), "kendall": (0.330, "fine-tuned CLIP")},
    "clip_p10": {"pearson": (0.459, ""), "kendall": (0.299, "")},
    "blip2_p10": {"pearson": (0.499, ""), "kendall": (0.340, "")},
    "rr_mean": {"pearson": (0.302, "correlation CNN"), "kendall": (0.212, "correlation CNN")},
}
"""The best published correlations, on the test split, with the predictor's name where it is known."""

SOURCE = "Poesina et al., PQPP, CVPR 2025, arXiv 2406.04746: the best of its predictors, on its test split"


@dataclass(frozen=True, eq=False)
class Captions:
    """Captions with labels."""

    rows: list[dict[str, Any]]  # id, image_id and caption of each
    labels: dict[str, np.ndarray]  # (n,) of those of LABELS that the file has
    relevant: list[list[int]] | None = None  # ids of the relevant images of each

    @property
    def texts(self) -> list[str]:
        """The captions."""
        return [row["caption"] for row in self.rows]

    @property
    def log_relevant(self) -> np.ndarray:
        """(n,) log numbers of relevant images."""
        self.check_relevant()
        return self.labels["log_relevant"]

    def check_relevant(self) -> None:
        """Refuse captions whose relevant images are not known."""
        if "log_relevant" not in self.labels:
            raise UserError("the captions have no relevant images: PQPP's csv files leave them out")

    @classmethod
    def joined(cls, *parts: "Captions") -> "Captions":
        """Several splits as one, with the labels that all have."""
        names = [name for name in LABELS if all(name in part.labels for part in parts)]
        labels = {name: np.concatenate([part.labels[name] for part in parts]) for name in names}
        return cls([row for part in parts for row in part.rows], labels)


def read_split(folder: Path, split: str) -> Captions:
    """Read train or validation of a folder: SPLIT.jsonl, or SPLIT.csv as it was published."""
    found = [path for ending in ("jsonl", "csv") if (path := folder / f"{split}.{ending}").is_file()]
    if not found:
        raise UserError(f"{folder} has neither {split}.jsonl nor {split}.csv; give the folder of PQPP's files")
    captions = read_captions(found[0])
    if not captions.labels:
        raise UserError(f"{found[0]} has no labels; expected relevant, or clip_p10, blip2_p10, clip_rr and blip2_rr")
    return captions


_Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]


class _Row(pydantic.BaseModel):
    """A line of a file; the published csv has other names, and no relevant images."""

    id: int | str | None = None
    image_id: int | str | None = None
    caption: str = pydantic.Field(pattern=r"\S", validation_alias=pydantic.AliasChoices("caption", "best_caption"))
    relevant: list[int] | None = None
    clip_p10: _Fraction | None = pydantic.Field(None, validation_alias=pydantic.AliasChoices("clip_p10", "clip_pk"))
    blip2_p10: _Fraction | None = pydantic.Field(None, validation_alias=pydantic.AliasChoices("blip2_p10", "blip2_pk"))
    clip_rr: _Fraction | None = None
    blip2_rr: _Fraction | None = None


def read_captions(path: Path) -> Captions:
    """Read a file of captions, with or without labels."""
    found = [*_rows(path)]
    if not found:
        raise UserError(f"{path} holds no captions")
    columns = {name: [getattr(row, name) for row in found] for name in (*MEASURED, "relevant")}
    columns = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    if lacking := [name for name, column in columns.items() if None in column]:
        n = len(found) - columns[lacking[0]].count(None)
        raise UserError(f"{path}: only {n} of {len(found)} captions have {lacking[0]}")
    labels = {name: np.array(columns[name]) for name in MEASURED if name in columns}
    if "relevant" in columns:
        labels["log_relevant"] = np.log([max(1, len(own)) for own in columns["relevant"]])
    for kind in ("p10", "rr"):
        if {f"clip_{kind}", f"blip2_{kind}"} <= labels.keys():
            labels[f"{kind}_mean"] = (labels[f"clip_{kind}"] + labels[f"blip2_{kind}"]) / 2
    rows = [{"id": row.id, "image_id": row.image_id, "caption": row.caption} for row in found]
    return Captions(rows, {name: labels[name] for name in LABELS if name in labels}, columns.get("relevant"))


def read_texts(path: Path) -> list[str]:
    """The captions of a JSONL or csv file, or of one with a caption a line."""
    return read_captions(path).texts if path.suffix in (".jsonl", ".csv") else read_lines(path)[0]


def _rows(path: Path) -> Iterator[_Row]:
    """The lines of a file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if path.suffix == ".csv":
                yield from (_row(row, f"{path}:{reader.line_num}") for row in reader)
            else:
                yield from (_row(line, f"{path}:{k}") for k, line in enumerate(file, 1) if line.strip())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _row(line: str | dict[str, Any], where: str) -> _Row:
    if isinstance(line, dict) and None in line:
        raise UserError(f"{where}: more values than columns; quote a caption that has a comma")
    try:
        return _Row.model_validate_json(line) if isinstance(line, str) else _Row.model_validate(line)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"])) or "the line"
        raise UserError(f"{where}: {what}: {first['msg']}") from error


# ---------------------------------------------------------------- correlations
def pearson_statistic(x: np.ndarray, y: np.ndarray) -> Statistic:
    """Pearson correlation as a statistic for the bootstrap. x, y (n,)."""
    x, y = x - x.mean(), y - y.mean()
    products = np.stack([x, y, x * x, y * y, x * y], axis=1)

    def statistic(counts: np.ndarray) -> np.ndarray:
        a, b, aa, bb, ab = (counts @ products / counts.sum(1, keepdims=True)).T
        spread = np.maximum(aa - a * a, 0) * np.maximum(bb - b * b, 0)
        return np.divide(ab - a * b, np.sqrt(spread), out=np.full(len(spread), np.nan), where=spread > 1e-18)

    return statistic


def kendall_statistic(x: np.ndarray, y: np.ndarray) -> Statistic:
    """Kendall's tau-b as a statistic for the bootstrap. x, y (n,); it takes three arrays of n * n."""
    a, b = (np.sign(values[:, None] - values).astype(np.float32) for values in (x, y))
    signs = a * b, a * a, b * b

    def statistic(counts: np.ndarray) -> np.ndarray:
        # Sums of whole numbers, so float32 is exact up to 2^24 captions.
        weights = counts.astype(np.float32)
        both, own, other = (((weights @ sign).astype(float) * counts).sum(1) for sign in signs)
        return np.divide(both, np.sqrt(own * other), out=np.full(len(both), np.nan), where=own * other > 0)

    return statistic


CORRELATIONS: Mapping[str, Callable[[np.ndarray, np.ndarray], Statistic]] = {
    "pearson": pearson_statistic, "kendall": kendall_statistic, "spearman": spearman_statistic,
}  # fmt: skip


def correlations(
    predicted: np.ndarray, label: np.ndarray, *, n_resamples: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """The correlations of (n,) predictions with a label, with intervals over captions; None for a constant."""
    statistics = {name: make(predicted, label) for name, make in CORRELATIONS.items()}
    return bootstrap(statistics, len(label), n_resamples=n_resamples, seed=seed)


def agreement(
    captions: Captions, folder: Path, *, n_resamples: int = 1000, seed: int = 0
) -> dict[str, tuple[int, Interval]]:
    """Number of captions that two of PQPP, CxC and ECCV Caption have, and Spearman of their numbers of images."""
    truths = eccv_caption(folder)
    numbers = {name: dict(zip(truths[name].text_ids, truths[name].t2i.totals, strict=True)) for name in ("cxc", "eccv")}
    ids = [str(row["id"]) for row in captions.rows]
    numbers["pqpp"] = dict(zip(ids, np.exp(captions.log_relevant), strict=True))
    found = {}
    for a, b in combinations(numbers, 2):
        both = [i for i in numbers[a] if numbers[a][i] > 0 and numbers[b].get(i, 0) > 0]
        statistic = {"": spearman_statistic(*(np.array([numbers[name][i] for i in both]) for name in (a, b)))}
        found[f"{a}, {b}"] = len(both), bootstrap(statistic, len(both), n_resamples=n_resamples, seed=seed)[""]
    return found
