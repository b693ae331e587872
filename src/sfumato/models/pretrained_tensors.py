"""Tensors of published models by their names: expected shapes, checks, and dictionaries with other prefixes."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import UserError

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by their names."""


def linear_shapes(name: str, out: int, into: int) -> Shapes:
    """Shapes of a linear layer.

    Args:
        name: of the layer.
        out: channels that come out.
        into: channels that go in.

    Returns:
        Shapes of weight and bias.
    """
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def norm_shapes(name: str, width: int) -> Shapes:
    """Shapes of a layer norm.

    Args:
        name: of the layer.
        width: channels.

    Returns:
        Shapes of weight and bias.
    """
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def gpo_shapes(name: str) -> Shapes:
    """Shapes of GPO(32, 32), the only size that the released code builds.

    Args:
        name: of the layer.

    Returns:
        Shapes by name.
    """
    shapes: Shapes = {f"{name}.linear.weight": (1, 32)}
    for end in ("l0", "l0_reverse"):
        shapes |= {f"{name}.gru.weight_{x}_{end}": (96, 32) for x in ("ih", "hh")}
        shapes |= {f"{name}.gru.bias_{x}_{end}": (96,) for x in ("ih", "hh")}
    return shapes


def count_blocks(tensors: Mapping[str, Any], prefix: str) -> int:
    """Number of the blocks whose tensors are there.

    Args:
        tensors: by name.
        prefix: of the blocks' names.

    Returns:
        One more than the largest number of a block; 0 for none.
    """
    numbers = [key.removeprefix(f"{prefix}.").split(".")[0] for key in tensors if key.startswith(f"{prefix}.")]
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)


def check_tensors(tensors: Mapping[str, Any], expected: Shapes, where: str) -> None:
    """Check that the tensors are the expected ones.

    Args:
        tensors: by name.
        expected: shapes by name.
        where: name of the model for errors.

    Raises:
        UserError: tensors are missing, left over or of another shape; the message names the first three.
    """
    wrong = [f"{key!r} is missing" for key in expected if key not in tensors]
    wrong += [f"{key!r} is left over" for key in tensors if key not in expected]
    for key, shape in expected.items():
        value = tensors.get(key, torch.empty(shape, device="meta"))
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if came != shape:
            wrong.append(f"{key!r} is {came}, expected {shape}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"{where}: {len(wrong)} tensors do not fit the {len(expected)} expected ones:"
            f" {'; '.join(wrong[:3])}{more}. Check that the file is complete and that the configuration belongs to it"
        )


def below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors with a prefix, by their names without it.

    Args:
        prefix: beginning of the names.
        tensors: by name.

    Returns:
        Some of the tensors.
    """
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def without(tensors: Mapping[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Tensors without any of some prefixes.

    Args:
        tensors: by name.
        prefixes: beginnings of the names to leave out.

    Returns:
        The other tensors.
    """
    return {key: value for key, value in tensors.items() if not key.startswith(prefixes)}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with a prefix added to their names.

    Args:
        prefix: new beginning of the names.
        tensors: by name.

    Returns:
        The same tensors.
    """
    return {prefix + key: value for key, value in tensors.items()}


def projection(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """The projection x @ matrix as the tensors of a linear layer.

    Args:
        name: of the layer.
        matrix: (c, d).

    Returns:
        Its weight (d, c), and a bias of 0.
    """
    return {f"{name}.weight": matrix.T, f"{name}.bias": torch.zeros_like(matrix[0])}


def number_of(tensor: Tensor) -> float:
    """The value of a scalar.

    Args:
        tensor: with one element.

    Returns:
        The value; nan on the meta device.
    """
    return math.nan if tensor.is_meta else float(tensor)
