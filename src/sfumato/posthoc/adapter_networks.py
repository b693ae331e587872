"""Small networks on frozen embeddings, and the one loop that trains them.

The module knows no loss. Everything is in memory, and equal seeds give equal weights on one machine.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sfumato.posthoc.method import FrozenPairs, Side, check_embeddings, unit

Optimiser = Literal["adamw", "adam", "sgd"]
"""AdamW, Adam, or SGD with momentum 0.9."""

MIN_PAIRS = 32
"""Fewest pairs that an adapter is trained on."""

_LAST_LR = 1e-6


@dataclass(frozen=True)
class AdapterTraining:
    """How an adapter is trained. The defaults take about a minute for 30,000 pairs in 512 dimensions on one thread."""

    widths: tuple[int, ...] = (256, 256)  # of the hidden layers
    epochs: int = 8  # passes over the pairs
    batch_size: int = 512  # pairs of a step; the other items of a batch are the negatives, where a loss has any
    lr: float = 1e-3  # first learning rate; a cosine takes it to 1e-6
    optimiser: Optimiser = "adamw"  # see :data:`Optimiser`
    weight_decay: float = 1e-4  # of the optimiser

    def __post_init__(self) -> None:
        if self.optimiser not in get_args(Optimiser):
            known = ", ".join(get_args(Optimiser))
            raise ValueError(f"AdapterTraining: unknown optimiser {self.optimiser!r}; known: {known}")
        if min(self.epochs, *self.widths) < 1 or self.batch_size < 2:
            raise ValueError(
                "AdapterTraining: epochs and widths must be at least 1 and batch_size at least 2, got"
                f" {self.epochs}, {self.widths} and {self.batch_size}"
            )
        if not (self.lr > 0 and self.weight_decay >= 0):
            raise ValueError(
                f"AdapterTraining: lr must be positive and weight_decay not negative, got {self.lr} and"
                f" {self.weight_decay}"
            )


def mlp(d_in: int, widths: Iterable[int], d_out: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    sizes = [d_in, *widths, d_out]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def own_randomness() -> AbstractContextManager[None]:
    """Leave torch's global generators on the CPU as they are: linear layers draw their first weights from them."""
    context: AbstractContextManager[None] = torch.random.fork_rng(devices=[])
    return context


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Give all linear layers the initial weights of torch, from a generator of one's own."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


@torch.no_grad()
def start_at(network: nn.Sequential, value: float) -> None:
    """Make the output of a network nearly constant at first."""
    layer = network[-1]
    assert isinstance(layer, nn.Linear)
    layer.weight.mul_(0.1)
    layer.bias.fill_(value)


def scaled_inputs(x: Tensor) -> Tensor:
    """Embeddings as the adapters see them: unit length times sqrt(d), so that an entry is about 1.

    x (n, d) -> (n, d).
    """
    return unit(x) * math.sqrt(x.shape[1])


class PairBatches:
    """The items of some pairs, each once, and which of them match."""

    def __init__(self, pairs: FrozenPairs) -> None:
        self.index = pairs.pairs
        order = self.index[:, 0].argsort(stable=True)
        self._texts = self.index[order, 1]
        count = torch.bincount(self.index[:, 0], minlength=len(pairs.images))
        self._count, self._first = count, count.cumsum(0) - count
        self._n_texts = len(pairs.texts)

    def __len__(self) -> int:
        return len(self.index)

    def items(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The items of a batch of pairs and all their matches, also those listed in pairs outside of the batch.

        rows (b,).
        """
        images, texts = (self.index[rows, column].unique() for column in (0, 1))
        place = torch.full((self._n_texts,), -1, device=texts.device)
        place[texts] = torch.arange(len(texts), device=texts.device)
        count = self._count[images]
        row = torch.arange(len(images), device=images.device).repeat_interleave(count)
        within = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count).repeat_interleave(count)
        column = place[self._texts[self._first[images].repeat_interleave(count) + within]]
        match = torch.zeros(len(images), len(texts), device=images.device)
        match[row[column >= 0], column[column >= 0]] = 1.0
        return images, texts, match


def train(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    n_pairs: int,
    training: AdapterTraining,
    *,
    generator: torch.Generator,
) -> float:
    """Minimise a loss of batches of pairs."""
    optimiser = _optimiser(list(parameters), training)
    steps = training.epochs * -(-n_pairs // training.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=min(_LAST_LR, training.lr))
    mean = math.nan
    for epoch in range(training.epochs):
        losses = []
        for rows in torch.randperm(n_pairs, generator=generator).split(training.batch_size):
            loss = loss_of(rows)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.detach())
        mean = float(torch.stack(losses).mean())
        if not math.isfinite(mean):
            raise ArithmeticError(f"the loss of the adapter is {mean} in epoch {epoch}; lower the learning rate")
    return mean


def _optimiser(parameters: list[nn.Parameter], training: AdapterTraining) -> torch.optim.Optimizer:
    if training.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=training.lr, momentum=0.9, weight_decay=training.weight_decay)
    kind = torch.optim.AdamW if training.optimiser == "adamw" else torch.optim.Adam
    return kind(parameters, lr=training.lr, weight_decay=training.weight_decay, fused=True)


def network_state(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The weights of networks."""
    return {
        f"{name}.{key}": w.detach().clone() for name, net in networks.items() for key, w in net.state_dict().items()
    }


def weights_of(state: Mapping[str, Tensor], network: str, who: str) -> dict[str, Tensor]:
    """The weights of one network in a state."""
    prefix = f"{network}."
    found = {key.removeprefix(prefix): w for key, w in state.items() if key.startswith(prefix)}
    if not found:
        raise ValueError(
            f"{who}: the state has no weights of {network!r}; it has {', '.join(sorted(state)) or 'nothing'}"
        )
    return found


def mlp_of(weights: Mapping[str, Tensor], who: str) -> nn.Sequential:
    """An :func:`mlp` with given weights, in their dtype."""
    matrices = [weights[name] for name in sorted((k for k in weights if k.endswith("weight")), key=_layer_number)]
    if not matrices:
        raise ValueError(f"{who}: the state holds no weights of a network; it has {', '.join(sorted(weights))}")
    widths = [len(w) for w in matrices]
    with own_randomness():
        network = mlp(matrices[0].shape[1], widths[:-1], widths[-1]).to(matrices[0].dtype)
    load_weights(network, weights, who)
    return network


def load_weights(network: nn.Module, weights: Mapping[str, Tensor], who: str) -> None:
    """Give a network its weights."""
    try:
        network.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise ValueError(f"{who}: the weights do not fit the network: {str(error).splitlines()[-1].strip()}") from error


def _layer_number(name: str) -> int:
    first = name.split(".")[0]
    return int(first) if first.isdecimal() else -1


def checked_items(who: str, side: Side, x: Tensor, network: nn.Module) -> Tensor:
    """Embeddings of the width that an adapter was fitted on, in its dtype. x (n, d) -> (n, d)."""
    first = next(m for m in network.modules() if isinstance(m, nn.Linear))
    check_embeddings(x, who, f"{side} embeddings", d=first.in_features)
    return x.to(first.weight.device, first.weight.dtype)
