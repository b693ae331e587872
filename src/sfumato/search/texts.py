"""Texts of items as evidence: captions, title, tags and names that lie beside an image say what it shows.

An item's texts are in its payload. The mean of their sentence embeddings is a vector in a store of its own, beside that
of the collection and under the same ids, so that every engine can search it. MiniLM embeds queries and texts.
"""

import functools
import hashlib
import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from sfumato.arrays import log_sigmoid, some_rows
from sfumato.calibration.fits import Evidence, FitsCalibration
from sfumato.encoders.package_weights import WIDTH, sentence_vectors
from sfumato.ids import NUMBERS, plain_text, spelled_numbers
from sfumato.search.languages import AsEnglish, date_words, e5_means, unpacked, words_of
from sfumato.search.stores.protocol import WORDS, Filter, Records, VectorStore, WordStore

TEXT_FIELDS = ("captions", "title", "tags")
"""Payload fields that are texts of an item; captions and tags have one a line."""

WORD_FIELDS = (*TEXT_FIELDS, "name", "place", "ocr")
"""Payload fields whose words are looked up. The words of a file's or folder's name do not say what else it shows."""

FUNCTION_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        "a an and are as at be by for from has have he her his in into is it its of on or over she some that the their"
        " them there they this through to up while who with"
        " image images photo photograph photographs photos picture pictures showing shows",
    )
)
"""Words that say nothing of what is shown."""


def item_texts(payload: Mapping[str, str]) -> list[str]:
    """The texts of an item: each caption, the title, and the tags together."""
    captions = [line for line in payload.get("captions", "").split("\n") if line.strip()]
    others = [payload.get(name, "").replace("\n", ", ") for name in TEXT_FIELDS[1:]]
    return captions + [text for text in others if text.strip()]


def item_words(payload: Mapping[str, str]) -> str:
    """All words of an item; the last three lines are its place, the words of its date, and the text in its pixels."""
    *own, place, written = (payload.get(name, "") for name in WORD_FIELDS)
    last = place, " ".join(date_words(payload.get("date", ""))), written
    return "\n".join([*own, *(line.replace("\n", " ") for line in last)])


def _tokens(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", spelled_numbers(plain_text(text)).casefold())


_MOST_ODD = 8
"""Unknown words above which no spelling is looked for: each is compared with all words."""


def spelling(text: str, there: Callable[[], Mapping[str, int]], known: frozenset[str]) -> str | None:
    """The text with its misspelt words replaced; None without any.

    A word is misspelt if neither the items nor the model know it and a word of the items, else of the model, is one
    edit away; two in a word of seven letters or more, of the items or of the same letters. Words of three letters are
    left alone, and a text of many words that nobody knows.
    """
    odd = [word for word in dict.fromkeys(words_of(text)) if len(word) > 3 and word not in known] if known else []
    odd = odd if len(odd) <= _MOST_ODD else []
    counts = there() if odd else {}
    better = {word: found for word in odd if word not in counts and (found := _nearest_word(word, counts, known))}
    if not better:
        return None
    return re.sub(r"[^\W\d_]+", lambda word: better.get(word[0].lower(), word[0]), text)


def _nearest_word(word: str, *lists: Collection[str]) -> str | None:
    """The nearest word of the first list that has one; None if one has the same stem, so that it is well spelt."""
    from rapidfuzz import process
    from rapidfuzz.distance import OSA

    best = None
    for words in lists:
        most = 2 if len(word) > 6 else 1
        found = process.extract(word, list(words), scorer=OSA.distance, score_cutoff=most, limit=50)
        if not isinstance(words, Mapping):
            found = [one for one in found if one[1] < 2 or sorted(one[0]) == sorted(word)]
        if any(_stem(other) == _stem(word) for other, *_ in found):
            return None
        if found and best is None:
            counts = words if isinstance(words, Mapping) else {}
            best = min(found, key=lambda one: (one[1], one[0][0] != word[0], -counts.get(one[0], 0), one[0]))[0]
    return best


_local = threading.local()


@functools.lru_cache(maxsize=200_000)
def _stem(word: str) -> str:
    if not hasattr(_local, "stemmer"):
        import snowballstemmer

        _local.stemmer = snowballstemmer.stemmer("english")  # It keeps the word that it works on.
    return str(_local.stemmer.stemWord(word))


def stemmed(text: str) -> dict[str, str]:
    """The words of a text by stem, the first of each, without function words unless it has no others."""
    words = _tokens(text)
    found: dict[str, str] = {}
    for word in [word for word in words if word not in FUNCTION_WORDS] or words:
        found.setdefault(_stem(word), word)
    return found


def word_stems(text: str) -> list[str]:
    """The distinct stems of the words of a text, without function words unless it has no others."""
    return list(stemmed(text))


@functools.cache
def _kinds() -> dict[str, str]:
    """By word stem, others that say it. benchmarks/word_kinds.py makes the table from WordNet."""
    return dict(json.loads(files(__package__).joinpath("kinds.json").read_text("utf-8")))


@functools.lru_cache(maxsize=10_000)
def saying(stem: str) -> frozenset[str]:
    """The word stems that say a word stem: itself, others for the same thing, and kinds of it, as a poodle is a dog."""
    return frozenset((stem, *_kinds().get(stem, "").split()))


def says(stems: Collection[str], wanted: Iterable[str]) -> bool:
    """Whether some word stems say all that are wanted."""
    return all(not saying(one).isdisjoint(stems) for one in wanted)


_LABEL = 2
"""Words of a tag or a name at most; longer lines are sentences, in which "red" may belong to another thing."""

_NUMBER, _ZEROS = re.compile(r"\d{3,}"), re.compile(r"(?<!\d)0+(?=\d)")
"""What a query has that may be the name of a file, such as IMG_1039."""

_CLOSE = 3
"""Words that may stand between those of a query, in "a blue and red hat", but not in "a hat by a long red wall"."""


def _says_closely(order: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a few words say all that are wanted, a number before what there are so many of."""
    if not says(order, wanted):
        return False
    counted = [(a, b) for a, b in itertools.pairwise(wanted) if a in NUMBERS[1:]]
    return all(not saying(b).isdisjoint(order[order.index(a) + 1 :]) for a, b in counted)


def is_close(stems: Sequence[str], line: str) -> bool:
    """Whether a line of text says all of some stems close together; "two" stands before its noun."""
    order = [_stem(word) for word in _tokens(line)]
    width = len(stems) + _CLOSE
    if not says(order, stems):
        return False
    return any(_says_closely(order[i : i + width], stems) for i in range(max(1, len(order) - width + 1)))


def are_together(stems: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether a line says all of some stems close together, or labels do: lines of one or two words, such as tags."""
    labels = " ".join(line for line in lines if len(line.split()) <= _LABEL)
    return says(word_stems(labels), stems) or any(is_close(stems, line) for line in lines)


def text_vectors(payloads: Sequence[Mapping[str, str]]) -> np.ndarray:
    """(n, 384) unit vectors, each the mean of the embeddings of an item's texts; zeros for an item without texts."""
    texts = [item_texts(payload) for payload in payloads]
    vectors = np.zeros((len(texts), WIDTH), np.float32)
    owner = [i for i, own in enumerate(texts) for _ in own]
    np.add.at(vectors, owner, sentence_vectors([text for own in texts for text in own]))
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


_LIKENESS = 0.6
"""Mean cosine of two captions of one photograph of Flickr8k."""

_RAREST = math.log(1_000)
"""Largest weight of a word, so that a word that no text has weighs the same in every large gallery."""


@dataclass(frozen=True, eq=False)
class ItemTexts:
    """The texts of n items, in some order."""

    vectors: np.ndarray  # (n, 384) unit vectors; zeros for an item without texts
    words: Sequence[str]  # n times all words of an item
    stems: Sequence[frozenset[str]]  # n sets of their stems
    n_texts: np.ndarray  # (n,) numbers of texts
    files: Sequence[str]  # n times the parts of the name of a file that has a number
    across: Sequence[str]  # n vectors of e5 as they are stored; "" where there is none

    @classmethod
    def of(
        cls,
        vectors: np.ndarray,
        payloads: Sequence[Mapping[str, str]],
        stems: Mapping[int, Iterable[str]] | None = None,
        across: Mapping[int, str] | None = None,
    ) -> "ItemTexts":
        """From their vectors and payloads, and by position the stems and the vectors of e5 that are known."""
        words, known = [item_words(payload) for payload in payloads], stems or {}
        n_texts = np.array([len(item_texts(payload)) for payload in payloads], np.int64)
        own_stems = [frozenset(known.get(i) or word_stems(own)) for i, own in enumerate(words)]
        by_e5 = [(across or {}).get(i, "") for i in range(len(words))]
        return cls(vectors, words, own_stems, n_texts, [payload.get("file", "") for payload in payloads], by_e5)

    @functools.cached_property
    def has_texts(self) -> np.ndarray:
        """(n,) whether an item has texts."""
        return np.asarray(self.vectors.any(axis=1))

    @functools.cached_property
    def by_e5(self) -> np.ndarray:
        """(n, 384) unit vectors of e5; zeros where there is none."""
        return unpacked(self.across)

    @property
    def few(self) -> np.ndarray:
        """(n,) one over the number of texts; 1 without any."""
        return 1 / np.maximum(self.n_texts, 1)

    @property
    def lengths(self) -> np.ndarray:
        """(n,) lengths of the means of the unit vectors of an item's texts, over that of four texts.

        A text is closer to the mean of many texts than to each of them, so that its cosine with the mean grows with
        their number. Times these it is the mean cosine, in units of the constants, which were fitted with four.
        """
        few = np.concatenate([self.few, [1 / 4]])
        length = np.sqrt(few + (1 - few) * _LIKENESS)
        return np.asarray(length[:-1] / length[-1])

    @functools.cached_property
    def _having(self) -> dict[str, list[int]]:
        """By word stem, the items whose texts have it."""
        found: dict[str, list[int]] = {}
        for i, stems in enumerate(self.stems):
            for stem in stems:
                found.setdefault(stem, []).append(i)
        return found

    @functools.cached_property
    def _saying(self) -> Callable[[str], set[int]]:
        """The items whose texts say a word stem."""
        having = self._having  # Without self, so that nothing refers to itself.
        return lambda stem: set[int]().union(*(having.get(one, ()) for one in saying(stem)))

    @functools.cached_property
    def rarity(self) -> Callable[[str], float]:
        """The weight of a word stem: the log of one over the fraction of items whose texts say it."""
        said, n = self._saying, len(self.stems)
        return functools.cache(lambda stem: min(_RAREST, math.log((n + 1) / (len(said(stem)) + 0.5))))

    def take(self, positions: Sequence[int]) -> "ItemTexts":
        """Some of the items."""
        return some_rows(self, list(positions))

    def evidence(
        self,
        queries: Sequence[str],
        vectors: np.ndarray,
        image: np.ndarray,
        prior: np.ndarray,
        rarity: Callable[[str], float] | None = None,
        across: AsEnglish | None = None,
    ) -> Evidence:
        """What the texts say for q queries, or one of another language. vectors (q, 384); image (q, n) logits; prior
        (q,)."""
        cosine, known = vectors @ self.vectors.T, self.has_texts
        if across is not None:  # Of items indexed before, the image speaks alone.
            cosine, known = across.by_e5[: len(queries)] @ self.by_e5.T, known & self.by_e5.any(1)
        agreement = np.where(known, cosine * self.lengths, np.nan)
        stems = [word_stems(query) for query in queries]
        words, missing, together = (np.zeros_like(image) for _ in range(3))
        for i, own in enumerate(stems):
            weight = {stem: (rarity or self.rarity)(stem) for stem in own}
            total = sum(weight.values()) or 1.0
            said = [self._saying(stem) for stem in own]
            for stem, items in zip(own, said, strict=True):
                has = np.zeros(image.shape[1], bool)
                has[list(items)] = True
                words[i] += has * (weight[stem] / total)
                missing[i] = np.maximum(missing[i], ~has * weight[stem])
            both = set.intersection(*said) if said else set[int]()
            near = [j for j in both if len(own) == 1 or are_together(own, self.words[j].splitlines())]
            together[i, near] = 1
            if len(own) > 1:  # What is written in the pixels is a text that says just this.
                agreement[i, [j for j in near if is_close(own, self.words[j].rpartition("\n")[2])]] = 1
            if number := "".join(_NUMBER.findall(queries[i])[-1:]).lstrip("0"):
                name = word_stems(_ZEROS.sub("", queries[i].rpartition("/")[2]))
                there = (j for j, file in enumerate(self.files) if number in file)
                named = [j for j in there if is_close(name, _ZEROS.sub("", self.files[j]))]
                agreement[i, named] = words[i, named] = together[i, named] = 1
                missing[i, named] = 0
        n_words = np.array([max(1.0, len(own)) for own in stems])
        return Evidence(image, agreement, words, together, missing, np.full_like(image, self.few), n_words, prior)

    def without(
        self,
        texts: Sequence[str],
        logit: np.ndarray,
        image: np.ndarray,
        fits: FitsCalibration,
        rarity: Callable[[str], float] | None = None,
    ) -> np.ndarray:
        """Logits that an item fits a query and, by its own texts, none of some other texts. logit, image (n,)."""
        for text in texts:  # What the image says of it is in the distance already.
            neutral, vectors = np.full((1, len(image)), image.mean()), sentence_vectors([text])
            evidence = self.evidence([text], vectors, neutral, fits.query_prior(vectors), rarity)
            both = log_sigmoid(logit) + log_sigmoid(-fits.of(len(word_stems(text))).of_pairs(evidence)[0])
            logit = np.where(evidence.has_texts[0], both - np.log(-np.expm1(both)), logit)
        return logit

    def best_text(self, query: str, payload: Mapping[str, str]) -> str:
        """The text of an item that says most of the query's words, the first of equals; "" without any."""
        own, texts = word_stems(query), item_texts(payload)

        def found(text: str) -> float:
            has = set(word_stems(text))
            return sum(self.rarity(stem) for stem in own if not saying(stem).isdisjoint(has))

        others = [payload.get(field, "").replace("\n", ", ") for field in WORD_FIELDS[3:]]
        best = max([*texts, *others, " ".join(date_words(payload.get("date", "")))], key=found)
        return best if texts or found(best) else ""


_MARK = "sfumatostems4"
"""Stands before the stems: those of earlier versions lack "two" for 2 and the words of dates."""

_LONGEST_STEM, _MOST_LETTERS = 100, 20_000
"""Letters of a stem, and of all stems of an item, that are stored for the search by words."""


def _stored_words(payload: Mapping[str, str]) -> str:
    """The stems of an item's words, for the search by words."""
    stems = [stem for stem in word_stems(item_words(payload)) if len(stem) <= _LONGEST_STEM]
    return " ".join((_MARK, *stems))[:_MOST_LETTERS]


_E5 = "_e5"
"""Payload field of the mean of e5's vectors of the texts, packed."""

_DIGEST = "_texts"
"""Payload field of the digest of the texts that a vector is of."""


def _digest(payload: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(item_texts(payload)).encode(), digest_size=8).hexdigest()


def _all_stems(stored: Mapping[str, str]) -> list[str]:
    """The stems of an item from its record in the store of texts; none where they may be incomplete."""
    words = stored.get(WORDS, "")
    mark, *stems = words.split() or [""]
    return stems if mark == _MARK and len(words) < _MOST_LETTERS else []


class TextStore:
    """The vectors of the texts of a collection's items."""

    def __init__(self, store: VectorStore) -> None:
        self.store = store

    def upsert(self, ids: Sequence[str], payloads: Sequence[Mapping[str, str]]) -> None:
        """Store the vectors of items with texts, and remove those of items that have none now."""
        vectors = text_vectors(payloads)
        some = np.any(vectors, axis=1)
        if gone := [i for i, has in zip(ids, some, strict=True) if not has]:
            self.store.delete(gone)
        if kept := np.flatnonzero(some).tolist():
            own = [payloads[i] for i in kept]
            self.write([ids[i] for i in kept], vectors[kept], e5_means(map(item_texts, own)), own)

    def write(
        self, ids: Sequence[str], vectors: np.ndarray, across: Sequence[str], payloads: Sequence[Mapping[str, str]]
    ) -> None:
        """Store vectors with what searches filter by, and with the words if the store finds them. vectors (n, 384)."""
        kept = [{k: v for k, v in one.items() if k not in WORD_FIELDS or k == "place"} for one in payloads]
        kept = [own | {_DIGEST: _digest(one)} for own, one in zip(kept, payloads, strict=True)]
        kept = [own | ({_E5: by_e5} if by_e5 else {}) for own, by_e5 in zip(kept, across, strict=True)]
        if isinstance(self.store, WordStore):
            kept = [own | {WORDS: _stored_words(one)} for own, one in zip(kept, payloads, strict=True)]
        self.store.upsert(Records(tuple(ids), vectors, np.zeros(len(ids), np.float32), tuple(kept)))

    def vectors_for(
        self, ids: Sequence[str], payloads: Sequence[Mapping[str, str]]
    ) -> tuple[np.ndarray, Sequence[str]]:
        """(n, 384) vectors of these texts, and n of e5, even if a writer has other texts of the items by now: those are
        embedded."""
        vectors, found = np.zeros((len(ids), WIDTH), np.float32), self.store.get(ids)
        across = [""] * len(ids)
        row = {i: k for k, i in enumerate(ids)}
        same = [j for j, i in enumerate(found.ids) if found.payloads[j].get(_DIGEST) == _digest(payloads[row[i]])]
        there = [row[found.ids[j]] for j in same]
        vectors[there] = found.vectors[same]
        for k, j in zip(there, same, strict=True):
            across[k] = found.payloads[j].get(_E5, "")
        lacking = [k for k, by_e5 in enumerate(across) if not by_e5]
        for k, by_e5 in zip(lacking, e5_means(item_texts(payloads[k]) for k in lacking), strict=True):
            across[k] = by_e5
        if others := [k for k in sorted({*range(len(ids))} - {*there}) if item_texts(payloads[k])]:
            vectors[others] = text_vectors([payloads[k] for k in others])
        return vectors, across

    def of(self, ids: Sequence[str], payloads: Sequence[Mapping[str, str]], known: Records | None = None) -> ItemTexts:
        """The texts of some items, of which some records may be known."""
        known = known or Records.none(WIDTH)
        there, stems, across = set(known.ids), dict[int, list[str]](), dict[int, str]()
        with_texts = [i for i, one in zip(ids, payloads, strict=True) if i not in there and item_texts(one)]
        vectors, row = np.zeros((len(ids), WIDTH), np.float32), {i: k for k, i in enumerate(ids)}
        for found in (self.store.get(with_texts), known):
            stored = [j for j, i in enumerate(found.ids) if i in row]
            rows = [row[found.ids[j]] for j in stored]
            vectors[rows] = found.vectors[stored]
            stems |= {k: _all_stems(found.payloads[j]) for k, j in zip(rows, stored, strict=True)}
            across |= {k: found.payloads[j].get(_E5, "") for k, j in zip(rows, stored, strict=True)}
        return ItemTexts.of(vectors, payloads, stems, across)

    def having(self, stems: Sequence[str], c: int, filter: Filter | None) -> list[str]:
        """The ids of c items whose texts say some word stems, if the store finds words: the first of its own order."""
        stems = list(dict.fromkeys(one for stem in stems for one in sorted(saying(stem))))
        return self.store.match_words(stems, c, filter) if stems and isinstance(self.store, WordStore) else []

    def closest(self, vectors: np.ndarray, c: int, filter: Filter | None) -> list[Records]:
        """The c items whose texts agree most with each query. vectors (q, 384)."""
        return self.store.search(vectors, c, filter)
