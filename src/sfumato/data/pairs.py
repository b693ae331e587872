"""Pairs of images and texts: matches, graded labels, parts for cross-fitting, and the sampling of batches."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from sfumato.data.feature_tables import EmbeddingRow
from sfumato.data.images import ImageSource
from sfumato.ids import first_twice
from sfumato.metrics.relevance import Relevance


@dataclass(frozen=True, eq=False)
class PairData:
    """A split: n images, m texts, and which of them match.

    Attributes:
        image_ids: n distinct ids.
        images: n sources.
        text_ids: m distinct ids; texts with one id are one text.
        texts: m strings.
        text_kinds: m kinds of the texts, "caption" for ordinary data.
        pairs: (p, 2) int64 (image index, text index), one for each match; sorted, each once.
        groups: (n,) int64; images of the same concept (in two drawing styles, for example) have one group. By default
            each image has its own group.
        text_rows: m embeddings that the text encoder reads instead of the strings; empty if it reads the strings.

    Raises:
        ValueError: lengths do not fit, an id occurs twice, or a pair points outside.
    """

    image_ids: tuple[str, ...]
    images: tuple[ImageSource, ...]
    text_ids: tuple[str, ...]
    texts: tuple[str, ...]
    text_kinds: tuple[str, ...]
    pairs: np.ndarray
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    text_rows: tuple[EmbeddingRow, ...] = ()

    def __post_init__(self) -> None:
        n, m = len(self.image_ids), len(self.text_ids)
        if len(self.images) != n or len(self.texts) != m or len(self.text_kinds) != m:
            images = f"{n} image ids for {len(self.images)} images"
            texts = f"{m} text ids for {len(self.texts)} texts and {len(self.text_kinds)} kinds"
            raise ValueError(f"PairData: got {images}, and {texts}; the numbers must be equal")
        if len(self.text_rows) not in (0, m):
            raise ValueError(f"PairData: got {len(self.text_rows)} text rows for {m} texts; give one for each or none")
        for what, ids in (("image", self.image_ids), ("text", self.text_ids)):
            if (twice := first_twice(ids)) is not None:
                raise ValueError(f"PairData: {what} id {twice!r} occurs more than once; ids must be distinct")
        pairs = np.unique(np.asarray(self.pairs, dtype=np.int64).reshape(-1, 2), axis=0)
        if len(pairs) and (pairs.min() < 0 or pairs[:, 0].max() >= n or pairs[:, 1].max() >= m):
            raise ValueError(f"PairData: a pair points outside of {n} images and {m} texts")
        groups = np.asarray(self.groups, dtype=np.int64) if len(self.groups) else np.arange(n)
        if len(groups) != n:
            raise ValueError(f"PairData: got {len(groups)} groups for {n} images")
        object.__setattr__(self, "pairs", pairs)
        object.__setattr__(self, "groups", groups)

    def __repr__(self) -> str:
        return f"PairData({len(self.image_ids)} images, {len(self.text_ids)} texts, {len(self.pairs)} matches)"

    @cached_property
    def _keys(self) -> np.ndarray:
        """(p,) sorted keys of the pairs, for look-up."""
        return np.asarray(self.pairs[:, 0] * len(self.text_ids) + self.pairs[:, 1])

    def relevance(self) -> Relevance:
        """The matches as a relevance.

        Returns:
            (n, m): image -> its matching texts.
        """
        n, m = len(self.image_ids), len(self.text_ids)
        return Relevance.from_pairs(self.pairs[:, 0], self.pairs[:, 1], n_queries=n, n_gallery=m)

    def match(self, image_index: np.ndarray, text_index: np.ndarray) -> np.ndarray:
        """The labels of all pairs of some images and texts.

        Args:
            image_index: (b,) positions of images.
            text_index: (c,) positions of texts.

        Returns:
            (b, c) float32, 1 where the data lists the pair, else 0.
        """
        found = np.zeros((len(image_index), len(text_index)), np.float32)
        order = np.argsort(text_index, kind="stable")
        ascending, m = text_index[order], len(self.text_ids)
        start, end = (np.searchsorted(self._keys, (image_index + k) * m) for k in (0, 1))
        row = np.repeat(np.arange(len(image_index)), end - start)
        texts = self._keys[np.arange(len(row)) + np.repeat(end - np.cumsum(end - start), end - start)] % m
        # A text may stand in several columns.
        first, last = (np.searchsorted(ascending, texts, side=side) for side in ("left", "right"))
        times = last - first
        column = np.arange(times.sum()) + np.repeat(last - np.cumsum(times), times)
        found[np.repeat(row, times), order[column]] = 1
        return found

    def keep_images(self, index: np.ndarray) -> "PairData":
        """A split with only some of the images, and the texts that match one of them.

        Args:
            index: (k,) positions of images, in the new order.

        Returns:
            A split of k images.
        """
        index = np.asarray(index, dtype=np.int64)
        position = np.full(len(self.image_ids), -1)
        position[index] = np.arange(len(index))
        pairs = np.stack([position[self.pairs[:, 0]], self.pairs[:, 1]], axis=1)
        pairs = pairs[pairs[:, 0] >= 0]
        texts, renumbered = np.unique(pairs[:, 1], return_inverse=True)
        chosen = {name: tuple(getattr(self, name)[i] for i in index) for name in ("image_ids", "images")}
        chosen |= self.text_fields(texts)
        return PairData(**chosen, pairs=np.stack([pairs[:, 0], renumbered], axis=1), groups=self.groups[index])

    def text_fields(self, index: np.ndarray) -> dict[str, Any]:
        """What is known of some texts, by the names of the fields.

        Args:
            index: (k,) positions of texts.

        Returns:
            The fields of k texts.
        """
        fields = {name: getattr(self, name) for name in ("text_ids", "texts", "text_kinds", "text_rows")}
        return {name: tuple(values[i] for i in index) if values else () for name, values in fields.items()}

    def keep_texts(self, kept: np.ndarray) -> "PairData":
        """A split with all of the images and only some of the texts; an image may have none.

        Args:
            kept: (m,) bool.

        Returns:
            A split of n images.
        """
        return replace(self, pairs=self.pairs[kept[self.pairs[:, 1]]]).keep_images(np.arange(len(self.image_ids)))


@dataclass(frozen=True, eq=False)
class PairBatch:
    """b pairs, and the labels of all pairs among their images and texts."""

    image_index: np.ndarray  # (b,) positions of the images
    text_index: np.ndarray  # (b,) positions of their texts
    labels: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def __len__(self) -> int:
        return len(self.image_index)

    @property
    def match(self) -> np.ndarray:
        """(b, b) float32 labels, rows are images."""
        everything = np.arange(len(self))
        return self.labels(everything, everything)


_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""No grade makes a match: from 1/2 on a label does."""

EpochOver = Literal["images", "pairs", "groups"]
EqualTexts = Literal["merged", "separate"]
Positives = Literal["listed", "sampled"]


class PairSampler:
    """Samples the batches of an epoch, the same for the same seed and epoch."""

    def __init__(
        self,
        data: PairData,
        batch_size: int,
        seed: int,
        *,
        epoch_over: EpochOver = "images",
        positives: Positives = "listed",
        kind_weights: dict[str, float] | None = None,
        grades: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        if len(data.pairs) < 2:
            raise ValueError(f"PairSampler: the data has {len(data.pairs)} pairs; at least 2 are needed to train")
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.epoch_over, self.positives, self.grades = epoch_over, positives, grades
        if kind_weights is not None and epoch_over == "pairs":
            why = 'epoch_over="pairs", which visits every pair once; leave them out'
            raise ValueError(f"PairSampler: kind_weights have no effect with {why}")
        self._starts = np.searchsorted(data.pairs[:, 0], np.arange(len(data.image_ids) + 1))
        weights = np.ones(len(data.pairs)) if kind_weights is None else self._pair_weights(kind_weights)
        self._cumulated = np.concatenate([[0.0], np.cumsum(weights)])
        drawn = self._cumulated[self._starts[1:]] > self._cumulated[self._starts[:-1]]
        self._drawn_images = np.flatnonzero(drawn)
        if len(self._drawn_images) < 2:
            raise ValueError("PairSampler: fewer than two images have a text of a kind with a positive weight")
        groups = data.groups[self._drawn_images]
        self._by_group = self._drawn_images[groups.argsort(kind="stable")]
        self._group_starts = np.unique(np.sort(groups), return_index=True)[1]
        if epoch_over == "groups" and len(self._group_starts) < 2:
            raise ValueError('PairSampler: epoch_over="groups" needs at least two groups of images, the data has one')

    def __len__(self) -> int:
        if self.epoch_over == "groups":
            return max(1, len(self.data.texts) // min(self.batch_size, len(self._group_starts)))
        total = len(self._drawn_images) if self.epoch_over == "images" else len(self.data.pairs)
        return min(math.ceil(total / self.batch_size), total // 2)

    def batches(self, epoch: int) -> Iterator[PairBatch]:
        """The batches of an epoch, of nearly equal sizes: the large gradient of a few pairs can ruin a training."""
        random = np.random.default_rng([self.seed, epoch])
        if self.epoch_over == "pairs":
            images, texts = self.data.pairs[random.permutation(len(self.data.pairs))].T
        else:
            if self.epoch_over == "images":
                images = random.permutation(self._drawn_images)
            else:
                size = min(self.batch_size, len(self._group_starts))
                images = np.concatenate([self._one_of_each_group(random, size) for _ in range(len(self))])
            texts = self._some_texts(images, random)
        for of, own in zip(np.array_split(images, len(self)), np.array_split(texts, len(self)), strict=True):
            yield PairBatch(of, own, partial(self._labels, of, own))

    def _some_texts(self, images: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """One text of each image at random, by the weights of the pairs."""
        low, high = self._cumulated[self._starts[images]], self._cumulated[self._starts[images + 1]]
        # Rounding up to `high` would land on the next image's first pair.
        drawn = np.minimum(low + random.random(len(images)) * (high - low), np.nextafter(high, low))
        return np.asarray(self.data.pairs[np.searchsorted(self._cumulated, drawn, side="right") - 1, 1])

    def _one_of_each_group(self, random: np.random.Generator, size: int) -> np.ndarray:
        """One image of each of some groups at random."""
        groups = random.permutation(len(self._group_starts))[:size]
        ends = np.append(self._group_starts[1:], len(self._by_group))
        return self._by_group[random.integers(self._group_starts[groups], ends[groups])]

    def _labels(self, images: np.ndarray, texts: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Of a batch (images and texts, b each) the labels at some rows and columns."""
        labels = self._matches(images, texts, rows, columns)
        if self.grades is None:
            return labels
        return np.asarray(np.maximum(labels, np.minimum(self.grades(images[rows], texts[columns]) / 2, _BELOW_HALF)))

    def _matches(self, images: np.ndarray, texts: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        if self.positives == "listed":
            return self.data.match(images[rows], texts[columns])
        # A text matches the groups of all samples of the same text.
        groups, count = self.data.groups[images], len(self.data.text_ids)
        keys = groups[rows][:, None] * count + texts[columns]
        return np.isin(keys, np.unique(groups * count + texts)).astype(np.float32)

    def _pair_weights(self, kind_weights: dict[str, float]) -> np.ndarray:
        kinds = np.array(self.data.text_kinds)
        if unknown := set(kind_weights) - set(self.data.text_kinds):
            known = f"the texts are of the kinds {sorted(set(self.data.text_kinds))}"
            raise ValueError(f"PairSampler: kind_weights names {sorted(unknown)}, but {known}")
        weight = np.array([kind_weights.get(kind, 0.0) for kind in kinds])[self.data.pairs[:, 1]]
        # The weight of a kind is divided among an image's texts of this kind.
        kind_number = np.unique(kinds, return_inverse=True)[1][self.data.pairs[:, 1]]
        key = self.data.pairs[:, 0] * (kind_number.max() + 1) + kind_number
        _, which, counts = np.unique(key, return_inverse=True, return_counts=True)
        return np.asarray(weight / counts[which])


@dataclass(frozen=True)
class SourceItem:
    """What a source yields: an image with its texts. What is read from its file (EXIF, say) would be added here."""

    id: str  # id of the image
    image: ImageSource
    texts: tuple[tuple[str, str], ...]  # (id, text) of each; texts with one id are one text; "": an id of the image's
    split: str = ""  # name of its split; "" if the data does not say
    location: str = ""  # where it stands, for messages
    group: int | None = None  # of the images of its concept; None: it has one of its own


def make_splits(items: Iterable[SourceItem]) -> dict[str, PairData]:
    """The one assembler of what sources yield."""
    found: dict[str, list[SourceItem]] = {}
    for item in items:
        found.setdefault(item.split, []).append(item)
    return {split: _split_of(own) for split, own in found.items()}


def make_pair_data(image_ids: Sequence[str], images: Sequence[ImageSource], texts: Sequence[Sequence[str]]) -> PairData:
    """A split of n images, each with its own captions."""
    items = zip(image_ids, images, texts, strict=True)
    return _split_of([SourceItem(i, image, tuple(("", text) for text in own)) for i, image, own in items])


def _split_of(items: Sequence[SourceItem]) -> PairData:
    ids = [i or f"{item.id}#{k}" for item in items for k, (i, _) in enumerate(item.texts)]
    texts: dict[str, str] = {}
    for identity, (_, text) in zip(ids, itertools.chain.from_iterable(item.texts for item in items), strict=True):
        texts.setdefault(identity, text)
    number = dict(zip(texts, range(len(texts)), strict=True))
    image = np.repeat(np.arange(len(items)), [len(item.texts) for item in items])
    pairs = np.stack([image, np.fromiter(map(number.__getitem__, ids), np.int64, len(ids))], axis=1)
    groups = np.array([item.group for item in items if item.group is not None], np.int64)
    images = tuple(item.id for item in items), tuple(item.image for item in items)
    return PairData(*images, tuple(texts), tuple(texts.values()), ("caption",) * len(texts), pairs, groups)


def normal_wording(text: str) -> str:
    """A text in lower case with single spaces: two texts with the same result are equally worded."""
    return " ".join(text.lower().split())


_WORD = re.compile(r"\w\w+")


class Grades:
    """TF-IDF cosines between texts and the texts of images.

    Words are what ``\\w\\w+`` finds in the lower-case text; a word in k of n texts weighs its count times ln((1 + n) /
    (1 + k)) + 1; the weight vector of a text has unit length. A text without a word has similarity 0 to every text.
    """

    def __init__(self, data: PairData) -> None:
        words = [Counter(_WORD.findall(text.lower())) for text in data.texts]
        texts_of = Counter(word for counts in words for word in counts)
        number = {word: i for i, word in enumerate(texts_of)}
        rarity = np.log((1 + len(words)) / (1 + np.fromiter(texts_of.values(), float, len(texts_of)))) + 1
        lengths = np.array([len(counts) for counts in words], dtype=np.int64)
        word = np.array([number[w] for counts in words for w in counts], dtype=np.int64)
        weight = np.array([k for counts in words for k in counts.values()], dtype=float) * rarity[word]
        norms = np.sqrt(np.bincount(np.repeat(np.arange(len(words)), lengths), weight**2, len(words)))
        weight /= np.repeat(norms, lengths)
        self._n_words = len(number)
        self._texts = _Rows(np.concatenate([[0], np.cumsum(lengths)]), word, weight)
        # An image's row is the mean of its texts' rows.
        image, text = data.pairs.T
        n_texts = np.bincount(image, minlength=len(data.image_ids))
        of_pair, entry = self._texts.take(text)
        ends = np.cumsum(np.bincount(image[of_pair], minlength=len(data.image_ids)))
        weight = self._texts.weight[entry] / n_texts[image[of_pair]]
        self._images = _Rows(np.concatenate([[0], ends]), self._texts.word[entry], weight)

    def __call__(self, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """(r,) and (c,) positions -> (r, c) float32 in [0, 1], the mean cosine of each text with each image's texts."""
        row, entry = self._texts.take(texts)
        used, column = np.unique(self._texts.word[entry], return_inverse=True)
        of_texts = np.zeros((len(texts), len(used)))
        of_texts[row, column] = self._texts.weight[entry]
        column_of_word = np.full(self._n_words, -1)
        column_of_word[used] = np.arange(len(used))
        row, entry = self._images.take(images)
        column = column_of_word[self._images.word[entry]]
        seen = column >= 0
        of_images = np.zeros((len(images), len(used)))
        np.add.at(of_images, (row[seen], column[seen]), self._images.weight[entry[seen]])
        return (of_images @ of_texts.T).clip(max=1).astype(np.float32)


class _Rows:
    """Sparse rows in one array: starts (n + 1,), word and weight (total,)."""

    def __init__(self, starts: np.ndarray, word: np.ndarray, weight: np.ndarray) -> None:
        self.starts, self.word, self.weight = starts, word, weight

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(k,) rows -> for all their t entries, (t,) position of the row among the k and (t,) position of the entry."""
        counts = self.starts[index + 1] - self.starts[index]
        which = np.repeat(np.arange(len(index)), counts)
        entry: np.ndarray = np.arange(len(which)) + np.repeat(self.starts[index] - (np.cumsum(counts) - counts), counts)
        return which, entry
