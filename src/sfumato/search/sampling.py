"""A uniform sample of the records of a vector store, kept until a hundredth of the store has changed."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sfumato.search.stores.protocol import Records, VectorStore


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample, and the state of the collection when it was taken.

    Attributes:
        records: the sampled records.
        size: number of items in the collection.
        changed: number of items that this process had written or removed.
        seed: seed of the sample.
    """

    records: Records
    size: int
    changed: int
    seed: int


class Sampler:
    """Takes samples of a store and keeps the last one.

    Args:
        store: the store to sample.
    """

    def __init__(self, store: VectorStore) -> None:
        self._store = store
        self._last: Sample | None = None
        self._lock = threading.Lock()

    def sample(self, n: int, *, size: int, changed: int, seed: int = 0) -> Sample:
        """A uniform sample of at least min(n, size) records.

        Args:
            n: wanted number of records.
            size: number of items in the store now.
            changed: number of items that this process has written or removed so far.
            seed: the same seed gives the same records, as long as the store does not change.

        Returns:
            The last sample, if it is large enough and at most a hundredth of the store has changed since; else a new
            one, by a scan of the store.
        """
        with self._lock:
            last = self._last
            if (
                last is None
                or last.seed != seed
                or len(last.records) < min(n, size)
                or 100 * max(changed - last.changed, abs(size - last.size)) > size
            ):
                last = self._last = Sample(
                    even_sample(self._store.scan(), n, self._store.dim, seed), size, changed, seed
                )
            return last


def even_sample(batches: Iterator[Records], n: int, e: int, seed: int = 0) -> Records:
    """The n records whose ids have the smallest digests: a sample that does not depend on the order of the records.

    Args:
        batches: all records.
        n: wanted number of records.
        e: dimensions of their vectors.
        seed: salt of the digests.

    Returns:
        min(n, all) records.
    """
    kept, digests, salt = Records.none(e), list[bytes](), seed.to_bytes(16, "little")
    for batch in batches:
        new = [hashlib.blake2b(i.encode(), digest_size=8, salt=salt).digest() for i in batch.ids]
        last = digests[-1] if len(digests) == n else b"\xff" * 9
        if not (low := [i for i, digest in enumerate(new) if digest < last]):
            continue
        part = batch.take(low)
        both = Records(
            kept.ids + part.ids,
            torch.cat([kept.vectors, part.vectors]),
            torch.cat([kept.uncertainty, part.uncertainty]),
            kept.payloads + part.payloads,
        )
        digests += [new[i] for i in low]
        order = sorted(range(len(digests)), key=digests.__getitem__)[:n]
        kept, digests = both.take(order), [digests[i] for i in order]
    return kept
