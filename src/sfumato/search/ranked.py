"""The best items of a query before they become an answer: what is shown of them, and what is said."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.search.answer import Hit, Verdict, fits_verdict, verdict
from sfumato.search.candidates import Candidates
from sfumato.search.fitting import Fitting

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ranked:
    """The k best items of one query, and those that its answer shows."""

    hits: tuple[Hit, ...]
    kept: tuple[Hit, ...]  # those of at least min_probability
    shown: tuple[Hit, ...]  # those of the answer
    near: Candidates  # the closest items
    fitting: Fitting | None  # where texts are evidence
    folds: bool = False

    @property
    def best(self) -> float:
        """Probability of the first hit."""
        return self.hits[0].match_probability if self.hits else 0.0

    def verdict(self, expected: float, abstained: bool | None, *, empty_set: bool) -> Verdict:
        """What is said of them. expected: the number of matches in the whole gallery."""
        if self.fitting is None:
            return verdict(expected, self.best, abstained, empty_set=empty_set)
        said_of = self.shown if self.folds and self.kept else self.hits
        return fits_verdict([hit.match_probability for hit in said_of], expected, self.fitting.nothing)


def folded(hits: Sequence[Hit], means: Mapping[str, Tensor], k: int, limit: float) -> tuple[Hit, ...]:
    """The first k of some hits that are not nearly the same as one above; the others are duplicates of these.

    means: of the hits by id; hits without one were deleted meanwhile. limit: of the squared distance of two means.
    """
    kept, duplicates = list[Hit](), list[list[str]]()
    for hit in hits:
        if (mean := means.get(hit.id)) is None:
            continue
        above = torch.stack([means[other.id] for other in kept] or [mean + math.inf])
        near = ((above - mean).square().sum(1) <= limit).nonzero().flatten().tolist()
        if near:
            duplicates[near[0]].append(hit.id)
        elif len(kept) < k:
            kept.append(hit)
            duplicates.append([])
    pairs = enumerate(zip(kept, duplicates, strict=True), 1)
    return tuple(replace(hit, rank=rank, duplicates=tuple(ids)) for rank, (hit, ids) in pairs)


def completed(
    known: Sequence[T | None], queries: GaussianEmbedding, find: Callable[[GaussianEmbedding], list[T]]
) -> list[T]:
    """A value for each query: the known one, else the one found. queries (n, d)."""
    others = [i for i, one in enumerate(known) if one is None]
    some = queries if len(others) == queries.n else queries[torch.tensor(others, dtype=torch.long)]
    found = iter(find(some) if others else [])
    return [next(found) if one is None else one for one in known]
