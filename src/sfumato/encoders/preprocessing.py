"""What published models do to a text or a picture before their first layer, where it differs from our own."""

import html
import io
import string
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.nn import functional

from sfumato.data.transforms import decode_image
from sfumato.encoders.dual import Item, OnError, Progress
from sfumato.encoders.features import RaggedStore, Store
from sfumato.encoders.pictures import PictureReader
from sfumato.errors import UserError


def single_spaces(text: str) -> str:
    """HTML entities as characters, twice for those that were escaped twice, and single spaces.

    The released tokenizers also repair broken encodings with ftfy; here such texts stay as they are.
    """
    return " ".join(html.unescape(html.unescape(text)).split())


def lower(text: str) -> str:
    """What :func:`single_spaces` gives, in lower case."""
    return single_spaces(text).lower()


def canonicalize(text: str) -> str:
    """Lower case without ASCII punctuation ("_" is a space): how ProLIP's training cleaned its texts."""
    return lower(single_spaces(text).replace("_", " ").translate(str.maketrans("", "", string.punctuation)))


CLEANINGS: dict[str, Callable[[str], str]] = {
    "whitespace": single_spaces,
    "lower": lower,
    "canonicalize": canonicalize,
}
"""By the names that configurations of open_clip models use."""


class SpecialTokenReader:
    """Texts as the ids that a pre-trained text transformer knows, with its begin and end tokens.

    Args:
        find: returns the tokenizer; called with the first text, so that pictures can be embedded without it.
        vocabulary: number of tokens of the model; a tokenizer with more, or with less than half as many, belongs to another.
        max_tokens: longest text, with its begin and end; a longer one loses its last words, never its end token.
        begin, end: special tokens around a text; no begin token if "".
        pad_to_max: fill every text up to max_tokens with the end token, all of it in the mask.
        clean: applied to each text first.
    """

    def __init__(
        self,
        find: Callable[[], Tokenizer],
        *,
        vocabulary: int,
        max_tokens: int,
        begin: str,
        end: str,
        pad_to_max: bool,
        clean: Callable[[str], str],
    ) -> None:
        self.find, self.clean = find, clean
        self.vocabulary, self.max_tokens, self.pad_to_max = vocabulary, max_tokens, pad_to_max
        self.begin, self.end = begin, end
        self._tokenizer: Tokenizer | None = None

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.dual.Reader`.

        Raises:
            UserError: the tokenizer cannot be had, or belongs to another model.
        """
        if self._tokenizer is None:
            self._tokenizer = self._own(self.find())
        begin = [_id(self._tokenizer, self.begin)] if self.begin else []
        end = _id(self._tokenizer, self.end)
        ids = []
        texts = [self.clean(str(item())) for item in items]
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            # A text that spells the end token out ends there: the models look at the first one.
            words = encoding.ids[: encoding.ids.index(end)] if end in encoding.ids else encoding.ids
            text = [*begin, *words[: self.max_tokens - len(begin) - 1], end]
            ids.append(text + [end] * (self.max_tokens - len(text)) if self.pad_to_max else text)
        if progress:
            progress(len(items))
        return RaggedStore.from_list(ids), np.arange(len(items))

    def _own(self, tokenizer: Tokenizer) -> Tokenizer:
        """A copy that neither pads nor cuts, of the right tokenizer."""
        size, known = tokenizer.get_vocab_size(), tokenizer.get_vocab()
        missing = [token for token in (self.begin, self.end) if token and token not in known]
        if missing or not self.vocabulary / 2 <= size <= self.vocabulary:
            without = f", none of them {missing[0]!r}" if missing else ""
            raise UserError(
                f"the tokenizer has {size} tokens{without}; the model expects {self.vocabulary}. Give the tokenizer.json that"
                " belongs to it"
            )
        own = Tokenizer.from_str(tokenizer.to_str())
        own.no_padding()
        own.no_truncation()
        return own


def _id(tokenizer: Tokenizer, token: str) -> int:
    return tokenizer.get_vocab()[token]


class BilinearReader:
    """Pictures as PCME++'s training code resizes them: to a square whatever their aspect, bilinearly without smoothing.

    Args:
        size: side in pixels.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._squares = PictureReader(size)

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.dual.Reader`."""
        return self._squares.read([self._square(item) for item in items], progress=progress, on_error=on_error)

    def _square(self, item: Item) -> Item:
        """The picture at its final size, in a format that loses nothing."""

        def read() -> bytes:
            data = item()
            pixels = torch.from_numpy(decode_image(data if isinstance(data, bytes) else data.encode(), None)).float()
            square = functional.interpolate(pixels[None], size=(self.size, self.size), mode="bilinear")[0]
            buffer = io.BytesIO()
            Image.fromarray(square.round().byte().permute(1, 2, 0).numpy()).save(buffer, "BMP")
            return buffer.getvalue()

        return read
