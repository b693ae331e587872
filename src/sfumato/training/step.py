"""One step of training: from a batch to the gradients of all parameters, and from these to new weights.

The embeddings of the batch are detached from the networks that made them. The loss of a process's block of pairs gives
their gradients; these are summed over the processes and then sent back through the networks. A batch may therefore be
distributed over processes, or be encoded in micro-batches in two passes, and the contrastive loss still uses the whole
batch.

Paper: Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021, for the two passes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from adamp import AdamP
from torch import Tensor, nn

from sfumato.data.transforms import MixPlan
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.package_weights import number_format
from sfumato.encoders.scratch import Encoder
from sfumato.gaussian import GaussianEmbedding, Sides
from sfumato.losses.base import LossOutput, MatchLoss, PairBlock, loss_of_block
from sfumato.losses.tiles import dense_labels
from sfumato.models.build import DualEncoder
from sfumato.models.process_group import ProcessGroup
from sfumato.models.recipe import Recipe
from sfumato.models.sections import OptimConfig


class DivergedError(ArithmeticError):
    """A term of the loss or the gradient is NaN or infinite; the message says which, and when."""


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """One process's part of a batch."""

    images: Inputs
    texts: Inputs
    labels: Callable[[ProcessGroup], tuple[Tensor, Tensor]]
    mix: MixPlan | None = None


_UNSCALED = torch.amp.GradScaler("cpu", enabled=False)


def forward_backward(
    model: DualEncoder,
    loss: MatchLoss,
    batch: TrainBatch,
    process_group: ProcessGroup,
    *,
    epoch: int,
    precision: torch.dtype = torch.float32,
    scaler: torch.amp.GradScaler = _UNSCALED,
    micro_batch: int = 0,
) -> dict[str, float]:
    """Compute the gradients of the whole batch for the parameters of the model and the loss, scaled by the scaler."""
    images, texts = batch.images.to(process_group.device), batch.texts.to(process_group.device)
    if batch.mix is not None:
        images = Inputs(batch.mix.apply(images.values))

    n, size = len(images), micro_batch or max(len(images), 1)
    pieces = [slice(start, min(start + size, n)) for start in range(0, n, size)]
    states: list[list[Tensor]] = []
    encoded: list[Sides] = []
    with torch.set_grad_enabled(len(pieces) == 1):
        for piece in pieces:
            states.append(_random_state(process_group.device))
            encoded.append(_encode(model, images, texts, piece, precision))

    counts = process_group.counts(n)
    first = sum(counts[: process_group.rank])
    own = slice(first, first + n)
    leaves = _leaves(model, encoded, process_group, counts)
    labels = batch.labels(process_group)
    device_labels = [label.to(process_group.device) for label in labels]
    if loss.needs_whole and process_group.size > 1:
        match = process_group.gather(dense_labels(device_labels[0]), counts)
        whole = _share(leaves, slice(0, leaves[0].n), match, match.T)
        output = _divided(loss_of_block(loss, whole, epoch=epoch), process_group.size)
    else:
        output = loss_of_block(loss, _share(leaves, own, *device_labels), epoch=epoch, gather=process_group.gather_row)
    measured = _measured(output, leaves, labels[0], process_group)
    _check_terms(measured)
    scaler.scale(output.total).backward()
    gradients = [_own_gradients(leaf, own, process_group) for leaf in leaves]

    for k, piece in enumerate(pieces):
        if len(pieces) > 1:
            _set_random_state(states[k], process_group.device)
            encoded[k] = _encode(model, images, texts, piece, precision)
        for embeddings, (mean, log_var) in zip(encoded[k], gradients, strict=True):
            outputs, theirs = [embeddings.mean], [mean[piece]]
            if log_var is not None:
                outputs, theirs = [*outputs, embeddings.log_var], [*theirs, log_var[piece]]
            learnt = [pair for pair in zip(outputs, theirs, strict=True) if pair[0].requires_grad]
            if learnt:  # With model.identity nothing of a mean is.
                torch.autograd.backward([output for output, _ in learnt], [gradient for _, gradient in learnt])
    process_group.sum_gradients([*model.parameters(), *loss.parameters()])
    return measured


def _divided(output: LossOutput, n: int) -> LossOutput:
    """A loss that n processes compute alike, as a part that sums to it."""
    shared = [{name: value / n for name, value in values.items()} for values in (output.terms, output.stats)]
    return LossOutput(output.total / n, *shared)


def _encode(model: DualEncoder, images: Inputs, texts: Inputs, piece: slice, precision: torch.dtype) -> Sides:
    low = precision != torch.float32
    with torch.autocast(images.values.device.type, dtype=precision if low else None, enabled=low):
        image, text = model(images[piece], texts[piece])
    return image, text


def _leaves(model: DualEncoder, encoded: Sequence[Sides], process_group: ProcessGroup, counts: Sequence[int]) -> Sides:
    """The embeddings of the batch, detached from the networks; they collect gradients."""
    leaves = []
    for side, tower in enumerate((model.image, model.text)):
        nothing = GaussianEmbedding.point(tower.new_zeros(0, tower.head.dim))
        mine = GaussianEmbedding.cat([pair[side] for pair in encoded]) if encoded else nothing
        leaf = process_group.gather_embeddings(mine, counts)
        leaf.mean.requires_grad_()
        leaf.log_var.requires_grad_(tower.head.log_var is not None)
        leaves.append(leaf)
    return leaves[0], leaves[1]


def _share(leaves: Sides, own: slice, match_i2t: Tensor, match_t2i: Tensor) -> PairBlock:
    image, text = leaves
    if own == slice(0, image.n):  # A single process has the whole batch: no distance is computed twice.
        return PairBlock(image, text, image, text, match_i2t, match_t2i)
    return PairBlock(image[own], text[own], image, text, match_i2t, match_t2i, own.start, own.start)


def _own_gradients(leaf: GaussianEmbedding, own: slice, process_group: ProcessGroup) -> tuple[Tensor, Tensor | None]:
    """Gradients of means and log variances (None for points), summed over the processes: the rows of this one."""
    learnt = [value for value in (leaf.mean, leaf.log_var) if value.requires_grad]
    gradients = [process_group.total(torch.zeros_like(v) if v.grad is None else v.grad)[own] for v in learnt]
    return gradients[0], gradients[1] if len(gradients) > 1 else None


def _measured(output: LossOutput, leaves: Sides, match_i2t: Tensor, process_group: ProcessGroup) -> dict[str, float]:
    """The measured quantities of the whole batch: the sums of the terms and statistics of the processes."""
    parts = {"loss": output.total} | {f"loss/{name}": term for name, term in output.terms.items()} | output.stats
    parts["positives_per_row"] = match_i2t.double().sum() / leaves[0].n
    values = process_group.total(torch.stack([value.detach().double().cpu() for value in parts.values()]))
    image, text = (float(leaf.total_variance.detach().mean()) for leaf in leaves)
    variances = {"total_variance/image": image, "total_variance/text": text}
    return dict(zip(parts, values.tolist(), strict=True)) | variances


def _check_terms(measured: dict[str, float]) -> None:
    for name, value in measured.items():
        if name.startswith("loss/") and not math.isfinite(value):
            ways = "lower optim.lr, lengthen optim.warmup_epochs, or lower model.init_total_variance"
            raise DivergedError(f"the loss term {name.removeprefix('loss/')!r} is {value}; {ways}")


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if torch.device(device).type == "cuda" else [])


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def build_optimiser(model: DualEncoder, loss: MatchLoss, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or AdamP over groups that differ in learning rate and weight decay.

    Matrices decay; vectors and scalars (biases, norms, the match logits) do not. The encoders and the match logits have
    separate learning-rate multipliers. A transformer block is also multiplied by layer_decay to the power of its
    number, counted from the top: the last block has the factor layer_decay, for any number of blocks. (The released
    code counts from 12, so that the last block of a ViT-L, its number 23, has the factor layer_decay^-11: 51 with a
    decay of 0.7.)
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
        return AdamP(options, lr=config.lr, betas=config.betas, eps=config.eps)
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
    return _stage_factor(progress, config, epochs=max(first, epochs - first))


def _stage_factor(progress: float, config: OptimConfig, *, epochs: int) -> float:
    since = progress - config.freeze_image_epochs
    warmup = min(1.0, since / config.warmup_epochs) if config.warmup_epochs and since >= 0 else 1.0
    done = progress / epochs
    if config.schedule == "cosine":
        start = min((config.freeze_image_epochs + config.warmup_epochs) / epochs, 1.0)
        after = (done - start) / (1 - start) if done > start else 0.0
        return warmup * (1 + math.cos(math.pi * after)) / 2
    if config.schedule == "step" and done >= config.step_at:
        return warmup * 0.1
    return warmup


def set_learning_rate(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to its base learning rate times a factor."""
    for group in optimiser.param_groups:
        group["lr"] = group["base_lr"] * factor


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> float:
    """Scale the gradients to a largest norm."""
    return float(nn.utils.clip_grad_norm_(parameters, largest if largest else math.inf))


class WeightAverage(nn.Module):
    """The average of all weights and buffers of a model: both towers and their heads.

    With an anchor, what is kept lies between the weights at construction and the average.

    Papers: Izmailov et al., "Averaging weights leads to wider optima and better generalization", UAI 2018, for the
        plain mean; Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022, for the anchor.
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float | None, anchor: float = 0.0) -> None:
        super().__init__()
        self.decay, self.anchor = decay, anchor
        self._start = [value.detach().clone() for value in model.state_dict().values()] if anchor else []
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

    def kept(self) -> list[Tensor]:
        """The averaged values, mixed with those of the start by the anchor."""
        if not self._start:
            return self.values()
        pairs = zip(self.values(), self._start, strict=True)
        return [own.lerp(start, self.anchor) if own.is_floating_point() else own for own, start in pairs]


@contextmanager
def averaged(model: nn.Module, average: WeightAverage | None) -> Iterator[None]:
    """Use the averaged weights of a model within a ``with`` block, and restore its own weights afterwards."""
    if average is None or not average.updates:
        yield
        return
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(dict(zip(average.names, average.kept(), strict=True)))
    try:
        yield
    finally:
        model.load_state_dict(own)


_SMALLEST_SCALE = 1e-4
"""A gradient that overflows float16 below this scale has diverged."""


class Learner:
    """A model that learns as a recipe says, equal on all processes."""

    def __init__(self, recipe: Recipe, model: DualEncoder, loss: MatchLoss, process_group: ProcessGroup) -> None:
        self.optim, self.config = recipe.optim, recipe.train
        self.model, self.loss, self.process_group = model, loss, process_group
        self.optimiser = build_optimiser(model, loss, recipe.optim)
        self.precision = number_format(recipe.train.precision, process_group.device)
        half = self.precision == torch.float16
        self.scaler = torch.amp.GradScaler(torch.device(process_group.device).type, enabled=half)
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
            self.model, self.loss, batch, self.process_group, epoch=epoch, precision=self.precision, scaler=self.scaler,
            micro_batch=self.config.micro_batch,
        )  # fmt: skip

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

    def logits(self) -> dict[str, float]:
        """The match logits of the loss, if it has any."""
        if (logits := getattr(self.loss, "logits", None)) is None:
            return {}
        return {"logit_scale": float(logits.logit_scale.detach()), "logit_bias": float(logits.logit_bias.detach())}
