"""Splits of data: read, prepared for a model's towers, and embedded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sfumato.data.feature_tables import EmbeddingRow
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig, get_source
from sfumato.data.splits import WORDINGS, hold_out_wordings, merge_equal_texts, parse_part
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.encoder_protocol import Item, Store
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.errors import UserError, counted
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.process_group import ProcessGroup, alone
from sfumato.progress import progress_bar, say

Sides = tuple[GaussianEmbedding, GaussianEmbedding]
"""Embedded images and texts."""


@dataclass(frozen=True)
class PreparedSplit:
    """A split whose images and texts are ready to be fed to the towers."""

    data: PairData  # the usable items
    images: Store  # inputs of the image tower, in the order of the data
    texts: Store  # inputs of the text tower, in the order of the data


def prepare_split(
    model: DualEncoder, data: PairData, problems: Problems, name: str, process_group: ProcessGroup | None = None
) -> PreparedSplit:
    """Read every image and text of a split for the model's towers; items that cannot be used are left out and reported.

    With several processes each one first computes the frozen features of its part; all then read them from the cache.
    """
    items = [source if isinstance(source, EmbeddingRow) else source.read_bytes for source in data.images]
    if process_group is not None and process_group.size > 1:
        for processor, source in ((model.image.processor, items), (model.text.processor, _text_items(data))):
            if isinstance(processor, FrozenProcessor):
                processor.read([source[i] for i in process_group.part(len(source))], on_error=lambda i, error: None)
        process_group.wait()
    with progress_bar(f"reading {name} images", len(items)) as advance:
        images, kept = model.image.processor.read(
            items, progress=advance, on_error=lambda i, error: problems.add(data.images[i].location, str(error))
        )
    if len(kept) < len(items):
        data = data.keep_images(kept)
    if not len(data.image_ids) or not len(data.text_ids):
        raise UserError(f"split {name!r} has no usable pair left:\n{problems.summary()}")
    texts, _ = model.text.processor.read(_text_items(data))
    return PreparedSplit(data, images, texts)


def load_split(
    model: DualEncoder,
    config: DataConfig,
    name: str,
    problems: Problems | None = None,
    process_group: ProcessGroup | None = None,
) -> PreparedSplit:
    """A split of some data, ready for a model; problems are recorded, and printed on standard error."""
    problems = Problems() if problems is None else problems
    prepared = prepare_split(model, read_split(config, name, problems), problems, name, process_group)
    say_problems(problems)
    return prepared


def read_split(config: DataConfig, name: str, problems: Problems) -> PairData:
    """A split of some data."""
    return chosen_split(load_splits(config, problems), name, config)


def chosen_split(splits: Mapping[str, PairData], name: str, config: DataConfig) -> PairData:
    """One of the splits of some data."""
    if name not in splits:
        raise UserError(f"the data ({config.source}) has no split {name!r}; it has {', '.join(splits)}")
    return splits[name]


def say_problems(problems: Problems) -> None:
    """Print what was left out, if anything was."""
    if problems.left_out:
        say(f"{counted(problems.left_out, 'item')} left out:\n{problems.summary()}")


def embed_split(model: DualEncoder, split: PreparedSplit, process_group: ProcessGroup | None = None) -> Sides:
    """Embed a split; each process computes its part, and every process returns all embeddings."""
    process_group = process_group or alone()
    image, text = (
        _embed_part(tower, store, process_group)
        for tower, store in ((model.image, split.images), (model.text, split.texts))
    )
    return image, text


def _embed_part(tower: Tower, store: Store, process_group: ProcessGroup) -> GaussianEmbedding:
    own = process_group.part(len(store))
    if not len(own):  # With fewer items than processes, one item is computed without use.
        mine = tower.embed(store, np.arange(1))[:0]
    else:
        mine = tower.embed(store, own)
    return process_group.gather_embeddings(mine, process_group.counts(len(own)))


def _text_items(data: PairData) -> Sequence[Item]:
    return data.text_rows or [partial(str, text) for text in data.texts]


def load_splits(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    """The data of a recipe by split ("train", "val", "test" and any other split of the source).

    Equally worded texts are merged unless the recipe keeps them separate.
    """
    splits = get_source(config.source).read(config, problems)
    merged = config.equal_texts == "merged"
    if config.held_out_wordings and "train" in splits:
        if WORDINGS in splits:
            raise UserError(f"the data have a split {WORDINGS!r} already; leave data.held_out_wordings out")
        splits = hold_out_wordings(splits, *parse_part(config.held_out_wordings), merged=merged)
    return {name: merge_equal_texts(split) for name, split in splits.items()} if merged else splits
