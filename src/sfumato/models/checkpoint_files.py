"""Checkpoints of others, read without running code from them."""

import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from sfumato.errors import UserError


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint without running code from it.

    A pickle may hold tensors and containers of plain values. Settings of the classes munch.Munch, argparse.Namespace
    and Lightning's AttributeDict become dictionaries, numpy scalars become numbers. Any other class is refused.

    Args:
        path: a file of torch.save, or a .safetensors file.

    Returns:
        The content of the file, tensors on the CPU: a state dict, or a dictionary with state dicts and settings.

    Raises:
        UserError: there is no such file, it is damaged or not a checkpoint, or reading it would run code.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        if foreign is None:
            raise UserError(f"{path}: damaged, or not a checkpoint of torch.save") from error
        raise UserError(
            f"{path}: holds a {foreign[1]}, and reading that would run code; only tensors and plain settings are read."
            " If you trust the file, load it where it was made and save only its state dict:"
            " torch.save(model.state_dict(), path)"
        ) from error
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, safetensors.SafetensorError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: damaged, or not a checkpoint ({first})") from error
    plain = _plain(content)
    if not isinstance(plain, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected a dictionary of tensors")
    return plain


def _plain(value: Any) -> Any:
    """Containers as dictionaries, lists and tuples; parameters as tensors."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return [_plain(item) for item in value] if isinstance(value, list | set) else value


class _Dict:
    """Stands in for subclasses of dict: an OrderedDict, which torch's reader fills and which may have a state."""

    def __new__(cls) -> Any:
        return OrderedDict()


class _Namespace(dict[str, Any]):
    """Stands in for classes whose attributes are all they hold."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.update(state)


class _NumpyDtype:
    """Stands in for numpy.dtype."""

    _CODES: ClassVar = {"b1": "?", "f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}

    def __init__(self, name: str, *_: Any) -> None:
        self.code, self.order = self._CODES[name], "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _numpy_scalar(dtype: _NumpyDtype, data: bytes) -> Any:
    """Stands in for numpy's function that makes a scalar of bytes."""
    return struct.unpack(dtype.order + dtype.code, data)[0]


_STAND_INS: list[Any] = [
    (_Dict, "munch.Munch"),
    (_Namespace, "argparse.Namespace"),
    (_Dict, "lightning.fabric.utilities.data.AttributeDict"),
    (_Dict, "lightning_fabric.utilities.data.AttributeDict"),
    (_Dict, "pytorch_lightning.utilities.parsing.AttributeDict"),
    (_NumpyDtype, "numpy.dtype"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
]
