"""Processors: from images and texts as they come to batches of encoder inputs."""

import html
import io
import os
import string
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.nn import functional

from sfumato.data.transforms import Fit, check_fit, check_image, decode_image, random_crop_box
from sfumato.encoders.features import FrozenBackbone, Inputs, PixelStore, RaggedStore, Store, cached_features
from sfumato.encoders.small import tokenize
from sfumato.errors import UserError

Item = Callable[[], bytes | str]
"""A function that returns the bytes of an encoded picture, or a text."""

Progress = Callable[[int], None]
"""Called with the number of items just done."""

OnError = Callable[[int, Exception], None]
"""Called with the position and the error of an item that cannot be used."""


class Processor(Protocol):
    """Turns raw items into a store of inputs for a tower."""

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """(inputs of the usable items, (k,) their positions); unusable ones go to on_error, or raise without it."""
        ...


class PixelProcessor:
    """Decodes pictures to squares of one size.

    Args:
        size: side in pixels.
        fit: "squash" or "crop", see :func:`~sfumato.data.transforms.decode_image`.
    """

    def __init__(self, size: int, *, fit: Fit = "squash") -> None:
        self.size, self.fit = size, fit

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`Processor`."""
        pixels = np.empty((len(items), 3, self.size, self.size), np.uint8)
        errors: dict[int, Exception] = {}

        def decode(position: int) -> None:
            try:
                data = items[position]()
                encoded = data if isinstance(data, bytes) else data.encode()
                pixels[position] = decode_image(encoded, self.size, fit=self.fit)
            except (ValueError, OSError) as error:
                errors[position] = error

        with ThreadPoolExecutor() as pool:
            for _ in pool.map(decode, range(len(items))):
                if progress:
                    progress(1)
        for position in sorted(errors):
            if on_error is None:
                raise errors[position]
            on_error(position, errors[position])
        kept = np.array([i for i in range(len(items)) if i not in errors], dtype=np.int64)
        return PixelStore(torch.from_numpy(pixels if not errors else pixels[kept])), kept


class FrozenProcessor:
    """Token features of a frozen backbone, through the cache on disk.

    Args:
        backbone: computes them.
        cache: folder of the caches.
    """

    def __init__(self, backbone: FrozenBackbone, cache: str | Path) -> None:
        self.backbone, self.cache = backbone, cache

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`Processor`."""
        return cached_features(self.backbone, items, self.cache, progress=progress, on_error=on_error)


class TokenProcessor:
    """Word pieces of texts.

    Args:
        tokenizer: as trained with the model. One that adds begin and end tokens cuts long texts itself, so as to keep them; one
            for an encoder that looks at padding pads them itself.
        max_tokens: longer texts are cut.

    Attributes:
        special: how many tokens at the beginning and at the end of each text are not words.
        mask_id: the piece that stands for a hidden word: the tokenizer's own, an unknown word, or "m" as in PCME++'s code.
        forbidden: ids that are no words.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        empty = tokenizer.encode("")
        around = [i for i, present in zip(empty.ids, empty.attention_mask, strict=True) if present]
        self.special = len(around) // 2, len(around) - len(around) // 2
        known = (tokenizer.token_to_id(piece) for piece in ("[MASK]", "<mask>", "[UNK]", "m</w>", "<unk>"))
        self.mask_id = next((i for i in known if i is not None), 0)
        self.forbidden = tuple(sorted({self.mask_id, *around}))

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`Processor`."""
        store = RaggedStore.from_list(tokenize(self.tokenizer, [str(item()) for item in items], self.max_tokens))
        if progress:
            progress(len(items))
        return store, np.arange(len(items))


_CHECKED_TOGETHER = 512


class ImageFileStore:
    """Encoded pictures, decoded batch by batch; only the batch is in memory.

    Args:
        items: for each picture, a function that returns its bytes; called from several threads, every time it is needed.
        size: side of the square pictures in pixels.
        fit: how a picture becomes a square outside of training; see :func:`sfumato.data.transforms.decode_image`.
        crop_low: smallest share of either side that a training crop keeps.
        workers: threads that decode; None for as many as this process has processors.

    Raises:
        ValueError: size or workers are less than 1, fit is unknown, or crop_low is not in (0, 1].
    """

    def __init__(
        self,
        items: Sequence[Item],
        size: int,
        *,
        fit: Fit = "squash",
        crop_low: float = 0.6,
        workers: int | None = None,
    ) -> None:
        check_fit(fit)
        workers = processors() if workers is None else workers
        for name, value in (("size", size), ("workers", workers)):
            if value < 1:
                raise ValueError(f"ImageFileStore: {name} must be at least 1, got {value}")
        if not 0 < crop_low <= 1:
            raise ValueError(f"ImageFileStore: crop_low must be in (0, 1], got {crop_low}")
        self.items, self.size, self.fit, self.crop_low, self.workers = items, size, fit, crop_low, workers

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: np.ndarray) -> Inputs:
        """The pictures at (n,) positions, as evaluation sees them.

        Returns:
            (n, 3, size, size) uint8 pixels.

        Raises:
            OSError: a picture can no longer be read or decoded; the message names its position.
        """
        return self._decoded(index, lambda place, data: decode_image(data, self.size, fit=self.fit))

    def training_batch(self, index: np.ndarray, seed_key: Sequence[int]) -> Inputs:
        """The pictures at (n,) positions with the random geometry of PCME++'s training.

        Each is cut to a part of it (:func:`sfumato.data.transforms.random_crop_box`), resized to the square whatever its aspect,
        and mirrored with probability 1/2.

        Args:
            index: (n,) positions.
            seed_key: what the batch's randomness depends on, e.g. (seed, epoch, step, rank), none negative. The picture at
                place i of the batch draws from ``numpy.random.default_rng([*seed_key, i])``.

        Returns:
            (n, 3, size, size) uint8 pixels.

        Raises:
            OSError: a picture can no longer be read or decoded; the message names its position.

        Source: https://github.com/naver-ai/pcmepp, which resizes bilinearly; here it is bicubic, as in evaluation.
        """

        randoms = [np.random.default_rng([*seed_key, place]) for place in range(len(index))]

        def decode(place: int, data: bytes) -> np.ndarray:
            pixels = decode_image(data, self.size, crop=random_crop_box(randoms[place], self.crop_low))
            return pixels[:, :, ::-1] if randoms[place].random() < 0.5 else pixels

        return self._decoded(index, decode)

    def _decoded(self, index: np.ndarray, decode: Callable[[int, bytes], np.ndarray]) -> Inputs:
        """decode(place in the batch, bytes) of every picture, in threads."""
        pixels = np.empty((len(index), 3, self.size, self.size), np.uint8)

        def fill(place: int) -> None:
            position = int(index[place])
            try:
                pixels[place] = decode(place, _bytes(self.items[position]))
            except (ValueError, OSError) as error:
                raise OSError(
                    f"the picture at position {position} can no longer be read: {error}. It could when the data were checked;"
                    " has the file changed, or its disk gone?"
                ) from error

        with ThreadPoolExecutor(self.workers) as pool:
            for _ in pool.map(fill, range(len(index))):
                pass
        return Inputs(torch.from_numpy(pixels))


class ImageFileProcessor:
    """Checks pictures once and leaves them where they are, to be decoded batch by batch.

    Args:
        size: side of the square pictures in pixels.
        fit: how a picture becomes a square; see :func:`sfumato.data.transforms.decode_image`.
        crop_low: smallest share of either side that a training crop keeps.
        workers: threads that check and decode; None for as many as this process has processors.

    Raises:
        ValueError: as :class:`ImageFileStore`.
    """

    def __init__(self, size: int, *, fit: Fit = "squash", crop_low: float = 0.6, workers: int | None = None) -> None:
        store = ImageFileStore(
            [], size, fit=fit, crop_low=crop_low, workers=workers
        )  # Refuses what makes no sense, now.
        self.size, self.fit, self.crop_low, self.workers = size, fit, crop_low, store.workers

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[ImageFileStore, np.ndarray]:
        """See :class:`sfumato.encoders.processors.Processor`; every file is read once, and no picture is kept."""

        def check(position: int) -> Exception | None:
            try:
                check_image(_bytes(items[position]))
            except (ValueError, OSError) as error:
                return error
            return None

        kept: list[int] = []
        with ThreadPoolExecutor(self.workers) as pool:
            # In parts: the pool would hold a task for each of millions.
            for start in range(0, len(items), _CHECKED_TOGETHER):
                part = range(start, min(start + _CHECKED_TOGETHER, len(items)))
                for position, error in zip(part, pool.map(check, part), strict=True):
                    if error is None:
                        kept.append(position)
                    elif on_error is None:
                        raise error
                    else:
                        on_error(position, error)
                    if progress:
                        progress(1)
        store = ImageFileStore(
            [items[i] for i in kept], self.size, fit=self.fit, crop_low=self.crop_low, workers=self.workers
        )
        return store, np.array(kept, dtype=np.int64)


def _bytes(item: Item) -> bytes:
    data = item()
    return data if isinstance(data, bytes) else data.encode()


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


class SpecialTokenProcessor:
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
        """See :class:`~sfumato.encoders.processors.Processor`.

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


class BilinearProcessor:
    """Pictures as PCME++'s training code resizes them: to a square whatever their aspect, bilinearly without smoothing.

    Args:
        size: side in pixels.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._squares = ImageFileProcessor(size)

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.processors.Processor`."""
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
