"""The frame of the methods that are networks on frozen embeddings: how they are fitted, stored and read.

The module knows no loss and no uncertainty.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from sfumato.posthoc.adapter_networks import (
    MIN_PAIRS,
    AdapterTraining,
    PairBatches,
    initialise,
    mlp_of,
    network_state,
    own_randomness,
    train,
    weights_of,
)
from sfumato.posthoc.method import FrozenPairs, PosthocMethod, Side, check_side, pack_options, unpack_options

Network = TypeVar("Network", bound=nn.Module)

LossOfRows = Callable[[Tensor], Tensor]
"""From (b,) positions of pairs to the () loss of the batch."""


class AdapterMethod(PosthocMethod, Generic[Network]):
    """Base of the methods that train a network for each of their sides.

    A constructor takes the networks in the order of ``sides``, and by keyword what :attr:`options` gives.
    """

    per_item = True
    default: ClassVar[AdapterTraining] = AdapterTraining()  # how it is trained unless the caller says otherwise
    published: ClassVar[AdapterTraining]  # how its authors train it; hours on a CPU
    network_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, networks: Iterable[Network]) -> None:
        self.networks: dict[str, Network] = {
            side: network.eval() for side, network in zip(self.sides, networks, strict=True)
        }

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """JSON values by name that are stored beside the weights."""

    @classmethod
    @abstractmethod
    def read_network(cls, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> Network:
        """Build one network again."""

    def network(self, side: Side) -> Network:
        """The network of a side."""
        check_side(side)
        return self.networks[side]

    @classmethod
    def _trained(
        cls,
        pairs: FrozenPairs,
        make: Callable[[], Network],
        start: Callable[[Side, Network], None],
        loss: Callable[[Self, PairBatches], LossOfRows],
        *,
        options: Mapping[str, Any],
        seed: int,
        training: AdapterTraining,
        parameters: Iterable[nn.Parameter] = (),
    ) -> Self:
        """Make a network for each side, give it its first values by ``start``, and minimise the loss."""
        batches = PairBatches(pairs.at_least(MIN_PAIRS, cls.name))
        generator = torch.Generator().manual_seed(seed)
        networks = []
        for side in cls.sides:
            with own_randomness():
                network = make()
            initialise(network, generator)
            start(side, network)
            networks.append(network.to(pairs.embeddings(side).device))
        build: Callable[..., Self] = cls
        method = build(*networks, **options)
        loss_of = loss(method, batches)
        learnt = [*(w for network in networks for w in network.parameters()), *parameters]
        with own_randomness():  # Dropout has no generator of its own.
            torch.manual_seed(seed)
            for network in networks:
                network.train()
            train(learnt, loss_of, len(batches), training, generator=generator)
        for network in networks:
            network.eval()
        return method

    def state(self) -> dict[str, Tensor]:
        """See :meth:`PosthocMethod.state`."""
        return {**network_state(self.networks), "options": pack_options(self.options)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """See :meth:`PosthocMethod.from_state`."""
        options = unpack_options(state, cls.name)
        networks = [cls.read_network(weights_of(state, side, cls.name), options) for side in cls.sides]
        build: Callable[..., Self] = cls
        return build(*networks, **{name: value for name, value in options.items() if name not in cls.network_options})


class MLPMethod(AdapterMethod[nn.Sequential]):
    """Base of the methods whose networks are an :func:`~sfumato.posthoc.adapter_networks.mlp`."""

    @classmethod
    def read_network(cls, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> nn.Sequential:
        """See :meth:`AdapterMethod.read_network`."""
        return mlp_of(weights, cls.name)
