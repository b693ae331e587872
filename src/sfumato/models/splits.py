"""Splits of data, read for a model: loading, preparing and embedding them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sfumato.data.emoji import load_emoji
from sfumato.data.karpathy import read_karpathy
from sfumato.data.manifest import read_image_folder, read_manifest
from sfumato.data.pairs import PairData
from sfumato.data.problems import Problems
from sfumato.data.region_features import read_scan
from sfumato.data.shards import expand_shards, read_shards
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.encoder_protocol import Item
from sfumato.encoders.features import Store
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.process_group import ProcessGroup, alone
from sfumato.models.recipe import DataConfig
from sfumato.progress import progress_bar, say


@dataclass(frozen=True)
class PreparedSplit:
    """A split whose images and texts are ready to be fed to the towers.

    Attributes:
        data: the usable items.
        images, texts: their inputs, in the same order.
    """

    data: PairData
    images: Store
    texts: Store


def prepare_split(
    model: DualEncoder, data: PairData, problems: Problems, name: str, process_group: ProcessGroup | None = None
) -> PreparedSplit:
    """Read every image and text of a split for the model's towers; items that cannot be used are left out and reported.

    Of several processes each computes the frozen features of its part first; all then find them in the cache.
    """
    items: list[Item] = [source.read_bytes for source in data.images]
    if process_group is not None and process_group.size > 1:
        for processor, source in (
            (model.image.processor, items),
            (model.text.processor, [_text(t) for t in data.texts]),
        ):
            if isinstance(processor, FrozenProcessor):
                processor.read([source[i] for i in process_group.part(len(source))], on_error=lambda i, error: None)
        process_group.wait()
    with progress_bar(f"reading {name} images", len(items)) as advance:
        images, kept = model.image.processor.read(
            items, progress=advance, on_error=lambda i, error: problems.add(data.images[i].place, str(error))
        )
    if len(kept) < len(items):
        data = data.keep_images(kept)
    if not len(data.image_ids) or not len(data.text_ids):
        raise UserError(f"split {name!r} has no usable pair left:\n{problems.summary()}")
    texts, _ = model.text.processor.read([_text(t) for t in data.texts])
    return PreparedSplit(data, images, texts)


def load_split(
    model: DualEncoder,
    config: DataConfig,
    name: str,
    problems: Problems | None = None,
    process_group: ProcessGroup | None = None,
) -> PreparedSplit:
    """A split of some data, ready for a model; problems are noted, and told on standard error.

    Raises:
        UserError: the data has no such split.
    """
    problems = Problems() if problems is None else problems
    splits = load_splits(config, problems)
    if name not in splits:
        raise UserError(f"the data ({config.source}) has no split {name!r}; it has {', '.join(splits)}")
    prepared = prepare_split(model, splits[name], problems, name, process_group)
    if len(problems):
        say(f"{len(problems)} items left out:\n{problems.summary()}")
    return prepared


def embed_split(
    model: DualEncoder, split: PreparedSplit, process_group: ProcessGroup | None = None
) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    """Embeddings of the images and of the texts of a split; each process computes its part, all get the whole."""
    process_group = process_group or alone()
    image, text = (
        _embed_part(tower, store, process_group)
        for tower, store in ((model.image, split.images), (model.text, split.texts))
    )
    return image, text


def _embed_part(tower: Tower, store: Store, process_group: ProcessGroup) -> GaussianEmbedding:
    own = process_group.part(len(store))
    if not len(own):  # Fewer items than processes: one is computed for nothing.
        mine = tower.embed(store, np.arange(1))[:0]
    else:
        mine = tower.embed(store, own)
    return process_group.gather_embeddings(mine, process_group.counts(len(own)))


def _text(value: str) -> Item:
    return lambda: value


def load_splits(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    """The data of a recipe by split ("train", "val", "test" and whatever else the source has).

    Args:
        config: section ``data`` of the recipe.
        problems: receives every unusable item.

    Raises:
        UserError: the path does not exist.
    """
    if config.source == "emoji":
        return load_emoji(held_out_style=config.held_out_style)
    if config.source == "shards":
        return {"val": read_shards(expand_shards(config.val_path), problems)} if config.val_path else {}
    path = Path(config.path)
    if not path.exists():
        raise UserError(
            f"data.path: there is no {path}; paths in a recipe are relative to the current folder ({Path.cwd()})"
        )
    images = Path(config.images) if config.images else None
    if config.source == "scan":
        return read_scan(path, problems)
    if config.source == "karpathy":
        return read_karpathy(path, images or path.parent, problems)
    shares = {"val_share": config.val_share, "test_share": config.test_share}
    if config.source == "folder":
        return read_image_folder(path, problems, **shares)
    return read_manifest(path, problems, image_root=images, **shares)
