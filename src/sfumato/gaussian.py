"""The Gaussian embedding, the only type that is passed between the folders of this package.

It has means, log variances, their scalar summaries, sampling, and a safe file format. It does not depend on distances.
Arrays of NumPy are converted here, wherever functions take tensors.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from sfumato.errors import refuse_newer
from sfumato.files import write_atomically

EMBEDDINGS_FORMAT = "sfumato-embeddings-1"
"""The format in the metadata of a safetensors file of mean, log_var and ids."""

ScalarUncertainty = Literal["total_variance", "geometric_std", "log_det"]
"""The scalar uncertainties of an embedding: those of Chun 2024, of Chun et al. 2021, and of Pishdad et al."""


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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over d are taken."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True, eq=False)
class GaussianEmbedding:
    r"""n diagonal Gaussians N(mean, diag(exp(log_var))) in d dimensions.

    A deterministic embedding is the same type with variance 0, i.e. log_var = -inf: see :meth:`point`.

    Args:
        mean: (n, d) floating point, a tensor or an array of NumPy.
        log_var: (n, d) natural logarithm of the variance (sigma squared, not sigma); same shape, dtype and device.

    Raises:
        TypeError: an argument is neither a tensor nor an array, or not floating point.
        ValueError: shapes, dtypes or devices differ, or the tensors are not two-dimensional.

    Example:
        >>> e = GaussianEmbedding(torch.zeros(1, 2), torch.log(torch.tensor([[1.0, 3.0]])))
        >>> e.total_variance
        tensor([4.])
    """

    mean: Tensor
    log_var: Tensor

    if TYPE_CHECKING:

        def __init__(self, mean: Array, log_var: Array) -> None: ...

    def __post_init__(self) -> None:
        for name in ("mean", "log_var"):
            value = as_tensor(getattr(self, name), name, "GaussianEmbedding")
            object.__setattr__(self, name, value)
            if not value.is_floating_point():
                raise TypeError(
                    f"GaussianEmbedding: {name} must be a floating point tensor, got a tensor of {value.dtype}"
                )
            if value.ndim != 2:
                raise ValueError(
                    f"GaussianEmbedding: {name} must have shape (n, d), got {tuple(value.shape)};"
                    " a single embedding is a batch of one: use x.unsqueeze(0)"
                )
        if self.mean.shape != self.log_var.shape:
            raise ValueError(
                f"GaussianEmbedding: mean {tuple(self.mean.shape)} and log_var {tuple(self.log_var.shape)} must have"
                " the same shape; expand an isotropic variance with log_var.expand_as(mean)"
            )
        if self.mean.dtype != self.log_var.dtype or self.mean.device != self.log_var.device:
            raise ValueError(
                f"GaussianEmbedding: mean is {self.mean.dtype} on {self.mean.device}, log_var is {self.log_var.dtype}"
                f" on {self.log_var.device}; move one with .to()"
            )

    @classmethod
    def point(cls, mean: Array) -> "GaussianEmbedding":
        """A deterministic embedding: variance 0.

        Args:
            mean: (n, d) floating point, a tensor or an array.

        Returns:
            n points; log_var is -inf.

        Example:
            >>> GaussianEmbedding.point(torch.ones(1, 2)).total_variance
            tensor([0.])
        """
        mean = as_tensor(mean, "mean", "GaussianEmbedding.point")
        return cls(mean, torch.full_like(mean, -math.inf))

    @classmethod
    def cat(cls, parts: Sequence["GaussianEmbedding"]) -> "GaussianEmbedding":
        """Concatenate embeddings.

        Args:
            parts: at least one, all with the same d, dtype and device.

        Returns:
            All their rows in this order.

        Raises:
            ValueError: there are no parts.
        """
        if not parts:
            raise ValueError("GaussianEmbedding.cat: got no parts, expected at least one")
        return cls(torch.cat([p.mean for p in parts]), torch.cat([p.log_var for p in parts]))

    def __repr__(self) -> str:
        kind = "points" if self.n and torch.isneginf(self.log_var).all() else "Gaussians"
        dtype, where = str(self.dtype).removeprefix("torch."), "" if self.device.type == "cpu" else f", {self.device}"
        return f"GaussianEmbedding({self.n} {kind} in {self.d} dimensions, {dtype}{where})"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: slice | Array) -> "GaussianEmbedding":
        """Rows by slice, (k,) indices or (n,) mask. An integer is refused: use [i : i + 1] for a batch of one."""
        if isinstance(index, np.ndarray):
            index = as_tensor(index, "index", "GaussianEmbedding")
        if (isinstance(index, Tensor) and index.ndim != 1) or not isinstance(index, Tensor | slice):
            raise TypeError(
                f"GaussianEmbedding: index with a slice or a 1-D tensor (x[i : i + 1] for one row), got {index!r}"
            )
        return GaussianEmbedding(self.mean[index], self.log_var[index])

    @property
    def n(self) -> int:
        """Number of embeddings."""
        return self.mean.shape[0]

    @property
    def d(self) -> int:
        """Number of dimensions."""
        return self.mean.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of both tensors."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.mean.device

    @property
    def var(self) -> Tensor:
        """(n, d) variances, exp(log_var)."""
        return self.log_var.exp()

    @property
    def total_variance(self) -> Tensor:
        """(n,) sum of the variances over d, in float32 or better: the default scalar uncertainty.

        Paper: Chun 2024, section 3.4.
        """
        return self.log_var.to(accumulation_dtype(self.dtype)).exp().sum(-1)

    @property
    def log_det(self) -> Tensor:
        """(n,) log determinant of the covariance, the sum of log_var; -inf for points.

        Paper: Pishdad et al., section 3.3.
        """
        return self.log_var.to(accumulation_dtype(self.dtype)).sum(-1)

    @property
    def geometric_std(self) -> Tensor:
        """(n,) geometric mean over d of the standard deviation, exp(mean(log_var) / 2).

        Paper: Chun et al. 2021, section 3.2.1.
        """
        return (self.log_var.to(accumulation_dtype(self.dtype)).mean(-1) / 2).exp()

    def uncertainty(self, measure: ScalarUncertainty = "total_variance") -> Tensor:
        """A scalar uncertainty by its name.

        Args:
            measure: one of ScalarUncertainty. geometric_std and log_det order items alike.

        Returns:
            (n,) numbers, higher is less certain.

        Raises:
            ValueError: the name is unknown.
        """
        if measure not in get_args(ScalarUncertainty):
            raise ValueError(f"unknown uncertainty {measure!r}; known: {', '.join(get_args(ScalarUncertainty))}")
        value: Tensor = getattr(self, measure)
        return value

    def sample(self, n_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Reparametrised samples mean + sqrt(var) * noise; gradients flow to mean and log_var.

        Args:
            n_samples: number s >= 1 of samples of each embedding.
            generator: source of the noise, on the same device; the global one if None.

        Returns:
            (n, s, d) samples.

        Raises:
            ValueError: n_samples < 1.
        """
        if n_samples < 1:
            raise ValueError(f"sample: n_samples must be at least 1, got {n_samples}")
        shape = (self.n, n_samples, self.d)
        noise = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        return reparametrised(self, noise)

    def to(self, target: torch.device | torch.dtype | str) -> "GaussianEmbedding":
        """Move both tensors to a device, or cast them to a dtype.

        Args:
            target: a device, its name, or a dtype.

        Returns:
            The moved embeddings.
        """
        return GaussianEmbedding(self.mean.to(target), self.log_var.to(target))

    def detach(self) -> "GaussianEmbedding":
        """The same numbers without their gradient history.

        Returns:
            Embeddings without gradient.
        """
        return GaussianEmbedding(self.mean.detach(), self.log_var.detach())


def reparametrised(x: GaussianEmbedding, noise: Tensor) -> Tensor:
    """The samples mean + sqrt(var) * noise, in the dtype of x. noise (n, s, d) -> (n, s, d)."""
    noise = noise.to(x.device, x.dtype)
    return torch.addcmul(x.mean.unsqueeze(1), (x.log_var / 2).exp().unsqueeze(1), noise)


def save_embeddings(path: str | Path, embeddings: GaussianEmbedding, ids: Sequence[str]) -> None:
    """Write embeddings and their ids into one safetensors file, atomically.

    Args:
        path: the file; its folder must exist.
        embeddings: n embeddings, saved on the CPU in their own dtype.
        ids: n distinct strings.

    Raises:
        ValueError: the number of ids is not n, an id occurs twice, or a value is NaN or a mean is infinite.
    """
    ids = list(ids)
    check_finite(embeddings, "save_embeddings")
    if len(ids) != embeddings.n:
        raise ValueError(f"save_embeddings: got {len(ids)} ids for {embeddings.n} embeddings; give one id for each")
    if len(set(ids)) != len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise ValueError(f"save_embeddings: id {twice!r} occurs more than once; ids must be distinct")
    tensors = {name: getattr(embeddings, name).detach().cpu().contiguous() for name in ("mean", "log_var")}
    # Ids are a tensor of UTF-8 bytes, because the format limits its header to 100 MB.
    tensors["ids"] = torch.frombuffer(bytearray(json.dumps(ids, ensure_ascii=False).encode()), dtype=torch.uint8)
    write_atomically(path, safetensors_bytes(tensors, {"format": EMBEDDINGS_FORMAT}))


def load_embeddings(path: str | Path) -> tuple[GaussianEmbedding, list[str]]:
    """Read a file of :func:`save_embeddings`.

    Args:
        path: the file.

    Returns:
        (embeddings, ids).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format, is truncated, or its ids do not fit.
        UserError: a later version of sfumato has written it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no embeddings at {path}; write them with save_embeddings()")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            refuse_newer(str(path), metadata.get("format"), EMBEDDINGS_FORMAT)
            if metadata.get("format") != EMBEDDINGS_FORMAT:
                raise ValueError(
                    f"{path}: not an embeddings file of sfumato (format {metadata.get('format')!r},"
                    f" expected {EMBEDDINGS_FORMAT!r})"
                )
            embeddings = GaussianEmbedding(file.get_tensor("mean"), file.get_tensor("log_var"))
            ids = [str(i) for i in json.loads(file.get_tensor("ids").numpy().tobytes())]
    except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: damaged or not an embeddings file ({error}); write it again with save_embeddings()"
        ) from error
    if len(ids) != embeddings.n:
        raise ValueError(f"{path}: damaged: {len(ids)} ids for {embeddings.n} embeddings; write it again")
    return embeddings, ids


def is_embeddings_file(path: str | Path) -> bool:
    """Whether :func:`save_embeddings` wrote a file."""
    try:
        with safe_open(path, framework="pt") as file:
            return bool((file.metadata() or {}).get("format") == EMBEDDINGS_FORMAT)
    except SafetensorError:
        return False


def check_finite(embeddings: GaussianEmbedding, who: str) -> None:
    """Refuse NaN, infinite means and infinite variances; log_var = -inf, a point, is allowed."""
    bad = ~torch.isfinite(embeddings.mean) | torch.isnan(embeddings.log_var) | torch.isposinf(embeddings.log_var)
    if bad.any():
        row = int(bad.any(dim=1).nonzero()[0])
        raise ValueError(
            f"{who}: embedding {row} holds NaN or infinity; the model may have diverged. Leave such rows out,"
            " or train again"
        )
