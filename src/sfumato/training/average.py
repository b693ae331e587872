"""The running average of a model's weights, which is validated and kept in place of the last ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage(nn.Module):
    """Exponential moving average of a model's weights and buffers, for evaluation.

    Args:
        model: whose values it starts from.
        decay: share of the average that an update keeps; less during the first updates.
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.names = list(model.state_dict())
        for i, value in enumerate(model.state_dict().values()):
            self.register_buffer(f"value{i}", value.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model's present values."""
        self.updates += 1
        decay = min(self.decay, float(self.updates) / (float(self.updates) + 10))
        for own, value in zip(self.values(), model.state_dict().values(), strict=True):
            if own.is_floating_point():
                own.lerp_(value, 1 - decay)
            else:
                own.copy_(value)

    def values(self) -> list[Tensor]:
        """The averaged values, in the order of the model's state dict."""
        return [self.get_buffer(f"value{i}") for i in range(len(self.names))]


@contextmanager
def averaged(model: nn.Module, average: WeightAverage | None) -> Iterator[None]:
    """The model with its averaged weights, and with its own again afterwards."""
    if average is None:
        yield
        return
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(dict(zip(average.names, average.values(), strict=True)))
    try:
        yield
    finally:
        model.load_state_dict(own)
