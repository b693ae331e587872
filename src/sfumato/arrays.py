"""Arrays of NumPy wherever tensors are taken: the one conversion, and its errors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Tensor | np.ndarray
"""What public functions take: a tensor, or an array of NumPy, which is converted without a copy where possible."""


def as_tensor(value: Array, name: str, who: str) -> Tensor:
    """A tensor of an argument."""
    if isinstance(value, Tensor):
        return value
    if not hasattr(value, "__array__"):
        raise TypeError(f"{who}: {name} must be a tensor or an array, got {type(value).__name__}; use numpy.asarray")
    array: np.ndarray[Any, Any] = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{who}: {name} must be an array of numbers, got {array.dtype}")
    # torch reads neither foreign byte orders nor negative strides, and warns of arrays that cannot be written.
    array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise TypeError(f"{who}: {name} has the dtype {array.dtype}, which torch lacks; use float32") from error
