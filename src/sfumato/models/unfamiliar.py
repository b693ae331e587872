"""Texts of words that a model cannot know: typing errors, random letters, words of no language.

A search answers every text, "asdfgh" too, and the probabilities of its hits are not fitted on such queries. The subword
pieces of a text betray it: a tokenizer splits what it has never seen into many short pieces. So a logistic regression
of the number of pieces tells the training texts from made-up ones.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sfumato.calibration.platt import fit_logistic
from sfumato.encoders.dual import DualEncoder, Pieces, piece_counter
from sfumato.errors import UserError
from sfumato.files import write_json

_WORD = re.compile(r"[^\W_]+")
_PENALTY = 1e-3


@dataclass(frozen=True)
class UnfamiliarTexts:
    """Judges whether a text consists of words; make one with :meth:`fit`."""

    weights: tuple[float, float]  # of the number of pieces for each letter and of that for each word
    bias: float  # log odds = bias + weights . numbers
    threshold: float  # log odds above which a text counts as unfamiliar
    words: frozenset[str]  # the words of the training texts, in lower case; a text of these is always familiar

    @classmethod
    def fit(
        cls, texts: Sequence[str], pieces: Pieces, *, false_alarms: float = 0.05, seed: int = 0
    ) -> "UnfamiliarTexts":
        """Fit on training texts against as many made-up ones, half of random letters and half pronounceable."""
        random = np.random.default_rng(seed)
        spelt = [text for text in texts if _WORD.search(text)]
        if len(spelt) < 100:
            raise ValueError(f"UnfamiliarTexts: needs 100 texts with words, got {len(spelt)}")
        chosen = [spelt[i] for i in random.permutation(len(spelt))[:5000]]
        made_up = nonsense(len(chosen), seed=seed)
        x = torch.from_numpy(np.concatenate([_numbers(chosen, pieces), _numbers(made_up, pieces)]))
        y = torch.cat([torch.zeros(len(chosen)), torch.ones(len(made_up))]).double()
        centre, deviation = x.mean(0), x.std(0, correction=0).clamp_min(1e-9)
        standard, bias = fit_logistic((x - centre) / deviation, y, penalty=_PENALTY)
        weights = standard / deviation
        bias -= float(weights @ centre)
        threshold = float(np.quantile((x[: len(chosen)] @ weights + bias).numpy(), 1 - false_alarms))
        words = frozenset(word.lower() for text in texts for word in _WORD.findall(text))
        return cls((float(weights[0]), float(weights[1])), bias, threshold, words)

    def score(self, texts: Sequence[str], pieces: Pieces) -> np.ndarray:
        """Log odds that texts are made up. Returns (n,)."""
        return np.asarray(_numbers(texts, pieces) @ np.array(self.weights) + self.bias)

    def of(self, texts: Sequence[str], pieces: Pieces) -> list[bool]:
        """Which texts are unfamiliar."""
        above = self.score(texts, pieces) > self.threshold
        return [
            bool(over) and not all(word.lower() in self.words for word in _WORD.findall(text))
            for text, over in zip(texts, above, strict=True)
        ]

    def save(self, path: str | Path) -> None:
        """Write the judge into a JSON file, atomically."""
        write_json(path, {**vars(self), "words": sorted(self.words)})

    @classmethod
    def load(cls, path: str | Path) -> "UnfamiliarTexts":
        """Read a file of :meth:`save`."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            first, second = found["weights"]
            numbers = float(first), float(second), float(found["bias"]), float(found["threshold"])
            return cls(numbers[:2], *numbers[2:], frozenset(map(str, found["words"])))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); delete it, and texts are no longer judged") from error


def remember_words(model: DualEncoder, texts: Sequence[str], path: Path) -> None:
    """Write what tells texts of words from made-up ones, if the model reads subwords and there are enough texts."""
    if counter := piece_counter(model):
        with contextlib.suppress(ValueError):
            UnfamiliarTexts.fit(texts, counter).save(path)


def nonsense(n: int, *, seed: int = 0) -> list[str]:
    """Made-up texts of one or two words: the even ones of random letters, the odd ones of syllables."""
    random = np.random.default_rng(seed)
    letters, vowels, consonants = (
        np.array(list(some)) for some in ("abcdefghijklmnopqrstuvwxyz", "aeiou", "bcdfghjklmnprstvwz")
    )

    def letters_of_a_word() -> str:
        return "".join(random.choice(letters, random.integers(4, 10)))

    def syllables() -> str:
        closed = random.random(random.integers(2, 4)) < 0.3
        return "".join(
            random.choice(consonants) + random.choice(vowels) + (random.choice(consonants) if close else "")
            for close in closed
        )

    return [
        " ".join((syllables if i % 2 else letters_of_a_word)() for _ in range(random.integers(1, 3))) for i in range(n)
    ]


def _numbers(texts: Sequence[str], pieces: Pieces) -> np.ndarray:
    """(n, 2) pieces for each letter and for each word; 0 for texts without a word."""
    words = [_WORD.findall(text) for text in texts]
    counts = iter(pieces([word for own in words for word in own]))
    found = np.zeros((len(texts), 2))
    for i, own in enumerate(words):
        if own:
            total = sum(next(counts) for _ in own)
            found[i] = total / sum(map(len, own)), total / len(own)
    return found
