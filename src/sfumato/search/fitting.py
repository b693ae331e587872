"""The best items of a query: what fits a text by distances and texts together, what is shown, and what is said."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from sfumato.calibration.fits import N_NEAR, Evidence, FitsCalibration, FitsLogits, list_features
from sfumato.calibration.scorer import MatchEstimate
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.answer import Hit, Verdict, fits_verdict, verdict
from sfumato.search.candidates import Candidates, SampledItems, with_margin
from sfumato.search.options import TextQuery
from sfumato.search.texts import ItemTexts, word_stems


@dataclass(frozen=True)
class Fitting:
    """What fits one query in a gallery; by default of an empty one."""

    hits: tuple[Hit, ...] = ()  # the most probable or the closest, the best first
    expected: float = 0.0  # number of items that fit
    nothing: float = 1.0  # probability that none does
    near: Candidates | None = None  # the closest item, of a large gallery the closest ones


@dataclass(frozen=True, eq=False)
class TextSearch:
    """Queries by text, and the sample of the gallery that says which words are rare and how far items usually are."""

    forms: Sequence[TextQuery]  # q queries
    vectors: Tensor  # (q, 384)
    prior: Tensor  # (q,)
    logits: Sequence[FitsLogits]  # of each query
    fits: FitsCalibration
    image_logit: Callable[[Tensor, Tensor], Tensor]  # logits of pairs, from their distances and usual distances
    sample: SampledItems
    own: ItemTexts  # the texts of the sample
    n: int  # items of the gallery that may be found

    @classmethod
    def of(
        cls,
        forms: Sequence[TextQuery],
        fits: FitsCalibration,
        image_logit: Callable[[Tensor, Tensor], Tensor],
        sample: SampledItems,
        own: ItemTexts,
        n: int,
    ) -> "TextSearch":
        """Embed the queries."""
        texts = [form.joined for form in forms]
        vectors, logits = sentence_vectors(texts), [fits.of(len(word_stems(text))) for text in texts]
        return cls(forms, vectors, fits.query_prior(vectors), logits, fits, image_logit, sample, own, n)

    def _evidence(self, i: int, items: ItemTexts, distance: Tensor, usual: Tensor) -> Evidence:
        image = self.image_logit(distance, usual)
        texts = [self.forms[i].joined]
        return items.evidence(texts, self.vectors[[i]], image, self.prior[[i]], self.own.rarity)

    def _of_hits(self, i: int, items: ItemTexts, known: Evidence, pair: Tensor, listed: Tensor) -> Tensor:
        """(c,) logits of items as hits."""
        found = self.logits[i].of_hits(pair, known.has_texts, listed)[0]
        return items.without(self.forms[i].without, found, known.image[0], self.fits, self.own.rarity)

    def fitting(
        self, i: int, usual: Tensor, found: Candidates, items: ItemTexts, k: int, *, by_distance: bool
    ) -> Fitting:
        """What fits query i among some items, all of the gallery or more than fit. usual (1, s): of the sample."""
        if not found.ids:
            return Fitting()
        logits = self.logits[i]
        known = self._evidence(i, items, found.distance.unsqueeze(0), usual)
        pair = logits.of_pairs(known)
        listed = list_features(pair.topk(min(N_NEAR, len(found.ids))).values, known.n_words, known.prior)
        logit = self._of_hits(i, items, known, pair, listed)
        total = float(logit.sigmoid().sum())
        if not self.sample.whole:
            others = self._evidence(i, self.own, usual, usual)
            rest = self._of_hits(i, self.own, others, logits.of_pairs(others), listed).sigmoid()
            outside = self.sample.without(found.ids)
            total = MatchEstimate.of(logit.sigmoid()[None], rest[None], outside, self.n)[0].expected
        key = -found.distance if by_distance else logit
        top = _highest(key, found, logit, k, partial(self.own.best_text, self.forms[i].joined))
        # The best may fit, and then something does.
        nothing = min(float(logits.of_nothing(listed).sigmoid()), 1 - float(logit.sigmoid().max()))
        return Fitting(top, total, nothing, found.take([int(found.distance.argmin())]))


def _highest(
    key: Tensor, found: Candidates, logit: Tensor, k: int, best: Callable[[Mapping[str, str]], str]
) -> tuple[Hit, ...]:
    """The k candidates with the highest keys; those with equal keys by id. key, logit (c,)."""
    values = key.tolist()
    top = key.topk(min(with_margin(k), len(values))).indices.tolist()
    order = sorted(top, key=lambda j: (-values[j], found.ids[j]))[:k]
    columns = (column[order].tolist() for column in (found.distance, logit.sigmoid(), found.uncertainty))
    return tuple(
        Hit(found.ids[j], rank, d, p, u, dict(found.payloads[j]), best(found.payloads[j]))
        for rank, (j, d, p, u) in enumerate(zip(order, *columns, strict=True), 1)
    )


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
