"""The probability of target "fits": a person would say that the text describes the image.

It has two steps, each a logistic function of a few numbers. The first is of a pair: what the image and the item's texts
say about the query. The second is of a hit: the same pair means more where it is the best of its list by far, and less
where a whole list fits a little. A third function says that nothing in the gallery fits.

One word, two words and a sentence are different questions, so each has its constants: a word is there or not, and a
sentence may be said in other words.

The constants lie in fits.json. They were fitted once: on people's verdicts about sentences (Hodosh, Young and
Hockenmaier 2013, Flickr8k), and, for words, on whether captions mention them. benchmarks/fits_prior.py fits them, and
docs/results/people.md says how well they hold. Those of sentences and items without texts also read how near the query
is to the captions that the model was trained on, where these are known, and were fitted on topics that `small` had not
seen, by benchmarks/left_out_topics.py.

Verdicts on one's own hits correct the logits of hits (:func:`fit_correction`). A penalty holds the correction at no
change: with few verdicts the fitted logits stay, with many they follow. Cross-validation over queries chooses the
penalty. A change must be clearly better than none, and of equally good ones the most careful wins; so verdicts seldom
do harm.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

from sfumato.arrays import Array, as_numpy, sigmoid, some_rows
from sfumato.calibration.logistic import Floats, log_losses
from sfumato.calibration.logits import LinearLogit, fit_logistic

N_NEAR = 50
"""Number of a query's best items that its list consists of."""

_MAX_GAP = 5.0
_NAMES = 0.5

PAIR_FEATURES = ("agreement", "words", "together", "missing", "missing in few", "one over words", "prior")
"""What the logit of a pair reads beside that of its distance; without texts the last two alone. One caption leaves more
unsaid than four: a word that is missing in few texts is the rarity of "missing", over their number."""

LIST_FEATURES = ("gap", "log expected", "one over words", "prior")
"""What the list of a query says beside its best logit. The logits of a hit and of nothing read it."""

_WORDS = 1 + LIST_FEATURES.index("one over words")
_LAST_OF_LIST = LIST_FEATURES.index("log expected") + 1

N_CLOSE = 5
"""The nearness of a query is its mean cosine with this many training captions, the closest. It is the last feature of a
hit without texts."""

KNOWN_TEXTS, N_KNOWN = "known_texts.npy", 2_000
"""The file of a run, and of the collections by it, with the sentence vectors of that many of its training texts, in
steps of one byte."""

LENGTHS = (1, 2, 3)
"""Numbers of words of the queries that have constants of their own; the last is of longer ones, too."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of q queries and c items."""

    image: np.ndarray  # (q, c) logit that a random pair at their distance is a listed match
    agreement: np.ndarray  # (q, c) mean cosine of the query with the item's texts, estimated; nan without texts
    words: np.ndarray  # (q, c) fraction of the query's words that the texts have, weighed by rarity
    together: np.ndarray  # (q, c) 1 if one text has all words of the query close together, else 0
    missing: np.ndarray  # (q, c) rarity of the rarest word that the texts do not have; 0 if they have all
    few: np.ndarray  # (q, c) one over the number of the item's texts
    n_words: np.ndarray  # (q,) number of the query's words, at least 1
    prior: np.ndarray  # (q,) log of the fraction of images that such a query fits elsewhere

    @property
    def has_texts(self) -> np.ndarray:
        """(q, c) whether an item has texts."""
        return np.asarray(~np.isnan(self.agreement))

    def items(self, chosen: Sequence[int]) -> "Evidence":
        """What is known of some of the items."""
        rows = {name: values if values.ndim == 1 else values[:, chosen] for name, values in vars(self).items()}
        return Evidence(**rows)

    def features(self) -> Floats:
        """(q, c, 7) PAIR_FEATURES."""
        by_query = (np.broadcast_to(values[:, None], self.image.shape) for values in (1 / self.n_words, self.prior))
        missing = self.missing, self.missing * self.few
        columns = (np.nan_to_num(self.agreement), self.words, self.together, *missing, *by_query)
        return np.stack(columns, axis=2).astype(np.float64, copy=False)


def list_features(near: np.ndarray, n_words: np.ndarray, prior: np.ndarray) -> Floats:
    """(q, 5) the best logit and LIST_FEATURES of the best items of each query. near (q, k) descending, k at least 1."""
    near = near.astype(np.float64)
    first, expected = near[:, 0], np.log(np.maximum(sigmoid(near).sum(1), 1e-12))
    gap = first - near[:, 1] if near.shape[1] > 1 else np.full_like(first, _MAX_GAP)
    return np.stack([first, np.minimum(gap, _MAX_GAP), expected, 1 / n_words, prior], axis=1)


@dataclass(frozen=True)
class FitsLogits:
    """The logits for queries of one length, of items with texts and of others."""

    pair_with: LinearLogit  # of a pair: of the logit of its distance and PAIR_FEATURES
    pair_without: LinearLogit
    hit_with: LinearLogit  # of a hit: of the logit of the pair, and of the best logit and LIST_FEATURES
    hit_without: LinearLogit
    hit_bare: LinearLogit  # of a hit without texts by a model of known training texts; also of the query's nearness
    nothing: LinearLogit  # that no item fits: of minus the best logit and LIST_FEATURES

    def is_sound(self) -> bool:
        """Whether all numbers are such as a fit gives."""
        sizes = (len(PAIR_FEATURES), 2, *[len(LIST_FEATURES) + 1] * 2, len(LIST_FEATURES) + 2, len(LIST_FEATURES))
        return all(logit.is_sound(n) for logit, n in zip(vars(self).values(), sizes, strict=True))

    def of_pairs(self, evidence: Evidence) -> Floats:
        """(q, c) logits that the query fits the item, whatever else there is."""
        image, features = evidence.image.astype(np.float64), evidence.features()
        with_texts = self.pair_with.of(image, features)
        # An item without texts may have the words of its name or place: they count less, and none is missed. In the fit
        # of two words nearly all that they say is that they stand together.
        words, together = (self.pair_with.weights[k] * features[..., k] for k in (1, 2))
        names = _NAMES * np.maximum(words, (words + together) / 2)
        without = self.pair_without.of(image, features[..., -2:]) + names
        return np.where(evidence.has_texts, with_texts, without)

    def of_hits(self, pair: np.ndarray, has_texts: np.ndarray, listed: np.ndarray, near: np.ndarray | None) -> Floats:
        """(q, c) logits that items fit, given the list of each query.

        pair (q, c), listed (q, 5); near (q,) the nearness of the queries, None if it is unknown.
        """
        of_list = listed[:, None]
        if near is None:
            without = self.hit_without.of(pair, of_list)
        else:
            without = self.hit_bare.of(pair, np.column_stack([listed, near])[:, None])
        return np.where(has_texts, self.hit_with.of(pair, of_list), without)

    def why(self, evidence: Evidence, listed: np.ndarray, near: np.ndarray | None) -> dict[str, Floats]:
        """The parts of :meth:`of_hits`, (q, c) log odds that add up to it: what it loses if each of them is 0."""
        image, has, none = evidence.image, evidence.has_texts, np.zeros_like(evidence.image)
        of_list = listed * (np.arange(listed.shape[1]) > _LAST_OF_LIST)

        def logit(known: Evidence, listed: np.ndarray) -> Floats:
            return self.of_hits(self.of_pairs(known), has, listed, near)

        whole, silent = logit(evidence, listed), np.where(has, 0.0, np.nan)
        said = replace(evidence, agreement=silent, words=none, together=none, missing=none)
        parts = {
            "image": whole - logit(replace(evidence, image=np.zeros_like(image)), listed),
            "texts": whole - logit(said, listed),
            "other results": whole - logit(evidence, of_list),
        }
        return parts | {"query": whole - sum(parts.values())}

    def of_nothing(self, listed: np.ndarray) -> Floats:
        """(q,) logits that no item of the gallery fits. listed (q, 5)."""
        return self.nothing.of(-listed[:, 0], listed[:, 1:])


ACROSS = "fits_across.json"
"""The constants for queries of other languages, which :mod:`sfumato.search.languages` embeds."""

PENALTIES = (math.inf, 100.0, 30.0, 10.0)
"""Strengths of the penalty, in verdicts; the first leaves the logits as they are."""

N_FOLDS = 5
"""Number of folds, and smallest number of queries."""

_LEAST_DEVIATION = 0.1

_SURE = 2.0
"""Standard errors by which a change must be better than none. benchmarks/judgements.py: with one, ten verdicts made the
packaged constants worse on average."""


@dataclass(frozen=True, eq=False)
class JudgedHits:
    """Hits that people judged."""

    query: np.ndarray  # (k,) number of the query
    n_words: np.ndarray  # (k,) number of its words
    logit: np.ndarray  # (k,) logit of the hit, by the calibration that is to be corrected
    has_texts: np.ndarray  # (k,) whether the item has texts
    yes: np.ndarray  # (k,) fraction of people who say yes
    weight: np.ndarray  # (k,) one over the probability that the hit was sampled


@dataclass(frozen=True)
class Correction:
    """The logit becomes factor * logit + shift + by_words / (number of words)."""

    factor: float
    shift: float
    by_words: float

    def logit(self, logit: np.ndarray, inverse_words: np.ndarray) -> Floats:
        """Corrected logits. logit (k,), inverse_words (k,)."""
        return self.factor * logit + self.shift + self.by_words * inverse_words

    def of(self, logit: LinearLogit, words: int) -> LinearLogit:
        """A logit that has it. words: position of the feature one over words."""
        weights = [self.factor * weight for weight in logit.weights]
        weights[words] += self.by_words
        intercept = self.factor * logit.intercept + self.shift
        return replace(logit, slope=self.factor * logit.slope, intercept=intercept, weights=tuple(weights))


def fit_correction(
    logit: np.ndarray, inverse_words: np.ndarray, hits: JudgedHits, *, seed: int = 0
) -> Correction | None:
    """The correction of logits by verdicts; None if no change is best, or if there are fewer than N_FOLDS queries.

    logit (k,), inverse_words (k,).
    """
    queries, group = np.unique(hits.query, return_inverse=True)
    if len(queries) < N_FOLDS:
        return None
    w, y, raw = hits.weight, hits.yes, np.stack([logit, inverse_words], axis=1)
    centre = (w @ raw) / w.sum()
    deviation = np.maximum(np.sqrt((w @ (raw - centre) ** 2) / w.sum()), _LEAST_DEVIATION)
    x = (raw - centre) / deviation

    def fit(rows: np.ndarray, penalty: float) -> tuple[Floats, float]:
        if math.isinf(penalty):
            return np.zeros(2), 0.0
        n = w[rows].sum() ** 2 / (w[rows] ** 2).sum()  # Verdicts of equal weights that say as much.
        return fit_logistic(x[rows], y[rows], weight=w[rows], penalty=penalty / n, offset=logit[rows])

    fold = (np.random.default_rng(seed).permutation(len(queries)) % N_FOLDS)[group]
    losses = np.zeros((len(PENALTIES), len(y)))
    for k in range(N_FOLDS):
        out = fold == k
        for i, penalty in enumerate(PENALTIES):
            weights, bias = fit(~out, penalty)
            losses[i, out] = w[out] * log_losses(logit[out] + x[out] @ weights + bias, y[out])
    by_query = np.stack([np.bincount(group, row) for row in losses])
    weights, bias = fit(np.ones(len(y), bool), PENALTIES[_careful(by_query)])
    if not (weights.any() or bias):
        return None
    scaled = weights / deviation
    return Correction(1 + float(scaled[0]), bias - float(scaled @ centre), float(scaled[1]))


def _careful(losses: np.ndarray) -> int:
    """No change, row 0, unless the best is clearly better: by _SURE standard errors of the difference over queries, and
    more of few queries, as Student's t has it. Then the first row at most one worse than the best. losses (p, q)."""
    n = losses.shape[1]
    worse = losses - losses[losses.sum(1).argmin()]
    errors = worse.mean(1) * math.sqrt(n) / np.maximum(worse.std(1, ddof=1), 1e-12)
    limit = _SURE + (_SURE**3 + _SURE) / (4 * (n - 1))
    return 0 if errors[0] <= limit else 1 + int(np.flatnonzero(errors[1:] <= 1)[0])


@dataclass(frozen=True)
class FitsCalibration:
    """The probability that items fit a query. :meth:`packaged` has the constants that come with the package."""

    lengths: tuple[FitsLogits, ...]  # for queries of one word, of two, and of more
    prior: tuple[float, ...]  # weights of a query's sentence embedding, and a constant

    @classmethod
    @functools.cache
    def packaged(cls, file: str = "fits.json") -> "FitsCalibration":
        """The constants of a file of this folder."""
        return cls.from_json(json.loads(files(__package__).joinpath(file).read_text("utf-8")))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FitsCalibration":
        """Make it from plain values."""
        read = [{name: LinearLogit.from_json(of) for name, of in one.items()} for one in values["lengths"]]
        for one in read:  # An earlier version had hit_without for all galleries; verdicts may have refined it.
            if "hit_bare" not in one:
                one["hit_bare"] = with_zero(one["hit_without"], len(LIST_FEATURES) + 1)
            if len(one["pair_with"].weights) < len(PAIR_FEATURES):  # Another did not count the texts.
                one["pair_with"] = with_zero(one["pair_with"], PAIR_FEATURES.index("missing in few"))
        lengths = tuple(FitsLogits(**one) for one in read)
        prior = tuple(values["prior"])
        sound = all(one.is_sound() for one in lengths) and all(map(math.isfinite, prior))
        if len(lengths) != len(LENGTHS) or not sound:
            raise ValueError('the constants of target "fits" are damaged')
        return cls(lengths, prior)

    def to_json(self) -> dict[str, Any]:
        """Its constants as plain values."""
        return asdict(self)

    def of(self, n_words: int) -> FitsLogits:
        """The logits for queries of this many words."""
        return self.lengths[min(max(n_words, 1), LENGTHS[-1]) - 1]

    def query_prior(self, vectors: Array) -> Floats:
        """(q,) log of the fraction of images that queries fit, as their words say. vectors (q, 384)."""
        return np.asarray(as_numpy(vectors) @ np.array(self.prior[:-1]) + self.prior[-1])

    @staticmethod
    def nearness(vectors: Array, known: np.ndarray | None = None) -> Floats:
        """(q,) mean cosine of queries with the closest :func:`known_texts`. vectors (q, 384)."""
        cosines = as_numpy(vectors) @ (known_texts() if known is None else known).T
        return np.asarray(np.partition(cosines, -N_CLOSE, axis=1)[:, -N_CLOSE:].mean(1))

    def corrections(self, hits: JudgedHits, *, seed: int = 0) -> dict[str, Correction]:
        """What verdicts change about the logits of hits: by field of FitsLogits, only where it is better.

        hits: their logits are of this calibration.
        """
        found = {}
        for name, rows in _kinds(hits).items():
            some = some_rows(hits, rows)
            own = fit_correction(some.logit, self._inverse_words(name, some.n_words), some, seed=seed)
            if own is not None and own.factor > 0:
                found[name] = own
        return found

    def corrected_logits(self, corrections: Mapping[str, Correction], hits: JudgedHits) -> Floats:
        """(k,) logits of hits with corrections. hits: their logits are of this calibration."""
        logit = hits.logit.copy()
        for name, rows in _kinds(hits).items():
            if name in corrections:
                inverse_words = self._inverse_words(name, hits.n_words[rows])
                logit[rows] = corrections[name].logit(logit[rows], inverse_words)
        return logit

    def refined(self, hits: JudgedHits, *, seed: int = 0) -> "FitsCalibration":
        """The same with the logits of hits corrected by verdicts, those of items with texts and of others apart.

        hits: their logits are of this calibration.
        """
        changes = self.corrections(hits, seed=seed)
        if "hit_without" in changes:
            changes["hit_bare"] = changes["hit_without"]
        lengths = [
            replace(of, **{name: one.of(getattr(of, name), _WORDS) for name, one in changes.items()})
            for of in self.lengths
        ]
        return replace(self, lengths=tuple(lengths))

    def _inverse_words(self, name: str, n_words: np.ndarray) -> Floats:
        """(k,) the feature one over words as a logit reads it."""
        logits = [getattr(of, name) for of in self.lengths]
        limits = np.array([(one.low[_WORDS], one.high[_WORDS]) for one in logits])
        low, high = limits[n_words.astype(np.int64).clip(1, LENGTHS[-1]) - 1].T
        return np.asarray((1 / np.maximum(n_words, 1)).clip(low, high))


def _kinds(hits: JudgedHits) -> dict[str, np.ndarray]:
    """The rows of hits by the field of FitsLogits that their logits are of."""
    return {"hit_with": hits.has_texts, "hit_without": ~hits.has_texts}


def with_zero(of: LinearLogit, at: int) -> LinearLogit:
    """The same logit with one more feature, of no weight."""
    weights, low, high = ((*some[:at], 0.0, *some[at:]) for some in (of.weights, of.low, of.high))
    return replace(of, weights=weights, low=low, high=high)


def known_texts(folder: Path | None = None) -> np.ndarray:
    """(n, 384) unit sentence vectors of training texts, none if the folder has none; without it those of `small`."""
    path = Path(__file__).with_name("captions.npy") if folder is None else folder / KNOWN_TEXTS
    return _unit_rows(path, path.stat().st_mtime_ns) if path.is_file() else np.empty((0, 384), np.float32)


@functools.lru_cache(8)
def _unit_rows(path: Path, changed: int) -> np.ndarray:
    return unit(np.load(path).astype(np.float32))


def in_bytes(vectors: np.ndarray) -> np.ndarray:
    """Vectors in steps of one byte, for :data:`KNOWN_TEXTS`."""
    return np.round(vectors * 127 / np.abs(vectors).max()).astype(np.int8)


FEWEST_WORDS = 3
"""Words of the shortest text that is asked for like a caption."""

SHARPNESS, _BLOCK = (8, 15, 20, 30, 40), 64


@functools.cache
def _text_constants() -> dict[str, np.ndarray]:
    """Captions (n, k) directions, axes (d, k), numbers (n, 9) standardised, centre and spread (9,), weights (n, 2) and
    mean (2,) of the log number of images and of the precision."""
    values = load(files(__package__).joinpath("multiplicity.safetensors").read_bytes())
    found = {name: value.astype(np.float32) for name, value in values.items()}
    return found | {"captions": unit(found["captions"])}


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def place(cosine: np.ndarray, n_words: np.ndarray) -> np.ndarray:
    """(q, 9) numbers of words, nearness to the closest captions, and densities of captions. cosine (q, n)."""
    n = min(100, cosine.shape[1])
    near = -np.sort(-np.partition(cosine, -n, axis=1)[:, -n:], axis=1)
    density = [np.log(np.exp(k * (cosine - 1)).sum(1)) for k in SHARPNESS]
    return np.stack([n_words, near[:, 0], near[:, :10].mean(1), near.mean(1), *density], axis=1, dtype=np.float32)


def kernel(numbers: np.ndarray, cosine: np.ndarray, known: np.ndarray) -> np.ndarray:
    """(q, n) likeness of texts and captions. numbers (q, 9), known (n, 9), cosine (q, n)."""
    n = known.shape[1]
    square = (numbers**2).sum(1)[:, None] + (known**2).sum(1) - 2 * numbers @ known.T
    return np.asarray(0.3 * numbers @ known.T / n + 0.5 * np.exp(-0.3 / n * square) + 0.8 * np.exp(2 * (cosine - 1)))


def images_and_precision(vectors: Array, n_words: np.ndarray) -> tuple[Floats, Floats]:
    """(q,) numbers of COCO's 123,287 images that people would find relevant for English captions, and (q,) fractions of
    relevant images among COCO's 10 best, the mean of CLIP and BLIP-2. vectors (q, 384), n_words (q,)."""
    log_images, precision = log_images_and_precision(vectors, n_words).T
    return np.exp(log_images), precision.clip(0, 1)


def log_images_and_precision(vectors: Array, n_words: np.ndarray) -> Floats:
    """(q, 2) natural log of the numbers of :func:`images_and_precision`, and its fractions, not yet cut to [0, 1].

    A Gaussian process on a text's place among 6,000 captions. PQPP (Poesina et al., CVPR 2025, annotations CC BY 4.0)
    has the images that people found relevant for each. scripts/make_multiplicity.py fits the constants.
    """
    known, parts = _text_constants(), [np.empty((0, 2))]
    for start in range(0, len(n_words), _BLOCK):
        some = slice(start, start + _BLOCK)
        cosine = unit(as_numpy(vectors[some]) @ known["axes"]) @ known["captions"].T
        numbers = ((place(cosine, n_words[some]) - known["centre"]) / known["spread"]).clip(-4, 4)
        parts.append(kernel(numbers, cosine, known["numbers"]) @ known["weights"] + known["mean"])
    return np.concatenate(parts)
