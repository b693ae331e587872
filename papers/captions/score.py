"""The caption metric: the probability that a person would say that a text describes an item, one pair at a time.

The item has texts, an image, or both. There is no gallery; each different text is embedded once.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from papers.captions.constants import CaptionEvidence, CaptionFits, grouped, word_weight
from sfumato.arrays import Array
from sfumato.calibration.calibrator import Scorer
from sfumato.calibration.fits import FitsCalibration
from sfumato.data.image_inputs import ImageInput
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import Pieces
from sfumato.encoders.package_weights import WIDTH, sentence_vectors, shared_minilm
from sfumato.errors import UserError, first_line, progress_bar
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.model import Model
from sfumato.models.run import SMALL, load_model
from sfumato.search.candidates import REFERENCE_SIZE
from sfumato.search.texts import FUNCTION_WORDS, saying, stemmed

_LETTERS_PER_PIECE = 3.5
"""Letters for each subword piece of a word that a tokenizer does not have whole, from which it still reads it."""


def read_fraction(texts: Sequence[str], pieces: Pieces) -> list[float]:
    """The fraction of each text's letters in words that a tokenizer has whole or in long pieces.

    It is nearly 1 in the languages of its vocabulary, less than one half in others, and 0 where a text has no words but
    function words.
    """
    own = [re.findall(r"[^\W_]+", text.casefold()) for text in texts]
    own = [[] if FUNCTION_WORDS.issuperset(some) else some for some in own]
    words = list(dict.fromkeys(word for some in own for word in some))
    read = {word: n == 1 or len(word) >= _LETTERS_PER_PIECE * n for word, n in zip(words, pieces(words), strict=True)}
    return [sum(len(word) for word in some if read[word]) / max(1, sum(map(len, some))) for some in own]


Progress = Callable[[int], None]

_TEXT_BLOCK, _IMAGE_BLOCK, _COSINES = 2048, 64, 65_536


@dataclass(frozen=True, eq=False)
class Pair:
    """A text and an item, checked."""

    text: str
    texts: tuple[str, ...]  # of the item, without blank ones
    image: ImageInput | None

    @classmethod
    def of(cls, text: Any, texts: Any, image: Any, where: str) -> "Pair":
        """Check what a user gave. where: its name in errors."""
        if not isinstance(text, str):
            raise TypeError(f"{where}: text is a {type(text).__name__}, expected a string")
        if not text.strip():
            raise ValueError(f"{where}: text is empty; give the text to judge")
        if isinstance(texts, str) or not all(isinstance(one, str) for one in texts):
            raise TypeError(f"{where}: texts must be a list of strings, got {texts!r:.80}")
        if any("\ud800" <= letter <= "\udfff" for one in (text, *texts) for letter in one):
            raise ValueError(f"{where}: a text holds half a character (a lone surrogate); correct its encoding")
        kept = tuple(one for one in texts if one.strip())
        if not kept and image is None:
            raise ValueError(f"{where}: there is neither a text in texts nor an image; give one to compare with")
        return cls(text, kept, image)


def _position(once: dict[Any, int], key: Any) -> int:
    """The position of a key among different ones, in the order of their first use."""
    return once.setdefault(key, len(once))


def _blocks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


@cache
def _small() -> Model:
    return load_model(SMALL)


def pair_logits(texts: GaussianEmbedding, images: GaussianEmbedding) -> Array:
    """(n,) logits that random pairs at their distances are listed, by the model `small`. texts, images (n, d)."""
    model = _small()
    assert model.calibration is not None
    scorer = Scorer(model.logit_scale, model.logit_bias, model.calibration)
    return scorer.pair_logit(get_distance(model.distance).row(texts.tensors(), images.tensors()), REFERENCE_SIZE)


def _embed_images(images: Sequence[ImageInput], where: Callable[[int], str], advance: Progress) -> GaussianEmbedding:
    model, parts = _small(), []
    for block in _blocks(len(images), _IMAGE_BLOCK):
        try:
            parts.append(model.embed_images(list(images[block])).tensors())
        except (UserError, TypeError, ValueError):
            for i in range(block.start, block.stop):
                try:
                    model.embed_images([images[i]])
                except (UserError, TypeError, ValueError) as error:
                    raise type(error)(f"{where(i)}: {first_line(error).removeprefix('embed_images: ')}") from error
            raise
        advance(block.stop - block.start)
    return GaussianEmbedding.cat(parts)


def _image_key(image: Any) -> Any:
    return os.fspath(image) if isinstance(image, str | os.PathLike) else id(image)


def _image_logits(pairs: Sequence[Pair], where: Callable[[int], str], advance: Progress) -> Tensor:
    """(n,) logits of the images; nan without one."""
    found, rows = torch.full((len(pairs),), torch.nan), [i for i, pair in enumerate(pairs) if pair.image is not None]
    if not rows:
        return found
    images, texts = dict[Any, int](), dict[Any, int]()
    shown = [_position(images, _image_key(pairs[i].image)) for i in rows]
    said = [_position(texts, pairs[i].text) for i in rows]
    first = [rows[k] for k in np.unique(shown, return_index=True)[1].tolist()]
    embedded = _embed_images([pairs[i].image for i in first], lambda k: where(first[k]), advance)
    found[rows] = pair_logits(
        _small().embed_texts(list(texts)).tensors()[torch.tensor(said)], embedded[torch.tensor(shown)]
    )
    return found


def _vectors(texts: Sequence[str], advance: Progress) -> Tensor:
    """(n, 384) sentence embeddings."""
    order, found = sorted(range(len(texts)), key=lambda i: len(texts[i])), torch.empty(len(texts), WIDTH)
    for block in _blocks(len(texts), _TEXT_BLOCK):
        found[order[block]] = torch.from_numpy(sentence_vectors([texts[i] for i in order[block]]))
        advance(block.stop - block.start)
    return found


def _found_words(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """(n,) fraction of each text's words that the item's texts say, by weight, and their number."""
    own = {text: stemmed(text) for text in dict.fromkeys(text for pair in pairs for text in (pair.text, *pair.texts))}
    words = list(dict.fromkeys(word for text in dict.fromkeys(p.text for p in pairs) for word in own[text].values()))
    weights = word_weight(FitsCalibration.packaged().query_prior(sentence_vectors(words))).tolist()
    weight, found = dict(zip(words, weights, strict=True)), []
    for pair in pairs:
        there = {stem for text in pair.texts for stem in own[text]}
        mine = {stem: weight[word] for stem, word in own[pair.text].items()}
        said = sum(w for stem, w in mine.items() if not saying(stem).isdisjoint(there))
        found.append(said / (sum(mine.values()) or 1.0))
    return torch.tensor(found), torch.tensor([float(len(own[pair.text])) for pair in pairs])


def evidence_of(
    pairs: Sequence[Pair], image: Tensor, content: Callable[[Tensor], Tensor], advance: Progress = lambda n: None
) -> CaptionEvidence:
    """What is known of n pairs. image (n,) logits; content makes (t, c) unit vectors of (t, 384)."""
    once, judged = dict[Any, int](), dict[Any, int]()
    rows = [
        (i, _position(once, pair.text), _position(once, text)) for i, pair in enumerate(pairs) for text in pair.texts
    ]
    vectors = _vectors(list(once), advance)
    meaning = content(vectors)
    pair, mine, other = torch.tensor(rows, dtype=torch.long).view(-1, 3).T
    cosine, agreement = torch.empty(len(rows)), torch.empty(len(rows))
    for block in _blocks(len(rows), _COSINES):
        a, b = mine[block], other[block]
        cosine[block] = (vectors[a] * vectors[b]).sum(1)
        agreement[block] = (meaning[a] * meaning[b]).sum(1)
    mean, first = grouped(cosine, pair, len(pairs))
    words, n_words = _found_words(pairs)
    text = [_position(judged, one.text) for one in pairs]
    read = torch.tensor(read_fraction(list(judged), shared_minilm("cpu").pieces))[text]
    n_texts = torch.tensor([float(len(one.texts)) for one in pairs])
    return CaptionEvidence(mean, first, grouped(agreement, pair, len(pairs))[1], words, n_words, n_texts, image, read)


def score_pairs(pairs: Sequence[Pair], where: Callable[[int], str], advance: Progress = lambda n: None) -> np.ndarray:
    """(n,) probabilities that people would say that the texts describe the items. where: names of pairs in errors."""
    constants = CaptionFits.packaged()
    image = _image_logits(pairs, where, advance)
    return constants.logit(evidence_of(pairs, image, constants.content, advance)).sigmoid().numpy()


def fits(text: Any, *, texts: Any = (), image: Any = None) -> Any:
    """The probability that a person would say that a text describes an item, given its texts, its image, or both.

    A caption metric for one pair, without a gallery. "Describes" is what the judges of Flickr8k meant by it, of
    candidates of which they accepted 7 %; where most captions are right, the probability is too low. Texts are read by
    MiniLM, which knows English; what it cannot read does not raise the probability. The image is read by the model
    `small` of the package. The texts say far more than the image.

    Args:
        text: the text to judge, or a list of n.
        texts: texts that describe the item, such as its captions; blank ones do not count. For a list, n lists of them.
        image: path, bytes of an image file, Pillow image or array of uint8 pixels. For a list, n of them or None.

    Returns:
        A float in [0, 1] for one text; for a list, an array (n,) of float64, also if n is 1.

    Raises:
        ValueError: a text is empty, a pair has neither texts nor an image, or lists have other lengths than text.
        TypeError: text is no string, or texts is one string.
        UserError: an image is missing or cannot be read, or the package of MiniLM is not installed.

    Example:
        >>> round(fits("a dog runs", texts=["A brown dog is running on grass.", "Dog in a park"]), 4)  # doctest: +SKIP
        0.6976

    Paper: the judgements are those of Hodosh, Young and Hockenmaier, "Framing image description as a ranking task",
        JAIR 2013.
    """
    if not isinstance(text, list | tuple):
        return float(score_pairs([Pair.of(text, texts, image, "fits")], lambda i: "fits")[0])
    n = len(text)
    texts = [()] * n if isinstance(texts, tuple) and not texts else texts
    image = [None] * n if image is None else image
    for name, given in (("texts", texts), ("image", image)):
        if isinstance(given, str | bytes | os.PathLike) or not hasattr(given, "__len__") or len(given) != n:
            raise ValueError(f"fits: text is a list of {n}, so {name} must be a list of {n}; got {given!r:.80}")
    names = [f"fits: pair {i}" for i in range(n)]
    return score_pairs(list(map(Pair.of, text, texts, image, names)), names.__getitem__)


def _read_pair(line: str, folder: Path, where: str) -> tuple[dict[str, Any], Pair]:
    """The object of a line, and its pair."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # Escapes may name half a character, which no file can hold.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not usable JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f'{where}: expected an object like {{"text": "...", "texts": ["..."]}}, got {line.strip():.60}')
    if "text" not in row:
        raise UserError(f"{where}: there is no text; the keys are {', '.join(row) or '(none)'}")
    image, texts = row.get("image"), row.get("texts")
    if image is not None and not isinstance(image, str):
        raise UserError(f"{where}: image must be a path, got {image!r:.60}")
    if texts is not None and not isinstance(texts, list):
        raise UserError(f"{where}: texts must be a list of strings, got {texts!r:.60}")
    try:
        return row, Pair.of(row["text"], texts or (), None if image is None else folder / image, where)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error


def score_file(path: Path, out: Path) -> int:
    """Write the objects of a JSONL file of pairs with their probability as `fits`; returns their number.

    Paths of images are relative to the file. Nothing is written if a line cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    if not numbers:
        raise UserError(f'{path} holds no pairs; expected one {{"text": "...", "texts": ["..."]}} a line')
    where = [f"{path}:{number}" for number in numbers]
    read = [_read_pair(lines[k - 1], path.parent, name) for k, name in zip(numbers, where, strict=True)]
    pairs = [pair for _, pair in read]
    texts = {text for pair in pairs if pair.texts for text in (pair.text, *pair.texts)}
    images = {_image_key(pair.image) for pair in pairs if pair.image is not None}
    with progress_bar("embedding texts and images", len(texts) + len(images)) as advance:
        found = score_pairs(pairs, where.__getitem__, advance)
    rows = (row | {"fits": round(float(p), 6)} for (row, _), p in zip(read, found, strict=True))
    write_atomically(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(pairs)
