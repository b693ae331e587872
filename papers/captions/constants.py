"""The probability that a person would say that a text describes an item, given the item's texts, its image, or both.

It is a caption metric: one pair, without a gallery. Three logistic functions belong to it, for items with texts, with
an image, and with both. Each reads a few numbers of the pair, :class:`CaptionEvidence`.

Two texts agree by the cosine of their sentence embeddings, and by that of their content: the part of the embeddings in
which captions of one image agree and captions of different images differ. It is a linear discriminant analysis of
captions.

The constants lie in caption_fits.json and caption_axes.npy. They were fitted once, on people's verdicts (Hodosh, Young
and Hockenmaier 2013, Flickr8k). papers/benchmarks/caption_metric.py fits them and says how well they agree with people.
"""

import functools
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from sfumato.calibration.logits import LinearLogit

TEXT_FEATURES = ("first", "first of content", "words", "number of words", "one over number of texts")
"""What the logits read of an item with texts, beside the mean cosine, or beside the logit of the image and it."""

_LEAST, _MOST, _COMMON = 0.3, 5.0, -4.0
"""Smallest and largest weight of a word, and the log frequency of common words."""

_READ = 0.65
"""Fraction of a text's letters that the encoder has to read; 99 of 100 captions have more."""


def word_weight(log_frequency: np.ndarray) -> np.ndarray:
    """The weight of words by the log of the fraction of images that they fit."""
    return np.clip(_COMMON - log_frequency, _LEAST, _MOST)


def grouped(cosine: Tensor, pair: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(n,) mean and largest cosine of each pair; nan for a pair without texts. cosine (t,), pair (t,) of each text."""
    count = torch.zeros(n, dtype=cosine.dtype).index_add_(0, pair, torch.ones_like(cosine))
    mean = torch.zeros(n, dtype=cosine.dtype).index_add_(0, pair, cosine) / count
    largest = torch.full((n,), torch.nan, dtype=cosine.dtype)
    return mean, largest.scatter_reduce_(0, pair, cosine, "amax", include_self=False)


@dataclass(frozen=True, eq=False)
class CaptionEvidence:
    """What is known of n pairs of a text and an item."""

    mean: Tensor  # (n,) mean cosine of the text with the item's texts; nan for an item without texts
    first: Tensor  # (n,) largest of these cosines
    content: Tensor  # (n,) largest cosine of content
    words: Tensor  # (n,) fraction of the text's words that the item's texts have, by weight
    n_words: Tensor  # (n,) number of the text's words
    n_texts: Tensor  # (n,) number of the item's texts
    image: Tensor  # (n,) logit that a random pair at their distance is listed; nan for an item without an image
    read: Tensor  # (n,) fraction of the text's letters in words that the encoder reads

    def discounted(self, usual: float) -> "CaptionEvidence":
        """Without what the encoder says of a text that it does not read. usual: logit of the image of a random pair."""
        known = (self.read / _READ).clamp(max=1)
        image = usual + known * (self.image - usual)
        return CaptionEvidence(**(vars(self) | {
            "mean": known * self.mean, "first": known * self.first, "content": known * self.content, "image": image,
        }))  # fmt: skip

    def features(self) -> Tensor:
        """(n, 7) the logit of the image, the mean cosine, and TEXT_FEATURES."""
        columns = (self.image, self.mean, self.first, self.content, self.words, self.n_words, 1 / self.n_texts)
        return torch.stack([column.double() for column in columns], dim=1)


def columns_of(features: Tensor, kind: str) -> Tensor:
    """The columns that the logit of an item with "texts", with an "image" or with "both" reads. features (n, 7)."""
    return {"texts": features[:, 1:], "image": features[:, :1], "both": features}[kind]


@dataclass(frozen=True, eq=False)
class CaptionFits:
    """The constants of the caption metric. :meth:`packaged` has those that come with the package."""

    texts: LinearLogit  # of the mean cosine and TEXT_FEATURES
    image: LinearLogit  # of the logit of the image
    both: LinearLogit  # of the logit of the image, the mean cosine and TEXT_FEATURES
    usual: float  # logit of the image of a random pair
    axes: Tensor  # (385, c) from a sentence embedding to its content; the last row is a constant

    @classmethod
    @functools.cache
    def packaged(cls) -> "CaptionFits":
        """The constants of the package."""
        folder = files(__package__)
        axes = torch.from_numpy(np.load(io.BytesIO(folder.joinpath("caption_axes.npy").read_bytes())))
        return cls.from_json(json.loads(folder.joinpath("caption_fits.json").read_text("utf-8")), axes)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], axes: Tensor) -> "CaptionFits":
        """Make them from plain values and axes (385, c)."""
        n = len(TEXT_FEATURES)
        logits = {name: LinearLogit.from_json(values[name]) for name in ("texts", "image", "both")}
        sizes = {"texts": n, "image": 0, "both": n + 1}
        if not all(logits[name].is_sound(size) for name, size in sizes.items()) or not axes.isfinite().all():
            raise ValueError("the constants of the caption metric are damaged")
        return cls(**logits, usual=float(values["usual"]), axes=axes.float())

    def to_json(self) -> dict[str, Any]:
        """The constants as plain values, without the axes."""
        return {name: asdict(getattr(self, name)) for name in ("texts", "image", "both")} | {"usual": self.usual}

    def content(self, vectors: Tensor) -> Tensor:
        """(n, c) unit vectors of the content of sentences. vectors (n, 384)."""
        return normalize(vectors @ self.axes[:-1] + self.axes[-1], dim=1)

    def logit(self, evidence: CaptionEvidence) -> Tensor:
        """(n,) logits that a person would say that the texts describe the items; nan without texts and image."""
        features = evidence.discounted(self.usual).features()
        has_image, has_texts = ~features[:, 0].isnan(), ~features[:, 1].isnan()
        found = torch.full((len(features),), torch.nan, dtype=torch.float64)
        for kind, rows in {
            "texts": has_texts & ~has_image, "image": has_image & ~has_texts, "both": has_texts & has_image,
        }.items():  # fmt: skip
            of: LinearLogit = getattr(self, kind)
            x = columns_of(features[rows], kind).numpy()
            found[rows] = torch.from_numpy(of.of(x[:, 0], x[:, 1:]))
        return found
