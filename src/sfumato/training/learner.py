"""What a training changes: the model, the loss with its logits, the optimiser, and the average of the weights."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from sfumato.encoders.dual import DualEncoder
from sfumato.encoders.package_weights import number_format
from sfumato.losses import MatchLoss
from sfumato.models.process_group import ProcessGroup
from sfumato.models.recipe import Recipe
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

_SMALLEST_SCALE = 1e-4
"""A gradient that overflows float16 below this scale has diverged."""


class Learner:
    """A model that learns as a recipe says, equal on all processes."""

    def __init__(self, recipe: Recipe, model: DualEncoder, loss: MatchLoss, process_group: ProcessGroup) -> None:
        self.optim, self.config = recipe.optim, recipe.train
        self.model, self.loss, self.process_group = model, loss, process_group
        self.optimiser = build_optimiser(model, loss, recipe.optim)
        self.precision = number_format(recipe.train.precision, process_group.device)
        self.scaler = torch.amp.GradScaler(process_group.device.type, enabled=self.precision == torch.float16)
        averages = self.config.ema_decay or self.config.swa_epochs
        self.average = WeightAverage(model, self.config.ema_decay or None, self.config.anchor) if averages else None

    @property
    def weights(self) -> dict[str, nn.Module]:
        """The modules that are saved as the best weights."""
        return {"model": self.model, "loss": self.loss}

    @property
    def state(self) -> dict[str, nn.Module]:
        """The modules that resuming needs besides the optimiser."""
        return self.weights | ({"average": self.average} if self.average else {})

    def begin_epoch(self, epoch: int) -> None:
        """Set the modules to training, and freeze what the recipe freezes in an epoch."""
        self.model.train()
        freeze_for_epoch(self.model, epoch, self.optim)

    def set_rate(self, progress: float) -> None:
        """Set the learning rate after a number of epochs."""
        set_learning_rate(self.optimiser, learning_rate_factor(progress, self.optim, epochs=self.config.epochs))

    @contextmanager
    def at(self, epoch: int, step: int) -> Iterator[None]:
        """Say in which step a training diverged."""
        try:
            yield
        except DivergedError as error:
            wider = "; or train.precision=bfloat16, with a wider range" if self.scaler.is_enabled() else ""
            raise DivergedError(f"epoch {epoch + 1}, step {step + 1}: {error}{wider}") from error

    def gradients_of_loss(self, batch: TrainBatch, epoch: int) -> dict[str, float]:
        """Compute the loss of a batch and its gradients, in place of former ones; return the measured quantities."""
        self.optimiser.zero_grad(set_to_none=True)
        return forward_backward(
            self.model,
            self.loss,
            batch,
            self.process_group,
            epoch=epoch,
            precision=self.precision,
            scaler=self.scaler,
            micro_batch=self.config.micro_batch,
        )

    def update(self) -> dict[str, float]:
        """Make one update of the weights by their gradients; return the measured quantities."""
        measured = {}
        self.process_group.average_buffers(self.model)
        self.scaler.unscale_(self.optimiser)
        trained = [p for group in self.optimiser.param_groups for p in group["params"]]
        norm = clip_gradients(trained, self.optim.clip_norm)
        scale, skipped = self.scaler.get_scale(), False
        if self.scaler.is_enabled():
            self.scaler.step(self.optimiser)  # Leaves the weights as they are if a gradient is not finite.
            self.scaler.update()
            skipped = self.scaler.get_scale() < scale
            measured = {"loss_scale": self.scaler.get_scale(), "skipped": float(skipped)}
        if not math.isfinite(norm) and not (skipped and scale >= _SMALLEST_SCALE):
            raise DivergedError(f"the gradient is {norm}; lower optim.lr or lengthen optim.warmup_epochs")
        if skipped:
            return measured
        if not self.scaler.is_enabled():
            self.optimiser.step()
        try:
            self.loss.advance()
        except ArithmeticError as error:
            raise DivergedError(str(error)) from error
        if self.average is not None and self.config.ema_decay:
            self.average.update(self.model)
        return {**measured, "gradient_norm": norm}

    def end_epoch(self, epoch: int) -> None:
        """Add the weights after one of the last epochs to their mean, if the recipe asks for it."""
        if self.average is not None and epoch >= self.config.epochs - self.config.swa_epochs:
            self.average.update(self.model)

    def averaged(self) -> AbstractContextManager[None]:
        """Use the averaged weights within a ``with`` block, if there are any."""
        return averaged(self.model, self.average)

    def logits(self) -> dict[str, float]:
        """The match logits of the loss, if it has any."""
        logits = getattr(self.loss, "logits", None)
        if logits is None:
            return {}
        return {"logit_scale": float(logits.logit_scale.detach()), "logit_bias": float(logits.logit_bias.detach())}
