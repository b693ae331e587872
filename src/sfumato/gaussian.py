"""The Gaussian embedding, the only type that is passed between the folders of this package.

It has means, log variances, their scalar summaries, sampling, and a safe file format. It does not depend on distances.
"""

import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import array_api_compat
import numpy as np
from safetensors import SafetensorError, safe_open

from sfumato.arrays import Array, as_array, as_numpy, as_tensor, is_tensor, like, namespace
from sfumato.errors import refuse_newer
from sfumato.files import write_atomically
from sfumato.ids import first_twice

if TYPE_CHECKING:
    import torch

EMBEDDINGS_FORMAT = "sfumato-embeddings-1"
"""The format in the metadata of a safetensors file of mean, log_var and ids."""

Sides = tuple["GaussianEmbedding", "GaussianEmbedding"]
"""Two sides that are compared, as images and texts."""

ScalarUncertainty = Literal["total_variance", "geometric_std", "log_det"]
"""The scalar uncertainties of an embedding: those of Chun 2024, of Chun et al. 2021, and of Pishdad et al."""


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype in which sums over d are taken: float32 for half precision."""
    if str(dtype) in ("torch.float16", "torch.bfloat16"):
        import torch

        return torch.float32
    return np.dtype(np.float32) if dtype == np.float16 else dtype


@dataclass(frozen=True, eq=False)
class GaussianEmbedding:
    r"""n diagonal Gaussians N(mean, diag(exp(log_var))) in d dimensions.

    A deterministic embedding is the same type with variance 0, i.e. log_var = -inf: see :meth:`point`.

    Args:
        mean: (n, d) floating point, a tensor of torch or an array of NumPy; all results are of the same library.
        log_var: (n, d) natural logarithm of the variance (sigma squared, not sigma); same shape, dtype and device.

    Raises:
        TypeError: an argument is neither a tensor nor an array, or not floating point.
        ValueError: shapes, dtypes or devices differ, or the arrays are not two-dimensional.

    Example:
        >>> e = GaussianEmbedding(np.zeros((1, 2)), np.log([[1.0, 3.0]]))
        >>> e.total_variance
        array([4.])
    """

    mean: Array
    log_var: Array

    def __post_init__(self) -> None:
        for name in ("mean", "log_var"):
            value = as_array(getattr(self, name), name, "GaussianEmbedding")
            object.__setattr__(self, name, value)
            if not namespace(value).isdtype(value.dtype, "real floating"):
                raise TypeError(f"GaussianEmbedding: {name} must be floating point, got {value.dtype}")
            if value.ndim != 2:
                found = f"{name} must have shape (n, d), got {tuple(value.shape)}"
                raise ValueError(f"GaussianEmbedding: {found}; a single embedding is a batch of one: use x[None]")
        mean, log_var = self.mean, self.log_var
        if mean.shape != log_var.shape:
            shapes = f"mean {tuple(mean.shape)} and log_var {tuple(log_var.shape)} must have the same shape"
            way = "expand an isotropic variance with expand_as or numpy.broadcast_to"
            raise ValueError(f"GaussianEmbedding: {shapes}; {way}")
        if mean.dtype != log_var.dtype or self.device != array_api_compat.device(log_var):
            means = f"mean is {mean.dtype} on {self.device}"
            variances = f"log_var is {log_var.dtype} on {array_api_compat.device(log_var)}"
            raise ValueError(f"GaussianEmbedding: {means}, {variances}; move one with .to()")

    @classmethod
    def point(cls, mean: Array) -> "GaussianEmbedding":
        """A deterministic embedding: variance 0.

        Args:
            mean: (n, d) floating point, a tensor or an array.

        Returns:
            n points; log_var is -inf.

        Example:
            >>> GaussianEmbedding.point(np.ones((1, 2))).total_variance
            array([0.])
        """
        mean = as_array(mean, "mean", "GaussianEmbedding.point")
        return cls(mean, namespace(mean).full_like(mean, -math.inf))

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
        concat = namespace(parts[0].mean).concat
        return cls(concat([p.mean for p in parts]), concat([p.log_var for p in parts]))

    def __repr__(self) -> str:
        kind = "points" if self.n and (self.log_var == -math.inf).all() else "Gaussians"
        dtype, where = str(self.dtype).removeprefix("torch."), "" if str(self.device) == "cpu" else f", {self.device}"
        return f"GaussianEmbedding({self.n} {kind} in {self.d} dimensions, {dtype}{where})"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: slice | Array) -> "GaussianEmbedding":
        """Rows by slice, (k,) indices or (n,) mask. An integer is refused: use [i : i + 1] for a batch of one."""
        if not isinstance(index, slice):
            if getattr(index, "ndim", 0) != 1:
                way = "a slice or a 1-D array (x[i : i + 1] for one row)"
                raise TypeError(f"GaussianEmbedding: index with {way}, got {index!r}")
            index = as_tensor(index, "index", "GaussianEmbedding") if is_tensor(self.mean) else as_numpy(index)
        return GaussianEmbedding(self.mean[index], self.log_var[index])

    @property
    def n(self) -> int:
        """Number of embeddings."""
        return int(self.mean.shape[0])

    @property
    def d(self) -> int:
        """Number of dimensions."""
        return int(self.mean.shape[1])

    @property
    def dtype(self) -> Any:
        """Dtype of both."""
        return self.mean.dtype

    @property
    def device(self) -> Any:
        """Device of both; "cpu" for arrays of NumPy."""
        return array_api_compat.device(self.mean)

    @property
    def var(self) -> Array:
        """(n, d) variances, exp(log_var)."""
        return namespace(self.log_var).exp(self.log_var)

    @property
    def total_variance(self) -> Array:
        """(n,) sum of the variances over d, in float32 or better: the default scalar uncertainty.

        Paper: Chun 2024, section 3.4.
        """
        log_var = self._accumulated()
        return namespace(log_var).exp(log_var).sum(-1)

    @property
    def log_det(self) -> Array:
        """(n,) log determinant of the covariance, the sum of log_var; -inf for points.

        Paper: Pishdad et al., section 3.3.
        """
        return self._accumulated().sum(-1)

    @property
    def geometric_std(self) -> Array:
        """(n,) geometric mean over d of the standard deviation, exp(mean(log_var) / 2).

        Paper: Chun et al. 2021, section 3.2.1.
        """
        log_var = self._accumulated()
        return namespace(log_var).exp(log_var.mean(-1) / 2)

    def _accumulated(self) -> Array:
        return self.to(accumulation_dtype(self.dtype)).log_var

    def uncertainty(self, measure: ScalarUncertainty = "total_variance") -> Array:
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
        return getattr(self, measure)

    def sample(self, n_samples: int, *, generator: "torch.Generator | None" = None) -> "torch.Tensor":
        """Reparametrised samples mean + sqrt(var) * noise; gradients flow to mean and log_var. It needs torch.

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
        import torch

        own = self.tensors()
        shape = (self.n, n_samples, self.d)
        return reparametrised(own, torch.randn(shape, generator=generator, dtype=own.dtype, device=own.device))

    def to(self, target: Any) -> "GaussianEmbedding":
        """Move both tensors to a device, or cast them to a dtype.

        Args:
            target: a device, its name, or a dtype.

        Returns:
            The moved embeddings; arrays of NumPy take a dtype, and are tensors on a device other than "cpu".
        """
        if not is_tensor(self.mean):
            try:
                dtype = self.dtype if str(target) == "cpu" else np.dtype(target)
            except TypeError:  # A device, or a dtype of torch.
                return self.tensors().to(target)
            return GaussianEmbedding(self.mean.astype(dtype, copy=False), self.log_var.astype(dtype, copy=False))
        return GaussianEmbedding(self.mean.to(target), self.log_var.to(target))

    def detach(self) -> "GaussianEmbedding":
        """The same numbers without their gradient history.

        Returns:
            Embeddings without gradient.
        """
        return GaussianEmbedding(self.mean.detach(), self.log_var.detach()) if is_tensor(self.mean) else self

    def numpy(self) -> "GaussianEmbedding":
        """The same numbers as arrays of NumPy, without gradients; bfloat16 becomes float32.

        Returns:
            Embeddings of arrays.
        """
        return GaussianEmbedding(as_numpy(self.mean), as_numpy(self.log_var))

    def tensors(self) -> "GaussianEmbedding":
        """The same numbers as tensors of torch, without a copy where possible.

        Returns:
            Embeddings of tensors.
        """
        both = (as_tensor(getattr(self, name), name, "GaussianEmbedding") for name in ("mean", "log_var"))
        return GaussianEmbedding(*both)


def reparametrised(x: GaussianEmbedding, noise: "torch.Tensor") -> "torch.Tensor":
    """The samples mean + sqrt(var) * noise, in the dtype of x. noise (n, s, d) -> (n, s, d)."""
    return x.mean[:, None].addcmul((x.log_var / 2).exp()[:, None], noise.to(x.device, x.dtype))


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
    if (twice := first_twice(ids)) is not None:
        raise ValueError(f"save_embeddings: id {twice!r} occurs more than once; ids must be distinct")
    held = {"mean": embeddings.mean, "log_var": embeddings.log_var}
    # Ids are an array of UTF-8 bytes, because the format limits its header to 100 MB.
    held["ids"] = like(np.frombuffer(json.dumps(ids, ensure_ascii=False).encode(), np.uint8), embeddings.mean)
    if is_tensor(embeddings.mean):
        held = {name: value.detach().cpu().contiguous() for name, value in held.items()}
    library = importlib.import_module("safetensors.torch" if is_tensor(embeddings.mean) else "safetensors.numpy")
    write_atomically(path, library.save(held, {"format": EMBEDDINGS_FORMAT}))


def load_embeddings(path: str | Path) -> tuple[GaussianEmbedding, list[str]]:
    """Read a file of :func:`save_embeddings`.

    Args:
        path: the file.

    Returns:
        (embeddings, ids); the embeddings are arrays of NumPy, and tensors if they are bfloat16.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format, is truncated, or its ids do not fit.
        UserError: a later version of sfumato has written it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no embeddings at {path}; write them with save_embeddings()")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            refuse_newer(str(path), metadata.get("format"), EMBEDDINGS_FORMAT)
            if metadata.get("format") != EMBEDDINGS_FORMAT:
                found = f"format {metadata.get('format')!r}, expected {EMBEDDINGS_FORMAT!r}"
                raise ValueError(f"{path}: not an embeddings file of sfumato ({found})")
            ids = [str(i) for i in json.loads(file.get_tensor("ids").tobytes())]
            framework = "pt" if file.get_slice("mean").get_dtype() == "BF16" else "np"  # NumPy has no bfloat16.
        with safe_open(path, framework=framework) as file:
            embeddings = GaussianEmbedding(file.get_tensor("mean"), file.get_tensor("log_var"))
    except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = f"damaged or not an embeddings file ({error})"
        raise ValueError(f"{path}: {reason}; write it again with save_embeddings()") from error
    if len(ids) != embeddings.n:
        raise ValueError(f"{path}: damaged: {len(ids)} ids for {embeddings.n} embeddings; write it again")
    return embeddings, ids


def is_embeddings_file(path: str | Path) -> bool:
    """Whether :func:`save_embeddings` wrote a file."""
    try:
        with safe_open(path, framework="np") as file:
            return bool((file.metadata() or {}).get("format") == EMBEDDINGS_FORMAT)
    except SafetensorError:
        return False


def check_finite(embeddings: GaussianEmbedding, who: str) -> None:
    """Refuse NaN, infinite means and infinite variances; log_var = -inf, a point, is allowed."""
    xp, log_var = namespace(embeddings.mean), embeddings.log_var
    bad = ~xp.isfinite(embeddings.mean) | xp.isnan(log_var) | (log_var == math.inf)
    if bad.any():
        row = int(xp.argmax(xp.astype(bad.any(1), xp.int8)))
        found = f"embedding {row} holds NaN or infinity; the model may have diverged"
        raise ValueError(f"{who}: {found}. Leave such rows out, or train again")
