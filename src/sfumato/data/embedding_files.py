"""Reading of embeddings of any model from .npy, .safetensors and .parquet files, with their ids; plain vectors become
points.

No code from a file is executed: pickled arrays are refused. Large .npy files are memory-mapped. The module gaussian.py
reads Sfumato's own files; this module adds the formats of other programs.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sfumato.errors import first_line, need
from sfumato.gaussian import GaussianEmbedding, check_finite, is_embeddings_file, load_embeddings

MEAN_NAMES = ("mean", "embeddings")
"""Tensors of a .safetensors file that are taken for the means, the first that is there."""

_FLOATS = (np.float16, np.float32, np.float64)


def read_embeddings(
    path: str | Path, *, ids: str | Path | None = None, log_var: str | Path | None = None
) -> tuple[GaussianEmbedding, list[str] | None]:
    """Read embeddings of any model.

    Args:
        path: a .npy file of (n, d) means, or a .safetensors file: either written by Sfumato, or with a tensor "mean" or
            "embeddings", (n, d), and optionally "log_var". PATH.safetensors:NAME selects the tensor with that name. Or
            a .parquet file with a column of vectors, see :func:`open_vectors`.
        ids: file of n distinct ids, see :func:`read_ids`; a file of Sfumato contains its ids.
        log_var: .npy file of (n, d) natural logarithms of variances; without log variances, vectors are points.

    Returns:
        (embeddings in the dtype of the file, ids or None if no file contains them). A .npy file is memory-mapped
        copy-on-write: pages are read on access, and changes in memory never reach the file.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, has an unknown format, is pickled, or does not fit the others.
    """
    file = _split(path)[0]
    mean, log_variance, own = open_vectors(path, copy_on_write=True)
    if log_var is not None:
        if log_variance is not None:
            raise ValueError(f"{file}: holds log variances already; leave out {log_var}")
        if not Path(log_var).is_file():
            raise FileNotFoundError(f"no log variances at {log_var}")
        log_variance = _read_array(Path(log_var)).to(mean.dtype)
        if log_variance.shape != mean.shape:
            raise ValueError(
                f"{log_var}: log variances of shape {tuple(log_variance.shape)} for means of shape"
                f" {tuple(mean.shape)} in {file}"
            )
    result = GaussianEmbedding(mean, _minus_infinity(mean) if log_variance is None else log_variance)
    check_finite(GaussianEmbedding(mean, mean) if log_variance is None else result, str(file))
    if ids is not None:
        own = read_ids(ids)
    if own is not None and len(own) != result.n:
        raise ValueError(f"{ids}: {len(own)} ids for {result.n} embeddings in {file}; give one id for each")
    return result, own


def open_vectors(path: str | Path, *, copy_on_write: bool = False) -> tuple[Tensor, Tensor | None, list[str] | None]:
    """Open a file of embeddings without a look at their values."""
    file, name = _split(path)
    if not file.is_file():
        raise FileNotFoundError(f"no embeddings at {file}")
    if file.suffix == ".npy":
        if name is not None:
            raise ValueError(f"{path}: a .npy file holds one array and no names; leave out :{name}")
        return _read_array(file, copy_on_write=copy_on_write), None, None
    if file.suffix == ".parquet":
        return _read_column(file, name), None, None
    if file.suffix == ".safetensors":
        if name is None and is_embeddings_file(file):
            embeddings, ids = load_embeddings(file)
            return embeddings.mean, embeddings.log_var, ids
        return *_read_tensors(file, name), None
    pickle = " (a pickle can run code when it is read: save with numpy.save or safetensors)" if _pickled(file) else ""
    raise ValueError(f"{file}: unknown kind of file {file.suffix!r}; expected .npy, .safetensors or .parquet{pickle}")


def read_ids(path: str | Path) -> list[str]:
    """Read distinct ids from a text file (one on each line), a JSON list, or a .npy file of strings or integers."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no ids at {path}")
    loaded = _map_array(path, copy_on_write=False) if path.suffix == ".npy" else None
    unit = "line" if path.suffix not in (".npy", ".json") else "entry"
    try:
        if loaded is not None:
            if loaded.ndim != 1 or loaded.dtype.kind not in "iuU":
                raise ValueError(
                    f"ids of shape {loaded.shape} and type {loaded.dtype}; expected (n,) strings or integers"
                )
            ids = [str(i) for i in loaded.tolist()]
        elif path.suffix == ".json":
            entries = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(entries, list) or any(
                isinstance(i, bool) or not isinstance(i, str | int) for i in entries
            ):
                raise ValueError("expected a list of strings or whole numbers")
            ids = [str(i) for i in entries]
        else:
            ids = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
            ids = [] if ids == [""] else [i.removesuffix("\r") for i in ids]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot read ids: {first_line(error)}") from error
    first: dict[str, int] = {}
    for number, i in enumerate(ids, 1):
        if not i:
            raise ValueError(f"{path}: {unit} {number} is empty; every embedding needs an id")
        if first.setdefault(i, number) != number:
            raise ValueError(
                f"{path}: id {i!r} occurs at {unit} {first[i]} and again at {number}; ids must be distinct"
            )
    return ids


def _split(path: str | Path) -> tuple[Path, str | None]:
    """(file, name of the tensor or column, or None) of FILE or FILE:NAME."""
    before, mark, name = str(path).rpartition(":")
    if mark and name and before.endswith((".safetensors", ".npy", ".parquet")) and not Path(path).exists():
        return Path(before), name
    return Path(path), None


def _map_array(path: Path, *, copy_on_write: bool) -> np.ndarray:
    """The array of a .npy file, memory-mapped: its header may claim more than the memory holds."""
    try:
        with np.errstate(over="ignore"):  # Of the sizes in a damaged header.
            array = np.load(path, mmap_mode="c" if copy_on_write else "r", allow_pickle=False)
    except Exception as error:  # numpy lets through what parsing the header raises, also MemoryError and TokenError.
        if _pickled(path) or "Object arrays" in str(error) or "Python objects" in str(error):
            raise ValueError(
                f"{path}: holds pickled Python objects, which can run code when read; save plain numbers with"
                f" numpy.save"
            ) from error
        raise ValueError(f"{path}: not a complete .npy file ({first_line(error)})") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(f"{path}: an archive of several arrays; save one array with numpy.save")
    return array


def _read_array(path: Path, *, copy_on_write: bool = True) -> Tensor:
    array = _map_array(path, copy_on_write=copy_on_write)
    if array.ndim != 2 or array.dtype.newbyteorder("=") not in _FLOATS:
        raise ValueError(
            f"{path}: an array of shape {array.shape} and type {array.dtype}; expected (n, d) floating point"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Torch warns of memory that cannot be written.
        return torch.from_numpy(array if array.size else np.array(array))


def _read_tensors(path: Path, name: str | None) -> tuple[Tensor, Tensor | None]:
    try:
        with safe_open(path, framework="pt") as file:
            present = list(file.keys())
            chosen = name or next((n for n in MEAN_NAMES if n in present), None)
            if chosen is None or chosen not in present:
                wanted = f"no tensor {name!r}" if name else "no tensor named mean or embeddings"
                raise ValueError(
                    f"{path}: {wanted}; it has {', '.join(present) or 'none'}: choose one with {path.name}:NAME"
                )
            mean = file.get_tensor(chosen)
            log_variance = file.get_tensor("log_var") if name in (None, "mean") and "log_var" in present else None
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete .safetensors file ({first_line(error)})") from error
    if mean.ndim != 2 or not mean.is_floating_point():
        raise ValueError(
            f"{path}: tensor {chosen!r} has shape {tuple(mean.shape)} and type {mean.dtype}; expected (n, d)"
            f" floating point"
        )
    if log_variance is not None and log_variance.shape != mean.shape:
        raise ValueError(
            f"{path}: log_var has shape {tuple(log_variance.shape)}, {chosen} {tuple(mean.shape)}; they must be"
            f" the same"
        )
    return mean, None if log_variance is None else log_variance.to(mean.dtype)


def _read_column(path: Path, name: str | None) -> Tensor:
    """The vectors in a column of a Parquet file."""
    with need("parquet", f"{path}: Parquet files need pyarrow"):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            lists = [c.name for c in file.schema_arrow if _is_list_of_floats(c.type)]
            chosen = name or (lists[0] if len(lists) == 1 else None)
            if chosen not in lists:
                found = f"no column {name!r} of vectors" if name else f"{len(lists)} columns of vectors"
                raise ValueError(
                    f"{path}: {found}; lists of floating point numbers are in {', '.join(lists) or 'none'}:"
                    f" choose one with {path.name}:NAME"
                )
            chunks = file.read(columns=[chosen]).column(0).chunks
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # The last: names of columns.
        raise ValueError(f"{path}: not a complete Parquet file ({first_line(error)})") from error
    n = sum(map(len, chunks))
    lengths = {length for chunk in chunks for length in chunk.value_lengths().unique().to_pylist()}
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    if len(lengths) != 1 or None in lengths:
        raise ValueError(f"{path}: the vectors of column {chosen!r} differ in length, or some are missing")
    return torch.from_numpy(np.concatenate(values).reshape(n, -1))


def _is_list_of_floats(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<")) and any(
        str(kind.value_type) == name for name in ("halffloat", "float", "double")
    )


def _minus_infinity(mean: Tensor) -> Tensor:
    """The log variances of points: one number expanded to (n, d), so that a memory-mapped file is not read."""
    return torch.full((1, 1), -torch.inf, dtype=mean.dtype).expand_as(mean)


def _pickled(path: Path) -> bool:
    """Whether a file looks like a pickle or an archive of torch.save."""
    with path.open("rb") as file:
        start = file.read(4)
    return path.suffix in (".pkl", ".pickle", ".pt", ".pth", ".bin") or start[:1] == b"\x80"
