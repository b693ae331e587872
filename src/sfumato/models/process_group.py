"""Several processes that work on one model: the division of the work, and the exchange of tensors.

torchrun starts them. Every process encodes its part of a batch, all receive all embeddings, and each computes its own
rows and columns of the pairs. Parameters, optimiser and random numbers stay equal on all of them without being sent
again.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sfumato.arrays import Array, as_numpy, as_tensor, is_tensor
from sfumato.distances.distance import Distance
from sfumato.errors import RunFailedError, first_line
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.search.exact import rank_relevant

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_BUCKET = 25_000_000
"""Number of gradient values that are summed over the processes at a time."""

Result = TypeVar("Result")


class PeerLostError(RunFailedError):
    """Another process of the run has ended or does not answer; the message says how to continue."""


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, from the view of one of them."""

    rank: int  # number of this process, from 0
    size: int  # number of processes
    device: Any = "cpu"  # device of this process

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def part(self, n: int, rank: int | None = None) -> np.ndarray:
        """Positions of the items that belong to a process: contiguous, and the sizes differ by one at most.

        Returns (k,).
        """
        rank = self.rank if rank is None else rank
        return np.arange(rank * n // self.size, (rank + 1) * n // self.size)

    def total(self, value: "Tensor") -> "Tensor":
        """The sum of a tensor over the processes, without gradient."""
        if self.size == 1:
            return value.detach()
        result = value.detach().to(self.device).clone()
        _answered(lambda dist: dist.all_reduce(result))
        return result.to(value.device)

    def counts(self, own: int) -> list[int]:
        """The number of items of each process."""
        if self.size == 1:
            return [own]
        import torch

        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = own
        return [int(k) for k in self.total(counts)]

    def gather(self, value: Array, counts: Sequence[int]) -> Array:
        """The tensors of all processes, one after the other, without gradient. Returns (sum of counts, ...)."""
        if self.size == 1:
            return value.detach() if is_tensor(value) else value
        import torch

        own = as_tensor(value, "value", "ProcessGroup.gather").detach().to(self.device)
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        _answered(lambda dist: dist.all_gather(parts, padded))
        found = torch.cat([part[:k] for part, k in zip(parts, counts, strict=True)])
        return found.to(value.device) if is_tensor(value) else as_numpy(found)

    def gather_row(self, row: "Tensor") -> "Tensor":
        """:meth:`gather` of one row of each process. row (k,) -> (processes, k)."""
        return self.gather(row.unsqueeze(0), [1] * self.size)

    def gather_embeddings(self, embeddings: GaussianEmbedding, counts: Sequence[int]) -> GaussianEmbedding:
        """:meth:`gather` of means and log variances. Returns (sum of counts, d)."""
        return GaussianEmbedding(self.gather(embeddings.mean, counts), self.gather(embeddings.log_var, counts))

    def rank_relevant(
        self, queries: GaussianEmbedding, gallery: GaussianEmbedding, relevance: Relevance, distance: str | Distance
    ) -> np.ndarray:
        """:func:`~sfumato.search.exact.rank_relevant`, where each process ranks its part of the queries.

        queries (n, d), gallery (m, d), relevance (n, m).
        """
        own = self.part(queries.n)
        first = int(own[0]) if len(own) else 0
        part, relevant = queries[first : first + len(own)], relevance.select_queries(own)
        mine = rank_relevant(part, gallery, relevant, distance, first=first)
        return self.gather(mine, self.counts(len(mine)))

    def sum_gradients(self, parameters: "Iterable[nn.Parameter]") -> None:
        """Replace every parameter's gradient by its sum over the processes; a missing gradient counts as 0."""
        if self.size == 1:
            return
        import torch

        bucket: list[Tensor] = []
        for parameter in (trained := [p for p in parameters if p.requires_grad]):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(g.numel() for g in bucket) < _BUCKET and parameter is not trained[-1]:
                continue
            flat = torch.cat([g.flatten() for g in bucket])
            _answered(lambda dist, flat=flat: dist.all_reduce(flat))  # type: ignore[misc]
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))
            bucket = []

    def copy_from_main(self, model: "nn.Module") -> None:
        """Replace weights and buffers by those of the first process."""
        if self.size == 1:
            return
        for value in model.state_dict().values():
            _answered(lambda dist, value=value: dist.broadcast(value, 0))  # type: ignore[misc]

    def average_buffers(self, model: "nn.Module") -> None:
        """Replace running statistics by their mean over the processes; other buffers are equal already."""
        if self.size == 1:
            return
        import torch

        running = [b for name, b in model.named_buffers() if name.rpartition(".")[2] in ("running_mean", "running_var")]
        if running:
            means = self.total(torch.cat([b.flatten() for b in running])) / self.size
            for buffer, mean in zip(running, means.split([b.numel() for b in running]), strict=True):
                buffer.copy_(mean.view_as(buffer))

    def wait(self) -> None:
        """Wait until all processes have called this."""
        self.counts(0)


def alone(device: Any = "cpu") -> ProcessGroup:
    """The group of a single process."""
    return ProcessGroup(0, 1, device)


ALONE = alone()


@contextmanager
def join_process_group(choose_device: "Callable[[int], torch.device | str]", minutes: float) -> Iterator[ProcessGroup]:
    """The processes that torchrun has started, or this one alone without torchrun."""
    device: Any = choose_device(int(os.environ.get("LOCAL_RANK", "0")))
    process_group = alone(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield process_group
        return
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=minutes))
    try:
        yield replace(process_group, rank=dist.get_rank(), size=dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _answered(operation: Callable[[Any], Result]) -> Result:
    import torch
    import torch.distributed as dist

    try:
        return operation(dist)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo has no separate class for this error.
        kept = "the state of the last save is kept, start the same command again to continue from there"
        reason = f"another process of this run has ended or does not answer ({first_line(error)})"
        raise PeerLostError(f"{reason}; {kept}") from error
