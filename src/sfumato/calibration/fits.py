"""The probability of target "fits": a person would say that the text describes the image.

It has two steps, each a logistic function of a few numbers. The first is of a pair: what the image and the item's texts
say about the query. The second is of a hit: the same pair means more where it is the best of its list by far, and less
where a whole list fits a little. A third function says that nothing in the gallery fits.

One word, two words and a sentence are different questions, so each has its constants: a word is there or not, and a
sentence may be said in other words.

The constants lie in fits.json. They were fitted once: on people's verdicts about sentences (Hodosh, Young and
Hockenmaier 2013, Flickr8k), and, for words, on whether captions mention them. benchmarks/fits_prior.py fits them, and
docs/results/people.md says how well they hold.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from sfumato.calibration.conditional import LinearLogit
from sfumato.calibration.corrections import Correction, JudgedHits, fit_correction

N_NEAR = 50
"""Number of a query's best items that its list consists of."""

_MAX_GAP = 5.0
_NAMES = 0.5

PAIR_FEATURES = ("agreement", "words", "together", "missing", "one over words", "prior")
"""What the logit of a pair reads beside that of its distance; without texts the last two alone."""

LIST_FEATURES = ("gap", "log expected", "one over words", "prior")
"""What the list of a query says beside its best logit. The logits of a hit and of nothing read it."""

_WORDS = 1 + LIST_FEATURES.index("one over words")

LENGTHS = (1, 2, 3)
"""Numbers of words of the queries that have constants of their own; the last is of longer ones, too."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of q queries and c items."""

    image: Tensor  # (q, c) logit that a random pair at their distance is a listed match
    agreement: Tensor  # (q, c) cosine of the query with the mean of the item's texts; nan for an item without texts
    words: Tensor  # (q, c) fraction of the query's words that the texts have, weighed by rarity
    together: Tensor  # (q, c) 1 if one text has all words of the query close together, else 0
    missing: Tensor  # (q, c) rarity of the rarest word that the texts do not have; 0 if they have all
    n_words: Tensor  # (q,) number of the query's words, at least 1
    prior: Tensor  # (q,) log of the fraction of images that such a query fits elsewhere

    @property
    def has_texts(self) -> Tensor:
        """(q, c) whether an item has texts."""
        return ~self.agreement.isnan()

    def features(self) -> Tensor:
        """(q, c, 6) PAIR_FEATURES."""
        by_query = (values.unsqueeze(1).expand_as(self.image) for values in (1 / self.n_words, self.prior))
        columns = (self.agreement.nan_to_num(), self.words, self.together, self.missing, *by_query)
        return torch.stack([column.double() for column in columns], dim=2)


def list_features(near: Tensor, n_words: Tensor, prior: Tensor) -> Tensor:
    """(q, 5) the best logit and LIST_FEATURES of the best items of each query. near (q, k) descending, k at least 1."""
    near = near.double()
    first, expected = near[:, 0], near.sigmoid().sum(1).clamp_min(1e-12).log()
    gap = first - near[:, 1] if near.shape[1] > 1 else torch.full_like(first, _MAX_GAP)
    return torch.stack([first, gap.clamp_max(_MAX_GAP), expected, 1 / n_words.double(), prior.double()], dim=1)


@dataclass(frozen=True)
class FitsLogits:
    """The logits for queries of one length, of items with texts and of others."""

    pair_with: LinearLogit  # of a pair: of the logit of its distance and PAIR_FEATURES
    pair_without: LinearLogit
    hit_with: LinearLogit  # of a hit: of the logit of the pair, and of the best logit and LIST_FEATURES
    hit_without: LinearLogit
    nothing: LinearLogit  # that no item fits: of minus the best logit and LIST_FEATURES

    def is_sound(self) -> bool:
        """Whether all numbers are such as a fit gives."""
        sizes = (len(PAIR_FEATURES), 2, len(LIST_FEATURES) + 1, len(LIST_FEATURES) + 1, len(LIST_FEATURES))
        return all(logit.is_sound(n) for logit, n in zip(vars(self).values(), sizes, strict=True))

    def of_pairs(self, evidence: Evidence) -> Tensor:
        """(q, c) logits that the query fits the item, whatever else there is."""
        image, features = evidence.image.double(), evidence.features()
        with_texts = self.pair_with.of(image, features)
        # An item without texts may have the words of its name or place: they count less, and none is missed.
        names = _NAMES * self.pair_with.weights[1] * features[..., 1]
        without = self.pair_without.of(image, features[..., -2:]) + names
        return torch.where(evidence.has_texts, with_texts, without)

    def of_hits(self, pair: Tensor, has_texts: Tensor, listed: Tensor) -> Tensor:
        """(q, c) logits that items fit, given the list of each query. pair (q, c), listed (q, 5)."""
        of_list = listed.unsqueeze(1)
        return torch.where(has_texts, self.hit_with.of(pair, of_list), self.hit_without.of(pair, of_list))

    def of_nothing(self, listed: Tensor) -> Tensor:
        """(q,) logits that no item of the gallery fits. listed (q, 5)."""
        return self.nothing.of(-listed[:, 0], listed[:, 1:])


@dataclass(frozen=True)
class FitsCalibration:
    """The probability that items fit a query. :meth:`packaged` has the constants that come with the package."""

    lengths: tuple[FitsLogits, ...]  # for queries of one word, of two, and of more
    prior: tuple[float, ...]  # weights of a query's sentence embedding, and a constant

    @classmethod
    @functools.cache
    def packaged(cls) -> "FitsCalibration":
        """The constants of fits.json."""
        return cls.from_json(json.loads(files(__package__).joinpath("fits.json").read_text("utf-8")))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FitsCalibration":
        """Make it from plain values."""
        lengths = tuple(
            FitsLogits(**{name: LinearLogit.from_json(of) for name, of in one.items()}) for one in values["lengths"]
        )
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

    def query_prior(self, vectors: Tensor) -> Tensor:
        """(q,) log of the fraction of images that queries fit, as their words say. vectors (q, 384)."""
        return vectors.double() @ torch.tensor(self.prior[:-1], dtype=torch.float64) + self.prior[-1]

    def corrections(self, hits: JudgedHits, *, seed: int = 0) -> dict[str, Correction]:
        """What verdicts change about the logits of hits: by field of FitsLogits, only where it is better.

        hits: their logits are of this calibration.
        """
        found = {}
        for name, rows in _kinds(hits).items():
            some = hits.some(rows)
            own = fit_correction(some.logit, self._inverse_words(name, some.n_words), some, seed=seed)
            if own is not None and own.factor > 0:
                found[name] = own
        return found

    def corrected_logits(self, corrections: Mapping[str, Correction], hits: JudgedHits) -> Tensor:
        """(k,) logits of hits with corrections. hits: their logits are of this calibration."""
        logit = hits.logit.double().clone()
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
        lengths = [
            replace(of, **{name: one.of(getattr(of, name), _WORDS) for name, one in changes.items()})
            for of in self.lengths
        ]
        return replace(self, lengths=tuple(lengths))

    def _inverse_words(self, name: str, n_words: Tensor) -> Tensor:
        """(k,) the feature one over words as a logit reads it."""
        logits = [getattr(of, name) for of in self.lengths]
        limits = torch.tensor([(one.low[_WORDS], one.high[_WORDS]) for one in logits], dtype=torch.float64)
        low, high = limits[n_words.long().clamp(1, LENGTHS[-1]) - 1].unbind(1)
        return (1 / n_words.double().clamp_min(1)).clamp(low, high)


def _kinds(hits: JudgedHits) -> dict[str, Tensor]:
    """The rows of hits by the field of FitsLogits that their logits are of."""
    return {"hit_with": hits.has_texts, "hit_without": ~hits.has_texts}
