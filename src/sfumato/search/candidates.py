"""Items of a gallery as a search sees them: candidates with distances, records, samples, and those that fit a text."""

import contextlib
import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sfumato.arrays import as_numpy, joined_rows, sigmoid
from sfumato.calibration import fits as fitted
from sfumato.calibration.calibrator import Scorer
from sfumato.calibration.fits import Evidence, FitsCalibration, images_and_precision, list_features
from sfumato.data.image_decoding import PIXELS
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.answer import Hit, TextQuery, Verdict, fits_verdict, verdict
from sfumato.search.languages import date_words, unaccented, words_of
from sfumato.search.stores.protocol import Filter, Records, VectorStore
from sfumato.search.texts import ItemTexts, TextStore, word_stems

_COUNTED_SECONDS = 5.0
"""Other processes may write. To count a million items anew for every query would take longer than to search them."""


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
    distance: np.ndarray  # (c,) distances, ascending unless joined
    uncertainty: np.ndarray  # (c,) total variances
    payloads: tuple[Mapping[str, str], ...]  # c dictionaries
    closest: GaussianEmbedding | None = None

    def first(self, n: int | None) -> "Candidates":
        """The closest of the candidates; None: all."""
        return Candidates(self.ids[:n], self.distance[:n], self.uncertainty[:n], self.payloads[:n], self.closest)

    def take(self, order: list[int]) -> "Candidates":
        """Some of the candidates, in an order."""
        payloads = tuple(self.payloads[j] for j in order)
        return Candidates(tuple(self.ids[j] for j in order), self.distance[order], self.uncertainty[order], payloads)

    def ordered(self) -> "Candidates":
        """Closest first, equally close ones by id."""
        values = self.distance.tolist()
        return self.take(sorted(range(len(values)), key=lambda j: (values[j], self.ids[j])))

    def joined(self, others: "Candidates") -> "Candidates":
        """With other candidates behind them."""
        return Candidates(
            self.ids + others.ids,
            np.concatenate([self.distance, others.distance]),
            np.concatenate([self.uncertainty, others.uncertainty]),
            self.payloads + others.payloads,
        )


@dataclass(frozen=True, eq=False)
class SampledItems:
    """Some items of a gallery."""

    ids: tuple[str, ...]
    items: Callable[[np.ndarray], GaussianEmbedding]  # their embeddings, by position among them
    blocks: Callable[[GaussianEmbedding], Iterator[tuple[int, np.ndarray]]]  # distances of blocks of queries to them
    whole: bool  # whether they are all items
    uncertainty: np.ndarray = field(default_factory=lambda: np.empty(0))  # (s,) total variances
    payloads: tuple[Mapping[str, str], ...] = ()
    texts: ItemTexts | None = None

    def candidates(self, distance: np.ndarray) -> Candidates:
        """All of them. distance (s,)."""
        return Candidates(self.ids, distance, self.uncertainty, self.payloads)

    def without(self, ids: Sequence[str]) -> np.ndarray:
        """(1, s) whether an item is none of these."""
        outside = np.ones((1, len(self.ids)), bool)
        outside[0, [self.column[key] for key in ids if key in self.column]] = False
        return outside

    @functools.cached_property
    def column(self) -> dict[str, int]:
        """Positions by id."""
        return {i: j for j, i in enumerate(self.ids)}

    @functools.cached_property
    def facts(self) -> tuple[frozenset[str], frozenset[str]]:
        """Their places and the words of their dates."""
        places = {part for p in self.payloads for part in p.get("place", "").split(",")}
        dates = {p.get("date", "")[:10] for p in self.payloads}
        return frozenset(map(unaccented, places)) - {""}, frozenset(word for one in dates for word in date_words(one))


def padded(found: Sequence[Candidates]) -> np.ndarray:
    """(n, c) distances of candidates, infinite where a query has fewer."""
    widest = max((len(each.ids) for each in found), default=0)
    rows = np.full((len(found), widest), np.inf, np.float32)
    for row, each in zip(rows, found, strict=True):
        row[: len(each.ids)] = each.distance
    return rows


def estimated_sums(near: np.ndarray, sample: np.ndarray, outside: np.ndarray, n: int) -> list[float]:
    """Sums over n items without bias, from their largest terms and a sample, some of it outside of these.

    near (b, h), sample (b, s), outside (b, s).
    """
    first, s, others = near.sum(1, dtype=np.float64), outside.sum(1), n - (near > 0).sum(1)
    rest = np.where(outside, sample, 0).sum(1, dtype=np.float64)
    return [float(total) for total in first + others * (rest / np.maximum(s, 1))]


def with_margin(k: int) -> int:
    """Number of candidates to fetch for k results, so that a wrong order of near ties has no effect."""
    return k + max(8, k // 4)


class ItemCount:
    """The number of items of a store, counted again after every write of this process and every few seconds."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self._lock = count, threading.Lock()
        self._last = (-1, -math.inf, 0)  # (value of changed, time, number of items) of the last count
        self._writes = 0  # beginnings and ends of writes
        self.changed = 0  # items written or removed by this process
        self.counts_itself = True  # if not, it follows the writes of this process, and somebody calls recount()

    @property
    def value(self) -> int:
        """The number."""
        changed, when, n = self._last
        if self.counts_itself and (changed != self.changed or time.monotonic() > when + _COUNTED_SECONDS):
            return self.recount()
        return n

    def recount(self) -> int:
        """Count the items. Where the number follows the writes, a count beside a write is not used."""
        before, changed, n = self._writes, self.changed, self._count()
        with self._lock:
            if self.counts_itself or (before == self._writes and before % 2 == 0):
                self._last = changed, time.monotonic(), n
            return self._last[2]

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[int, int], None]]:
        """Around a write; to be called with the numbers of written or removed items, and of items more than before."""

        def note(changed: int, more: int) -> None:
            self.changed += changed
            with self._lock:
                self._last = self._last[0], self._last[1], self._last[2] + more

        self._writes += 1
        try:
            yield note
        finally:
            self._writes += 1


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample of a store, and the state of the collection when it was taken."""

    records: Records
    size: int  # number of items in the collection
    changed: int  # number of items that this process had written or removed
    seed: int
    texts: ItemTexts | None = None
    good_until: float = math.inf  # time from which results of others' writes are looked for, where hits come from it
    prepared: dict[bool, SampledItems] = field(default_factory=dict)  # all of it, by whether it is the whole gallery


class Sampler:
    """Takes uniform samples of a store and keeps the last one while few items change."""

    def __init__(self, store: VectorStore, texts: TextStore | None) -> None:
        self._store, self._texts = store, texts
        self._last: Sample | None = None
        self._lock = threading.Lock()

    def take(self, n: int, items: ItemCount, seed: int = 0) -> Sample:
        """A uniform sample of at least n records, or of all; by a scan of the store, unless the last one serves."""
        size, changed = items.value, items.changed
        with self._lock:
            last = self._last
            if (
                last is None
                or last.seed != seed
                or len(last.records) < min(n, size)
                or 100 * max(changed - last.changed, abs(size - last.size)) > size
                or (self._texts is not None and time.monotonic() > last.good_until)
            ):
                start = time.monotonic()
                records = even_sample(self._store.scan(), n, self._store.dim, seed)
                texts = None if self._texts is None else self._texts.of(records.ids, records.payloads)
                end = time.monotonic()  # Others may change items; to look takes a twentieth of the time at most.
                until = end + max(_COUNTED_SECONDS, 20 * (end - start))
                last = self._last = Sample(records, size, changed, seed, texts, until)
            return last


def even_sample(batches: Iterator[Records], n: int, e: int, seed: int = 0) -> Records:
    """The n records whose ids have the smallest digests: a sample that does not depend on the order of the records."""
    kept, digests, salt = Records.none(e), list[bytes](), seed.to_bytes(16, "little")
    for batch in batches:
        new = [hashlib.blake2b(i.encode(), digest_size=8, salt=salt).digest() for i in batch.ids]
        last = digests[-1] if len(digests) == n else b"\xff" * 9
        if not (low := [i for i, digest in enumerate(new) if digest < last]):
            continue
        both = joined_rows([kept, batch.take(low)])
        digests += [new[i] for i in low]
        order = sorted(range(len(digests)), key=digests.__getitem__)[:n]
        kept, digests = both.take(order), [digests[i] for i in order]
    return kept


@dataclass(frozen=True, eq=False)
class Ranked:
    """The k best items of one query, and those that its answer shows."""

    hits: tuple[Hit, ...]
    near: Candidates  # the closest items, at least one
    expected: float | None = None  # number of items that fit; None where no texts are evidence
    nothing: float | None = None  # probability that none does
    multiplicity: float | None = None  # number of COCO's images that people would find relevant
    unjudged: float = 0.0  # fraction of the items without texts
    kept: tuple[Hit, ...] = ()  # those of at least min_probability
    shown: tuple[Hit, ...] = ()  # those of the answer
    folds: bool = False

    @property
    def best(self) -> float:
        """Probability of the first hit."""
        return self.hits[0].match_probability if self.hits else 0.0

    def verdict(self, expected: float, abstained: bool | None, *, empty_set: bool) -> Verdict:
        """What is said of them. expected: the number of matches in the whole gallery."""
        if self.nothing is None:
            return verdict(expected, self.best, abstained, empty_set=empty_set)
        said_of = self.shown if self.folds and self.kept else self.hits
        return fits_verdict([hit.match_probability for hit in said_of], expected, self.nothing, self.unjudged)


REFERENCE_SIZE = 1_000
"""Size of the gallery that the logits of pairs are for where texts are beside them."""

_ELSEWHERE, _UNKNOWN = 0.05, 0.25
"""Parts of its probability that an item of another time or place keeps, for words may mean a thing and files may err,
and one of an unknown time or place. They were chosen, not fitted."""

_USUAL_LOGIT, _USUAL_SPREAD = -11.52, 2.84
"""Mean and standard deviation of the logits that `small` gives to random pairs of Flickr8k's validation split."""


@dataclass(eq=False)
class TextSearch:
    """Queries by text, and the sample of the gallery that says which words are rare and how far items usually are."""

    forms: Sequence[TextQuery]
    fits: FitsCalibration
    scorer: Scorer | None  # None of a model that is not calibrated
    sample: SampledItems
    own: ItemTexts  # the texts of the sample
    n: int  # number of items that may be found
    size: int  # number of all items
    known: Path | None  # folder that may have the model's known texts; None for `small`
    filter: Filter | None  # of what may be found, while lists are those of the whole gallery

    def __post_init__(self) -> None:
        self._passing = self._accepted(self.sample.uncertainty, self.sample.payloads)
        texts = [form.joined for form in self.forms]
        self.vectors = sentence_vectors(texts)  # (q, 384)
        across = {i: form.across for i, form in enumerate(self.forms) if form.across}
        for i, of_query in across.items():
            self.vectors[i] = of_query.sentences[0]
        kinds = [FitsCalibration.packaged(fitted.ACROSS) if i in across else self.fits for i in range(len(texts))]
        self.logits = [kind.of(len(word_stems(text))) for kind, text in zip(kinds, texts, strict=True)]
        self.prior = self.fits.query_prior(self.vectors)  # (q,)
        known = fitted.known_texts(self.known)
        self.near = self.fits.nearness(self.vectors, known) if len(known) else None  # (q,)
        n_words = np.array([len(words_of(text)) for text in texts])
        long = np.flatnonzero(n_words >= fitted.FEWEST_WORDS)
        like_captions = np.array([i for i in long if i not in across], np.int64)
        counts = images_and_precision(self.vectors[like_captions], n_words[like_captions])[0].tolist()
        self.multiplicity = dict(zip(like_captions.tolist(), counts, strict=True))  # by query
        self._has = self.own.has_texts[self._passing]  # of those of the sample that may be found

    def _accepted(self, uncertainty: np.ndarray, payloads: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Positions of the items that the filter accepts."""
        if self.filter is None:
            return np.arange(len(payloads))
        rows = zip(payloads, uncertainty.tolist(), strict=True)
        return np.array([j for j, row in enumerate(rows) if self.filter.accepts(*row)], np.int64)

    def _image_logit(self, distance: np.ndarray, usual: np.ndarray) -> np.ndarray:
        """(q, c) logits of pairs; of a model that is not calibrated, with the mean and spread that `small` has."""
        if self.scorer is not None:
            return as_numpy(self.scorer.pair_logit(distance, REFERENCE_SIZE))
        mean, deviation = usual.mean(1, keepdims=True), usual.std(1, keepdims=True)
        least = 1e-5 * np.abs(mean) + 1e-12
        return as_numpy(_USUAL_LOGIT - _USUAL_SPREAD * (distance - mean) / np.maximum(deviation, least))

    def _evidence(self, i: int, items: ItemTexts, distance: np.ndarray, usual: np.ndarray) -> Evidence:
        image, texts, across = self._image_logit(distance, usual), [self.forms[i].joined], self.forms[i].across
        if across is not None and across.embeddings is None:
            image = np.full_like(image, image.mean())
        found = items.evidence(texts, self.vectors[[i]], image, self.prior[[i]], self.own.rarity, across)
        # Words of another language that an item has say what they say, and those that it lacks say nothing.
        return found if across is None else replace(found, missing=np.zeros_like(found.missing))

    def _nearness(self, i: int) -> np.ndarray | None:
        return None if self.near is None else self.near[[i]]

    def _of_hits(self, i: int, items: ItemTexts, known: Evidence, pair: np.ndarray, listed: np.ndarray) -> np.ndarray:
        """(c,) logits of items as hits."""
        found = self.logits[i].of_hits(pair, known.has_texts, listed, self._nearness(i))[0]
        return items.without(self.forms[i].without, found, known.image[0], self.fits, self.own.rarity)

    def _of_facts(self, form: TextQuery, items: ItemTexts, logit: np.ndarray) -> np.ndarray:
        """(c,) logits of items that fit, given the time and the place that a query names. logit (c,)."""
        if not (any(form.facts) and len(logit)):
            return logit
        parts = np.array([_part_of(form, *words.rsplit("\n", 3)[1:3]) for words in items.words])
        log_p = np.log(parts) - np.logaddexp(0, -logit)
        return np.where(parts == 1, logit, log_p - np.log1p(-np.exp(np.minimum(log_p, math.log(_UNKNOWN)))))

    def ranked(
        self, i: int, usual: np.ndarray, found: Candidates, items: ItemTexts, k: int, n_list: int, *, by_distance: bool
    ) -> Ranked:
        """What fits query i among some items, all of the gallery or more than fit. usual (1, s): of the sample.

        The list of the query is made of the first n_list of them, whether they may be found or not.
        """
        whole = self.sample.whole
        passing = self._passing if whole else self._accepted(found.uncertainty, found.payloads)
        if not len(passing):
            return Ranked((), found.take([]), 0.0, 1.0, self.multiplicity.get(i))
        form, logits = self.forms[i], self.logits[i]
        known = self._evidence(i, items, found.distance[None], usual)
        pair = logits.of_pairs(known)
        best = -np.sort(-pair[:, :n_list], axis=1)[:, : fitted.N_NEAR]
        listed = list_features(best, known.n_words, known.prior)
        anywhere = self._of_hits(i, items, known, pair, listed)  # at any time
        logit, others, outside = self._of_facts(form, items, anywhere), np.empty(0), np.empty((1, 0), bool)
        if not whole:
            outside, more = self.sample.without(found.ids), self._evidence(i, self.own, usual, usual)
            others = self._of_hits(i, self.own, more, logits.of_pairs(more), listed)

        def expected(logit: np.ndarray, rest: np.ndarray, here: np.ndarray, there: np.ndarray, n: int) -> float:
            if whole:
                return float(sigmoid(logit)[here].sum())
            return estimated_sums(sigmoid(logit[None, here]), sigmoid(rest[None, there]), outside[:, there], n)[0]

        fits = sigmoid(logit)
        total = expected(logit, self._of_facts(form, self.own, others), passing, self._passing, self.n)
        # The best may fit, and then something does.
        nothing = min(float(sigmoid(logits.of_nothing(listed))[0]), 1 - float(sigmoid(anywhere[:n_list]).max()))
        if self.filter is not None or any(form.facts):
            # All that fit in the gallery may be among what the filter takes away, or at another time or place.
            everything = expected(anywhere, others, np.arange(len(fits)), np.arange(len(others)), self.size)
            gone = max(0.0, 1 - total / max(everything, 1e-12)) ** max(1.0, everything / max(1e-12, 1 - nothing))
            nothing = min(nothing + (1 - nothing) * gone, 1 - float(fits[passing].max()))
        key = -found.distance if by_distance else logit
        highest = passing[(-key[passing]).argsort(kind="stable")[: with_margin(k)]].tolist()
        order = sorted(highest, key=lambda j: (-float(key[j]), found.ids[j]))[:k]  # Equal ones by id.
        best_text = functools.partial(self.own.best_text, " ".join((form.joined, *form.facts[0], *form.facts[1])))
        top = hits_of(found.take(order), sigmoid(logit)[order], best_text)
        if not form.without:
            parts = logits.why(known.items(order), listed, self._nearness(i))
            if any(form.facts):
                parts["time and place"] = logit[None, order] - sum(parts.values())
            values = [dict(zip(parts, row, strict=True)) for row in np.stack([*parts.values()], 2)[0].tolist()]
            top = tuple(replace(hit, why=of_hit) for hit, of_hit in zip(top, values, strict=True))
        has = self._has if len(self._has) else items.has_texts[passing]
        unjudged = 1 - float(has.mean())
        nearest = found.take([int(passing[found.distance[passing].argmin()])])
        return Ranked(top, nearest, total, nothing, self.multiplicity.get(i), unjudged)


def _part_of(form: TextQuery, place: str, dates: str) -> float:
    """The part of its probability that an item of this place and these words of a date keeps."""
    part, own = 1.0, (set(map(unaccented, place.split(","))) - {""}, set(dates.split()))
    for wanted, there in zip(form.facts, own, strict=True):
        part *= 1.0 if there.issuperset(wanted) else _ELSEWHERE if there else _UNKNOWN
    return part


def hits_of(
    found: Candidates, probability: np.ndarray, best: Callable[[Mapping[str, str]], str] = lambda payload: ""
) -> tuple[Hit, ...]:
    """Candidates as hits. probability (c,); best: gives the best text of a payload."""
    columns = (column.tolist() for column in (found.distance, probability, found.uncertainty))
    rows = zip(found.ids, found.payloads, *columns, strict=True)
    return tuple(Hit(i, rank, d, p, u, dict(own), best(own)) for rank, (i, own, d, p, u) in enumerate(rows, 1))


def folded(hits: Sequence[Hit], means: Mapping[str, np.ndarray], k: int, limit: float) -> tuple[Hit, ...]:
    """The first k of some hits that are not nearly the same as one above; the others are duplicates of these.

    The largest image stands for those that are nearly the same, in the place of the first. means: of the hits by id;
    hits without one were deleted meanwhile. limit: of the squared distance of two means.
    """
    groups = list[list[Hit]]()
    for hit in hits:
        if (mean := means.get(hit.id)) is None:
            continue
        above = np.stack([means[first.id] for first, *_ in groups] or [mean + math.inf])
        near = np.flatnonzero(((above - mean) ** 2).sum(1) <= limit)
        if len(near):
            groups[near[0]].append(hit)
        elif len(groups) < k:
            groups.append([hit])
    return tuple(_largest(group, rank) for rank, group in enumerate(groups, 1))


_ALIKE = 0.1
"""Difference of the probabilities of two hits up to which one may stand for the other."""


def _largest(group: Sequence[Hit], rank: int) -> Hit:
    """The largest image of a group that is about as probable as the first, with the distance and probability of it."""
    first = group[0]
    alike = [hit for hit in group if first.match_probability - hit.match_probability < _ALIKE]
    best = max(alike, key=lambda hit: int(size) if (size := hit.payload.get(PIXELS, "")).isdecimal() else 0)
    others = tuple(hit.id for hit in group if hit is not best)
    best = replace(best, distance=first.distance, match_probability=first.match_probability, why=first.why)
    return replace(best, rank=rank, best_text=first.best_text or best.best_text, duplicates=others)
