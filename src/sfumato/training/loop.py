"""The training loop, which resumes an interrupted run bit for bit.

All random choices of a step depend only on (seed, epoch, step), so the state after a step is sufficient for resuming.
"""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from sfumato.models.embed import embed_split
from sfumato.models.recipe import Recipe
from sfumato.progress import say
from sfumato.training.batches import epoch_seed, steps
from sfumato.training.saving import EpochPart, OnEpoch, resume, save_epoch, save_part_if_due, told_to_end, tracked
from sfumato.training.setup import opened, set_up
from sfumato.training.validation import after_training, epoch_line, figures_of, keep_weights, result_of, validate


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
    with opened(recipe, Path(folder)) as (recipe, folder, group):
        training = set_up(recipe, folder, group)
        learner, batches, val, config = training.learner, training.data.batches, training.data.val, recipe.train
        done = resume(training)
        with tracked(config.tracker if group.main else "", recipe, folder) as track, told_to_end(training):
            for epoch in range(done.epoch, config.epochs):
                done = done if epoch == done.epoch else EpochPart(epoch)
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
                        save_part_if_due(training, done)
                learner.end_epoch(epoch)
                line = {"epoch": epoch, **done.means(), **learner.logits()}
                if val is not None and config.validates(epoch):
                    with learner.averaged():
                        embedded = embed_split(learner.model, val, group)
                        evaluation, score = validate(embedded, val, learner.loss.distance, config.select, group)
                        keep_weights(training, epoch, score)
                    line |= figures_of(evaluation, score)
                line["seconds"] = time.monotonic() - started
                save_epoch(training, line)
                track(line)
                if on_epoch is not None and group.main:
                    on_epoch(line)
                say(epoch_line(line, config.epochs, training.data.val_split))
        after_training(training)
        return result_of(training)
