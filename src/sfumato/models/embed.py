"""Embedding of folders, files, tables and batches of items by any model."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer

from sfumato.data.feature_tables import EmbeddingRow, open_table
from sfumato.data.image_decoding import IMAGE_ENDINGS, spelt
from sfumato.data.image_inputs import REGION_ENDINGS
from sfumato.data.images import FileImage, ImageSource, Problems, image_files
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.encoder_protocol import Item
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import check_ids, id_error
from sfumato.models.model import Model
from sfumato.models.split import chosen_split, load_splits, prepare_split, say_problems
from sfumato.progress import progress_bar

T = TypeVar("T")

NamedItems = tuple[GaussianEmbedding, list[str], Problems]
"""Embedded items, their ids, and what was left out."""


def file_endings(model: DualEncoder) -> frozenset[str]:
    """File name endings of what a model embeds on its image side: images, or .npy files of features."""
    return REGION_ENDINGS if model.image.processor.reads else IMAGE_ENDINGS


def model_digest(model: DualEncoder) -> str:
    """The SHA-256 of a model's weights and of its processor and head settings, independent of its path and device."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for part in (model.image.processor, model.image.head, model.text.processor, model.text.head):
        digest.update(type(part).__name__.encode())
        known = {"backbone": part.backbone.fingerprint} if isinstance(part, FrozenProcessor) else vars(part)
        for key, value in sorted(known.items()):
            if key.startswith("_") or key in ("training", "workers"):
                continue
            if isinstance(value, Tokenizer):
                digest.update(value.to_str().encode())
            elif isinstance(value, int | str):
                # The two crops differ by a pixel at most, and galleries of either stay valid.
                digest.update(f"{key}={'crop' if value == 'crop-nearest' else value}".encode())
    return digest.hexdigest()


def embedding_steps(
    tower: Tower, modality: str
) -> tuple[Callable[[bytes | str], Any], Callable[[list[Any]], GaussianEmbedding]]:
    """The two steps that embed items batch by batch; frozen backbones do not use their cache on disk.

    Returns (prepare, encode).
    """
    processor = tower.processor
    if modality == "texts" and tower.processor.reads:
        raise UserError(
            f"this model reads {tower.processor.reads} and has no encoder for texts; embed texts with the model that"
            " made the embeddings, and index a split of them: `sfumato index RUN --split NAME`"
        )

    def encode(values: list[Any]) -> GaussianEmbedding:
        return tower.embed(processor.stack(values), batch_size=len(values))

    return processor.prepare, encode


def encode_each(
    encode: Callable[[list[Any]], GaussianEmbedding],
    batch: Sequence[tuple[T, Any]],
    report: Callable[[T, Exception], None],
) -> tuple[list[T], list[GaussianEmbedding]]:
    """The items that can be embedded, with (1, d) for each; if a batch fails, each of its items is tried alone.

    batch (item, prepared).
    """
    if not batch:
        return [], []
    items = [item for item, _ in batch]
    try:
        embeddings = encode([value for _, value in batch])
    except (ValueError, OSError) as error:
        if len(batch) == 1:
            report(items[0], error)
            return [], []
        alone = [encode_each(encode, [one], report) for one in batch]
        return [e for found, _ in alone for e in found], [e for _, found in alone for e in found]
    wrong = (~embeddings.mean.isfinite() | embeddings.log_var.isnan() | embeddings.log_var.isposinf()).any(1)
    for row in wrong.nonzero()[:, 0].tolist():
        report(items[row], ValueError("its embedding holds NaN or infinity"))
    usable = (~wrong).nonzero()[:, 0].tolist()
    return [items[i] for i in usable], [embeddings[i : i + 1] for i in usable]


def embed_folder(model: Model, folder: Path) -> NamedItems:
    """Embed every image below a folder; for a model that reads features, every .npy file."""
    if not folder.is_dir():
        what = f"{folder} is a file; give a folder of images" if folder.exists() else f"there is no folder {folder}"
        raise UserError(what)
    endings, problems = file_endings(model.model), Problems()
    ids = image_files(folder, problems, endings=endings)
    if not ids:
        why = f":\n{problems.summary()}" if problems.left_out else f" (looked for {spelt(endings)})"
        raise UserError(f"no images in {folder}{why}")
    return embed_sources(model, [FileImage(folder / i) for i in ids], ids, problems)


def embed_sources(
    model: Model, sources: Sequence[ImageSource], ids: Sequence[str], problems: Problems | None = None
) -> NamedItems:
    """Embed images; those that cannot be used are left out and reported."""
    problems = Problems() if problems is None else problems
    items: list[Item] = [partial(_read_item, source, i) for source, i in zip(sources, ids, strict=True)]
    with progress_bar("reading images", len(items)) as advance:
        store, kept = model.model.image.processor.read(
            items, progress=advance, on_error=lambda i, error: problems.add(sources[i].location, str(error))
        )
    if not len(kept):
        raise UserError(f"none of {len(items)} images can be used:\n{problems.summary()}")
    with progress_bar("embedding images", len(kept)) as advance:
        embeddings = model.model.image.embed(store, progress=advance)
    return embeddings, [ids[i] for i in kept], problems


def _read_item(source: ImageSource, id: str) -> bytes:
    """The bytes of an image whose id a gallery takes."""
    if error := id_error(id):
        raise ValueError(error)
    return source.read_bytes()


def read_lines(path: Path) -> tuple[list[str], list[str], Problems]:
    """Read the texts of a file, one on each line; empty lines are left out and reported."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    problems, texts, ids = Problems(), [], []
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            texts.append(line.strip())
            ids.append(str(number))
        else:
            problems.add(f"{path}:{number}", "empty line")
    if not texts:
        raise UserError(f"{path} holds no text")
    return texts, ids, problems


def split_names(splits: Mapping[str, PairData], split: str) -> list[str]:
    """The splits that a name stands for."""
    if split != "all" or "all" in splits:
        return [split]
    seen, names = set[str](), []
    for name, data in splits.items():
        if not seen.issuperset(data.image_ids):
            names.append(name)
            seen.update(data.image_ids)
    return names


def embed_split_images(model: Model, data: DataConfig, split: str) -> NamedItems:
    """Embed the images of a split."""
    problems = Problems()
    splits = load_splits(data, problems)
    names = split_names(splits, split)
    prepared = [prepare_split(model.model, chosen_split(splits, name, data), problems, name) for name in names]
    say_problems(problems)
    ids = [i for part in prepared for i in part.data.image_ids]
    check_ids(ids, f"the images of the split {split}")
    return GaussianEmbedding.cat([model.model.image.embed(part.images) for part in prepared]), ids, problems


def embed_table(model: Model, paths: str) -> NamedItems:
    """Embed the rows of a table of image embeddings, for a model that reads such."""
    named, problems = open_table(paths), Problems()
    errors = named.table.errors(np.arange(named.table.n))
    errors |= {row: error for row, i in enumerate(named.ids or ()) if (error := id_error(i))}
    for row, error in errors.items():
        problems.add(f"{named.table.name}[{row}]", error)
    rows = [row for row in range(named.table.n) if row not in errors]
    if not rows:
        raise UserError(f"{paths} has no usable row:\n{problems.summary()}")
    store, _ = model.model.image.processor.read([EmbeddingRow(named.table, row) for row in rows])
    with progress_bar("embedding images", len(rows)) as advance:
        embeddings = model.model.image.embed(store, progress=advance)
    return embeddings, [str(row) if named.ids is None else named.ids[row] for row in rows], problems
