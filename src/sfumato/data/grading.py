"""Labels between 0 and 1 for pairs that nobody listed: how much a text shares with what is said of an image."""

import re
from collections import Counter

import numpy as np

from sfumato.data.pairs import PairData

_WORD = re.compile(r"\w\w+")


class Grades:
    """TF-IDF cosines between texts and the texts of images.

    Words are what ``\\w\\w+`` finds in the lower-case text; a word in k of n texts weighs its count times ln((1 + n) /
    (1 + k)) + 1; a text's weights have unit length. A text without a word is like no other.

    Args:
        data: whose texts count.
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
        self._images = _Rows(
            np.concatenate([[0], ends]), self._texts.word[entry], self._texts.weight[entry] / n_texts[image[of_pair]]
        )

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
        grades: np.ndarray = (of_images @ of_texts.T).clip(max=1).astype(np.float32)
        return grades


class _Rows:
    """Sparse rows, one after the other: starts (n + 1,), word and weight (total,)."""

    def __init__(self, starts: np.ndarray, word: np.ndarray, weight: np.ndarray) -> None:
        self.starts, self.word, self.weight = starts, word, weight

    def take(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(k,) rows -> (t,) which of them, and (t,) entry, of all their entries."""
        counts = self.starts[index + 1] - self.starts[index]
        which = np.repeat(np.arange(len(index)), counts)
        entry: np.ndarray = np.arange(len(which)) + np.repeat(self.starts[index] - (np.cumsum(counts) - counts), counts)
        return which, entry
