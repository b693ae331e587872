"""Arrays of NumPy and tensors of torch: a formula takes both, and what comes in goes out.

torch is imported only where a tensor is given or asked for.
"""

import sys
import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import array_api_compat
import numpy as np

from sfumato.files import available_cores

if TYPE_CHECKING:
    from torch import Tensor

Array = Any
"""A tensor of torch, or an array of NumPy. Public functions take both, and return what they were given."""

Columns = TypeVar("Columns", bound=Any)

is_tensor = array_api_compat.is_torch_array


def namespace(value: Array) -> Any:
    """The functions of the array API for tensors, or for arrays; NumPy's own are such."""
    return array_api_compat.array_namespace(value) if is_tensor(value) else np


def as_array(value: Array, name: str, who: str) -> Array:
    """An argument that is a tensor or an array; an array in the byte order of the machine."""
    if is_tensor(value):
        return value
    if not hasattr(value, "__array__"):
        raise TypeError(f"{who}: {name} must be a tensor or an array, got {type(value).__name__}; use numpy.asarray")
    array: np.ndarray[Any, Any] = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{who}: {name} must be an array of numbers, got {array.dtype}")
    if array.dtype.itemsize > 8:
        raise TypeError(f"{who}: {name} has the dtype {array.dtype}, which torch lacks; use float64")
    return np.asarray(array, array.dtype.newbyteorder("="))


def as_tensor(value: Array, name: str, who: str) -> "Tensor":
    """An argument as a tensor, without a copy where possible."""
    value = as_array(value, name, who)
    if is_tensor(value):
        return value
    import torch

    # torch does not read negative strides, which even one element may have, and warns of arrays that cannot be written.
    plain = value.copy() if min(value.strides, default=0) < 0 else value
    return torch.from_numpy(np.require(plain, requirements=["C", "W"]))


def as_numpy(value: Array, name: str = "", who: str = "") -> np.ndarray:
    """An array with the numbers of a tensor, without their gradients; bfloat16, which NumPy lacks, as float32.

    Given names, it is an argument to check.
    """
    if who:
        value = as_array(value, name, who)
    if not is_tensor(value):
        return np.asarray(value)
    value = value.detach().cpu()
    return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)


def like(values: np.ndarray, given: Array) -> Array:
    """Numbers as a tensor on the device of `given`, if that is one."""
    if not is_tensor(given):
        return values
    return as_tensor(values, "values", "like").to(given.device)


def n_threads() -> int:
    """Number of threads for one computation: that of torch where it is loaded, else that of :func:`set_threads`."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    return getattr(_OF_THIS_THREAD, "n", 0) or available_cores()


_OF_THIS_THREAD = threading.local()


def set_threads(n: int) -> None:
    """Use n threads for the computations that this thread starts; 0: one by torch, else as many as there are cores."""
    _OF_THIS_THREAD.n = n
    if "torch" in sys.modules:
        sys.modules["torch"].get_num_threads()  # At first it gives a thread the last number that any thread has set.
        sys.modules["torch"].set_num_threads(n or 1)


def on_accelerator(values: Array) -> bool:
    """Whether a tensor is on a GPU or another device."""
    return is_tensor(values) and values.device.type != "cpu"


def smallest(values: Array, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k smallest values of each row, ascending, and their places; equal ones by place. They are looked for where a
    tensor is; on an accelerator any of those that are equal to the last are found. (n, m) -> (n, min(k, m)) each."""
    if (k := min(k, values.shape[1])) < 1:
        return as_numpy(values)[:, :0], np.empty((len(values), 0), np.int64)
    if on_accelerator(values):
        own, place = map(as_numpy, values.topk(k, dim=1, largest=False))
        order = np.lexsort((place, own), axis=1)
    else:
        values = as_numpy(values)
        n, m = values.shape
        # At least k values are below a limit: the k-th of the smallest values of groups. A partition of all is slow.
        size = max(1, m // max(4 * k, 256))
        groups = values[:, : m - m % size].reshape(n, size, m // size).min(1)
        row, found = np.nonzero(~(values > np.partition(groups, k - 1, axis=1)[:, k - 1 : k]))
        column = np.arange(len(row)) - np.searchsorted(row, np.arange(n))[row]
        own = np.full((n, 1 + column.max(initial=k - 1)), np.nan, values.dtype)
        place = np.empty(own.shape, np.int64)
        own[row, column], place[row, column] = values[row, found], found
        order = own.argsort(axis=1, kind="stable")[:, :k]
    return np.take_along_axis(own, order, 1), np.take_along_axis(place, order, 1)


def sigmoid(logit: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-logit)), without overflow."""
    small = np.exp(-np.abs(logit))
    return np.asarray(np.where(logit >= 0, 1, small) / (1 + small))


def log_sigmoid(logit: np.ndarray) -> np.ndarray:
    """The logarithm of :func:`sigmoid`."""
    return np.asarray(np.minimum(logit, 0) - np.log1p(np.exp(-np.abs(logit))))


def log_sum_exp(values: np.ndarray) -> np.ndarray:
    """The logarithm of the sum of exponentials over the last axis."""
    largest = values.max(-1, keepdims=True, initial=-np.inf)
    largest = np.where(np.isfinite(largest), largest, 0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(values - largest).sum(-1)) + largest[..., 0])


def some_rows(columns: Columns, rows: np.ndarray | Sequence[int]) -> Columns:
    """Some rows of a dataclass of columns, arrays or tuples that are equally long."""

    def taken(own: Any) -> Any:
        return own[rows] if isinstance(own, np.ndarray) else tuple(own[i] for i in rows)

    return replace(columns, **{one.name: taken(getattr(columns, one.name)) for one in fields(columns)})


def joined_rows(parts: Sequence[Columns]) -> Columns:
    """The rows of several such dataclasses, one part after the other."""
    every = {one.name: [getattr(part, one.name) for part in parts] for one in fields(parts[0])}
    arrays = {name: np.concatenate(own) for name, own in every.items() if isinstance(own[0], np.ndarray)}
    tuples = {name: tuple(chain(*own)) for name, own in every.items() if name not in arrays}
    return replace(parts[0], **arrays, **tuples)
