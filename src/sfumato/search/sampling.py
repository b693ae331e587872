"""A uniform sample of the items of a store, which does not depend on their order."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from sfumato.search.candidates import SampledItems
from sfumato.search.stores.protocol import Records
from sfumato.search.texts import ItemTexts


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample, and the state of the collection when it was taken."""

    records: Records
    size: int  # number of items in the collection
    changed: int  # number of items that this process had written or removed
    seed: int
    texts: ItemTexts | None = None
    good_until: float = math.inf  # time from which results of others' writes are looked for, where hits come from it
    prepared: dict[bool, SampledItems] = field(default_factory=dict)  # all of it, by whether it is the whole gallery


def even_sample(batches: Iterator[Records], n: int, e: int, seed: int = 0) -> Records:
    """The n records whose ids have the smallest digests: a sample that does not depend on the order of the records."""
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
