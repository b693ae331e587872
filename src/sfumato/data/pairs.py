"""Pairs of images and texts: what matches what, and how a batch is drawn. Pixels and tokens are elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, get_args

import numpy as np

from sfumato.data.images import ImageSource
from sfumato.metrics.relevance import Relevance


@dataclass(frozen=True, eq=False)
class PairData:
    """A split: n images, m texts, and which of them match.

    Attributes:
        image_ids: n distinct ids.
        images: n sources.
        text_ids: m distinct ids; texts with one id are one text.
        texts: m strings.
        text_kinds: m kinds, "caption" for ordinary data.
        pairs: (p, 2) int64 (image index, text index), one for each match; sorted, each once.
        groups: (n,) int64; images of the same thing (one concept in two drawing styles) share a group. Default: each
            its own.

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

    def __post_init__(self) -> None:
        n, m = len(self.image_ids), len(self.text_ids)
        if len(self.images) != n or len(self.texts) != m or len(self.text_kinds) != m:
            raise ValueError(
                f"PairData: got {n} image ids for {len(self.images)} images, and {m} text ids for"
                f" {len(self.texts)} texts and"
                f" {len(self.text_kinds)} kinds; they must be as many"
            )
        for what, ids in (("image", self.image_ids), ("text", self.text_ids)):
            if len(set(ids)) != len(ids):
                seen: set[str] = set()
                twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
                raise ValueError(f"PairData: {what} id {twice!r} occurs more than once; ids must be distinct")
        pairs = np.unique(np.asarray(self.pairs, dtype=np.int64).reshape(-1, 2), axis=0)
        if len(pairs) and (pairs.min() < 0 or pairs[:, 0].max() >= n or pairs[:, 1].max() >= m):
            raise ValueError(f"PairData: a pair points outside of {n} images and {m} texts")
        groups = np.asarray(self.groups, dtype=np.int64) if len(self.groups) else np.arange(n)
        if len(groups) != n:
            raise ValueError(f"PairData: got {len(groups)} groups for {n} images")
        object.__setattr__(self, "pairs", pairs)
        object.__setattr__(self, "groups", groups)

    @cached_property
    def _keys(self) -> np.ndarray:
        """(p,) sorted keys of the pairs, for look-up."""
        keys: np.ndarray = self.pairs[:, 0] * len(self.text_ids) + self.pairs[:, 1]
        return keys

    def relevance(self) -> Relevance:
        """The matches as a relevance.

        Returns:
            (n, m): image -> its matching texts.
        """
        return Relevance.from_pairs(
            self.pairs[:, 0], self.pairs[:, 1], n_queries=len(self.image_ids), n_gallery=len(self.text_ids)
        )

    def match(self, image_index: np.ndarray, text_index: np.ndarray) -> np.ndarray:
        """The labels of all pairs of some images and texts.

        Args:
            image_index: (b,) positions of images.
            text_index: (c,) positions of texts.

        Returns:
            (b, c) float32, 1 where the data lists the pair, else 0.
        """
        if not len(self._keys):
            return np.zeros((len(image_index), len(text_index)), np.float32)
        keys = image_index[:, None] * len(self.text_ids) + text_index
        position = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        found: np.ndarray = (self._keys[position] == keys).astype(np.float32)
        return found

    def keep_images(self, index: np.ndarray) -> "PairData":
        """The split with some of its images only, and the texts that match one of them.

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
        return PairData(
            tuple(self.image_ids[i] for i in index),
            tuple(self.images[i] for i in index),
            tuple(self.text_ids[i] for i in texts),
            tuple(self.texts[i] for i in texts),
            tuple(self.text_kinds[i] for i in texts),
            np.stack([pairs[:, 0], renumbered], axis=1),
            self.groups[index],
        )


@dataclass(frozen=True, eq=False)
class PairBatch:
    """b pairs, and the labels of all pairs among their images and texts.

    Attributes:
        image_index: (b,) positions of the images.
        text_index: (b,) positions of their texts.
        labels: (r,) image and (c,) text positions within the batch -> (r, c) float32 labels.
    """

    image_index: np.ndarray
    text_index: np.ndarray
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

EpochOver = Literal["images", "pairs"]
Positives = Literal["listed", "sampled"]


class PairSampler:
    """Draws the batches of an epoch, the same for the same seed and epoch.

    Args:
        data: the split.
        batch_size: pairs in a batch; a last batch of one is left out, a larger uneven one is kept.
        seed: of everything random.
        epoch_over: "images": each image once, with one of its texts at random; "pairs": every pair once.
        positives: "listed": every pair of the batch that the data lists is a match, so that several captions of one
            image are positives of each other's image, and a shared tag matches all images that carry it. "sampled":
            only texts drawn for an image of the same group, as in data where nobody listed the other matches.
        kind_weights: relative frequency of each kind of text, uniform within a kind, for epoch_over "images"; kinds
            left out are never drawn. None draws uniformly from an image's texts.
        grades: (r,) image and (c,) text positions -> (r, c) in [0, 1], how much of a match an unlisted pair is; half of
            it, below 1/2, becomes its label, see :class:`~sfumato.data.grading.Grades`. None: 0.

    Raises:
        ValueError: an option is unknown, a batch has fewer than two pairs, or there is nothing to draw.
    """

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
        for name, value, known in (("epoch_over", epoch_over, EpochOver), ("positives", positives, Positives)):
            if value not in get_args(known):
                raise ValueError(f"PairSampler: unknown {name} {value!r}; known: {', '.join(get_args(known))}")
        if batch_size < 2:
            raise ValueError(
                f"PairSampler: batch_size must be at least 2, got {batch_size}; a batch of one has no non-matches"
            )
        if len(data.pairs) < 2:
            raise ValueError(f"PairSampler: the data has {len(data.pairs)} pairs; at least 2 are needed to train")
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.epoch_over, self.positives, self.grades = epoch_over, positives, grades
        if kind_weights is not None and epoch_over == "pairs":
            raise ValueError(
                'PairSampler: kind_weights have no meaning with epoch_over="pairs", which draws every pair once'
            )
        self._starts = np.searchsorted(data.pairs[:, 0], np.arange(len(data.image_ids) + 1))
        weights = np.ones(len(data.pairs)) if kind_weights is None else self._pair_weights(kind_weights)
        self._cumulated = np.concatenate([[0.0], np.cumsum(weights)])
        drawn = self._cumulated[self._starts[1:]] > self._cumulated[self._starts[:-1]]
        self._drawn_images = np.flatnonzero(drawn)
        if len(self._drawn_images) < 2:
            raise ValueError("PairSampler: fewer than two images have a text of a kind with a positive weight")

    def __len__(self) -> int:
        total = len(self._drawn_images) if self.epoch_over == "images" else len(self.data.pairs)
        full, rest = divmod(total, self.batch_size)
        return full + (rest >= 2)

    def batches(self, epoch: int) -> Iterator[PairBatch]:
        """The batches of an epoch.

        Args:
            epoch: number of the epoch, from 0.

        Yields:
            The batches.
        """
        random = np.random.default_rng([self.seed, epoch])
        if self.epoch_over == "images":
            images = random.permutation(self._drawn_images)
            low, high = self._cumulated[self._starts[images]], self._cumulated[self._starts[images + 1]]
            # Rounding up to `high` would land on the next image's first pair.
            drawn = np.minimum(low + random.random(len(images)) * (high - low), np.nextafter(high, low))
            position = np.searchsorted(self._cumulated, drawn, side="right") - 1
            texts = self.data.pairs[position, 1]
        else:
            images, texts = self.data.pairs[random.permutation(len(self.data.pairs))].T
        for i in range(len(self)):
            part = slice(i * self.batch_size, (i + 1) * self.batch_size)
            yield PairBatch(images[part], texts[part], partial(self._labels, images[part], texts[part]))

    def _labels(self, images: np.ndarray, texts: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Of a batch (images and texts, b each) the labels at some rows and columns."""
        labels = self._matches(images, texts, rows, columns)
        if self.grades is None:
            return labels
        graded: np.ndarray = np.maximum(labels, np.minimum(self.grades(images[rows], texts[columns]) / 2, _BELOW_HALF))
        return graded

    def _matches(self, images: np.ndarray, texts: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        if self.positives == "listed":
            return self.data.match(images[rows], texts[columns])
        # A text matches the groups of all draws of the same text.
        groups, count = self.data.groups[images], len(self.data.text_ids)
        drawn = np.unique(groups * count + texts)
        keys = groups[rows][:, None] * count + texts[columns]
        return np.isin(keys, drawn).astype(np.float32)

    def _pair_weights(self, kind_weights: dict[str, float]) -> np.ndarray:
        kinds = np.array(self.data.text_kinds)
        unknown = set(kind_weights) - set(self.data.text_kinds)
        if unknown:
            raise ValueError(
                f"PairSampler: kind_weights names {sorted(unknown)}, but the texts are of the kinds"
                f" {sorted(set(self.data.text_kinds))}"
            )
        if not all(0 <= w < np.inf for w in kind_weights.values()):
            raise ValueError(f"PairSampler: kind_weights must be finite and not negative, got {kind_weights}")
        weight = np.array([kind_weights.get(kind, 0.0) for kind in kinds])[self.data.pairs[:, 1]]
        # An image's texts of one kind share that kind's weight.
        kind_number = np.unique(kinds, return_inverse=True)[1][self.data.pairs[:, 1]]
        key = self.data.pairs[:, 0] * (kind_number.max() + 1) + kind_number
        _, which, counts = np.unique(key, return_inverse=True, return_counts=True)
        shared: np.ndarray = weight / counts[which]
        return shared


def make_pair_data(
    image_ids: Sequence[str],
    images: Sequence[ImageSource],
    captions: Sequence[Sequence[str]],
    caption_ids: Sequence[Sequence[str]] | None = None,
) -> PairData:
    """Data of n images with captions of their own.

    Args:
        image_ids: n distinct ids.
        images: n sources.
        captions: the texts of each image.
        caption_ids: their ids; "imageid#0", "imageid#1" ... if None.

    Returns:
        A split in which each image matches its own captions.
    """
    if caption_ids is None:
        caption_ids = [[f"{i}#{k}" for k in range(len(c))] for i, c in zip(image_ids, captions, strict=True)]
    counts = np.array([len(c) for c in captions], dtype=np.int64)
    texts = tuple(t for c in captions for t in c)
    pairs = np.stack([np.repeat(np.arange(len(captions)), counts), np.arange(len(texts))], axis=1)
    return PairData(
        tuple(image_ids),
        tuple(images),
        tuple(i for c in caption_ids for i in c),
        texts,
        ("caption",) * len(texts),
        pairs,
    )
