"""Galleries of embeddings that other programs compute batch by batch, on as many machines as they have.

:class:`RowEmbedder` is the function that they call for each batch of rows; they write its rows to Parquet files, and
`sfumato index --data FILES` fills a gallery from these, a batch at a time.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from sfumato.data.feature_tables import vectors_of
from sfumato.errors import UserError, first_line, need
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.ids import check_ids
from sfumato.models.embed import embedding_steps, encode_each, model_digest
from sfumato.models.model import Model
from sfumato.models.run import load_model
from sfumato.workflows.index import GalleryPart

_COLUMNS = {"id", "mean", "log_var", "model"}
_ROWS = 4096
"""Rows in memory at a time."""


class RowEmbedder:
    """A model as a function of a batch of rows, for Ray Data's `map_batches` and its like.

    A batch is a dictionary of columns: `id`, and `bytes` with image files or `text`. The result has the same columns
    without `bytes`, and `mean`, `log_var` and `model`. Rows that cannot be embedded are left out with a warning.
    """

    def __init__(self, model: str, *, modality: Literal["images", "texts"] = "images") -> None:
        loaded = load_model(model)
        self._column = "bytes" if modality == "images" else "text"
        tower = loaded.model.image if modality == "images" else loaded.model.text
        self._prepare, self._encode = embedding_steps(tower, modality)
        self._digest = model_digest(loaded.model)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Embed a batch."""
        if missing := {"id", self._column} - batch.keys():
            raise UserError(f"RowEmbedder: no column {' and '.join(sorted(missing))}; got {', '.join(batch)}")
        ready: list[tuple[int, Any]] = []
        for row, item in enumerate(batch[self._column]):
            try:
                ready.append((row, self._prepare(item)))
            except (ValueError, OSError, MemoryError) as error:
                self._leave_out(batch["id"][row], error)
        kept, rows = encode_each(self._encode, ready, lambda row, error: self._leave_out(batch["id"][row], error))
        found = GaussianEmbedding.cat(rows) if rows else GaussianEmbedding.point(torch.empty(0, 0))
        named = {name: [values[row] for row in kept] for name, values in batch.items() if name != "bytes"}
        numbers = {"mean": found.mean.numpy(), "log_var": found.log_var.numpy()}
        return named | {name: list(value) for name, value in numbers.items()} | {"model": [self._digest] * len(kept)}

    def _leave_out(self, id: str, error: Exception) -> None:
        warnings.warn(f"{id} is left out: {error}", stacklevel=2)


def is_embedded(data: str | Path) -> bool:
    """Whether a name is a Parquet file, or a folder of such files, with rows of :class:`RowEmbedder`."""
    path = Path(data)
    if path.suffix.lower() != ".parquet" and not (path.is_dir() and any(path.glob("*.parquet"))):
        return False
    return path.exists() and {"mean", "log_var"} <= set(_dataset(path).schema.names)


def embedded_parts(model: Model, data: str | Path, images: Path | None = None) -> Iterator[GalleryPart]:
    """The rows of Parquet files, some at a time; `images` is the folder in which the ids are paths of images."""
    table = _dataset(Path(data))
    if missing := _COLUMNS - set(table.schema.names):
        raise UserError(f"{data}: no column {' and '.join(sorted(missing))}; RowEmbedder writes them")
    digest, folder = model_digest(model.model), {} if images is None else {"folder": str(images.resolve())}

    def parts() -> Iterator[GalleryPart]:
        for batch in table.to_batches(batch_size=_ROWS):
            if not batch.num_rows:
                continue
            numbers = ("mean", "log_var")
            rows = batch.drop_columns(list(numbers)).to_pydict()
            if set(rows["model"]) != {digest}:
                raise UserError(f"{data} holds embeddings by another model; give that model, or embed again")
            check_ids(rows["id"], f"{data}")
            mean, log_var = (vectors_of([batch.column(name)], f"{data}: the vectors of {name}") for name in numbers)
            embeddings = GaussianEmbedding(mean.float(), log_var.float())
            check_finite(embeddings, str(data))
            kept = {name: values for name, values in rows.items() if name not in _COLUMNS and _are_texts(values)}
            texts = kept.pop("text", None)
            yield GalleryPart(embeddings, rows["id"], texts, kept, folder)

    return parts()


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _dataset(path: Path) -> Any:
    with need("parquet", f"{path}: Parquet files need pyarrow"):
        import pyarrow
        import pyarrow.dataset
    try:
        return pyarrow.dataset.dataset(path, format="parquet")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a complete Parquet file ({first_line(error)})") from error
