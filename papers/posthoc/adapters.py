"""The frame of the methods that are small networks on frozen embeddings: training, variances, embedding.

The module knows no loss. Everything is in memory, and equal seeds give equal weights on one machine.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from papers.posthoc.method import FrozenPairs, PosthocMethod, unit
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side

Optimiser = Literal["adamw", "adam", "sgd"]
"""AdamW, Adam, or SGD with momentum 0.9."""

MIN_PAIRS = 32
"""Fewest pairs that an adapter is trained on."""

Networks = Mapping[Side, nn.Module]

Loss = Callable[[Networks, "PairBatches", Tensor], Tensor]
"""From the networks, the pairs and (b,) positions of pairs to the () loss of the batch."""


@dataclass(frozen=True)
class AdapterTraining:
    """How an adapter is trained. The defaults take about a minute for 30,000 pairs in 512 dimensions on one thread."""

    widths: tuple[int, ...] = (256, 256)  # of the hidden layers
    epochs: int = 8  # passes over the pairs
    batch_size: int = 512  # pairs of a step; the other items of a batch are the negatives, where a loss has any
    lr: float = 1e-3  # first learning rate; a cosine takes it to 1e-6
    optimiser: Optimiser = "adamw"  # see :data:`Optimiser`
    weight_decay: float = 1e-4  # of the optimiser


class AdapterMethod(PosthocMethod):
    """Base of the methods that train a network for each of their sides.

    With :meth:`variance` alone an item is the Gaussian about its unit embedding, so that the means rank exactly as the
    frozen model does, and its uncertainty is the mean variance over dimensions.
    """

    per_item = True
    default: ClassVar[AdapterTraining] = AdapterTraining()  # how it is trained unless the caller says otherwise
    published: ClassVar[AdapterTraining]  # how its authors train it; hours on a CPU

    def __init__(self, networks: Networks) -> None:
        self.networks = dict(networks)
        self._weight = next(self.networks["text"].parameters())

    @classmethod
    def train(
        cls,
        pairs: FrozenPairs,
        build: Callable[[Side], nn.Module],
        loss: Loss,
        *,
        seed: int,
        training: AdapterTraining,
        parameters: Iterable[nn.Parameter] = (),
    ) -> dict[Side, nn.Module]:
        """A network for each side, which minimise the loss together with more parameters."""
        batches, generator = PairBatches(pairs.at_least(MIN_PAIRS, cls.name)), torch.Generator().manual_seed(seed)
        networks: dict[Side, nn.Module] = {}
        for side in cls.sides:
            with torch.random.fork_rng(devices=[]):  # Linear layers draw their first weights from the global generator.
                networks[side] = build(side)
            initialise(networks[side], generator)
            networks[side].to(pairs.embeddings(side).device)
        learnt = [*(w for network in networks.values() for w in network.parameters()), *parameters]
        minimise(learnt, lambda rows: loss(networks, batches, rows), len(batches), training, generator=generator)
        return networks

    def inputs(self, x: Tensor) -> Tensor:
        """Embeddings as the networks see them. x (n, d) -> (n, d)."""
        return scaled_inputs(x.to(self._weight))

    @abstractmethod
    def variance(self, side: Side, x: Tensor) -> Tensor:
        """The variances of items, in squared units of unit embeddings. x (n, d) -> (n, d)."""

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed`; unit embeddings as means, variances in their squared units."""
        var = self.variance(side, x)
        return GaussianEmbedding(unit(x).to(var.dtype), var.log())

    def uncertainty(self, side: Side, x: Tensor, gallery: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; the mean variance over dimensions."""
        return self.variance(side, x).mean(1)

    def tensors(self) -> list[Tensor]:
        """See :meth:`PosthocMethod.tensors`."""
        return [w for network in self.networks.values() for w in network.state_dict().values()]


# ---------------------------------------------------------------- networks
class MLP(nn.Sequential):
    """Layers, and the value at which :func:`initialise` lets their output start."""

    start: float | None = None


def mlp(d_in: int, widths: Iterable[int], d_out: int, *, start: float | None = None) -> "MLP":
    """Linear layers with ReLU between them; `start` makes the output nearly constant at first."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise([d_in, *widths, d_out]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    network = MLP(*layers[:-1])
    network.start = start
    return network


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """The initial weights of torch, from a generator of one's own, and the first outputs of :func:`mlp`."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    for network in module.modules():
        if isinstance(network, MLP) and network.start is not None:
            last = network[-1]
            assert isinstance(last, nn.Linear)
            nn.init.constant_(last.bias, network.start)
            with torch.no_grad():
                last.weight.mul_(0.1)


def scaled_inputs(x: Tensor) -> Tensor:
    """Embeddings as the adapters see them: unit length times sqrt(d), so that an entry is about 1.

    x (n, d) -> (n, d).
    """
    return unit(x) * math.sqrt(x.shape[1])


# ---------------------------------------------------------------- training
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


def minimise(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    n_pairs: int,
    training: AdapterTraining,
    *,
    generator: torch.Generator,
) -> None:
    """Minimise a loss of batches of pairs."""
    optimiser = _optimiser(list(parameters), training)
    steps = training.epochs * -(-n_pairs // training.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=min(1e-6, training.lr))
    for epoch in range(training.epochs):
        losses = []
        for rows in torch.randperm(n_pairs, generator=generator).split(training.batch_size):
            loss = loss_of(rows)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.detach())
        if not math.isfinite(mean := float(torch.stack(losses).mean())):
            raise ArithmeticError(f"the loss of the adapter is {mean} in epoch {epoch}; lower the learning rate")


def _optimiser(parameters: list[nn.Parameter], training: AdapterTraining) -> torch.optim.Optimizer:
    if training.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=training.lr, momentum=0.9, weight_decay=training.weight_decay)
    kind = torch.optim.AdamW if training.optimiser == "adamw" else torch.optim.Adam
    return kind(parameters, lr=training.lr, weight_decay=training.weight_decay, fused=True)
