"""The setup of a run: claim the folder, read the data, build the model, make the batches."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from sfumato.data.images import Problems
from sfumato.data.pairs import Grades, PairData, PairSampler
from sfumato.data.shards import ShardStream, expand_shards
from sfumato.data.sources import DataConfig
from sfumato.data.splits import apply_noise, load_noise, noise_of, parse_part, save_noise, without_part
from sfumato.encoders.dual import DualEncoder
from sfumato.encoders.feature_rows import described_by
from sfumato.encoders.package_weights import where_weights_are
from sfumato.errors import UserError, as_typed
from sfumato.files import write_atomically
from sfumato.imports import file_digest, given_imports
from sfumato.models.embed import load_splits, prepare_split
from sfumato.models.process_group import ProcessGroup, alone
from sfumato.models.recipe import (
    BOOKKEEPING,
    IMPORTS,
    Recipe,
    absolute_recipe,
    differing_keys,
    find_recipe,
    load_recipe,
    save_recipe,
)
from sfumato.models.run import (
    ENCODERS,
    LAST,
    MODEL,
    NOISE,
    RECIPE,
    TOKENIZER,
    Assets,
    build_model,
    fresh_tokenizer,
    load_assets,
    load_model,
    load_tensors,
    save_assets,
)
from sfumato.training.batches import Augmentation, Batches, IndexedBatches, ShardBatches

LOCK = ".lock"
"""Name of the file that a training process locks in its run folder."""

_VOCABULARY_TEXTS = 100_000

_DIGITS = 12
"""Digits of a digest in the name of a kept file."""

_NAMED = 3
"""Largest number of differing keys in a message."""


def claim_folder(folder: Path, recipe: Recipe) -> int | None:
    """Check that a folder may be trained in, and save the recipe there.

    Before the first checkpoint, files of an earlier start are replaced, so a run that failed because of a wrong path
    can start again.
    """
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)  # The leftover file of a killed writer.
    started = (folder / LAST).exists() or (folder / MODEL).exists()
    kept = {path.stem[-_DIGITS:]: path for path in (folder / IMPORTS).glob("*.py")}
    if not (folder / RECIPE).exists():
        if any(path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no run; give an empty or new folder with --out")
    elif started:
        files = _own_files(recipe)
        changed = [path for path in files if file_digest(path)[:_DIGITS] not in kept]
        if changed or len(files) < len(kept):
            raise UserError(
                f"{changed[0] if changed else 'a file that the recipe imports'} has changed since the run in {folder}"
                f" began, which keeps a copy in {folder / IMPORTS}; import that copy in its place, or give another"
                " folder with --out"
            )
        saved = absolute_recipe(load_recipe(folder / RECIPE)).model_copy(update={"imports": recipe.imports})
        if saved == recipe:
            return None
        _check_extends(folder, saved, recipe)
        save_recipe(recipe, folder / RECIPE)
        return saved.train.epochs if saved.train.epochs < recipe.train.epochs else None
    for name in (TOKENIZER, ENCODERS, NOISE):
        (folder / name).unlink(missing_ok=True)
    for path in kept.values():
        path.unlink()
    for path in _own_files(recipe):
        (folder / IMPORTS).mkdir(exist_ok=True)
        write_atomically(folder / IMPORTS / _kept_name(path), path.read_bytes())
    save_recipe(recipe, folder / RECIPE)
    return None


def _own_files(recipe: Recipe) -> list[Path]:
    """The files of the user's own that a recipe imports."""
    return [Path(name) for name in recipe.imports if name.endswith(".py")]


def with_present_imports(recipe: Recipe) -> Recipe:
    """The recipe with files that --import names now, in place of those that are no longer where they were."""
    gone = [name for name in recipe.imports if name.endswith(".py") and not Path(name).is_file()]
    if gone and not given_imports():
        raise UserError(f"imports: there is no file {gone[0]}; name it as it is now: --import FILE")
    kept = [name for name in recipe.imports if name not in gone]
    return recipe.model_copy(update={"imports": tuple(dict.fromkeys([*kept, *(given_imports() if gone else ())]))})


def _kept_name(path: Path) -> str:
    """The name of a file in the folder of a run, with the beginning of its digest."""
    ending = f"-{file_digest(path)[:_DIGITS]}"
    return f"{path.stem.removesuffix(ending)}{ending}.py"


def _check_extends(folder: Path, saved: Recipe, recipe: Recipe) -> None:
    """Refuse to train a recipe in the folder of a run, unless it only has more epochs or other bookkeeping."""
    differing = {key: values for key, values in differing_keys(saved, recipe).items() if key not in BOOKKEEPING}
    if not differing:
        return
    if list(differing) != ["train.epochs"]:
        named = [f"{key} is {ours!r} there and {new!r} here" for key, (ours, new) in differing.items()]
        more = f", and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        raise UserError(
            f"{folder} holds a run of another recipe: {'; '.join(named[:_NAMED])}{more}. Give another folder with"
            f" --out, or delete that one: {as_typed('rm', '-r', folder)}"
        )
    before, now = saved.train.epochs, recipe.train.epochs
    reason = (
        f"train.epochs is {before} there and {now} here, and a run can only be extended"
        if now < before
        else f"its weights are averaged over the last epochs (train.swa_epochs={saved.train.swa_epochs}), which the"
        " further ones would be missing from"
        if saved.train.swa_epochs
        else f"{LAST} is missing, which holds the state of its training"
        if not (folder / LAST).exists()
        else None
    )
    if reason:
        raise UserError(
            f"the run in {folder} cannot go on: {reason}. Give another folder with --out,"
            f" or delete that one: {as_typed('rm', '-r', folder)}"
        )


def training_splits(
    recipe: Recipe, folder: Path, problems: Problems, process_group: ProcessGroup
) -> dict[str, PairData]:
    """The splits of the recipe's data; the training split has its noise and lacks the part that is left out."""
    splits = load_splits(recipe.data, problems)
    if "train" in splits:
        splits["train"] = _with_noise(recipe.data, splits["train"], folder, process_group)
        if recipe.data.leave_out:
            splits["train"] = without_part(splits["train"], *parse_part(recipe.data.leave_out))
    if recipe.data.source == "shards":
        _stream(recipe, Problems(), process_group)  # Refused on all processes before any of them starts to work.
    return splits


def _with_noise(config: DataConfig, data: PairData, folder: Path, process_group: ProcessGroup) -> PairData:
    """The training pairs with the recipe's noise; the run folder keeps the image of each pair."""
    if not (config.noise_rate or config.noise_file):
        return data
    path = folder / NOISE
    if process_group.main and not path.exists():
        noise = noise_of(data, config.noise_rate, config.noise_seed, config.noise_file)
        assert noise is not None
        save_noise(path, noise)
    process_group.wait()
    return apply_noise(data, load_noise(path, data))


def new_or_resumed_model(
    recipe: Recipe, folder: Path, splits: dict[str, PairData], process_group: ProcessGroup
) -> DualEncoder:
    """Build a new model, equal on all processes, or the model of an interrupted run without its weights."""
    if (folder / LAST).exists():
        return build_model(recipe.model, load_assets(folder, recipe), recipe.augment).to(process_group.device)
    if process_group.main:
        tokenizer = fresh_tokenizer(recipe.model, _training_texts(recipe, splits))
        described = described_by(splits["train"]) if "train" in splits else {}
        model = build_model(recipe.model, Assets(tokenizer, described), recipe.augment)
        save_assets(folder, tokenizer, model)
    process_group.wait()
    if not process_group.main:
        model = build_model(recipe.model, load_assets(folder, recipe), recipe.augment)
    model = model.to(process_group.device)
    process_group.copy_from_main(model)
    return model


_HELPS = 3_000
"""Training images from which on photographs of which it saw none gain (docs/results/own-photographs.md)."""


def what_to_expect(recipe: Recipe, n: int) -> str:
    """What training further on n images gives, and the way without; "" for a training from new weights."""
    if not recipe.train.start:
        return ""
    way = as_typed("sfumato", "index", "--data", recipe.data.path, "--out", "my-index")
    gain = (
        f"below {_HELPS:,} it finds fewer of them than their captions do by themselves, and no more of new photographs"
        if n < _HELPS
        else "with train.anchor=0.5 expect 4 more of 100 new photographs first; the own are found better by captions"
    )
    return f"training on {n:,} images: {gain}. With nothing trained: {way}"


def load_start(source: str, model: DualEncoder) -> None:
    """Give a new model the weights of the model that its training starts from."""
    if source:
        what = f"train.start={source}: does not fit the model of this recipe"
        way_out = "; take the section model of that one, or start from new weights: train.start= train.anchor=0"
        load_tensors(model, load_model(source).model.state_dict(), what, way_out)


def _training_texts(recipe: Recipe, splits: dict[str, PairData]) -> Iterator[str]:
    """All training texts, or the first 100,000 of a stream."""
    if recipe.data.source != "shards":
        yield from splits["train"].texts if "train" in splits else ()
        return
    stream = _stream(recipe, Problems(), alone())
    with closing(stream.samples(0)) as samples:
        yield from (s.text for s in itertools.islice(samples, min(_VOCABULARY_TEXTS, stream.samples_per_epoch)))


def _stream(recipe: Recipe, problems: Problems, process_group: ProcessGroup) -> ShardStream:
    paths = expand_shards(recipe.data.path)
    try:
        return ShardStream(
            paths,
            batch_size=max(1, recipe.train.batch_size // process_group.size),
            seed=recipe.train.seed,
            samples_per_epoch=recipe.data.samples_per_epoch,
            rank=process_group.rank,
            n_processes=process_group.size,
            shuffle_buffer=recipe.data.shuffle_buffer,
            problems=problems,
            max_problem_fraction=recipe.data.max_problem_fraction,
        )
    except ValueError as error:
        raise UserError(
            f"data.samples_per_epoch={recipe.data.samples_per_epoch},"
            f" train.batch_size={recipe.train.batch_size}: {error}"
        ) from error


def training_batches(
    recipe: Recipe, model: DualEncoder, splits: dict[str, PairData], problems: Problems, process_group: ProcessGroup
) -> Batches:
    """The batches of the split "train", or of a stream of shards."""
    augmentation = Augmentation(recipe, model, process_group)
    if recipe.data.source == "shards":
        for side, section in (("image", recipe.model.image), ("text", recipe.model.text)):
            if getattr(section, "whiten", None) is not None:
                raise UserError(
                    f"model.{side}.whiten is fitted on a training split, but shards are a stream; leave it out"
                )
        stream = _stream(recipe, problems, process_group)
        return ShardBatches(stream, model, augmentation, process_group, equal_texts=recipe.data.equal_texts)
    if "train" not in splits:
        raise UserError(f"the data has no split 'train'; it has {', '.join(splits)}")
    train = prepare_split(model, splits["train"], problems, "train", process_group)
    sampler = PairSampler(
        train.data,
        recipe.train.batch_size,
        recipe.train.seed,
        epoch_over=recipe.data.epoch_over,
        positives=recipe.data.positives,
        kind_weights=recipe.data.kind_weights or None,
        grades=Grades(train.data) if recipe.data.graded else None,
    )
    for tower, store in ((model.image, train.images), (model.text, train.texts)):
        tower.encoder.fit(store)  # A resumed run replaces what is computed here by its own.
    process_group.copy_from_main(model)
    return IndexedBatches(train.images, train.texts, sampler, augmentation, process_group)


_CHOOSES = ("model.", "loss.", "variance_stage.")
"""Overrides of these sections are for the recipe that was asked for."""


def preferred_recipe(recipe: Recipe, overrides: Sequence[str], folder: Path) -> tuple[Recipe, str]:
    """The recipe to train, and why."""
    if not recipe.prefer or any(override.strip().startswith(_CHOOSES) for override in overrides):
        return recipe, ""
    other = load_recipe(find_recipe(recipe.prefer), overrides).model_copy(update={"imports": recipe.imports})
    backbone = other.model.image.frozen_backbone
    if (saved := folder / RECIPE).is_file():
        if load_recipe(saved).name != other.name:
            return recipe, ""
    elif not (place := where_weights_are(backbone)):
        return recipe, (
            f"{backbone} is not in the hub's cache, and the hub cannot be reached: using"
            f" {recipe.model.image.base_model} and {recipe.model.text.base_model} instead. They are smaller and find"
            " less; train into another folder when there is a network"
        )
    elif place == "hub":
        return other, _reason(other, recipe, "downloaded once (0.6 GB)")
    return other, _reason(other, recipe, "in the hub's cache")


def _reason(chosen: Recipe, asked: Recipe, place: str) -> str:
    return (
        f"using recipe {chosen.name}: {chosen.model.image.frozen_backbone}, {place}. Its ranking is the model's own,"
        " and only probabilities are fitted. For the small models of the package:"
        f" model.image.backbone={asked.model.image.base_model}"
    )
