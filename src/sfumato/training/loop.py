"""The training loop, which resumes an interrupted run bit for bit.

All random choices of a step depend only on (seed, epoch, step), so the state after a step is sufficient for resuming.
"""

import contextlib
import math
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.conditional import N_REFERENCE
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.data.splits import WORDINGS
from sfumato.distances import Distance
from sfumato.encoders.feature_rows import features_read
from sfumato.encoders.package_weights import number_format
from sfumato.errors import UserError, counted
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.files import write_atomically
from sfumato.gaussian import check_finite
from sfumato.losses import MatchLoss
from sfumato.metrics.relevance import Relevance
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import PreparedSplit, Sides, embed_split, prepare_split
from sfumato.models.process_group import ProcessGroup, join_process_group
from sfumato.models.recipe import Recipe, absolute_recipe
from sfumato.models.run import (
    CALIBRATION,
    LOG,
    MODEL,
    PROBLEMS,
    TRAINED,
    TRAINING_CALIBRATION,
    WORDS,
    build_loss,
    choose_device,
    image_digest,
    load_state,
    read_log,
    save_state,
)
from sfumato.models.unfamiliar import remember_words
from sfumato.progress import progress_bar, say
from sfumato.training.batches import IndexedBatches, epoch_seed, prefetch
from sfumato.training.saving import (
    EpochPart,
    Training,
    append_line,
    resume,
    save_epoch,
    save_part_if_due,
    told_to_end,
)
from sfumato.training.setup import (
    LOCK,
    claim_folder,
    load_start,
    new_or_resumed_model,
    training_batches,
    training_splits,
    what_to_expect,
    with_present_imports,
)
from sfumato.training.step import (
    DivergedError,
    TrainBatch,
    WeightAverage,
    averaged,
    build_optimiser,
    clip_gradients,
    forward_backward,
    freeze_for_epoch,
    learning_rate_factor,
    set_learning_rate,
)
from sfumato.training.trackers import OnEpoch, tracked
from sfumato.training.variance_stage import teach_variances

_SMALLEST_SCALE = 1e-4
"""A gradient that overflows float16 below this scale has diverged."""


def fit(recipe: Recipe, folder: str | Path, *, on_epoch: OnEpoch | None = None) -> dict[str, Any]:
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
    folder, recipe = Path(folder), with_present_imports(absolute_recipe(recipe))
    build_loss(recipe)  # An unknown one is refused before anything is written.
    folder.mkdir(parents=True, exist_ok=True)
    with join_process_group(partial(choose_device, recipe.train.device), recipe.train.timeout_minutes) as process_group:
        if not process_group.main:
            return _fit(recipe, folder, process_group, None)
        try:
            with filelock.FileLock(folder / LOCK, timeout=0):
                return _fit(recipe, folder, process_group, on_epoch)
        except filelock.Timeout as error:
            raise UserError(
                f"another process is training in {folder}; wait for it, or give another folder with --out"
            ) from error


def _fit(recipe: Recipe, folder: Path, process_group: ProcessGroup, on_epoch: OnEpoch | None) -> dict[str, Any]:
    training = _prepare(recipe, folder, process_group)
    done = resume(training)
    if recipe.train.compile:
        training.model.image.encoder.compile()
        training.model.text.encoder.compile()
    if isinstance(training.batches, IndexedBatches):
        training.batches.prepare(training.model)
    tracker = recipe.train.tracker if process_group.main else ""
    with tracked(tracker, recipe, folder) as track, told_to_end(training):
        for epoch in range(done.epoch, recipe.train.epochs):
            done = done if epoch == done.epoch else EpochPart(epoch)
            started = time.monotonic() - done.seconds
            line = {"epoch": epoch, **_train_epoch(training, done), **_validate_epoch(training, epoch)}
            line["seconds"] = time.monotonic() - started
            if process_group.main:
                append_line(folder / LOG, line)
                save_epoch(training, epoch)
                track(line)
            if on_epoch is not None:
                on_epoch(line)
            say(_one_line(line, recipe.train.epochs, training.val_split))
    _finish(training)
    return {
        "run": str(folder),
        "epochs": recipe.train.epochs,
        "best_epoch": training.best_epoch,
        "best_score": training.best_score if training.val is not None else None,
        "selected_by": (
            selected_by(recipe.train.select, training.val.data.relevance()) if training.val is not None else None
        ),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "calibrated": (folder / CALIBRATION).exists(),
        "problems": len(training.problems),
        "seconds": round(sum(line["seconds"] for line in read_log(folder / LOG)), 1),
    }


def _prepare(recipe: Recipe, folder: Path, process_group: ProcessGroup) -> Training:
    """Read the data and build the model, the loss and the optimiser."""
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
    held_out = WORDINGS if recipe.data.held_out_wordings and WORDINGS in splits else None
    val_split = "val" if "val" in splits else held_out  # If all images train, their other texts validate.
    if recipe.data.held_out_wordings and not held_out:
        say(_one_text_an_image(val_split is not None))
    val = prepare_split(model, splits[val_split], problems, val_split, process_group) if val_split else None
    wordings = splits[held_out] if held_out and held_out != val_split else None
    batches = training_batches(recipe, model, splits, problems, process_group)
    if process_group.main:
        problems.write(folder / PROBLEMS)
    used = {"train": batches.sampler.data} if isinstance(batches, IndexedBatches) else {}
    used |= {val_split: val.data} if val is not None and val_split else {}
    problems.check(sum(len(data.image_ids) for data in used.values()), recipe.data.max_problem_fraction)
    for name, data in used.items():
        say(f"{name}: {counted(len(data.image_ids), 'image')}, {counted(len(data.text_ids), 'text')}")
    if problems.left_out:
        say(f"{counted(problems.left_out, 'item')} left out, listed in {folder / PROBLEMS}:\n{problems.summary(3)}")
    optimiser = build_optimiser(model, loss, recipe.optim)
    load_start(config.start, model)
    half = number_format(config.precision, process_group.device) == torch.float16
    averages = config.ema_decay or config.swa_epochs
    average = WeightAverage(model, config.ema_decay or None, config.anchor) if averages else None
    return Training(
        recipe,
        folder,
        process_group,
        model,
        loss,
        batches,
        val,
        val_split or "",
        wordings,
        problems,
        optimiser,
        torch.amp.GradScaler(process_group.device.type, enabled=half),
        average,
    )


def _one_text_an_image(validates: bool) -> str:
    """What it means for probabilities that no text can be kept back, and what to do."""
    if validates:
        return (
            "one text an image: none can be kept back from the training, so probabilities are fitted on images that it"
            " does not see, and in an index of the training images they are a rough guide. Give the images a second"
            " text for better ones"
        )
    return (
        "one text an image: none can be kept back from the training, so nothing chooses the best epoch, and there will"
        " be no probabilities. Give the images a second text, or stop now and keep some images back:"
        " data.val_fraction=0.2"
    )


def _extended(recipe: Recipe, former: int) -> str:
    """What it means that a run goes on with more epochs than it was to have."""
    ended, goes_on = (
        learning_rate_factor(former, recipe.optim, epochs=epochs) for epochs in (former, recipe.train.epochs)
    )
    return (
        f"extended from {former} to {recipe.train.epochs} epochs. The learning rate goes on by the schedule of"
        f" {recipe.train.epochs} epochs: after epoch {former} it is {goes_on:.0%} of its peak, where the former"
        f" schedule ended at {ended:.0%}. So the weights are not those of a run of {recipe.train.epochs} epochs in one"
        " go"
    )


def _train_epoch(training: Training, done: EpochPart) -> dict[str, Any]:
    """Train the rest of an epoch; return the means of the quantities measured at its steps."""
    recipe, group, batches, epoch = training.recipe, training.process_group, training.batches, done.epoch
    training.model.train()
    freeze_for_epoch(training.model, epoch, recipe.optim)
    started = time.monotonic() - done.seconds
    with (
        progress_bar(f"epoch {epoch + 1}/{recipe.train.epochs}", len(batches)) as advance,
        closing(prefetch(batches.epoch(epoch, done.step))) as coming,
    ):
        advance(done.step)
        for batch in coming:
            torch.manual_seed(epoch_seed(recipe.train.seed, epoch, 0, done.step, group.rank))
            factor = learning_rate_factor(epoch + done.step / len(batches), recipe.optim, epochs=recipe.train.epochs)
            set_learning_rate(training.optimiser, factor)
            try:
                done.add(_train_step(training, batch, epoch))
            except DivergedError as error:
                wider = "; or train.precision=bfloat16, with a wider range" if training.scaler.is_enabled() else ""
                raise DivergedError(f"epoch {epoch + 1}, step {done.step + 1}: {error}{wider}") from error
            advance(1)
            done.seconds = time.monotonic() - started
            save_part_if_due(training, done)
    if training.average is not None and epoch >= recipe.train.epochs - recipe.train.swa_epochs:
        training.average.update(training.model)
    means = {name: value / done.counts[name] for name, value in done.sums.items()}
    return {**means, **_current_logits(training.loss)}


def _train_step(training: Training, batch: TrainBatch, epoch: int) -> dict[str, float]:
    """Make one update of the weights; return the measured quantities."""
    recipe, optimiser, scaler = training.recipe, training.optimiser, training.scaler
    optimiser.zero_grad(set_to_none=True)
    measured = forward_backward(
        training.model,
        training.loss,
        batch,
        training.process_group,
        epoch=epoch,
        precision=number_format(recipe.train.precision, training.process_group.device),
        scaler=scaler,
        micro_batch=recipe.train.micro_batch,
    )
    training.process_group.average_buffers(training.model)
    scaler.unscale_(optimiser)
    norm = clip_gradients([p for group in optimiser.param_groups for p in group["params"]], recipe.optim.clip_norm)
    scale, skipped = scaler.get_scale(), False
    if scaler.is_enabled():
        scaler.step(optimiser)  # Leaves the weights as they are if a gradient is not finite.
        scaler.update()
        skipped = scaler.get_scale() < scale
        measured |= {"loss_scale": scaler.get_scale(), "skipped": float(skipped)}
    if not math.isfinite(norm) and not (skipped and scale >= _SMALLEST_SCALE):
        raise DivergedError(f"the gradient is {norm}; lower optim.lr or lengthen optim.warmup_epochs")
    if skipped:
        return measured
    if not scaler.is_enabled():
        optimiser.step()
    try:
        training.loss.advance()
    except ArithmeticError as error:
        raise DivergedError(str(error)) from error
    if training.average is not None and recipe.train.ema_decay:
        training.average.update(training.model)
    return {**measured, "gradient_norm": norm}


def _current_logits(loss: MatchLoss) -> dict[str, float]:
    logits = getattr(loss, "logits", None)
    if logits is None:
        return {}
    return {"logit_scale": float(logits.logit_scale.detach()), "logit_bias": float(logits.logit_bias.detach())}


def _validate_epoch(training: Training, epoch: int) -> dict[str, float]:
    """Evaluate the validation split if the recipe requests it, and keep the weights if they are the best."""
    config, val = training.recipe.train, training.val
    if val is None or (epoch + 1 < config.epochs and (epoch + 1) % config.evaluate_every):
        return {}
    with averaged(training.model, training.average):
        embedded = embed_split(training.model, val, training.process_group)
        evaluation, score = validate(embedded, val, training.loss.distance, config.select, training.process_group)
        # Averaged weights are not compared with earlier weights that were not averaged.
        first_mean = epoch >= config.epochs - config.swa_epochs > training.best_epoch
        if score > training.best_score or first_mean or config.select == "last":
            training.best_score, training.best_epoch = score, epoch
            if training.process_group.main:
                save_state(training.folder / MODEL, training.weights, None, {"epoch": epoch, "score": score})
    return _summary(evaluation, score)


def _finish(training: Training) -> None:
    """Keep the last weights if there was no validation, calibrate, and teach the variances."""
    group, folder, val, epochs = training.process_group, training.folder, training.val, training.recipe.train.epochs
    if val is None:
        say(
            "no validation split: the last weights are kept, and match probabilities are not calibrated."
            " For a validation split, raise data.val_fraction; with shards, give data.val_path; with cub,"
            " data.options.fold"
        )
        with averaged(training.model, training.average):
            if group.main:
                save_state(folder / MODEL, training.weights, None, {"epoch": epochs - 1})
    second_stage = training.recipe.variance_stage.epochs
    if group.main and isinstance(training.batches, IndexedBatches):
        data = training.batches.sampler.data
        remember_words(training.model, data.texts, folder / WORDS)
        if not features_read(training.model.image):
            write_atomically(folder / TRAINED, "".join(f"{image_digest(image)}\n" for image in data.images))
    if val is None and not second_stage:
        return
    group.wait()
    about, calibration = load_state(folder / MODEL, training.weights), None
    group.wait()  # Before the first process writes it again.
    if val is not None:
        embedded = embed_split(training.model, val, group)
        if group.main:
            calibration = calibrate(
                embedded, val.data, training.loss, folder, split=training.val_split, reference=_reference(training)
            )
        if training.wordings is not None:
            _calibrate_training(training, training.wordings)
    if second_stage and not about.get("variance_stage"):
        _fit_variances(training, calibration)
        if group.main:
            save_state(folder / MODEL, training.weights, None, about | {"variance_stage": True})
    group.wait()


def _calibrate_training(training: Training, wordings: PairData) -> None:
    """Calibrate a gallery of the training images on the texts that the training left out."""
    group = training.process_group
    prepared = prepare_split(training.model, wordings, training.problems, WORDINGS, group)
    embedded = embed_split(training.model, prepared, group)
    if group.main:
        path = training.folder / TRAINING_CALIBRATION
        path.unlink(missing_ok=True)  # Of the weights before, if the run was extended.
        with contextlib.suppress(ValueError):  # Too few texts: such a gallery has the probabilities of other images.
            calibrate_split(embedded, prepared.data, training.loss.distance.name, split=WORDINGS).save(path)


def _reference(training: Training) -> Sides | None:
    """Some embedded training items, the reference queries of the calibration; None of a stream."""
    batches = training.batches
    if not isinstance(batches, IndexedBatches):
        return None
    random = np.random.default_rng(training.recipe.train.seed)
    image, text = (
        tower.embed(store, np.sort(random.permutation(len(store))[:N_REFERENCE]))
        for tower, store in ((training.model.image, batches.images), (training.model.text, batches.texts))
    )
    return image, text


def _fit_variances(training: Training, calibration: Calibration | None) -> None:
    """Run the variance stage, equal on all processes. It changes no distance, so the calibration stays valid."""
    batches, recipe, group = training.batches, training.recipe, training.process_group
    assert isinstance(batches, IndexedBatches)  # The recipe was checked for this.
    if group.main:
        teach_variances(
            training.model,
            (batches.images, batches.texts),
            batches.sampler.data,
            recipe.variance_stage,
            logits=None if calibration is None else (calibration.logit_scale, calibration.logit_bias),
            seed=recipe.train.seed,
        )
    group.copy_from_main(training.model)


def validate(
    embedded: Sides, split: PreparedSplit, distance: Distance, select: str, process_group: ProcessGroup
) -> tuple[Evaluation, float]:
    """Evaluate the embeddings of a split, and compute the score by which the best epoch is chosen."""
    relevance = split.data.relevance()
    for side, embeddings in zip(("image", "text"), embedded, strict=True):
        try:
            check_finite(embeddings, f"validation, {side}s")
        except ValueError as error:
            raise DivergedError(f"{error}; lower optim.lr or lengthen optim.warmup_epochs") from error
    evaluation = evaluate_retrieval(
        *embedded, relevance, distance=distance.name, text_kinds=split.data.text_kinds, rank=process_group.rank_relevant
    )
    if selected_by(select, relevance) == "map@r":
        return evaluation, (evaluation.i2t["map@r"] + evaluation.t2i["map@r"]) / 2
    return evaluation, evaluation.rsum


def selected_by(select: str, relevance: Relevance) -> str:
    """The metric by which the best epoch is chosen."""
    many = relevance.transpose().counts.max() > 1
    return "map@r" if select == "map@r" or (select == "auto" and many) else "rsum"


def calibrate(
    embedded: Sides,
    data: PairData,
    loss: MatchLoss,
    folder: Path,
    *,
    split: str = "val",
    reference: Sides | None = None,
) -> Calibration | None:
    """Calibrate on the embeddings of the validation split, and write calibration.json into the run folder."""
    try:
        calibration = calibrate_split(embedded, data, loss.distance.name, split=split, reference=reference)
    except ValueError as error:
        say(f"match probabilities are not calibrated: {error}")
        return None
    calibration.save(folder / CALIBRATION)
    return calibration


def _summary(evaluation: Evaluation, score: float) -> dict[str, float]:
    directions = {"i2t": evaluation.i2t, "t2i": evaluation.t2i}
    return {f"val/{d}/{name}": value for d, metrics in directions.items() for name, value in metrics.items()} | {
        "val/rsum": evaluation.rsum,
        "val/chance_rsum": evaluation.chance_rsum,
        "val/above_chance": evaluation.above_chance,
        "val/score": score,
    }


def _one_line(line: dict[str, Any], epochs: int, val_split: str) -> str:
    text = f"epoch {line['epoch'] + 1}/{epochs}  loss {line['loss']:.4f}"
    if "val/score" in line:
        i2t, t2i = line["val/i2t/recall@1"], line["val/t2i/recall@1"]
        text += (
            f"  {val_split} recall@1 i2t {i2t:.1%} t2i {t2i:.1%}, rsum {line['val/rsum'] * 100:.1f} of 600"
            f" ({line['val/chance_rsum'] * 100:.1f} by chance)"
        )
        if line["val/score"] != line["val/rsum"]:
            text += f", map@r {line['val/score']:.1%}"
        if not line["val/above_chance"]:
            text += ": not above chance yet"
    return text
