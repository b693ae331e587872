"""Galleries in memory or in a vector store: results for Gaussian queries, with probabilities and guarantees.

:class:`Gallery` turns the candidates of its subclasses (an index in memory, a collection in a vector store) into
    results.
:class:`Scorer` turns distances into probabilities, sets and abstentions. Neither depends on where items are stored.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.conditional import REFERENCE_FEATURES, ReferenceQueries
from sfumato.calibration.fits import N_NEAR, Evidence, FitsCalibration, list_features
from sfumato.distances import get_distance
from sfumato.encoders.minilm import sentence_vectors
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.ids import Direction
from sfumato.matching import match_logit
from sfumato.search.answer import UNFAMILIAR, Answer, Hit, check_native, check_unfiltered, fits_verdict, verdict
from sfumato.search.stores.protocol import Filter
from sfumato.search.texts import ItemTexts, TextQuery, TextStore, item_words, word_stems, words_of

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class GalleryRecords:
    """Stored items of a gallery with their embeddings."""

    ids: tuple[str, ...]  # n ids
    embeddings: GaussianEmbedding
    payloads: tuple[Mapping[str, str], ...]  # n dictionaries


@dataclass(frozen=True, eq=False)
class Candidates:
    """Items close to one query, as columns."""

    ids: tuple[str, ...]  # c ids
    distance: Tensor  # (c,) distances, ascending unless joined
    uncertainty: Tensor  # (c,) total variances
    payloads: tuple[Mapping[str, str], ...]  # c dictionaries
    closest: GaussianEmbedding | None = None

    def first(self, n: int | None) -> "Candidates":
        """The closest of the candidates; None: all."""
        return Candidates(self.ids[:n], self.distance[:n], self.uncertainty[:n], self.payloads[:n], self.closest)

    def take(self, order: list[int]) -> "Candidates":
        """Some of the candidates, in an order."""
        payloads = tuple(self.payloads[j] for j in order)
        return Candidates(tuple(self.ids[j] for j in order), self.distance[order], self.uncertainty[order], payloads)

    def joined(self, others: "Candidates") -> "Candidates":
        """With other candidates behind them."""
        return Candidates(
            self.ids + others.ids,
            torch.cat([self.distance, others.distance]),
            torch.cat([self.uncertainty, others.uncertainty]),
            self.payloads + others.payloads,
        )


_SAMPLED = 200
"""Items whose fields are named where a filter asks for a field that no item has."""

N_WHOLE = 20_000
"""Number of items up to which match probabilities are added up over the whole gallery."""


@dataclass(frozen=True)
class MatchEstimate:
    """The expected number of matches of a query in a gallery."""

    expected: float  # the sum of the match probabilities over the gallery, or an unbiased estimate of it
    low: float  # lower end of the interval that holds the sum in about 95 of 100 samples; equal to `expected` if exact
    high: float  # its upper end

    @classmethod
    def exact(cls, total: float) -> "MatchEstimate":
        """An exact sum."""
        return cls(total, total, total)

    @classmethod
    def of(cls, near: Tensor, sample: Tensor, outside: Tensor, n: int) -> "list[MatchEstimate]":
        """Estimate sums from their largest terms and a sample of the others.

        near (b, h), sample (b, s), outside (b, s).
        """
        first, s, others = near.double().sum(1), outside.sum(1), n - (near > 0).sum(1)
        rest = torch.where(outside, sample, 0).double()
        mean = rest.sum(1) / s.clamp_min(1)
        variance = torch.where(outside, rest - mean.unsqueeze(1), 0).square().sum(1) / (s - 1).clamp_min(1)
        error = 1.96 * others * (variance * (1 - s / others.clamp_min(1)).clamp_min(0) / s.clamp_min(1)).sqrt()
        expected = first + others * mean
        low = torch.maximum(first, expected - error)
        return [
            cls(*values) for values in zip(expected.tolist(), low.tolist(), (expected + error).tolist(), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class QueryContext:
    """What the probabilities of a query's hits depend on beside their own distances."""

    nearest: Tensor  # (..., k) distances of its nearest items, ascending, infinite where there are fewer
    reference: Tensor | None = None

    def __getitem__(self, index: int | Tensor) -> "QueryContext":
        return QueryContext(self.nearest[index], None if self.reference is None else self.reference[index])


@dataclass(frozen=True)
class Scorer:
    """Computes match probabilities, conformal sets and abstention from distances, for galleries of any size."""

    logit_scale: float  # a of the match logit b - a * distance, without a correction for the size of the gallery
    logit_bias: float  # b of the match logit
    calibration: Calibration | None = None
    direction: Direction = "t2i"  # "t2i" if the queries are texts and the items images

    @property
    def of_hits(self) -> DirectionCalibration | None:
        """The calibration for queries of its direction."""
        return None if self.calibration is None else self.calibration.directions.get(self.direction)

    def prior_shift(self, n_gallery: int) -> float:
        """Correction of the logits for the size of the gallery."""
        return 0.0 if self.of_hits is None else self.of_hits.prior_shift(max(1, n_gallery))

    @property
    def n_nearest(self) -> int:
        """Number of nearest items of a query that its probabilities depend on; 1 if they depend on distances alone."""
        return 1 if self.of_hits is None else self.of_hits.n_nearest

    @property
    def reference(self) -> ReferenceQueries | None:
        """The reference queries that its probabilities depend on."""
        return None if self.of_hits is None else self.of_hits.reference

    def context(
        self, distance: Tensor, queries: GaussianEmbedding, first: Callable[[Tensor], GaussianEmbedding]
    ) -> QueryContext:
        """What the other methods need to know of queries. distance (n, c), queries (n, d)."""
        nearest, place = distance.topk(min(self.n_nearest, distance.shape[-1]), largest=False)
        nearest = functional.pad(nearest, (0, self.n_nearest - nearest.shape[-1]), value=torch.inf)
        if self.reference is None:
            return QueryContext(nearest)
        found = nearest[:, 0].isfinite()
        features = torch.zeros(len(nearest), len(REFERENCE_FEATURES), dtype=torch.float64)
        if found.any():
            items = first(place[:, 0] if place.shape[1] else place.new_zeros(len(place)))
            features[found] = self.reference.features(queries[found], items[found])
        return QueryContext(nearest, features)

    def match_probability(self, distance: Tensor, n_gallery: int, context: QueryContext | None = None) -> Tensor:
        """Probability that items at these distances from a query match it. distance (..., c) -> (..., c).

        Given what else is known of the query it is that of a hit; else that of a random pair at such a distance.
        """
        if context is not None and self.n_nearest > 1 and self.of_hits is not None:
            n, reference = max(1, n_gallery), context.reference
            return self.of_hits.hit_probability(distance, context.nearest, n_gallery=n, reference=reference)
        return torch.sigmoid(self.pair_logit(distance, n_gallery)).to(distance.dtype)

    def pair_logit(self, distance: Tensor, n_gallery: int) -> Tensor:
        """Logit that a random pair at these distances is listed. distance (..., c) -> (..., c)."""
        shift = self.prior_shift(n_gallery)
        if self.calibration is None or self.calibration.knots is None:
            return match_logit(distance, self.logit_scale, self.logit_bias + shift)
        return self.calibration.logit(distance) + shift

    def radius(self, coverage: float) -> float:
        """Radius of the set that contains a match with a given probability."""
        if not 0 < coverage < 1:
            raise ValueError(f"search: coverage must be between 0 and 1, got {coverage}")
        return self._calibration_for("coverage").conformal_radius(1 - coverage)

    def check_risk(self, max_risk: float) -> None:
        """Raise the error that a search with this risk would raise."""
        nearest = torch.zeros(1, self.n_nearest)
        reference = None if self.reference is None else torch.zeros(1, len(REFERENCE_FEATURES))
        self.abstains(QueryContext(nearest, reference), max_risk, 1)

    def abstains(self, context: QueryContext, max_risk: float, n_gallery: int) -> list[bool]:
        """The queries that should not be answered at a given risk."""
        calibration = self._calibration_for("abstention (max_risk)")
        found = context.nearest[:, 0].isfinite()
        answered = torch.zeros_like(found)
        answered[found] = ~calibration.abstains(
            context.nearest[found],
            max_risk,
            n_gallery=max(1, n_gallery),
            reference=None if context.reference is None else context.reference[found],
        )
        return (~answered).tolist()

    def _calibration_for(self, wanted: str) -> DirectionCalibration:
        if self.calibration is None:
            raise ValueError(
                f"search: {wanted} needs a calibration, and this index has none; calibrate the model on held-out pairs"
                " (sfumato calibrate RUN) and build the index again"
            )
        return self.calibration.of(self.direction)


FITS = "fits"
"""Name of the metadata that hold a calibration of target "fits"."""

SAME = 0.09
"""Largest squared distance of two images that are nearly the same, as a fraction of the usual one."""

_WORDS: "WeakKeyDictionary[Gallery, tuple[int, Counter[str]]]" = WeakKeyDictionary()


class Gallery(ABC):
    """A gallery of items; subclasses implement the abstract members."""

    distance: str
    """Name in DISTANCES."""

    centre: Tensor
    """(d,) point that lifted vectors are relative to."""

    metadata: dict[str, Any]
    """JSON values that the builder of the gallery keeps with it."""

    texts: TextStore | None = None
    """The vectors of the items' texts; None if they are no evidence."""

    n_exact = 300
    """Number of closest items that :meth:`match_estimates` sums exactly in a large gallery."""

    @property
    @abstractmethod
    def scorer(self) -> Scorer:
        """Computes probabilities and guarantees from distances."""

    @property
    @abstractmethod
    def d(self) -> int:
        """Dimensions of the embeddings."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def contents(self) -> str:
        """Number and kind of the items, the distance and whether it is calibrated, for one line."""
        kind = "images" if self.scorer.direction == "t2i" else "texts"
        state = "calibrated" if self.calibrated else "not calibrated"
        return f"{self.size} {kind} in {self.d} dimensions, {self.distance}, {state}"

    @property
    def calibrated(self) -> bool:
        """Whether the probabilities for queries of its direction were fitted on held-out pairs."""
        return bool(self.metadata.get("calibrated", self.scorer.calibration is not None))

    @property
    def note(self) -> str:
        """What a mix of training images and others means for the probabilities; empty without a mix."""
        n, n_trained = self.size, self.metadata.get("trained") or 0
        if not 0 < n_trained < n:
            return ""
        return (
            f"{n_trained:,} of the {n:,} images trained the model, and captions of these were seen: searches for the"
            f" other {n - n_trained:,} find theirs less often than the probabilities say"
        )

    @property
    def size(self) -> int:
        """Number of items that probabilities are computed for. Unlike len() it may be a few seconds old."""
        return len(self)

    @abstractmethod
    def closest(self, queries: GaussianEmbedding, k: int, filter: Filter | None = None) -> list[Candidates]:
        """The closest items of each query. queries (n, d)."""

    @abstractmethod
    def within(self, queries: GaussianEmbedding, radius: float, *, most: int | None = None) -> list[Candidates]:
        """All items within a distance of each query. queries (n, d)."""

    @abstractmethod
    def count(self, filter: Filter) -> int:
        """Number of items that a search with a filter may find."""

    def expected_matches(self, queries: GaussianEmbedding, filter: Filter | None = None) -> list[float]:
        """The expected number of matches of each query: the sum of the match probabilities over the gallery.

        queries (n, d).
        """
        return [estimate.expected for estimate in self.match_estimates(queries, filter)]

    @torch.no_grad()
    def match_estimates(self, queries: GaussianEmbedding, filter: Filter | None = None) -> list[MatchEstimate]:
        """The expected number of matches of each query with its interval.

        Up to N_WHOLE items the sum is exact. In a larger gallery the closest items that the engine finds are added up,
        and the rest of the sum is estimated without bias from a seeded sample. So the cost does not grow with the
        gallery beyond that of one search.

        queries (n, d).
        """
        queries, scorer, estimates = self.checked(queries), self.scorer, list[MatchEstimate]()
        n = self.size if filter is None else self.count(filter)
        if n == 0:
            return [MatchEstimate.exact(0.0)] * queries.n
        sample = self._sampled(n, filter)
        for start, block in sample.blocks(queries):
            some = queries[start : start + len(block)]
            if sample.whole:
                context = scorer.context(block, some, sample.items)
                estimates += map(MatchEstimate.exact, scorer.match_probability(block, n, context).sum(1).tolist())
                continue
            found = self._near(some, filter)
            distance, context = _padded(found), self._context(some, found)
            outside = torch.cat([sample.without(each.ids) for each in found])
            head = scorer.match_probability(distance, n, context).masked_fill(distance.isinf(), 0)
            estimates += MatchEstimate.of(head, scorer.match_probability(block, n, context), outside, n)
        return estimates

    def _near(self, queries: GaussianEmbedding, filter: Filter | None) -> list[Candidates]:
        """About the n_exact closest items of each query."""
        return self.closest(queries, self.n_exact, filter)

    @abstractmethod
    def _sampled(self, n: int, filter: Filter | None) -> "SampledItems":
        """All of the n items that a filter accepts, or a sample of them."""

    def _found_by(self, query: GaussianEmbedding, ids: Sequence[str]) -> Candidates:
        """Items by id with their distances, in no order. query (1, d)."""
        records = self.get(ids)
        distance = get_distance(self.distance).matrix(query, records.embeddings)[0]
        return Candidates(records.ids, distance, records.embeddings.total_variance, records.payloads)

    def _image_logit(self, distance: Tensor, usual: Tensor) -> Tensor:
        """(q, c) logits of pairs; of a model that is not calibrated, with the mean and spread that `small` has."""
        if self.calibrated:
            return self.scorer.pair_logit(distance, REFERENCE_SIZE)
        mean, deviation = usual.mean(1, keepdim=True), usual.std(1, unbiased=False, keepdim=True)
        return _USUAL_LOGIT - _USUAL_SPREAD * (distance - mean) / deviation.clamp_min(1e-12)

    @property
    def fits(self) -> FitsCalibration:
        """The calibration of target "fits": that of verdicts on its hits if it has one, else the packaged one."""
        own = self.metadata.get(FITS)
        return FitsCalibration.packaged() if own is None else FitsCalibration.from_json(own)

    def _by_texts(
        self, queries: GaussianEmbedding, asked: Mapping[int, TextQuery | str], k: int, filter: Filter | None, n: int
    ) -> "dict[int, _Fitting]":
        """What fits each query, by distance and texts together; nothing without a store of texts.

        Exact up to N_WHOLE items. In a larger gallery the closest n_exact by distance and by texts, and those with the
        most of the query's rare words, are compared.
        """
        sample = self._sampled(n, filter)
        forms = [TextQuery(one) if isinstance(one, str) else one for one in asked.values()]
        if self.texts is None or (own := sample.texts) is None:
            return {}
        texts, fits = [form.joined for form in forms], self.fits
        queries, vectors = queries[torch.tensor(list(asked))], sentence_vectors(texts)
        prior, logits = fits.query_prior(vectors), [fits.of(len(word_stems(text))) for text in texts]
        near = [] if sample.whole else self._near(queries, filter)
        agreeing = [] if sample.whole else self.texts.closest(vectors, self.n_exact, filter)
        having = [] if sample.whole else [self._having(text, own.rarity, filter, n) for text in texts]

        def evidence(i: int, items: ItemTexts, distance: Tensor, usual: Tensor) -> Evidence:
            image = self._image_logit(distance, usual)
            return items.evidence(texts[i : i + 1], vectors[[i]], image, prior[[i]], own.rarity)

        def hits(i: int, items: ItemTexts, known: Evidence, pair: Tensor, listed: Tensor) -> Tensor:
            found = logits[i].of_hits(pair, known.has_texts, listed)[0]
            return items.without(forms[i].without, found, known.image[0], fits, own.rarity)

        def fitting(i: int, usual: Tensor) -> _Fitting:
            found, items, distance = sample.candidates(usual[0]), own, usual
            if not sample.whole:
                assert self.texts is not None
                others = dict.fromkeys((*agreeing[i].ids, *having[i]))
                found = near[i].joined(self._found_by(queries[i : i + 1], [*others.keys() - set(near[i].ids)]))
                items = self.texts.of(found.ids, found.payloads, agreeing[i])
                distance = found.distance.unsqueeze(0)
            if not found.ids:
                return _Fitting()
            known = evidence(i, items, distance, usual)
            pair = logits[i].of_pairs(known)
            listed = list_features(pair.topk(min(N_NEAR, len(found.ids))).values, known.n_words, known.prior)
            logit = hits(i, items, known, pair, listed)
            total = float(logit.sigmoid().sum())
            if not sample.whole:
                others_known = evidence(i, own, usual, usual)
                rest = hits(i, own, others_known, logits[i].of_pairs(others_known), listed).sigmoid()
                total = MatchEstimate.of(logit.sigmoid()[None], rest[None], sample.without(found.ids), n)[0].expected
            key = -found.distance if forms[i].by_distance else logit
            top = _highest(key, found, logit, k, partial(own.best_text, texts[i]))
            # The best may fit, and then something does.
            nothing = min(float(logits[i].of_nothing(listed).sigmoid()), 1 - float(logit.sigmoid().max()))
            return _Fitting(top, total, nothing, near[i] if near else found.take([int(found.distance.argmin())]))

        results = [
            fitting(i, distance)
            for start, block in sample.blocks(queries)
            for i, distance in enumerate(block.split(1), start)
        ]
        return dict(zip(asked, results, strict=True))

    def _having(self, text: str, rarity: Callable[[str], float], filter: Filter | None, n: int) -> list[str]:
        """The items that have the most of a text's rare words; of common words the texts' vectors know enough."""
        most = max(self.n_exact, _RARE * n)
        rare = [stem for stem in word_stems(text) if n * math.exp(-rarity(stem)) <= most]
        return [] if self.texts is None else self.texts.having(rare, self.n_exact, filter)

    @abstractmethod
    def get(self, ids: Sequence[str]) -> GalleryRecords:
        """Items by id."""

    @abstractmethod
    def sample(self, n: int, *, seed: int = 0) -> GalleryRecords:
        """A uniform random sample of the items."""

    def words(self) -> Counter[str]:
        """The words of the items' texts, with their numbers, or of a sample's of a large gallery."""
        size, before = self.size, _WORDS.get(self)
        if before is None or before[0] != size:
            known = self.sample(5000).payloads
            texts = (text for p in known for text in (item_words(p), p.get("label", ""), p.get("text", "")))
            _WORDS[self] = before = size, Counter(word for text in texts for word in words_of(text))
        return before[1]

    @abstractmethod
    def scan(self, batch: int = 4096) -> Iterator[GalleryRecords]:
        """All items, each once."""

    @abstractmethod
    def ids_after(self, after: str, n: int) -> list[str]:
        """The next ids in the order of their UTF-8 bytes, so that all items can be listed page by page."""

    def close(self) -> None:
        """Release files and connections; nothing by default."""
        return None

    @torch.no_grad()
    def search(
        self,
        queries: GaussianEmbedding,
        k: int = 10,
        *,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
        max_set: int | None = None,
        filter: Filter | None = None,
        expected: bool = False,
        names: Sequence[str] | None = None,
        native: Sequence[bool] | None = None,
        unfamiliar: Sequence[bool] | None = None,
        texts: Sequence[TextQuery | str] | None = None,
    ) -> list[Answer]:
        """The k closest items of each query, and with `expected` the expected number of matches and the verdict.

        queries (n, d); by query, its name, whether it is of the kind that the calibration was fitted on, whether the
        model hardly knows its words, and its text, "" of a query without one. Where items have texts, they are
        evidence beside the distance for a query with a text, unless a guarantee is asked for: guarantees are about
        distances.
        """
        native = [True] * queries.n if native is None else native
        self._check({"min_probability": min_probability, "coverage": coverage, "max_risk": max_risk}, native, filter)
        queries, scorer = self.checked(queries, k), self.scorer
        radius = None if coverage is None else scorer.radius(coverage)
        n = self.size if filter is None else self.count(filter)
        guaranteed = coverage is not None or max_risk is not None
        asked = {i: text for i, text in enumerate(texts or ()) if text and not guaranteed}
        by_texts = self._by_texts(queries, asked, k, filter, n) if asked else {}
        near = {i: fitting.near for i, fitting in by_texts.items() if fitting.near is not None}
        found = _completed(near, queries, lambda others: self.closest(others, max(k, scorer.n_nearest), filter))
        context = self._context(queries, found)
        nothing: list[None] = [None] * queries.n
        abstained = nothing if max_risk is None else scorer.abstains(context, max_risk, n)
        most = None if max_set is None else max_set + 1
        sets = nothing if radius is None else self.within(queries, radius, most=most)
        known = {i: fitting.expected for i, fitting in by_texts.items()}
        totals = (
            _completed(known, queries, lambda others: self.expected_matches(others, filter)) if expected else nothing
        )
        answers = []
        for i, total_variance in enumerate(queries.total_variance.tolist()):
            inside, closest = sets[i], float(found[i].distance[0]) if found[i].ids else math.inf
            answer = Answer(
                str(i) if names is None else names[i],
                self.distance,
                self.calibrated and native[i],
                total_variance,
                by_texts[i].hits if i in by_texts else self._hits(found[i].first(k), n, context[i]),
                best_distance=closest,
                abstained=abstained[i],
                conformal_set=None if inside is None else self._hits(inside.first(max_set), n, context[i]),
                conformal_set_cut=inside is not None and max_set is not None and len(inside.ids) > max_set,
                note=self.note,
            )
            strange = unfamiliar is not None and unfamiliar[i]
            answer = self._in_words(answer, totals[i], by_texts.get(i), strange, filter)
            answers.append(answer.above(min_probability))
        return answers

    def _in_words(
        self, answer: Answer, total: float | None, fitting: "_Fitting | None", unfamiliar: bool, filter: Filter | None
    ) -> Answer:
        """An answer with its numbers of the whole gallery and its verdict. total: by the distances alone."""
        best = answer.hits[0].match_probability if answer.hits else 0.0
        total = fitting.expected if fitting is not None and total is None else total
        said, nothing = None, None
        if fitting is not None:
            nothing = fitting.nothing
            said = fits_verdict([hit.match_probability for hit in answer], fitting.expected, nothing)
        elif total is not None:
            inside = answer.conformal_set
            said = verdict(total, best, answer.abstained, empty_set=inside is not None and not inside)
            said = UNFAMILIAR if unfamiliar else said
        if said is not None and not answer.hits:
            said = replace(said, text="The gallery is empty" if filter is None else self._no_item(filter))
        if not (answer.calibrated or said is UNFAMILIAR or (filter is not None and not answer.hits)):
            said = None
        return replace(
            answer,
            best_probability=best,
            expected_matches=total if answer.calibrated else None,
            nothing_probability=nothing if answer.calibrated else None,
            verdict=said,
            target="listed" if fitting is None else "fits",
        )

    def folded(self, search: Callable[[int], list[Answer]], k: int) -> list[Answer]:
        """The answers of a search for some number of hits, cut to k: images nearly the same as one above fold into it.

        Two images are nearly the same if the squared distance of their means is a small fraction of the usual one.
        """
        if self.scorer.direction != "t2i":
            return search(k)
        limit, wanted = SAME * self._usual_distance(), 2 * k + 10
        while True:
            found = search(wanted)
            answers = [self._fold(answer, k, limit) for answer in found]
            if all(len(new) == k or len(old) < wanted for new, old in zip(answers, found, strict=True)):
                return answers
            wanted *= 4

    def _usual_distance(self) -> float:
        """The mean squared distance of the means of two items."""
        mean = self.sample(1000).embeddings.mean
        return float(2 * (mean - mean.mean(0)).square().sum(1).mean())

    def _fold(self, answer: Answer, k: int, limit: float) -> Answer:
        found = self.get([hit.id for hit in answer])
        row = {i: mean for i, mean in zip(found.ids, found.embeddings.mean, strict=True)}
        kept, folded = list[Hit](), list[list[str]]()
        for hit in answer:
            if (mean := row.get(hit.id)) is None:  # Deleted meanwhile.
                continue
            above = torch.stack([row[other.id] for other in kept] or [mean + math.inf])
            near = ((above - mean).square().sum(1) <= limit).nonzero().flatten().tolist()
            if near:
                folded[near[0]].append(hit.id)
            elif len(kept) < k:
                kept.append(hit)
                folded.append([])
        hits = [replace(h, rank=r, duplicates=tuple(f)) for r, (h, f) in enumerate(zip(kept, folded, strict=True), 1)]
        return replace(answer.showing(tuple(hits)), hidden=min(answer.hidden, k - len(hits)))

    def _check(self, wanted: Mapping[str, float | None], native: Sequence[bool], filter: Filter | None) -> None:
        check_native(wanted, self.scorer.direction, native)
        check_unfiltered(filter, coverage=wanted["coverage"], max_risk=wanted["max_risk"])
        if (least := wanted["min_probability"]) is not None and not 0 <= least <= 1:
            raise ValueError(f"search: min_probability must be between 0 and 1, got {least}")

    def _no_item(self, filter: Filter) -> str:
        """Why no item passes a filter."""
        fields = {*filter.where, *filter.ranges}
        if not (absent := sorted(name for name in fields if not self.count(Filter(ranges={name: ("", "")})))):
            return "No item passes the filter"
        there = {name for one in self.sample(_SAMPLED).payloads for name in one if not name.startswith("_")}
        known = f"the fields are {', '.join(sorted(there))}" if there else "the items have no fields"
        return f"No item passes the filter: no item has a field {absent[0]!r}; {known}"

    def _context(self, queries: GaussianEmbedding, found: Sequence[Candidates]) -> QueryContext:
        """The context of queries by their closest items."""

        def first(columns: Tensor) -> GaussianEmbedding:
            nothing = queries[:1]
            return GaussianEmbedding.cat([each.closest if each.closest is not None else nothing for each in found])

        return self.scorer.context(_padded(found), queries, first)

    def match_probability(self, distance: Tensor, context: QueryContext | None = None) -> Tensor:
        """Probability that items of this gallery at these distances from a query match it.

        distance (..., c) -> (..., c).
        """
        return self.scorer.match_probability(distance, self.size, context)

    def checked(self, queries: GaussianEmbedding, k: int = 1) -> GaussianEmbedding:
        """Check queries, and convert them to float32 on the CPU. queries (n, d)."""
        if not isinstance(queries, GaussianEmbedding):
            raise TypeError(
                f"search: queries must be a GaussianEmbedding, got {type(queries).__name__}; to search by texts and"
                " images, open the index with its model: sfumato.load_index(FOLDER)"
            )
        if k < 1:
            raise ValueError(f"search: k must be at least 1, got {k}")
        if queries.d != self.d:
            raise ValueError(
                f"search: queries have {queries.d} dimensions, the index has {self.d}; embed both with one model"
            )
        check_finite(queries, "search")
        return queries.detach().to("cpu").to(torch.float32)

    def _hits(self, found: Candidates, n_gallery: int, context: QueryContext) -> tuple[Hit, ...]:
        probability = self.scorer.match_probability(found.distance, n_gallery, context)
        columns = (column.tolist() for column in (found.distance, probability, found.uncertainty))
        return tuple(
            Hit(i, rank, d, p, u, dict(payload))
            for rank, (i, payload, d, p, u) in enumerate(zip(found.ids, found.payloads, *columns, strict=True), 1)
        )


@dataclass(frozen=True, eq=False)
class SampledItems:
    """Some items of a gallery."""

    ids: tuple[str, ...]
    items: Callable[[Tensor], GaussianEmbedding]  # their embeddings, by position among them
    blocks: Callable[[GaussianEmbedding], Iterator[tuple[int, Tensor]]]  # distances of blocks of queries to them
    whole: bool  # whether they are all items
    uncertainty: Tensor = field(default_factory=lambda: torch.empty(0))  # (s,) total variances
    payloads: tuple[Mapping[str, str], ...] = ()
    texts: ItemTexts | None = None

    def candidates(self, distance: Tensor) -> Candidates:
        """All of them. distance (s,)."""
        return Candidates(self.ids, distance, self.uncertainty, self.payloads)

    def without(self, ids: Sequence[str]) -> Tensor:
        """(1, s) whether an item is none of these."""
        outside = torch.ones(1, len(self.ids), dtype=torch.bool)
        outside[0, [self.column[key] for key in ids if key in self.column]] = False
        return outside

    @functools.cached_property
    def column(self) -> dict[str, int]:
        """Positions by id."""
        return {i: j for j, i in enumerate(self.ids)}


@dataclass(frozen=True)
class _Fitting:
    """What fits one query in a gallery; by default of an empty one."""

    hits: tuple[Hit, ...] = ()  # the most probable or the closest, the best first
    expected: float = 0.0  # number of items that fit
    nothing: float = 1.0  # probability that none does
    near: Candidates | None = None  # the closest item, of a large gallery the n_exact closest


_USUAL_LOGIT, _USUAL_SPREAD = -11.52, 2.84
"""Mean and standard deviation of the logits that `small` gives to random pairs of Flickr8k's validation split."""

_RARE = 0.01
"""Largest fraction of the items of a large gallery whose texts have a rare word."""

REFERENCE_SIZE = 1_000
"""Size of the gallery that the logits of pairs are for where texts are beside them."""


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


def _completed(
    known: Mapping[int, T], queries: GaussianEmbedding, find: Callable[[GaussianEmbedding], list[T]]
) -> list[T]:
    """A value for each query: that known by the query's number, else the one found. queries (n, d)."""
    others = [i for i in range(queries.n) if i not in known]
    found = dict(zip(others, find(queries[torch.tensor(others)] if known else queries) if others else [], strict=True))
    return [known[i] if i in known else found[i] for i in range(queries.n)]


def _padded(found: Sequence[Candidates]) -> Tensor:
    """(n, c) distances of candidates, infinite where a query has fewer."""
    widest = max((len(each.ids) for each in found), default=0)
    padded = [functional.pad(each.distance, (0, widest - len(each.ids)), value=torch.inf) for each in found]
    return torch.stack(padded) if padded else torch.empty(0, 0)


def with_margin(k: int) -> int:
    """Number of candidates to fetch for k results, so that a wrong order of near ties has no effect."""
    return k + max(8, k // 4)
