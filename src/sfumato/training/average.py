"""The average of a model's weights, which is validated and kept in place of the last ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage(nn.Module):
    """Average of a model's weights and buffers, all of it: both towers and their heads.

    Args:
        model: whose values it starts from.
        decay: exponential moving average: share of the average that an update keeps, less during the first updates. None:
            the plain mean of the values at all updates (stochastic weight averaging).

    Paper: Izmailov et al., "Averaging weights leads to wider optima and better generalization", UAI 2018, for the plain mean.
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
        """Take the model's present values in."""
        self.updates += 1
        count = float(self.updates)
        kept = 1 - 1 / count if self.decay is None else min(self.decay, count / (count + 10))
        for own, value in zip(self.values(), model.state_dict().values(), strict=True):
            if own.is_floating_point():
                own.lerp_(value, 1 - kept)
            else:
                own.copy_(value)

    def values(self) -> list[Tensor]:
        """The averaged values, in the order of the model's state dict."""
        return [self.get_buffer(f"value{i}") for i in range(len(self.names))]


@contextmanager
def averaged(model: nn.Module, average: WeightAverage | None) -> Iterator[None]:
    """The model with its averaged weights, and with its own again afterwards; its own where nothing is averaged yet."""
    if average is None or not average.updates:
        yield
        return
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(dict(zip(average.names, average.values(), strict=True)))
    try:
        yield
    finally:
        model.load_state_dict(own)
