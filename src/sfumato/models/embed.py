"""Embedding by any model (splits of data, folders, files and tables), and evaluation on a split."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sfumato.arrays import as_numpy
from sfumato.data.feature_tables import EmbeddingRow, open_table
from sfumato.data.image_decoding import IMAGE_ENDINGS, spelt
from sfumato.data.image_inputs import REGION_ENDINGS
from sfumato.data.images import FileImage, ImageSource, Problems, image_files
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig, get_source
from sfumato.data.splits import WORDINGS, hold_out_wordings, merge_equal_texts, parse_part
from sfumato.encoders.encoder_protocol import BaseTower, Item, Store, TwoTowers
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.errors import UserError, counted, progress_bar, say
from sfumato.evaluation.benchmarks import plan_ranks
from sfumato.evaluation.ground_truth import GroundTruth, ground_truth_from_data, ids_by_order
from sfumato.evaluation.protocols import EmbeddedSet, Evaluation, EvaluationOptions, evaluate_retrieval
from sfumato.files import read_utf8, write_json
from sfumato.gaussian import GaussianEmbedding, Sides
from sfumato.ids import NO_TEXT, check_id, check_ids, id_error, is_text, plain_id
from sfumato.models.model import Model
from sfumato.models.process_group import ALONE, ProcessGroup
from sfumato.models.run import Run


@dataclass(frozen=True)
class PreparedSplit:
    """A split whose images and texts are ready to be fed to the towers."""

    data: PairData  # the usable items
    images: Store  # inputs of the image tower, in the order of the data
    texts: Store  # inputs of the text tower, in the order of the data


def prepare_split(
    model: TwoTowers, data: PairData, problems: Problems, name: str, process_group: ProcessGroup = ALONE
) -> PreparedSplit:
    """Read every image and text of a split for the model's towers; items that cannot be used are left out and reported.

    With several processes each one first computes the frozen features of its part; all then read them from the cache.
    """
    items = [source if isinstance(source, EmbeddingRow) else source.read_bytes for source in data.images]
    if process_group.size > 1:
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
    model: TwoTowers, config: DataConfig, name: str, problems: Problems | None = None, group: ProcessGroup = ALONE
) -> PreparedSplit:
    """A split of some data, ready for a model; problems are recorded, and printed on standard error."""
    problems = Problems() if problems is None else problems
    prepared = prepare_split(model, read_split(config, name, problems), problems, name, group)
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


def embed_split(model: TwoTowers, split: PreparedSplit, process_group: ProcessGroup = ALONE) -> Sides:
    """Embed a split; each process computes its part, and every process returns all embeddings."""
    sides = (model.image, split.images), (model.text, split.texts)
    image, text = (_embed_part(tower, store, process_group) for tower, store in sides)
    return image, text


def _embed_part(tower: BaseTower, store: Store, process_group: ProcessGroup) -> GaussianEmbedding:
    own = process_group.part(len(store))
    # With fewer items than processes, one item is computed without use.
    mine = tower.embed(store, own) if len(own) else tower.embed(store, np.arange(1))[:0]
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


T = TypeVar("T")

NamedItems = tuple[GaussianEmbedding, list[str], Problems]
"""Embedded items, their ids, and what was left out."""


def file_endings(model: TwoTowers) -> frozenset[str]:
    """File name endings of what a model embeds on its image side: images, or .npy files of features."""
    return REGION_ENDINGS if model.image.processor.reads else IMAGE_ENDINGS


Encode = Callable[[list[Any]], GaussianEmbedding]
"""Embeds a batch of prepared items."""


def embedding_steps(tower: BaseTower, modality: str) -> tuple[Callable[[bytes | str], Any], Encode]:
    """The two steps that embed items batch by batch; frozen backbones do not use their cache on disk.

    Returns (prepare, encode).
    """
    processor = tower.processor
    if modality == "texts" and tower.processor.reads:
        found = f"this model reads {tower.processor.reads} and has no encoder for texts"
        ways = "index a split of them: `sfumato index RUN --split NAME`"
        raise UserError(f"{found}; embed texts with the model that made the embeddings, and {ways}")

    def encode(values: list[Any]) -> GaussianEmbedding:
        return tower.embed(processor.stack(values), batch_size=len(values))

    return processor.prepare, encode


def encode_each(
    encode: Encode, batch: Sequence[tuple[T, Any]], report: Callable[[T, Exception], None]
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
    mean, log_var = as_numpy(embeddings.mean), as_numpy(embeddings.log_var)
    wrong = (~np.isfinite(mean) | np.isnan(log_var) | np.isposinf(log_var)).any(1)
    for row in np.flatnonzero(wrong):
        report(items[row], ValueError("its embedding holds NaN or infinity"))
    usable = np.flatnonzero(~wrong).tolist()
    return [items[i] for i in usable], [embeddings[i : i + 1] for i in usable]


def embed_folder(model: Model, folder: Path) -> NamedItems:
    """Embed every image below a folder; for a model that reads features, every .npy file."""
    if not folder.is_dir():
        what = f"{folder} is a file; give a folder of images" if folder.exists() else f"there is no folder {folder}"
        raise UserError(what)
    endings, problems = file_endings(model.model), Problems()
    if not (ids := image_files(folder, problems, endings=endings)):
        why = f" (looked for {spelt(endings)})" if problems.is_empty else f":\n{problems.summary()}"
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
        raise UserError(f"none of {counted(len(items), 'image')} can be used:\n{problems.summary()}")
    with progress_bar("embedding images", len(kept)) as advance:
        embeddings = model.model.image.embed(store, progress=advance)
    return embeddings, [ids[i] for i in kept], problems


def _read_item(source: ImageSource, id: str) -> bytes:
    """The bytes of an image whose id a gallery takes."""
    check_id(id)
    return source.read_bytes()


def read_lines(path: Path) -> tuple[list[str], list[str], Problems]:
    """Read the texts of a file, one on each line; empty lines are left out and reported."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    problems, texts, ids = Problems(), [], []
    for number, line in enumerate(read_utf8(path).removesuffix("\n").split("\n"), 1):
        if line.strip() and is_text(line):
            texts.append(line.strip())
            ids.append(str(number))
        else:
            problems.add(f"{path}:{number}", NO_TEXT if line.strip() else "empty line")
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
    parts = [model.model.image.embed(part.images) for part in prepared]
    ids = [plain_id(i) for part in prepared for i in part.data.image_ids]
    if split == "all" and problems.bare:
        bare, problems.bare = {plain_id(i): image for i, (_, image) in problems.bare.items()}, {}
        with suppress(UserError):  # None of them can be used, and the problems have them.
            embeddings, more, _ = embed_sources(model, [*bare.values()], [*bare], problems)
            parts, ids = [*parts, embeddings], [*ids, *more]
    say_problems(problems)
    check_ids(ids, f"the images of the split {split}")
    return GaussianEmbedding.cat(parts), ids, problems


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


def embed_for_evaluation(
    model: Model, data: DataConfig, split: str, *, truths: Sequence[GroundTruth] = (), group: ProcessGroup = ALONE
) -> EmbeddedSet:
    """Embed a split of any data; its ground truth is named after the split."""
    if truths:
        data = data.model_copy(update={"equal_texts": "separate"})
    prepared = load_split(model.model, data, split, group=group)
    own, kinds = ground_truth_from_data(prepared.data, name=split), prepared.data.text_kinds
    chosen = tuple(truths) or (own,)
    if truths and data.source == "scan":  # Its captions have no ids.
        named = ids_by_order(own, chosen[0])
        if named is not own and group.main:
            say(f"note: the captions of SCAN's files have no ids; they take those of {chosen[0].name}, in their order")
        own = named
    plan_ranks(chosen, own.image_ids, own.text_ids)
    images, texts = embed_split(model.model, prepared, group)
    return EmbeddedSet(images, texts, own.image_ids, own.text_ids, chosen, tuple(kinds) if kinds else None)


def evaluate_model(
    model: Model,
    data: DataConfig,
    split: str,
    distance: str | None = None,
    *,
    process_group: ProcessGroup = ALONE,
    embedded: EmbeddedSet | None = None,
    options: EvaluationOptions = EvaluationOptions(),
) -> Evaluation:
    """Evaluate any model on a split of any data."""
    chosen = options.sampled(model.ranking_distance(distance))
    embedded = embedded or embed_for_evaluation(model, data, split, group=process_group)
    (ground_truth,) = embedded.ground_truths
    return evaluate_retrieval(
        embedded.images, embedded.texts, ground_truth.i2t, distance=chosen, text_kinds=embedded.text_kinds,
        rank=process_group.rank_relevant, uncertainty=options.uncertainty,
    )  # fmt: skip


def write_figures(run: Run, name: str, figures: Mapping[str, Any]) -> Path:
    """Write figures of a run, such as those of an evaluation, into its folder."""
    path = run.folder / f"{name}.json"
    write_json(path, figures)
    return path


def evaluate_run(
    run: Run, split: str, distance: str | None = None, *, embedded: EmbeddedSet | None = None
) -> tuple[Evaluation, Path]:
    """Evaluate a run on a split of its data, and write the figures into its folder."""
    result = evaluate_model(run, run.recipe.data, split, distance, embedded=embedded)
    return result, write_figures(run, f"evaluation-{split}-{result.distance}", result.to_json())
