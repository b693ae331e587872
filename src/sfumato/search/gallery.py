"""Galleries in memory or in a vector store: answers to Gaussian queries, with probabilities and guarantees.

:class:`Gallery` turns the candidates of its subclasses (an index in memory, a collection in a vector store) into
answers; :class:`~sfumato.calibration.calibrator.Scorer` turns distances into probabilities. Neither depends on where
items are stored.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from sfumato.arrays import Array
from sfumato.calibration.calibrator import QueryContext, Scorer
from sfumato.calibration.fits import FitsCalibration
from sfumato.data.images import ImageSource
from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding, check_finite
from sfumato.search import candidates
from sfumato.search.answer import UNFAMILIAR, Answer, Hit, QueryInfo, SearchOptions, TextQuery, Verdict
from sfumato.search.candidates import Candidates, GalleryRecords, Ranked, SampledItems, TextSearch
from sfumato.search.exact import quiet
from sfumato.search.languages import MATCHED_BY_DISTANCE, words_of
from sfumato.search.stores.protocol import Filter
from sfumato.search.texts import TextStore, item_words, word_stems

_SAMPLED = 200
"""Items whose fields are named where a filter asks for a field that no item has."""

N_WHOLE = 20_000
"""Number of items up to which match probabilities are added up over the whole gallery."""

_RARE = 0.01
"""Largest fraction of the items of a large gallery whose texts have a rare word."""

_DEFAULT = SearchOptions()

FITS = "fits"
"""Name of the metadata that hold a calibration of target "fits"."""

SAME = 0.09
"""Largest squared distance of two images that are nearly the same, as a fraction of the usual one."""

_WORDS: "WeakKeyDictionary[Gallery, tuple[int, Counter[str]]]" = WeakKeyDictionary()


FEWEST_CAPTIONED = 100
"""Number of images whose captions calibrate a model that is not."""

NO_PROBABILITIES = (
    f"hits have no probabilities, because the model is not calibrated; captions of {FEWEST_CAPTIONED} images calibrate"
    " it at sfumato index, as pairs of yours do at sfumato adopt"
)


class Gallery(ABC):
    """A gallery of items; subclasses implement the abstract members."""

    distance: str
    """Name in DISTANCES."""

    centre: np.ndarray
    """(d,) point that lifted vectors are relative to."""

    metadata: dict[str, Any]
    """JSON values that the builder of the gallery keeps with it."""

    texts: TextStore | None = None
    """The vectors of the items' texts; None if they are no evidence."""

    folder: Path  # of a collection's settings; an index in memory has none, and no texts
    n_exact = 300
    """Number of closest items that :meth:`expected_matches` sums exactly in a large gallery."""

    @property
    @abstractmethod
    def scorer(self) -> Scorer:
        """Computes probabilities and guarantees from distances."""

    @property
    def d(self) -> int:
        """Dimensions of the embeddings."""
        return len(self.centre)

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
        """Why there are no probabilities, or what a mix of training images and others means for them; else empty."""
        if not self.calibrated:
            return NO_PROBABILITIES
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

    @quiet
    def expected_matches(self, queries: GaussianEmbedding, filter: Filter | None = None) -> list[float]:
        """The expected number of matches of each query: the sum of the match probabilities over the gallery.

        Up to N_WHOLE items the sum is exact. In a larger gallery the closest items that the engine finds are added up,
        and the rest of the sum is estimated without bias from a seeded sample. So the cost does not grow with the
        gallery beyond that of one search.

        queries (n, d).
        """
        queries, scorer, sums = self.checked(queries), self.scorer, list[float]()
        n, size = self.size if filter is None else self.count(filter), self.size
        if n == 0 or queries.n == 0:
            return [0.0] * queries.n
        # Probabilities are those of the whole gallery, whatever a filter leaves of it.
        every = self._sampled(size, None)
        sample = every if filter is None else self._sampled(n, filter)
        if every.whole:
            passing = slice(None) if filter is None else [every.column[i] for i in sample.ids if i in every.column]
            for start, block in every.blocks(queries):
                context = scorer.context(block, queries[start : start + len(block)], every.items)
                sums += scorer.match_probability(block, size, context)[:, passing].sum(1).tolist()
            return sums
        for start, block in sample.blocks(queries):
            some = queries[start : start + len(block)]
            found = self.closest(some, self.n_exact, filter)
            context = self._context(some, found if filter is None else self.closest(some, scorer.n_nearest))
            distance = candidates.padded(found)
            outside = np.concatenate([sample.without(each.ids) for each in found])
            head = np.where(np.isinf(distance), 0, scorer.match_probability(distance, size, context))
            sums += candidates.estimated_sums(head, scorer.match_probability(block, size, context), outside, n)
        return sums

    @abstractmethod
    def _sampled(self, n: int, filter: Filter | None) -> SampledItems:
        """All of the n items that a filter accepts, or a sample of them."""

    def _found_by(self, query: GaussianEmbedding, ids: Sequence[str]) -> Candidates:
        """Items by id with their distances, in no order. query (1, d)."""
        records = self.get(ids)
        distance = get_distance(self.distance).matrix(query, records.embeddings)[0]
        return Candidates(records.ids, distance, records.embeddings.total_variance, records.payloads)

    @property
    def fits(self) -> FitsCalibration:
        """The calibration of target "fits": that of verdicts on its hits if it has one, else the packaged one."""
        own = self.metadata.get(FITS)
        return FitsCalibration.packaged() if own is None else FitsCalibration.from_json(own)

    def _by_texts(
        self, queries: GaussianEmbedding, forms: Sequence[TextQuery], k: int, options: SearchOptions, n: int
    ) -> list[Ranked]:
        """What fits each query, by distance and texts together; nothing without a store of texts.

        Exact up to N_WHOLE items. In a larger gallery the closest n_exact by distance and by texts, and those with the
        most of the query's rare words, are compared.
        """
        filter, by_distance = options.filter, options.order == "distance"
        sample = self._sampled(self.size, None)
        if self.texts is None or (own := sample.texts) is None:
            return []
        scorer = self.scorer if self.calibrated else None
        known = None if self.metadata.get("run") == "small" else self.folder
        asked = TextSearch(forms, self.fits, scorer, sample, own, n, self.size, known, filter)
        filters = [None] if filter is None else [None, filter]  # The list of a query is that of the whole gallery.
        near = [[] if sample.whole else self.closest(queries, self.n_exact, one) for one in filters]
        agreeing = [[] if sample.whole else self.texts.closest(asked.vectors, self.n_exact, one) for one in filters]
        found = list[Ranked]()
        for start, block in sample.blocks(queries):
            for i, usual in enumerate(block[:, None], start):
                if sample.whole:
                    compared, items, n_list = sample.candidates(usual[0]), own, len(own.words)
                else:
                    compared, n_list = near[0][i], 0
                    for one, closest, texts in zip(filters, near, agreeing, strict=True):
                        asked_for = " ".join((forms[i].joined, *itertools.chain(*forms[i].facts)))
                        having = self._having(asked_for, own.rarity, one, self.size)
                        others = {*closest[i].ids, *texts[i].ids, *having} - {*compared.ids}
                        compared = compared.joined(self._found_by(queries[i : i + 1], sorted(others)))
                        n_list = n_list or len(compared.ids)
                    items = self.texts.of(compared.ids, compared.payloads, agreeing[0][i])
                found.append(asked.ranked(i, usual, compared, items, k, n_list, by_distance=by_distance))
        return found

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

    def facts(self) -> tuple[frozenset[str], frozenset[str]]:
        """The places of the items and the words of their dates, or of a sample's."""
        return self._sampled(self.size, None).facts

    @property
    def is_read_by_e5(self) -> bool:
        """Whether items, or those of a sample, have texts that e5 has read."""
        own = self._sampled(self.size, None).texts
        return own is not None and bool(own.by_e5.any())

    @abstractmethod
    def ids_after(self, after: str, n: int) -> list[str]:
        """The next ids in the order of their UTF-8 bytes, so that all items can be listed page by page."""

    def follow(self) -> None:
        """Take over what other processes have changed about the calibration; nothing by default."""
        return None

    def close(self) -> None:
        """Release files and connections; nothing by default."""
        return None

    @quiet
    def search(
        self,
        queries: GaussianEmbedding,
        k: int = 10,
        options: SearchOptions = _DEFAULT,
        about: Sequence[QueryInfo] | None = None,
        *,
        image_of: Callable[[Hit], ImageSource | None] = lambda hit: None,
    ) -> list[Answer]:
        """The k best items of each query, with the expected number of matches and the verdict.

        They are the closest. For a query with a text, in a gallery whose items have texts, they are the most probable
        by distance and texts, unless a guarantee is asked for: guarantees are about distances.

        Args:
            queries: (n, d) embeddings.
            k: number of hits; all items if the gallery is smaller.
            options: how to search.
            about: what is known of each query; None: they are of the kind that the calibration was fitted on.
            image_of: gives the image of a hit, for notebooks.

        Returns:
            n answers.

        Raises:
            TypeError: queries are not a GaussianEmbedding.
            ValueError: an option does not fit, or needs a calibration and there is none.
            UserError: a guarantee is asked for queries of another kind.
        """
        self.follow()
        queries, scorer = self.checked(queries, k), self.scorer
        about = [QueryInfo(str(i)) for i in range(queries.n)] if about is None else about
        own = [one.text and one.text.across and one.text.across.embeddings for one in about]
        if any(own):
            queries = GaussianEmbedding.cat([one or queries[i : i + 1] for i, one in enumerate(own)])
        options.check(scorer.direction, [one.native for one in about])
        radius = None if options.coverage is None else scorer.radius(options.coverage)
        n = self.size if options.filter is None else self.count(options.filter)
        found, context = self._shown(queries, k, options, about, n)
        nothing: list[None] = [None] * queries.n
        abstained = nothing if options.max_risk is None else scorer.abstains(context, options.max_risk, n)
        most = None if options.max_set is None else options.max_set + 1
        inside = nothing if radius is None else self.within(queries, radius, most=most)
        sets = [
            None if each is None else self._hits(each.first(options.max_set), context[i])
            for i, each in enumerate(inside)
        ]
        others = queries[np.array([each.expected is None for each in found], bool)]
        sums, answers = iter(self.expected_matches(others, options.filter)), list[Answer]()
        for i, (one, each) in enumerate(zip(about, found, strict=True)):
            if each.nothing is None and one.text and one.text.across:
                one = replace(one, native=False, warning=MATCHED_BY_DISTANCE)
            calibrated, total = self.calibrated and one.native, each.expected
            total = next(sums) if total is None else total
            said = each.verdict(total, abstained[i], empty_set=sets[i] == ())
            answers.append(
                Answer(
                    one.name,
                    self.distance,
                    calibrated,
                    float(queries.total_variance[i]),
                    each.shown,
                    best_probability=each.best,
                    best_distance=float(each.near.distance[0]) if each.near.ids else math.inf,
                    expected_matches=total if calibrated else None,
                    nothing_probability=each.nothing if calibrated else None,
                    multiplicity=each.multiplicity,
                    hidden=min(len(each.hits) - len(each.kept), k - len(each.shown)),
                    verdict=self._verdict(one, each, said, options.filter),
                    abstained=abstained[i],
                    conformal_set=sets[i],
                    conformal_set_cut=most is not None and len(getattr(inside[i], "ids", ())) == most,
                    target="listed" if each.nothing is None else "fits",
                    note=self.note,
                    suggestion=one.suggestion,
                    warning=one.warning,
                    image_of=image_of,
                )
            )
        return answers

    def _shown(
        self, queries: GaussianEmbedding, k: int, options: SearchOptions, about: Sequence[QueryInfo], n: int
    ) -> tuple[list[Ranked], QueryContext]:
        """The hits of queries, and what their probabilities depend on.

        Images nearly the same as one above fold into it: the squared distance of their means is a small fraction of
        the usual one.
        """
        folds = options.duplicates == "fold" and self.scorer.direction == "t2i" and self.size > 0
        limit, wanted = SAME * self._usual_distance() if folds else 0.0, 2 * k + 10 if folds else k
        while True:
            found, context = self._ranked(queries, wanted, options, about, n)
            if not folds:
                return found, context
            found = [self._folded(each, k, limit) for each in found]
            if all(len(each.shown) == k or len(each.kept) < wanted for each in found):
                return found, context
            wanted *= 4

    def _ranked(
        self, queries: GaussianEmbedding, k: int, options: SearchOptions, about: Sequence[QueryInfo], n: int
    ) -> tuple[list[Ranked], QueryContext]:
        """:meth:`_shown` without folding."""
        by_text = options.target == "fits" and not options.is_guaranteed
        asked = [(i, one.text) for i, one in enumerate(about) if by_text and one.text is not None]
        found = dict[int, Ranked]()
        if asked:
            rows, forms = zip(*asked, strict=True)
            found = dict(zip(rows, self._by_texts(queries[np.array(rows)], forms, k, options, n), strict=False))
        others = [i for i in range(queries.n) if i not in found]
        some = queries[np.array(others, np.int64)]
        n_near, filter = self.scorer.n_nearest, options.filter
        near = self.closest(some, max(k, n_near), filter) if others else []
        every = near if filter is None or not others else self.closest(some, n_near)
        context = self._context(some, every)  # That of all queries where a guarantee is asked for.
        for row, (i, closest) in enumerate(zip(others, near, strict=True)):
            found[i] = Ranked(self._hits(closest.first(k), context[row]), closest)
        least, ranked = options.min_probability or 0.0, list[Ranked]()
        for i in range(queries.n):
            kept = tuple(hit for hit in found[i].hits if hit.match_probability >= least)
            ranked.append(replace(found[i], kept=kept, shown=kept))
        return ranked, context

    def _verdict(self, one: QueryInfo, found: Ranked, said: Verdict, filter: Filter | None) -> Verdict | None:
        """What is said of the items of a query; None where its numbers mean nothing."""
        if one.unfamiliar and found.nothing is None:
            said = UNFAMILIAR
        if not found.hits:
            said = replace(said, text="The gallery is empty" if filter is None else self._no_item(filter))
        told = (self.calibrated and one.native) or said is UNFAMILIAR or (filter is not None and not found.hits)
        return said if told else None

    def _usual_distance(self) -> float:
        """The mean squared distance of the means of two items."""
        some = self._sampled(self.size, None)
        mean = some.items(np.linspace(0, len(some.ids) - 1, min(1000, len(some.ids))).astype(np.int64)).mean
        return float(2 * ((mean - mean.mean(0)) ** 2).sum(1).mean())

    def _folded(self, found: Ranked, k: int, limit: float) -> Ranked:
        records = self.get([hit.id for hit in found.kept])
        means = dict(zip(records.ids, records.embeddings.mean, strict=True))
        return replace(found, shown=candidates.folded(found.kept, means, k, limit), folds=True)

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

        def first(columns: np.ndarray) -> GaussianEmbedding:
            nothing = queries[:1]
            return GaussianEmbedding.cat([each.closest if each.closest is not None else nothing for each in found])

        return self.scorer.context(candidates.padded(found), queries, first)

    def match_probability(self, distance: Array, context: QueryContext | None = None) -> Array:
        """Probability that items of this gallery at these distances from a query match it.

        distance (..., c) -> (..., c).
        """
        return self.scorer.match_probability(distance, self.size, context)

    def checked(self, queries: GaussianEmbedding, k: int = 1) -> GaussianEmbedding:
        """Check queries, and convert them to float32 on the CPU. queries (n, d)."""
        if not isinstance(queries, GaussianEmbedding):
            way = "to search by texts and images, open the index with its model: sfumato.load_index(FOLDER)"
            raise TypeError(f"search: queries must be a GaussianEmbedding, got {type(queries).__name__}; {way}")
        if k < 1:
            raise ValueError(f"search: k must be at least 1, got {k}")
        if queries.d != self.d:
            way = "embed both with one model"
            raise ValueError(f"search: queries have {queries.d} dimensions, the index has {self.d}; {way}")
        check_finite(queries, "search")
        return queries.numpy().to(np.float32)

    def _hits(self, found: Candidates, context: QueryContext) -> tuple[Hit, ...]:
        return candidates.hits_of(found, self.match_probability(found.distance, context))
