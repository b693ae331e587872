"""Source "shards": an endless shuffled stream for training, or the complete shards for validation."""

import contextlib
import hashlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sfumato.data.images import MemoryImage, Problems
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.data.shards import ShardSample, read_shard
from sfumato.errors import UserError


@dataclass(frozen=True)
class ShardBatch:
    """b samples."""

    keys: list[str]  # b keys, as in :class:`~sfumato.data.shards.ShardSample`
    images: list[bytes]  # b encoded images
    texts: list[str]  # b captions


class ShardStream:
    """The batches of an epoch from shards, the same for the same seed, epoch and process.

    In each epoch the shards are assigned to the processes again. If there are fewer shards than processes, the samples
    of each shard are divided among them. No two processes ever see one sample in an epoch. Each process reads its part
    in passes: the shards in a random order, then their samples through a shuffle buffer, every sample once. If an epoch
    is longer than the data, another pass follows, in another order; if it is shorter, it ends within the first. The
    parts are even if there are many more shards than processes.
    """

    def __init__(
        self,
        shards: Sequence[str | Path],
        *,
        batch_size: int,
        seed: int,
        samples_per_epoch: int,
        rank: int = 0,
        n_processes: int = 1,
        shuffle_buffer: int = 1000,
        problems: Problems | None = None,
        max_problem_fraction: float = 0.01,
    ) -> None:
        if not shards:
            raise ValueError("ShardStream: got no shards")
        if samples_per_epoch < batch_size * n_processes:
            raise ValueError(
                f"ShardStream: an epoch of {samples_per_epoch} samples has no batch of {batch_size} for each of"
                f" {n_processes} processes; samples_per_epoch must be at least {batch_size * n_processes}"
            )
        self.shards = [str(shard) for shard in shards]
        self.batch_size, self.seed, self.samples_per_epoch = batch_size, seed, samples_per_epoch
        self.rank, self.n_processes, self.shuffle_buffer = rank, n_processes, shuffle_buffer
        self.problems = Problems() if problems is None else problems
        self.max_problem_fraction = max_problem_fraction
        self._noted: set[tuple[str, str]] = set()
        self._usable = 0

    def __len__(self) -> int:
        return self.samples_per_epoch // (self.batch_size * self.n_processes)

    def batches(self, epoch: int) -> Generator[ShardBatch, None, None]:
        """The batches of an epoch: ``len(self)`` of them, in every process, each of ``batch_size`` samples."""
        with contextlib.closing(self.samples(epoch)) as samples:
            for _ in range(len(self)):
                part = list(itertools.islice(samples, self.batch_size))
                yield ShardBatch([s.key for s in part], [s.image for s in part], [s.text for s in part])

    def samples(self, epoch: int) -> Generator[ShardSample, None, None]:
        """An endless iterator over the samples of an epoch.

        Use it to decode before batching: take samples until a batch is full, and leave out the samples reported to
        :meth:`skip`.
        """
        everything = np.arange(len(self.shards))
        by_shard = len(self.shards) >= self.n_processes
        shuffled = np.random.default_rng([self.seed, epoch, 0]).permutation(everything)
        own = shuffled[self.rank :: self.n_processes] if by_shard else everything
        for number in itertools.count():
            random = np.random.default_rng([self.seed, epoch, 1 + self.rank, number])
            found = 0
            for sample in _shuffled(self._read(epoch, random.permutation(own), by_shard), self.shuffle_buffer, random):
                found += 1
                yield sample
            self.problems.check(self._usable, self.max_problem_fraction)
            if not found:
                raise UserError(
                    f"process {self.rank} of {self.n_processes} found no usable sample in {len(own)} shards, the first"
                    f" {self.shards[own[0]]}; a sample is KEY.jpg, .jpeg, .png or .webp with KEY.txt or KEY.json:\n"
                    f"{self.problems.summary()}"
                )

    def skip(self, key: str, reason: str) -> None:
        """Record a sample that turns out to be unusable, for instance because its image cannot be decoded.

        It stays in the stream, which depends on seed, epoch and process alone, and is recorded once.
        """
        if (key, reason) not in self._noted:
            self._noted.add((key, reason))
            self.problems.add(key, reason)
            if self._usable + len(self.problems) >= _ENOUGH_TO_JUDGE:
                self.problems.check(self._usable, self.max_problem_fraction)

    def _read(self, epoch: int, order: Iterable[int], by_shard: bool) -> Iterator[ShardSample]:
        for position in order:
            # The first process rotates with shard and epoch, so all processes get small shards, and samples change
            # process.
            first = (self.rank + epoch - position) % self.n_processes
            mine = slice(None) if by_shard else slice(first, None, self.n_processes)
            for sample in read_shard(self.shards[position], mine, self.skip):
                self._usable += 1
                yield sample


def read_shards(shards: Sequence[str | Path], problems: Problems) -> PairData:
    """All samples of some shards as a split, for validation: encoded images in memory, each once with all its captions.

    Args:
        shards: local tar files, see :func:`~sfumato.data.shards.expand_shards`.
        problems: receives what cannot be used.

    Returns:
        The split; ids are "path/of/shard.tar!key".
    """
    images: dict[bytes, MemoryImage] = {}
    captions: dict[bytes, list[str]] = {}
    for shard in shards:
        for sample in read_shard(str(shard), slice(None), problems.add):
            digest = hashlib.sha256(sample.image).digest()
            images.setdefault(digest, MemoryImage(sample.key, sample.image))
            if sample.text not in captions.setdefault(digest, []):
                captions[digest].append(sample.text)
    sources = list(images.values())
    return make_pair_data([source.location for source in sources], sources, [captions[digest] for digest in images])


def _shuffled(samples: Iterator[ShardSample], size: int, random: np.random.Generator) -> Iterator[ShardSample]:
    """Yield each sample once: whenever a sample enters the buffer, a random one of ``size`` samples leaves it."""
    buffer = list(itertools.islice(samples, size))
    for sample in samples:
        position = int(random.integers(size))
        yield buffer[position]
        buffer[position] = sample
    for position in random.permutation(len(buffer)):
        yield buffer[position]


_ENOUGH_TO_JUDGE = 1000
