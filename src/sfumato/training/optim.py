"""Optimisers, parameter groups, schedules and averaged weights."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from adamp import AdamP
from torch import Tensor, nn

from sfumato.encoders.dual import DualEncoder
from sfumato.encoders.encoder_protocol import Encoder
from sfumato.losses import MatchLoss
from sfumato.models.recipe import OptimConfig


def build_optimiser(model: DualEncoder, loss: MatchLoss, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or AdamP over groups that differ in learning rate and weight decay.

    Matrices decay; vectors and scalars (biases, norms, the match logits) do not. The encoders and the match logits have
    separate learning-rate multipliers. A transformer block is also multiplied by layer_decay to the power of its
    number, counted from the top: the last block has the factor 1, for any number of blocks. (The released code counts
    from 12, so that the last block of a ViT-L, its number 23, has the factor layer_decay^-11: 51 with a decay of 0.7.)
    Parameters outside of the blocks have the multiplier alone.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((_multiplier(model, name, config), decay), []).append(parameter)
    for parameter in loss.parameters():
        groups.setdefault((config.logits_lr_multiplier, 0.0), []).append(parameter)
    options = [
        {"params": trained, "lr": config.lr * multiplier, "base_lr": config.lr * multiplier, "weight_decay": decay}
        for (multiplier, decay), parameters in groups.items()
        if (trained := [p for p in parameters if p.requires_grad])
    ]
    if config.name == "adamp":
        optimiser: torch.optim.Optimizer = AdamP(options, lr=config.lr, betas=config.betas, eps=config.eps)
        return optimiser
    return torch.optim.AdamW(options, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _multiplier(model: DualEncoder, name: str, config: OptimConfig) -> float:
    for side, multiplier in (("image", config.image_lr_multiplier), ("text", config.text_lr_multiplier)):
        prefix = f"{side}.encoder."
        if name.startswith(prefix):
            if config.layer_decay == 1:
                return multiplier
            encoder = model.image.encoder if side == "image" else model.text.encoder
            return float(multiplier * config.layer_decay ** encoder.blocks_from_top(name.removeprefix(prefix)))
    return 1.0


def freeze_encoder(encoder: Encoder, frozen: bool) -> None:
    """Freeze or unfreeze the pre-trained parameters of an encoder and their running statistics.

    Call it after ``model.train()``.
    """
    for name, module in encoder.named_modules():
        if frozen and isinstance(module, nn.modules.batchnorm._BatchNorm) and encoder.freezes(f"{name}."):
            module.eval()
    for name, parameter in encoder.named_parameters():
        if encoder.freezes(name):
            parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None


def freeze_for_epoch(model: DualEncoder, epoch: int, config: OptimConfig) -> None:
    """Freeze the encoders that the recipe freezes in an epoch, and unfreeze the others.

    Call it after ``model.train()``.
    """
    first_stage = epoch < config.first_stage_epochs
    freeze_encoder(model.image.encoder, first_stage or epoch < config.freeze_image_epochs)
    freeze_encoder(model.text.encoder, first_stage)


def learning_rate_factor(progress: float, config: OptimConfig, *, epochs: int) -> float:
    """The factor on all base learning rates."""
    first = config.first_stage_epochs
    if first and progress >= first:
        return config.second_stage_factor * _stage_factor(progress - first, config, epochs=epochs - first)
    return _stage_factor(progress, config, epochs=config.first_stage_schedule_epochs or first or epochs)


def _stage_factor(progress: float, config: OptimConfig, *, epochs: int) -> float:
    since = progress - config.freeze_image_epochs
    warmup = min(1.0, since / config.warmup_epochs) if config.warmup_epochs and since >= 0 else 1.0
    done = progress / epochs
    if config.schedule == "cosine":
        start = min((config.freeze_image_epochs + config.warmup_epochs) / epochs, 1.0)
        after = (done - start) / (1 - start) if done > start else 0.0
        return warmup * (1 + math.cos(math.pi * after)) / 2
    if config.schedule == "step" and done >= config.step_at:
        return warmup * config.step_factor
    return warmup


def set_learning_rate(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to its base learning rate times a factor."""
    for group in optimiser.param_groups:
        group["lr"] = group["base_lr"] * factor


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> float:
    """Scale the gradients to a largest norm."""
    norm = nn.utils.clip_grad_norm_(parameters, largest if largest else math.inf)
    return float(norm)


class WeightAverage(nn.Module):
    """The average of all weights and buffers of a model: both towers and their heads.

    Paper: Izmailov et al., "Averaging weights leads to wider optima and better generalization", UAI 2018, for the plain
        mean.
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.names = list(model.state_dict())
        for i, value in enumerate(model.state_dict().values()):
            self.register_buffer(f"value{i}", value.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the model's current values to the average."""
        self.updates += 1
        count = float(self.updates)
        kept = 1 - 1 / count if self.decay is None else min(self.decay, count / (count + 10))
        for own, value in zip(self.values(), model.state_dict().values(), strict=True):
            if own.is_floating_point():
                own.lerp_(value, 1 - kept)
            else:
                own.copy_(value)

    def values(self) -> list[Tensor]:
        """The averaged values."""
        return [self.get_buffer(f"value{i}") for i in range(len(self.names))]


@contextmanager
def averaged(model: nn.Module, average: WeightAverage | None) -> Iterator[None]:
    """Use the averaged weights of a model within a ``with`` block, and restore its own weights afterwards."""
    if average is None or not average.updates:
        yield
        return
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(dict(zip(average.names, average.values(), strict=True)))
    try:
        yield
    finally:
        model.load_state_dict(own)
