"""What a model is: two encoders into one space, a distance, and match probabilities; and its files on a hub."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sfumato.arrays import Array
from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.logistic import deviations
from sfumato.calibration.logits import fit_logistic
from sfumato.data.image_inputs import ImageInput, image_sources, unreadable, vector_file
from sfumato.distances import get_distance
from sfumato.distances.distance import Distance
from sfumato.encoders.backbones import GRAPH_FILES, HUB_NAME, REFERENCE, snapshot
from sfumato.encoders.encoder_protocol import Pieces, TwoTowers, piece_counter
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.errors import UserError
from sfumato.files import CALIBRATION, CONFIG, ENCODER, TOKENIZER, WEIGHTS, write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import MATCH_PROBABILITY, SampledLogits, match_probability, match_probability_distance

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
    def fit(cls, texts: Sequence[str], pieces: Pieces, false_alarms: float = 0.05, seed: int = 0) -> "UnfamiliarTexts":
        """Fit on training texts against as many made-up ones, half of random letters and half pronounceable."""
        spelt = [text for text in texts if _WORD.search(text)]
        if len(spelt) < 100:
            raise ValueError(f"UnfamiliarTexts: needs 100 texts with words, got {len(spelt)}")
        chosen = [spelt[i] for i in np.random.default_rng(seed).permutation(len(spelt))[:5000]]
        made_up = nonsense(len(chosen), seed=seed)
        x = np.concatenate([_numbers(chosen, pieces), _numbers(made_up, pieces)])
        y = np.repeat([0.0, 1.0], [len(chosen), len(made_up)])
        centre, deviation = x.mean(0), deviations(x)
        standard, bias = fit_logistic((x - centre) / deviation, y, penalty=_PENALTY)
        weights = standard / deviation
        bias -= float(weights @ centre)
        threshold = float(np.quantile(x[: len(chosen)] @ weights + bias, 1 - false_alarms))
        words = frozenset(word.lower() for text in texts for word in _WORD.findall(text))
        return cls((float(weights[0]), float(weights[1])), bias, threshold, words)

    def score(self, texts: Sequence[str], pieces: Pieces) -> np.ndarray:
        """Log odds that texts are made up. Returns (n,)."""
        return np.asarray(_numbers(texts, pieces) @ np.array(self.weights) + self.bias)

    def of(self, texts: Sequence[str], pieces: Pieces) -> list[bool]:
        """Which texts are unfamiliar."""
        above = self.score(texts, pieces) > self.threshold
        known = [all(word.lower() in self.words for word in _WORD.findall(text)) for text in texts]
        return [bool(over) and not familiar for over, familiar in zip(above, known, strict=True)]

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


def remember_words(model: TwoTowers, texts: Sequence[str], path: Path) -> None:
    """Write what tells texts of words from made-up ones, if the model reads subwords and there are enough texts."""
    if counter := piece_counter(model):
        with contextlib.suppress(ValueError):
            UnfamiliarTexts.fit(texts, counter).save(path)


def nonsense(n: int, *, seed: int = 0) -> list[str]:
    """Made-up texts of one or two words: the even ones of random letters, the odd ones of syllables."""
    random = np.random.default_rng(seed)
    sets = "abcdefghijklmnopqrstuvwxyz", "aeiou", "bcdfghjklmnprstvwz"
    letters, vowels, consonants = (np.array(list(some)) for some in sets)

    def letters_of_a_word() -> str:
        return "".join(random.choice(letters, random.integers(4, 10)))

    def syllables() -> str:
        closed = random.random(random.integers(2, 4)) < 0.3
        pairs = ((random.choice(consonants) + random.choice(vowels), close) for close in closed)
        return "".join(pair + (random.choice(consonants) if close else "") for pair, close in pairs)

    kinds = (syllables if i % 2 else letters_of_a_word for i in range(n))
    return [" ".join(word() for _ in range(random.integers(1, 3))) for word in kinds]


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


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A model that embeds and matches: trained, adopted, exported or published.

    Attributes:
        model: the two towers; those of torch are in evaluation mode.
        distance: name in DISTANCES of the distance of the logits.
        logit_scale, logit_bias: match probability = sigmoid(logit_bias - logit_scale * distance).
        source: folder, file or name that it was loaded from.
        kind: what it is, in words.
        calibrated: whether the logits were fitted on held-out pairs; logits learnt by a loss were not.
        calibration: everything that was fitted on held-out pairs; None if nothing was.
        unfamiliar: tells texts of words from made-up ones; None if the training had no texts, or too few.
        sampled_logits: those of PCME's match probability, if the model learnt it; None for all others.
    """

    model: TwoTowers
    distance: str
    logit_scale: float
    logit_bias: float
    source: str = ""
    kind: str = ""
    calibrated: bool = False
    calibration: Calibration | None = None
    unfamiliar: UnfamiliarTexts | None = None
    sampled_logits: SampledLogits | None = None

    def __repr__(self) -> str:
        state = "calibrated" if self.calibrated else "not calibrated"
        kind = f"{self.kind}, " if self.kind else ""
        return f"{type(self).__name__}({self.source!r}, {kind}{self.distance}, {state})"

    def embed_images(self, images: Sequence[ImageInput], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed images.

        Args:
            images: n paths, bytes of image files, Pillow images or arrays of uint8 pixels, also mixed; of a model that
                reads features, n arrays of them, or .npy files.
            batch_size: number of images at a time.

        Returns:
            (n, d) embeddings on the CPU: arrays of NumPy by `small`, ONNX graphs and adopted models, else tensors.

        Raises:
            UserError: an image is missing or cannot be read; the message has its path or its number.
            TypeError: images is a single one, or one has another type.
            ValueError: there are none, or an array has another shape or dtype.
        """
        tower = self.model.image
        sources = image_sources(images, "embed_images", features=tower.processor.reads)
        if not sources:
            raise ValueError("embed_images: got no images, expected at least one")
        errors: list[UserError] = []
        items = [source.read_bytes for source in sources]
        store, _ = tower.processor.read(items, on_error=lambda i, error: errors.append(unreadable(sources[i], error)))
        if errors:
            raise errors[0]
        return tower.embed(store, batch_size=batch_size)

    def embed_texts(self, texts: Sequence[Any], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed texts.

        Args:
            texts: n texts; of a model that reads embeddings, n vectors (c,), or n .npy files by path or bytes.
            batch_size: number of texts at a time.

        Returns:
            (n, d) embeddings on the CPU, as those of :meth:`embed_images`.

        Raises:
            UserError: the model has no encoder for texts.
            TypeError: texts is a single one, or one is no text.
            ValueError: there are none.
        """
        if isinstance(texts, str):
            raise TypeError(f"embed_texts: got one string {texts!r}, expected a list of them: [{texts!r}]")
        texts, reads = list(texts), self.model.text.processor.reads
        if not texts:
            raise ValueError("embed_texts: got no texts, expected at least one")
        for i, text in enumerate(texts):
            if reads and isinstance(text, str):
                found = f"this model reads {reads} and has no encoder for texts such as {text[:40]!r}"
                raise UserError(f"{found}; give an array of them, or search an index by an item: Searcher.search_items")
            if reads and isinstance(text, os.PathLike):
                texts[i] = Path(text).read_bytes()
            elif reads and not isinstance(text, bytes):
                texts[i] = vector_file(text, f"embed_texts: text {i}", reads)
            elif not reads and not isinstance(text, str):
                raise TypeError(f"embed_texts: text {i} is a {type(text).__name__}, expected a string")
        return self.model.embed_texts(texts, batch_size=batch_size)

    def probability(
        self,
        texts: Sequence[Any] | GaussianEmbedding,
        images: Sequence[ImageInput] | GaussianEmbedding,
        *,
        match_fraction: float | None = None,
    ) -> Array:
        """Probability that each text matches each image, by their distance alone.

        It is that of a random pair at this distance. A search among images gives other probabilities: it also knows
        the size of its gallery and the other items near the query.

        Args:
            texts: n texts, or their embeddings.
            images: m images, or their embeddings.
            match_fraction: fraction of matches among pairs like these, in (0, 1): 0.5 if half of them match. None
                takes the fraction of the calibration, where every text was paired with every image. A model without a
                calibration knows none.

        Returns:
            (n, m) probabilities in [0, 1]; not calibrated unless :attr:`calibrated`.

        Raises:
            ValueError: match_fraction is outside of (0, 1), or the model has no calibration for it; see also
                :meth:`embed_texts` and :meth:`embed_images`.
        """
        query = texts if isinstance(texts, GaussianEmbedding) else self.embed_texts(texts)
        items = images if isinstance(images, GaussianEmbedding) else self.embed_images(images)
        distance: Array = get_distance(self.distance).for_direction("t2i").matrix(query, items)
        if self.calibration is not None:
            return self.calibration.probability(distance, match_fraction=match_fraction)
        if match_fraction is not None:
            ways = "calibrate it on held-out pairs (sfumato calibrate RUN), or leave match_fraction out"
            raise ValueError(f"probability: match_fraction needs a calibration, and this model has none; {ways}")
        return match_probability(distance, self.logit_scale, self.logit_bias)

    def unfamiliar_texts(self, texts: Sequence[str]) -> list[bool]:
        """Which texts have words that the model hardly knows.

        Args:
            texts: n texts.

        Returns:
            n answers; all False for a model that cannot tell.
        """
        counter = piece_counter(self.model)
        if self.unfamiliar is None or counter is None:
            return [False] * len(texts)
        return self.unfamiliar.of(texts, counter)

    def ranking_distance(self, name: str | None = None) -> Distance:
        """The distance to rank by.

        Args:
            name: in DISTANCES; or "match_probability", PCME's, with the logits that the model has learnt. None takes
                its own distance.

        Returns:
            The distance.

        Raises:
            UserError: the model has not learnt the logits of a match probability.
            ValueError: there is no such distance.
        """
        if name != MATCH_PROBABILITY:
            try:
                return get_distance(name or self.distance)
            except ValueError as error:
                raise ValueError(f"{error}; or {MATCH_PROBABILITY}, with the logits of the run") from error
        if (logits := self.sampled_logits) is None:
            found = "needs logits that were learnt on distances of samples; this model has none"
            ways = "that was trained with the loss pcme, or a released model of PCME, or rank by another distance"
            raise UserError(f"{MATCH_PROBABILITY} {found}. Name a run {ways}")
        return match_probability_distance(logits.logit_scale, logits.logit_bias, n_samples=logits.n_samples)


def model_digest(model: TwoTowers) -> str:
    """The SHA-256 of a model's weights and of its processor and head settings, independent of its path and device."""
    if model.digest:
        return model.digest
    towers: Any = model
    digest = hashlib.sha256()
    for key, value in sorted(getattr(towers, "state_dict", dict)().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().numpy().tobytes())
    for part in (towers.image.processor, towers.image.head, towers.text.processor, towers.text.head):
        digest.update(getattr(part, "named", type(part).__name__).encode())
        known = {"backbone": part.backbone.fingerprint} if isinstance(part, FrozenProcessor) else vars(part)
        for key, value in sorted(known.items()):
            if key.startswith("_") or key in ("training", "workers"):
                continue
            if isinstance(value, Tokenizer):
                digest.update(value.to_str().encode())
            elif isinstance(value, int | str):
                # The two crops differ by a pixel at most, and galleries of either stay valid.
                digest.update(f"{key}={'crop' if value == 'crop-nearest' else value}".encode())
    return digest.hexdigest()


ENCODER_FILES = (
    *("*config*.json", "*token*.json", "vocab*", "merges.txt", "*.model", "modules.json"),
    *("*.safetensors", "*.safetensors.index.json"),
)
"""Patterns of the files from which a frozen model is loaded: data alone, no code and no pickle."""

HUB_FILES = (
    *(CONFIG, WEIGHTS, TOKENIZER, CALIBRATION, REFERENCE),
    *(f"{ENCODER}/{pattern}" for pattern in (*ENCODER_FILES, *GRAPH_FILES)),
)
"""Patterns of the files of a model on the hub; ``*`` goes below subfolders, too."""


def download(name: str) -> Path:
    """The local copy of a model of the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION: the files to load it."""
    if (given := HUB_NAME.fullmatch(name)) is None:
        adopted = f". This command takes adopted models: sfumato adopt {name} --data my.csv --out runs/adopted"
        hint = adopted if name.startswith("open_clip:") else ""
        raise UserError(f"there is no file or folder {name!r}, and a name on the hub has the form owner/model{hint}")
    return snapshot(given, HUB_FILES)
