"""Processors: images are decoded once or batch by batch; texts become token ids by a tokenizer learnt from the data.

Features that another model has computed are rows of files, which stay on disk.
"""

import html
import string
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from sfumato.data.feature_tables import EmbeddingRow, EmbeddingTable
from sfumato.data.image_decoding import Fit, check_image, decode_image
from sfumato.data.image_inputs import regions_from_bytes, regions_to_bytes
from sfumato.encoders import encoder_protocol as protocol
from sfumato.encoders.encoder_protocol import Inputs, Item, OnError, PixelStore, Progress, RaggedStore, Read
from sfumato.errors import UserError
from sfumato.files import available_cores

T = TypeVar("T")
R = TypeVar("R")


def in_threads(
    items: Iterable[T], work: Callable[[T], R], workers: int, *, ahead: int
) -> Generator[tuple[T, R], None, None]:
    """Yield (item, its result) in order; at most ``ahead`` items are started in advance."""
    begun: deque[tuple[T, Future[R]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    try:
        for item in items:
            begun.append((item, pool.submit(work, item)))
            if len(begun) >= ahead:
                first, future = begun.popleft()
                yield first, future.result()
        while begun:
            first, future = begun.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class PixelProcessor(protocol.Processor):
    """Decodes images to squares of one size, once, and keeps the pixels in memory."""

    def __init__(self, size: int, *, fit: Fit = "squash") -> None:
        self.size, self.fit = size, fit

    def prepare(self, data: bytes | str) -> np.ndarray:
        return decode_image(_bytes(data), self.size, fit=self.fit)

    def stack(self, values: Sequence[np.ndarray]) -> PixelStore:
        return PixelStore(np.stack(values))

    def read(self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None) -> Read:
        pixels = np.empty((len(items), 3, self.size, self.size), np.uint8)

        def decode(position: int, item: Item) -> None:
            pixels[position] = self.prepare(item())

        kept = protocol.usable(items, decode, progress=progress, on_error=on_error, workers=None)
        return PixelStore(pixels if len(kept) == len(items) else pixels[kept]), kept


def _bytes(data: bytes | str) -> bytes:
    return data if isinstance(data, bytes) else data.encode()


@dataclass(frozen=True)
class ImageFileStore:
    """Image files, decoded batch by batch; only the batch is in memory."""

    items: Sequence[Item]
    size: int
    decode: Callable[[bytes], np.ndarray]  # (3, size, size) pixels without random changes
    workers: int = field(default_factory=available_cores)

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: np.ndarray) -> Inputs:
        """The images at some positions, without random changes. index (n,) -> (n, 3, size, size)."""
        return self._decoded(index, lambda _, data: self.decode(data))

    def training_batch(self, index: np.ndarray, seed_key: Sequence[int], *, resized_crop: bool = False) -> Inputs:
        """The images at some positions with the random geometry of PCME++'s training.

        Each image is cut to a random box (:func:`sfumato.data.transforms.random_crop_box`), resized to the square
        without keeping its aspect ratio, and mirrored with probability 1/2.

        Source: https://github.com/naver-ai/pcmepp, which resizes bilinearly; here it is bicubic, as in evaluation.

        index (n,) -> (n, 3, size, size).
        """
        from sfumato.data.transforms import random_crop_box, resized_crop_box  # Training alone imports torch.

        generators = [np.random.default_rng([*seed_key, i]) for i in range(len(index))]

        def decode(i: int, data: bytes) -> np.ndarray:
            random = generators[i]
            box = partial(resized_crop_box, random) if resized_crop else random_crop_box(random)
            pixels = decode_image(data, self.size, crop=box)
            return pixels[:, :, ::-1] if generators[i].random() < 0.5 else pixels

        return self._decoded(index, decode)

    def _decoded(self, index: np.ndarray, decode: Callable[[int, bytes], np.ndarray]) -> Inputs:
        """decode(number in the batch, bytes) of every image, in threads."""
        pixels = np.empty((len(index), 3, self.size, self.size), np.uint8)

        def fill(i: int) -> None:
            position = int(index[i])
            try:
                pixels[i] = decode(i, _bytes(self.items[position]()))
            except (ValueError, OSError) as error:
                reason = f"the image at position {position} can no longer be read: {error}"
                way = "Check that the file is unchanged and that its disk is mounted"
                raise OSError(f"{reason}. It was readable when the data were checked. {way}") from error

        with ThreadPoolExecutor(self.workers) as pool:
            for _ in pool.map(fill, range(len(index))):
                pass
        return Inputs(pixels)


class ImageFileProcessor(PixelProcessor):
    """Checks image files once and leaves them on disk; each batch is decoded when it is needed."""

    def read(self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None) -> Read:
        """Every file is read once; no pixels are kept."""

        def check(_: int, item: Item) -> None:
            check_image(_bytes(item()))

        workers = available_cores()
        kept = protocol.usable(items, check, progress=progress, on_error=on_error, workers=workers)
        return ImageFileStore([items[i] for i in kept], self.size, self.prepare, workers), kept


class BilinearProcessor(ImageFileProcessor):
    """Images resized as in PCME++'s training code: to a square, bilinearly, without smoothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def prepare(self, data: bytes | str) -> np.ndarray:
        import torch

        values = torch.from_numpy(decode_image(_bytes(data), None)).float()[None]
        square = torch.nn.functional.interpolate(values, size=(self.size, self.size), mode="bilinear")[0]
        return square.round().byte().numpy()


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn subword tokens: lower case, without accents, split at spaces and punctuation.

    The tokens are all single characters, then the most frequent words, then the most frequent word endings. An unseen
    word is split into known tokens, if necessary into characters. The same texts always give the same tokens. (The
    trainers of the library ``tokenizers`` break ties at random: two equal runs would differ.)
    """
    tokenizer = splitting_at_words(Tokenizer(models.WordPiece(unk_token="[UNK]")))
    words = count_words(tokenizer, texts)
    endings: Counter[str] = Counter()
    for word, count in words.items():
        endings.update({f"##{word[i:]}": count for i in range(1, len(word))})
    letters = sorted({letter for word in words for letter in word})
    tokens = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    if len(tokens) > vocabulary:
        found = f"{len(tokens)} single characters do not fit into a vocabulary of {vocabulary} tokens"
        raise ValueError(f"train_tokenizer: {found}; raise model.text.vocabulary")
    for counts in (words, endings):
        usual = (token for token in counts if counts[token] > 1 or counts is words)
        tokens += sorted(usual, key=lambda t: (-counts[t], t))[: vocabulary - len(tokens)]
    tokenizer.model = models.WordPiece({t: i for i, t in enumerate(dict.fromkeys(tokens))}, unk_token="[UNK]")
    return tokenizer


def splitting_at_words(tokenizer: Tokenizer) -> Tokenizer:
    """Make a tokenizer read lower case without accents, split at spaces and punctuation."""
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def count_words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """Count the words of some texts."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(w for w, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)))
    return words


def add_begin_and_end(tokenizer: Tokenizer, max_tokens: int) -> Tokenizer:
    """Make a tokenizer put a begin and an end token around every text."""
    tokenizer.add_special_tokens(["[BOS]", "[EOS]"])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[BOS]", "[EOS]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=ends)
    tokenizer.enable_truncation(max_tokens)
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of texts."""
    return [encoding.ids[:max_tokens] or [0] for encoding in tokenizer.encode_batch(list(texts))]


MASK_TOKENS = ("[MASK]", "<mask>", "[UNK]", "M", "<unk>")
"""Tokens that stand for a hidden word, the first that a tokenizer has. The fourth is for CLIP's tokenizer alone, as in
PCME++'s code: the capital letter within a word, id 44, which no text has after it was lower-cased."""


def _mask_id(tokenizer: Tokenizer) -> int | None:
    """The id of the first of MASK_TOKENS that a tokenizer has."""
    lowers = tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("M") == "m"
    clip = lowers and tokenizer.token_to_id("M</w>") is not None
    known = (tokenizer.token_to_id(token) for token in MASK_TOKENS if token != "M" or clip)
    return next((i for i in known if i is not None), None)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Number of the ids of a tokenizer, for a table of embeddings."""
    size, known = tokenizer.get_vocab_size(), tokenizer.get_vocab()
    token = max(known, key=known.__getitem__, default="")
    if known.get(token, -1) >= size:
        found = f"of its {size} tokens, {token[:40]!r} has the id {known[token]}"
        raise UserError(f"the tokenizer is damaged: {found}; copy the folder of the model again")
    return size


class TextProcessor(protocol.Processor):
    """Base class of processors of texts."""

    def prepare(self, data: bytes | str) -> str:
        return str(data)

    def read(self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None) -> Read:
        store = self.stack([str(item()) for item in items])
        if progress:
            progress(len(items))
        return store, np.arange(len(items))


class TokenProcessor(TextProcessor):
    """Texts as the ids of their subword tokens."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        empty = tokenizer.encode("")
        around = [i for i, present in zip(empty.ids, empty.attention_mask, strict=True) if present]
        self.special = len(around) // 2, len(around) - len(around) // 2
        self.mask_id = _mask_id(tokenizer)
        self.forbidden = tuple(sorted({*around} if self.mask_id is None else {self.mask_id, *around}))

    def stack(self, values: Sequence[str]) -> RaggedStore:
        return RaggedStore.from_list(tokenize(self.tokenizer, values, self.max_tokens))

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword pieces of each word; a letter that the tokenizer does not have is a piece."""
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        result = []
        for word in words:
            found = self.tokenizer.encode(word, add_special_tokens=False)
            known = [of for token, of in zip(found.tokens, found.offsets, strict=True) if token != unknown]
            result.append(len(known) + max(0, len(word) - sum(end - start for start, end in known)))
        return result


def single_spaces(text: str) -> str:
    """Replace HTML entities (also those escaped twice) by characters, and white space by single spaces.

    The released tokenizers also repair broken encodings with ftfy; here such texts are not changed.
    """
    return " ".join(html.unescape(html.unescape(text)).split())


def lower(text: str) -> str:
    """:func:`single_spaces` in lower case."""
    return single_spaces(text).lower()


def canonicalize(text: str) -> str:
    """Clean a text as in ProLIP's training: lower case without ASCII punctuation, with "_" as a space."""
    return lower(single_spaces(text).replace("_", " ").translate(str.maketrans("", "", string.punctuation)))


CLEANINGS: dict[str, Callable[[str], str]] = {"whitespace": single_spaces, "lower": lower, "canonicalize": canonicalize}
"""Cleaning functions by the names that configurations of open_clip models use."""


@dataclass(eq=False, repr=False, kw_only=True)
class SpecialTokenProcessor(TextProcessor):
    """Texts as the token ids of a pre-trained text transformer, with its begin and end tokens."""

    find: Callable[[], Tokenizer]
    vocabulary: int
    max_tokens: int
    begin: str  # "" for none
    end: str
    pad_to_max: bool
    clean: Callable[[str], str]
    _tokenizer: Tokenizer | None = field(default=None, init=False)

    def stack(self, values: Sequence[str]) -> RaggedStore:
        if self._tokenizer is None:
            self._tokenizer = self._own(self.find())
        begin = [_id(self._tokenizer, self.begin)] if self.begin else []
        end = _id(self._tokenizer, self.end)
        ids = []
        for encoding in self._tokenizer.encode_batch([self.clean(text) for text in values], add_special_tokens=False):
            # A text that contains the end token ends there, because the models use the first end token.
            words = encoding.ids[: encoding.ids.index(end)] if end in encoding.ids else encoding.ids
            text = [*begin, *words[: self.max_tokens - len(begin) - 1], end]
            ids.append(text + [end] * (self.max_tokens - len(text)) if self.pad_to_max else text)
        return RaggedStore.from_list(ids)

    def _own(self, tokenizer: Tokenizer) -> Tokenizer:
        """A copy of the tokenizer that neither pads nor truncates; a UserError if it belongs to another model."""
        size, known = tokenizer.get_vocab_size(), tokenizer.get_vocab()
        missing = [token for token in (self.begin, self.end) if token and token not in known]
        if missing or not self.vocabulary / 2 <= size <= self.vocabulary:
            without = f", none of them {missing[0]!r}" if missing else ""
            found = f"the tokenizer has {size} tokens{without}; the model expects {self.vocabulary}"
            raise UserError(f"{found}. Give the tokenizer.json that belongs to it")
        own = Tokenizer.from_str(tokenizer.to_str())
        own.no_padding()
        own.no_truncation()
        return own


def _id(tokenizer: Tokenizer, token: str) -> int:
    return tokenizer.get_vocab()[token]


class FeatureProcessor(protocol.Processor):
    """Base of the processors whose items are .npy files of features instead of images or texts."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def prepare(self, data: bytes | str) -> np.ndarray:
        """Read an item. Returns (r, c)."""
        return regions_from_bytes(data if isinstance(data, bytes) else data.encode(), self.channels)

    def stack(self, values: Sequence[np.ndarray]) -> RaggedStore:
        return RaggedStore.from_features(values, self.channels)

    def blank(self) -> bytes:
        return regions_to_bytes(np.ones((1, self.channels), np.float32))


class EmbeddingStore:
    """Rows of a table that stays on disk: a batch reads only its own rows."""

    def __init__(self, table: EmbeddingTable, index: np.ndarray) -> None:
        self.table, self.index = table, index

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, index: np.ndarray) -> Inputs:
        """One token an item, (n, 1, c) and no mask."""
        return Inputs(self.table.rows(self.index[index])[:, None])


class EmbeddingProcessor(FeatureProcessor):
    """Leaves the rows of a table on disk; other items are the bytes of .npy files of one vector each."""

    reads: ClassVar[str] = "embeddings"

    def read(self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None) -> Read:
        rows = [item for item in items if isinstance(item, EmbeddingRow)]
        if rows and len(rows) == len(items) and all(item.table is rows[0].table for item in rows):
            table = rows[0].table
            if table.channels != self.channels:
                raise UserError(f"{table.name}: has {table.channels} channels, and this model reads {self.channels}")
            if progress:
                progress(len(items))
            return EmbeddingStore(table, np.array([item.row for item in rows], np.int64)), np.arange(len(items))
        return super().read(items, progress=progress, on_error=on_error)

    def prepare(self, data: bytes | str) -> np.ndarray:
        """One vector for each image."""
        if isinstance(data, str):
            found = f"this model reads embeddings and has no encoder for {data[:40]!r}"
            ways = "or search by an item that is there (`sfumato search INDEX --id ID`)"
            raise UserError(f"{found}: give a .npy file of {self.channels} numbers, {ways}")
        values = regions_from_bytes(data)
        if values.shape != (1, self.channels):
            n, channels = values.shape
            raise ValueError(f"holds {n} x {channels} numbers; this model reads one embedding of {self.channels}")
        if not values.any():
            raise ValueError("holds zeros alone; give an embedding")
        return values
