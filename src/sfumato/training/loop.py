"""The training loop, which resumes an interrupted run bit for bit, and the setup of a run.

All random choices of a step depend only on (seed, epoch, step), so the state after a step is sufficient for resuming.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import torch

from sfumato.data.images import Problems
from sfumato.data.pairs import Grades, PairData, PairSampler
from sfumato.data.shards import ShardStream, expand_shards
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS, apply_noise, load_noise, parse_part, save_noise, shuffle_pairs, without_part
from sfumato.encoders.frozen import described_by
from sfumato.encoders.package_weights import where_weights_are
from sfumato.errors import UserError, as_typed, counted, say
from sfumato.files import LAST, MODEL, RECIPE, TOKENIZER
from sfumato.imports import given_imports
from sfumato.models import recipe as recipes
from sfumato.models.build import Assets, DualEncoder, build_loss, build_model, fresh_tokenizer, load_tensors
from sfumato.models.embed import embed_split, load_splits, prepare_split
from sfumato.models.process_group import ProcessGroup, alone, join_process_group
from sfumato.models.recipe import Recipe
from sfumato.models.run import ENCODERS, NOISE, PROBLEMS, choose_device, load_assets, load_model, save_assets
from sfumato.training import saving, validation
from sfumato.training.batches import Augmentation, Batches, IndexedBatches, ShardBatches, epoch_seed, steps
from sfumato.training.step import Learner, averaged, learning_rate_factor

_VOCABULARY_TEXTS = 100_000


def fit(recipe: Recipe, folder: str | Path, *, on_epoch: saving.OnEpoch | None = None) -> dict[str, Any]:
    """Train a recipe, resume an interrupted run of the same recipe, or extend a run to more epochs.

    Started by torchrun, all processes train one model together, and each takes a part of every batch.

    Args:
        recipe: the complete recipe.
        folder: the run folder; made if missing. A run of another recipe in it is refused.
        on_epoch: called after each epoch with its line of log.jsonl as a dict, in the first process alone: "epoch" from
            0, "loss", "loss/TERM", "logit_scale", "val/rsum", "seconds" and others.

    Returns:
        {"run", "epochs", "best_epoch", "best_score", "selected_by", "parameters", "problems", "seconds"}; selected_by
        is the metric of best_score, see :func:`selected_by`; seconds are those of all epochs together.

    Raises:
        UserError: the folder holds a run of another recipe, or the data cannot be used.
        DivergedError: a term of the loss is NaN or infinite.
        PeerLostError: another process of the run has ended.
    """
    with opened(recipe, Path(folder)) as (recipe, folder, group):
        training = set_up(recipe, folder, group)
        learner, batches, val, config = training.learner, training.data.batches, training.data.val, recipe.train
        done = saving.resume(training)
        tracker = config.tracker if group.main else ""
        with saving.tracked(tracker, recipe, folder) as track, saving.told_to_end(training):
            for epoch in range(done.epoch, config.epochs):
                done = done if epoch == done.epoch else saving.EpochPart(epoch)
                started = time.monotonic() - done.seconds
                learner.begin_epoch(epoch)
                with closing(steps(batches, epoch, config.epochs, first=done.step)) as coming:
                    for batch in coming:
                        torch.manual_seed(epoch_seed(config.seed, epoch, 0, done.step, group.rank))
                        learner.set_rate(epoch + done.step / len(batches))
                        with learner.at(epoch, done.step):
                            measured = learner.gradients_of_loss(batch, epoch)
                            measured |= learner.update()
                        done.add(measured, seconds=time.monotonic() - started)
                        saving.save_part_if_due(training, done)
                learner.end_epoch(epoch)
                line = {"epoch": epoch, **done.means(), **learner.logits()}
                if val is not None and config.validates(epoch):
                    with averaged(learner.model, learner.average):
                        chosen = learner.loss.distance, config.select, group
                        evaluation, score = validation.validate(embed_split(learner.model, val, group), val, *chosen)
                        validation.keep_weights(training, epoch, score)
                    line |= validation.figures_of(evaluation, score)
                line["seconds"] = time.monotonic() - started
                saving.save_epoch(training, line)
                track(line)
                if on_epoch is not None and group.main:
                    on_epoch(line)
                say(validation.epoch_line(line, config.epochs, training.data.val_split))
        validation.after_training(training)
        return validation.result_of(training)


def set_up(recipe: Recipe, folder: Path, process_group: ProcessGroup) -> saving.Training:
    """Read the data, and build the model, its loss and its optimiser."""
    if process_group.main and (former := claim_folder(folder, recipe)) is not None:
        say(_extended(recipe, former))
    process_group.wait()
    config, problems = recipe.train, Problems()
    if config.threads:
        torch.set_num_threads(config.threads)
    splits = training_splits(recipe, folder, problems, process_group)
    if (train := splits.get("train")) and (expect := what_to_expect(recipe, len(train.image_ids))):
        say(expect)
    torch.manual_seed(config.seed)
    model = new_or_resumed_model(recipe, folder, splits, process_group)
    loss = build_loss(recipe).to(process_group.device)
    held_out = WORDINGS if recipe.data.held_out_wordings and WORDINGS in splits else ""
    val_split = "val" if "val" in splits else held_out  # If all images train, their other texts validate.
    if recipe.data.held_out_wordings and not held_out:
        say(_one_text_an_image(bool(val_split)))
    val = prepare_split(model, splits[val_split], problems, val_split, process_group) if val_split else None
    wordings = splits[held_out] if held_out and held_out != val_split else None
    batches = training_batches(recipe, model, splits, problems, process_group)
    data = saving.TrainingData(batches, val, val_split, wordings, problems)
    if process_group.main:
        problems.write(folder / PROBLEMS)
    _check_data(data, recipe, folder)
    load_start(config.start, model)
    return saving.Training(recipe, folder, process_group, Learner(recipe, model, loss, process_group), data)


def _check_data(data: saving.TrainingData, recipe: Recipe, folder: Path) -> None:
    """Say what trains and validates, and refuse data of which too much cannot be used."""
    used = {} if data.indexed is None else {"train": data.indexed.sampler.data}
    used |= {} if data.val is None else {data.val_split: data.val.data}
    data.problems.check(sum(len(split.image_ids) for split in used.values()), recipe.data.max_problem_fraction)
    for name, split in used.items():
        say(f"{name}: {counted(len(split.image_ids), 'image')}, {counted(len(split.text_ids), 'text')}")
    if data.problems.left_out:
        left_out = counted(data.problems.left_out, "item")
        say(f"{left_out} left out, listed in {folder / PROBLEMS}:\n{data.problems.summary(3)}")


def _one_text_an_image(validates: bool) -> str:
    """What it means for probabilities that no text can be kept back, and what to do."""
    if validates:
        fitted = "probabilities are fitted on images that it does not see"
        rough = "in an index of the training images they are a rough guide"
        why = f"none can be kept back from the training, so {fitted}, and {rough}"
        return f"one text an image: {why}. Give the images a second text for better ones"
    lost = "nothing chooses the best epoch, and there will be no probabilities"
    ways = "Give the images a second text, or stop now and keep some images back: data.val_fraction=0.2"
    return f"one text an image: none can be kept back from the training, so {lost}. {ways}"


def _extended(recipe: Recipe, former: int) -> str:
    """What it means that a run goes on with more epochs than it was to have."""
    ends = former, recipe.train.epochs
    ended, goes_on = (learning_rate_factor(former, recipe.optim, epochs=epochs) for epochs in ends)
    epochs = recipe.train.epochs
    rate = f"The learning rate goes on by the schedule of {epochs} epochs: after epoch {former} it is {goes_on:.0%}"
    before = f"of its peak, where the former schedule ended at {ended:.0%}"
    other = f"So the weights are not those of a run of {epochs} epochs in one go"
    return f"extended from {former} to {epochs} epochs. {rate} {before}. {other}"


def training_splits(recipe: Recipe, folder: Path, problems: Problems, group: ProcessGroup) -> dict[str, PairData]:
    """The splits of the recipe's data; the training split has its noise and lacks the part that is left out."""
    splits = load_splits(recipe.data, problems)
    if "train" in splits:
        splits["train"] = _with_noise(recipe.data, splits["train"], folder, group)
        if recipe.data.leave_out:
            splits["train"] = without_part(splits["train"], *parse_part(recipe.data.leave_out))
    if recipe.data.source == "shards":
        _stream(recipe, Problems(), group)  # Refused on all processes before any of them starts to work.
    return splits


def _with_noise(config: DataConfig, data: PairData, folder: Path, process_group: ProcessGroup) -> PairData:
    """The training pairs with the recipe's noise; the run folder keeps the image of each pair."""
    if not config.noise_rate:
        return data
    path = folder / NOISE
    if process_group.main and not path.exists():
        save_noise(path, shuffle_pairs(data, config.noise_rate)[1])
    process_group.wait()
    return apply_noise(data, load_noise(path, data))


def new_or_resumed_model(recipe: Recipe, folder: Path, splits: dict[str, PairData], group: ProcessGroup) -> DualEncoder:
    """Build a new model, equal on all processes, or the model of an interrupted run without its weights."""
    if (folder / LAST).exists():
        return build_model(recipe.model, load_assets(folder, recipe), recipe.augment).to(group.device)
    if group.main:
        tokenizer = fresh_tokenizer(recipe.model, _training_texts(recipe, splits))
        described = described_by(splits["train"]) if "train" in splits else {}
        model = build_model(recipe.model, Assets(tokenizer, described), recipe.augment)
        save_assets(folder, tokenizer, model)
    group.wait()
    if not group.main:
        model = build_model(recipe.model, load_assets(folder, recipe), recipe.augment)
    model = model.to(group.device)
    group.copy_from_main(model)
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
        way_out = "; take the section model of that one, or start from new weights: train.start= train.anchor=0"
        begin: Any = load_model(source, trainable=True).model
        load_tensors(model, begin.state_dict(), f"train.start={source}: does not fit the model of this recipe", way_out)


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
            paths, batch_size=max(1, recipe.train.batch_size // process_group.size), seed=recipe.train.seed,
            samples_per_epoch=recipe.data.samples_per_epoch, rank=process_group.rank, n_processes=process_group.size,
            problems=problems, max_problem_fraction=recipe.data.max_problem_fraction,
        )  # fmt: skip
    except ValueError as error:
        given = f"data.samples_per_epoch={recipe.data.samples_per_epoch}, train.batch_size={recipe.train.batch_size}"
        raise UserError(f"{given}: {error}") from error


def training_batches(
    recipe: Recipe, model: DualEncoder, splits: dict[str, PairData], problems: Problems, process_group: ProcessGroup
) -> Batches:
    """The batches of the split "train", or of a stream of shards."""
    augmentation = Augmentation(recipe, model, process_group)
    if recipe.data.source == "shards":
        for side, section in (("image", recipe.model.image), ("text", recipe.model.text)):
            if getattr(section, "whiten", None) is not None:
                raise UserError(f"model.{side}.whiten is fitted on a split, but shards are a stream; leave it out")
        stream = _stream(recipe, problems, process_group)
        return ShardBatches(stream, model, augmentation, process_group, equal_texts=recipe.data.equal_texts)
    if "train" not in splits:
        raise UserError(f"the data has no split 'train'; it has {', '.join(splits)}")
    train = prepare_split(model, splits["train"], problems, "train", process_group)
    over, positives, weights = recipe.data.epoch_over, recipe.data.positives, recipe.data.kind_weights or None
    grades = Grades(train.data) if recipe.data.graded else None
    options: dict[str, Any] = {"epoch_over": over, "positives": positives, "kind_weights": weights, "grades": grades}
    sampler = PairSampler(train.data, recipe.train.batch_size, recipe.train.seed, **options)
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
    found = recipes.load_recipe(recipes.find_recipe(recipe.prefer), overrides)
    other = found.model_copy(update={"imports": recipe.imports})
    backbone = other.model.image.frozen_backbone
    if (saved := folder / RECIPE).is_file():
        if recipes.load_recipe(saved).name != other.name:
            return recipe, ""
    elif not (place := where_weights_are(backbone)):
        instead = f"using {recipe.model.image.base_model} and {recipe.model.text.base_model} instead"
        less = "They are smaller and find less; train into another folder when there is a network"
        return recipe, f"{backbone} is not in the hub's cache, and the hub cannot be reached: {instead}. {less}"
    elif place == "hub":
        return other, _reason(other, recipe, "downloaded once (0.6 GB)")
    return other, _reason(other, recipe, "in the hub's cache")


def _reason(chosen: Recipe, asked: Recipe, place: str) -> str:
    own = "Its ranking is the model's own, and only probabilities are fitted"
    way = f"For the small models of the package: model.image.backbone={asked.model.image.base_model}"
    return f"using recipe {chosen.name}: {chosen.model.image.frozen_backbone}, {place}. {own}. {way}"


LOCK = ".lock"
"""Name of the file that a training process locks in its run folder."""

_NAMED = 3
"""Largest number of differing keys in a message."""


@contextmanager
def opened(recipe: Recipe, folder: Path) -> Iterator[tuple[Recipe, Path, ProcessGroup]]:
    """Join the processes that train in a folder, and lock it against others; the recipe has absolute paths."""
    recipe = with_present_imports(recipes.absolute_recipe(recipe))
    build_loss(recipe)  # An unknown one is refused before anything is written.
    folder.mkdir(parents=True, exist_ok=True)
    joining = join_process_group(partial(choose_device, recipe.train.device), recipe.train.timeout_minutes)
    with joining as group, _locked(folder) if group.main else nullcontext():
        yield recipe, folder, group


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = filelock.FileLock(folder / LOCK, timeout=0)
    try:
        held = lock.acquire()
    except filelock.Timeout as error:
        reason = f"another process is training in {folder}; wait for it, or give another folder with --out"
        raise UserError(reason) from error
    with held:
        yield


def claim_folder(folder: Path, recipe: Recipe) -> int | None:
    """Check that a folder may be trained in, and save the recipe there; return the epochs of a run that is extended.

    Before the first checkpoint, files of an earlier start are replaced, so a run that failed because of a wrong path
    can start again.
    """
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)  # The leftover file of a killed writer.
    started = (folder / LAST).exists() or (folder / MODEL).exists()
    if not (folder / RECIPE).exists():
        if any(path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no run; give an empty or new folder with --out")
    elif started:
        saved = recipes.absolute_recipe(recipes.load_recipe(folder / RECIPE))
        saved = saved.model_copy(update={"imports": recipe.imports})
        if saved == recipe:
            return None
        _check_extends(folder, saved, recipe)
        recipes.save_recipe(recipe, folder / RECIPE)
        return saved.train.epochs if saved.train.epochs < recipe.train.epochs else None
    for name in (TOKENIZER, ENCODERS, NOISE):
        (folder / name).unlink(missing_ok=True)
    recipes.save_recipe(recipe, folder / RECIPE)
    return None


def with_present_imports(recipe: Recipe) -> Recipe:
    """The recipe with files that --import names now, in place of those that are no longer where they were."""
    gone = [name for name in recipe.imports if name.endswith(".py") and not Path(name).is_file()]
    if gone and not given_imports():
        raise UserError(f"imports: there is no file {gone[0]}; name it as it is now: --import FILE")
    kept = [name for name in recipe.imports if name not in gone]
    return recipe.model_copy(update={"imports": tuple(dict.fromkeys([*kept, *(given_imports() if gone else ())]))})


def _check_extends(folder: Path, saved: Recipe, recipe: Recipe) -> None:
    """Refuse to train a recipe in the folder of a run, unless it only has more epochs or other bookkeeping."""
    found = recipes.differing_keys(saved, recipe)
    differing = {key: values for key, values in found.items() if key not in recipes.BOOKKEEPING}
    if not differing:
        return
    way_out = f"Give another folder with --out, or delete that one: {as_typed('rm', '-r', folder)}"
    if list(differing) != ["train.epochs"]:
        named = [f"{key} is {ours!r} there and {new!r} here" for key, (ours, new) in differing.items()]
        more = f", and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        raise UserError(f"{folder} holds a run of another recipe: {'; '.join(named[:_NAMED])}{more}. {way_out}")
    before, now = saved.train.epochs, recipe.train.epochs
    if now < before:
        reason = f"train.epochs is {before} there and {now} here, and a run can only be extended"
    elif saved.train.swa_epochs:
        mean = f"its weights are averaged over the last epochs (train.swa_epochs={saved.train.swa_epochs})"
        reason = f"{mean}, which the further ones would be missing from"
    elif not (folder / LAST).exists():
        reason = f"{LAST} is missing, which holds the state of its training"
    else:
        return
    raise UserError(f"the run in {folder} cannot go on: {reason}. {way_out}")
