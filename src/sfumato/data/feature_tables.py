"""Features that some model has computed, as rows of files: embeddings, and regions of images.

Embeddings of any model are read from .npy, .safetensors and .parquet files, with their ids; plain vectors become
points. No code from a file is executed: pickled arrays are refused. A table is opened without a look at its values, and
a batch reads its own rows alone. The bytes of an item are a .npy file of (r, c) numbers, like the bytes of an image are
a JPEG file, so code that handles images as bytes handles features too. What the rows mean, and which of them match, is
not known here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from sfumato.arrays import as_numpy
from sfumato.data.image_inputs import FLOATS, load_array, regions_to_bytes
from sfumato.errors import UserError, first_line, need, need_pyarrow
from sfumato.gaussian import GaussianEmbedding, check_finite, is_embeddings_file, load_embeddings
from sfumato.ids import natural_key

MEAN_NAMES = ("mean", "embeddings")
"""Tensors of a .safetensors file that are taken for the means, the first that is there."""


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
        (arrays of NumPy in the dtype of the file, bfloat16 as float32; ids or None if no file contains them). A .npy
        file is memory-mapped copy-on-write: pages are read on access, and changes in memory never reach the file.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, has an unknown format, is pickled, or does not fit the others.
    """
    file = _split(path)[0]
    mean, log_variance, own = open_vectors(path, writable=True)
    if log_var is not None:
        if log_variance is not None:
            raise ValueError(f"{file}: holds log variances already; leave out {log_var}")
        if not Path(log_var).is_file():
            raise FileNotFoundError(f"no log variances at {log_var}")
        log_variance = _read_array(Path(log_var)).astype(mean.dtype)
        if log_variance.shape != mean.shape:
            shapes = f"{log_variance.shape} for means of shape {mean.shape}"
            raise ValueError(f"{log_var}: log variances of shape {shapes} in {file}")
    # The log variances of points are one number, expanded, so that a memory-mapped file is not read.
    points = np.broadcast_to(mean.dtype.type(-np.inf), mean.shape)
    result = GaussianEmbedding(mean, points if log_variance is None else log_variance)
    check_finite(GaussianEmbedding(mean, mean) if log_variance is None else result, str(file))
    if ids is not None:
        own = read_ids(ids)
    if own is not None and len(own) != result.n:
        raise ValueError(f"{ids}: {len(own)} ids for {result.n} embeddings in {file}; give one id for each")
    return result, own


def open_vectors(path: str | Path, writable: bool = False) -> tuple[np.ndarray, np.ndarray | None, list[str] | None]:
    """Open a file of embeddings without a look at their values."""
    file, name = _split(path)
    if not file.is_file():
        raise FileNotFoundError(f"no embeddings at {file}")
    if file.suffix == ".npy":
        if name is not None:
            raise ValueError(f"{path}: a .npy file holds one array and no names; leave out :{name}")
        return _read_array(file, writable=writable), None, None
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
    loaded = _map_array(path) if path.suffix == ".npy" else None
    unit = "line" if path.suffix not in (".npy", ".json") else "entry"
    try:
        if loaded is not None:
            if loaded.ndim != 1 or loaded.dtype.kind not in "iuU":
                raise ValueError(f"ids of shape {loaded.shape} and type {loaded.dtype}; expected (n,) str or int")
            ids = [str(i) for i in loaded.tolist()]
        elif path.suffix == ".json":
            listed = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, str | int) for i in listed):
                raise ValueError("expected a list of strings or whole numbers")
            ids = [str(i) for i in listed]
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
            raise ValueError(f"{path}: id {i!r} occurs at {unit} {first[i]} and again at {number}; give distinct ids")
    return ids


def _split(path: str | Path) -> tuple[Path, str | None]:
    """(file, name of the tensor or column, or None) of FILE or FILE:NAME."""
    before, mark, name = str(path).rpartition(":")
    if mark and name and before.endswith((".safetensors", ".npy", ".parquet")) and not Path(path).exists():
        return Path(before), name
    return Path(path), None


def _map_array(path: Path, mode: Literal["r", "c"] = "r") -> np.ndarray:
    try:
        return load_array(path, mode)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_array(path: Path, *, writable: bool = True) -> np.ndarray:
    array = _map_array(path, "c" if writable else "r")  # What is written stays in memory.
    if array.ndim != 2 or array.dtype.newbyteorder("=") not in FLOATS:
        raise ValueError(f"{path}: array of shape {array.shape} and type {array.dtype}; expected (n, d) floating point")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _read_tensors(path: Path, name: str | None) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        with safe_open(path, framework="np") as file:
            kinds = {n: file.get_slice(n).get_dtype() for n in file.keys()}  # noqa: SIM118 (not a mapping)
        chosen = name or next((n for n in MEAN_NAMES if n in kinds), "")
        if chosen not in kinds:
            wanted = f"no tensor {name!r}" if name else "no tensor named mean or embeddings"
            raise ValueError(f"{path}: {wanted}; it has {', '.join(kinds) or 'none'}: choose one with {path.name}:NAME")
        names = [chosen, *["log_var"] * (name in (None, "mean") and "log_var" in kinds)]
        half = any(kinds[n] == "BF16" for n in names)  # NumPy has no bfloat16.
        with need("train", f"{path}: bfloat16 needs torch"), safe_open(path, framework="pt" if half else "np") as file:
            mean, *log_variance = (as_numpy(file.get_tensor(n)) for n in names)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete .safetensors file ({first_line(error)})") from error
    if mean.ndim != 2 or mean.dtype.kind != "f":
        found = f"tensor {chosen!r} has shape {mean.shape} and type {mean.dtype}"
        raise ValueError(f"{path}: {found}; expected (n, d) floating point")
    if log_variance and log_variance[0].shape != mean.shape:
        raise ValueError(f"{path}: log_var has shape {log_variance[0].shape}, {chosen} {mean.shape}; expected the same")
    return mean, log_variance[0].astype(mean.dtype) if log_variance else None


def _read_column(path: Path, name: str | None) -> np.ndarray:
    """The vectors in a column of a Parquet file."""
    pyarrow = need_pyarrow(f"{path}: Parquet files need pyarrow")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            lists = [c.name for c in file.schema_arrow if _is_list_of_floats(c.type)]
            chosen = name or (lists[0] if len(lists) == 1 else None)
            if chosen not in lists:
                found = f"no column {name!r} of vectors" if name else f"{len(lists)} columns of vectors"
                held = f"lists of floating point numbers are in {', '.join(lists) or 'none'}"
                raise ValueError(f"{path}: {found}; {held}: choose one with {path.name}:NAME")
            chunks = file.read(columns=[chosen]).column(0).chunks
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # The last: names of columns.
        raise ValueError(f"{path}: not a complete Parquet file ({first_line(error)})") from error
    return vectors_of(chunks, f"{path}: the vectors of column {chosen!r}")


def vectors_of(chunks: Sequence[Any], what: str) -> np.ndarray:
    """(n, d) numbers of the chunks of an Arrow column of n lists."""
    lengths = {length for chunk in chunks for length in chunk.value_lengths().unique().to_pylist()}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(f"{what} differ in length, or some are missing")
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate(values).reshape(sum(map(len, chunks)), -1)


def _is_list_of_floats(kind: Any) -> bool:
    lists = str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))
    return lists and str(kind.value_type) in ("halffloat", "float", "double")


def _pickled(path: Path) -> bool:
    """Whether a file looks like a pickle or an archive of torch.save."""
    with path.open("rb") as file:
        start = file.read(4)
    return path.suffix in (".pkl", ".pickle", ".pt", ".pth", ".bin") or start[:1] == b"\x80"


_BLOCK = 4096
"""Rows that are checked at a time."""


class EmbeddingTable:
    """n embeddings of c channels, in files."""

    def __init__(self, name: str, blocks: Sequence[Sequence[np.ndarray]]) -> None:
        if not blocks or not all(blocks):
            raise ValueError(f"{name}: holds no array of embeddings")
        for parts in blocks:
            widths = list(dict.fromkeys(part.shape[1] for part in parts))
            if len(widths) > 1:
                raise ValueError(f"{name}: its files have {' and '.join(map(str, widths))} channels; give equal ones")
        heights = list(dict.fromkeys(sum(map(len, parts)) for parts in blocks))
        if len(heights) > 1:
            raise ValueError(f"{name}: {' and '.join(map(str, heights))} rows side by side; give equal numbers")
        self.name, self._blocks = name, blocks
        self.n, self.channels = heights[0], sum(parts[0].shape[1] for parts in blocks)
        self._starts = [np.cumsum([0, *map(len, parts)])[:-1] for parts in blocks]

    def rows(self, index: np.ndarray) -> np.ndarray:
        """Some rows. index (k,) -> (k, c)."""
        values, column = np.empty((len(index), self.channels), np.float32), 0
        for parts, starts in zip(self._blocks, self._starts, strict=True):
            of_block = values[:, column : column + parts[0].shape[1]]
            column += of_block.shape[1]
            part_of = np.searchsorted(starts, index, side="right") - 1
            for part in np.unique(part_of):
                own = np.flatnonzero(part_of == part)
                with np.errstate(over="ignore"):  # A number that float32 lacks is infinite, which errors() finds.
                    of_block[own] = parts[part][index[own] - starts[part]]
        return values

    def features(self, row: int) -> np.ndarray:
        """One row. Returns (1, c)."""
        return self.rows(np.array([row]))

    def errors(self, index: np.ndarray) -> dict[int, str]:
        """The rows among some that no model can use. index (k,)."""
        found: dict[int, str] = {}
        for start in range(0, len(index), _BLOCK):
            some = index[start : start + _BLOCK]
            values = self.rows(some)
            finite = np.isfinite(values).all(1)
            found |= dict.fromkeys(some[~finite].tolist(), "holds NaN or infinity")
            found |= dict.fromkeys(some[finite & ~values.any(1)].tolist(), "holds zeros alone")
        return dict(sorted(found.items()))


class RegionFile:
    """A .npy file of the features of n images: (n, r, c), or (n, c) for one region each, of floating point numbers."""

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        if not Path(path).is_file():
            raise UserError(f"there is no file {path}")
        try:
            array = _map_array(Path(path))
        except (ValueError, OSError) as error:
            raise UserError(str(error)) from error
        if array.dtype not in FLOATS or array.ndim not in (2, 3) or not array.size or not array.flags.c_contiguous:
            form = "(images, regions, channels) or (images, channels) in float32 or float16, saved row by row"
            raise UserError(f"{path}: an array of shape {array.shape} and type {array.dtype}; expected {form}")
        self.n, self.channels = array.shape[0], array.shape[-1]
        self._dtype, self._count, self._start = array.dtype, array[0].size, array.offset  # type: ignore[attr-defined]

    def features(self, row: int) -> np.ndarray:
        """The features of an image. Returns (r, c)."""
        return self._read(row, self._count).reshape(-1, self.channels)

    def same(self, row: int, other: int) -> bool:
        """Whether two rows are equal; whole rows are read only if their beginnings agree."""
        parts = min(128, self._count), self._count
        return all(np.array_equal(self._read(row, part), self._read(other, part)) for part in parts)

    def _read(self, row: int, count: int) -> np.ndarray:
        """The first numbers of a row; not by the map, whose reader is killed when the file has become shorter."""
        start = self._start + row * self._count * self._dtype.itemsize
        values = np.fromfile(self.name, self._dtype, count, offset=start)
        if len(values) < count:
            raise OSError(f"{self.name} ends within row {row}; it was longer when it was opened")
        return values


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """A row of a table: an item of a data set. Its bytes are a .npy file of (r, c) features."""

    table: "EmbeddingTable | RegionFile"
    row: int  # its position

    @property
    def location(self) -> str:
        """table[row]."""
        return f"{self.table.name}[{self.row}]"

    def read_bytes(self) -> bytes:
        return regions_to_bytes(self.table.features(self.row))


@dataclass(frozen=True, slots=True)
class EmbeddingRow(FeatureRow):
    """A row of embeddings: an :data:`~sfumato.encoders.encoder_protocol.Item` itself."""

    table: EmbeddingTable

    def __call__(self) -> bytes:
        return self.read_bytes()


@dataclass(frozen=True, eq=False)
class NamedTable:
    """A table with the names of its rows."""

    table: EmbeddingTable  # the table
    ids: Sequence[str] | None = None  # n distinct ids; None if no file has any
    captions: Sequence[str] | None = None  # n wordings; None if no file has any


def open_table(paths: str) -> NamedTable:
    """Open a table of embeddings.

    The ids of table.npy stand in the file table_ids.txt, .json or .npy beside it (see
    :func:`~sfumato.data.feature_tables.read_ids`), its wordings in table.txt, one a line. A folder of shards has them
    under its own name, or in the files ../metadata/\\*.parquet that clip-retrieval writes (``image_path``,
    ``caption``).
    """
    parts = _side_by_side(paths)
    ids: Sequence[str] | None = None
    captions: Sequence[str] | None = None
    blocks = []
    try:
        for part in parts:
            opened = [open_vectors(file) for file in _files(part)]
            blocks.append([mean for mean, _, _ in opened])
            own = [i for _, _, of_file in opened for i in of_file or ()]
            ids = ids or own or _ids_beside(Path(part))
            captions = captions or _captions_beside(Path(part))
        table = EmbeddingTable(paths, blocks)
        if Path(parts[0]).is_dir() and (ids is None or captions is None):
            image_paths, wordings = _metadata(Path(parts[0]).parent / "metadata")
            ids, captions = ids or image_paths, captions or wordings
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    for what, names in (("ids", ids), ("captions", captions)):
        if names is not None and len(names) != table.n:
            raise UserError(f"{paths}: {len(names)} {what} for {table.n} rows; give one for each")
    return NamedTable(table, ids, captions)


def resolved_table(paths: str) -> str:
    """The same table with absolute paths, so that it is found from any folder."""
    resolved = []
    for part in _side_by_side(paths):
        file, name = _split(part)
        resolved.append((str(file.resolve()) if file.exists() else str(file)) + (f":{name}" if name else ""))
    return "+".join(resolved)


def _side_by_side(paths: str) -> list[str]:
    """The tables of a name such as a.npy+b.npy."""
    return paths.split("+") if "+" in paths and not Path(paths).exists() else [paths]


def _files(part: str) -> list[str]:
    """The file, or the files of a folder in the order of their numbers."""
    folder = Path(part)
    if not folder.is_dir():
        return [part]
    found = [p for p in folder.iterdir() if p.suffix in (".npy", ".safetensors", ".parquet")]
    if len({p.suffix for p in found}) != 1:
        raise UserError(f"{folder}: expected a folder of .npy files, or of .safetensors or .parquet files alone")
    return [str(p) for p in sorted(found, key=lambda file: natural_key(file.name))]


def _ids_beside(path: Path) -> list[str] | None:
    stem = path.with_suffix("")
    beside = [Path(f"{stem}_ids{ending}") for ending in (".txt", ".json", ".npy")]
    return next((read_ids(file) for file in beside if file.is_file()), None)


def _captions_beside(path: Path) -> list[str] | None:
    beside = path.with_suffix(".txt")
    if not beside.is_file():
        return None
    try:
        return beside.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{beside}: not UTF-8: {error.reason} at byte {error.start}") from error


def _metadata(folder: Path) -> tuple[list[str] | None, list[str] | None]:
    """(distinct image_path values, caption values) of the Parquet files of a folder; None where there are none."""
    files = sorted(folder.glob("*.parquet"), key=lambda file: natural_key(file.name))
    if not files:
        return None, None
    instead = ", or move the folder away: ids are then row numbers"
    pyarrow = need_pyarrow(f"{folder}: Parquet metadata need pyarrow", instead)
    columns: dict[str, list[str]] = {"image_path": [], "caption": []}
    try:
        for file in files:
            with pyarrow.parquet.ParquetFile(file) as opened:
                present = [name for name in columns if name in opened.schema_arrow.names]
                read = opened.read(columns=present)
                for name in present:
                    columns[name] += ["" if value is None else str(value) for value in read.column(name).to_pylist()]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{folder}: damaged metadata ({error})") from error
    paths = columns["image_path"]
    return paths if paths and len(set(paths)) == len(paths) else None, columns["caption"] or None
