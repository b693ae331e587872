"""Splits of data for a model: loading, preparing and embedding them."""

from dataclasses import dataclass

import numpy as np

from sfumato.data.pairs import PairData
from sfumato.data.problems import Problems
from sfumato.data.sources import DataConfig, get_source
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.encoder_protocol import Item
from sfumato.encoders.features import Store
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.process_group import ProcessGroup, alone
from sfumato.progress import progress_bar, say


@dataclass(frozen=True)
class PreparedSplit:
    """A split whose images and texts are ready to be fed to the towers.

    Attributes:
        data: the usable items.
        images: inputs of the image tower, in the order of the data.
        texts: inputs of the text tower, in the order of the data.
    """

    data: PairData
    images: Store
    texts: Store


def prepare_split(
    model: DualEncoder, data: PairData, problems: Problems, name: str, process_group: ProcessGroup | None = None
) -> PreparedSplit:
    """Read every image and text of a split for the model's towers; items that cannot be used are left out and reported.

    With several processes each one first computes the frozen features of its part; all then read them from the cache.

    Args:
        model: image and text towers.
        data: the split.
        problems: receives the images that cannot be used.
        name: name of the split, for messages.
        process_group: the processes among which the work is divided; None for a single process.

    Returns:
        The split, without the unusable images.

    Raises:
        UserError: no usable pair is left.
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
            items, progress=advance, on_error=lambda i, error: problems.add(data.images[i].location, str(error))
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
    """A split of some data, ready for a model; problems are recorded, and printed on standard error.

    Args:
        model: image and text towers.
        config: section ``data`` of the recipe.
        name: name of the split.
        problems: receives every unusable item; a new list if None.
        process_group: the processes among which the work is divided; None for a single process.

    Returns:
        The split.

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
    """Embed a split; each process computes its part, and every process returns all embeddings.

    Args:
        model: image and text towers.
        split: ready for the model.
        process_group: the processes among which the work is divided; None for a single process.

    Returns:
        ((n, d) embeddings of the images, (m, d) of the texts).
    """
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


def _text(value: str) -> Item:
    return lambda: value


def load_splits(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    """The data of a recipe by split ("train", "val", "test" and any other split of the source).

    Args:
        config: section ``data`` of the recipe.
        problems: receives every unusable item.

    Returns:
        split -> data.

    Raises:
        UserError: the path does not exist, or nothing in the data can be used.
    """
    return get_source(config.source).read(config, problems)
