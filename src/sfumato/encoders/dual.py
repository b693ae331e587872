"""The dual encoder: an image tower and a text tower that meet in one space of Gaussians, and what each of them reads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from sfumato.data.size_augment import drop_tokens
from sfumato.data.transforms import Fit, decode_image
from sfumato.encoders.features import (
    FrozenBackbone,
    Inputs,
    PixelStore,
    RaggedStore,
    Store,
    TokenFeatures,
    cached_features,
)
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.small import tokenize
from sfumato.gaussian import GaussianEmbedding

Item = Callable[[], bytes | str]
"""A function that returns the bytes of an encoded picture, or a text."""

Progress = Callable[[int], None]
"""Called with the number of items just done."""

OnError = Callable[[int, Exception], None]
"""Called with the position and the error of an item that cannot be used."""


class Reader(Protocol):
    """Turns raw items into a store of inputs for a tower."""

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """(inputs of the usable items, (k,) their positions); unusable ones go to on_error, or raise without it."""
        ...


class PixelReader:
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
        """See :class:`Reader`."""
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


class FrozenReader:
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
        """See :class:`Reader`."""
        return cached_features(self.backbone, items, self.cache, progress=progress, on_error=on_error)


class TokenReader:
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
        """See :class:`Reader`."""
        store = RaggedStore.from_list(tokenize(self.tokenizer, [str(item()) for item in items], self.max_tokens))
        if progress:
            progress(len(items))
        return store, np.arange(len(items))


class FeatureInput(nn.Module):
    """What stands below the head of a frozen backbone: nothing but dropout of its features.

    Args:
        channels: c of the features.
        dropout: share of the values dropped while training.
    """

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.channels = channels
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """The features, and their mask."""
        return TokenFeatures(self.dropout(inputs.values), inputs.mask)


class Tower(nn.Module):
    """One side: a reader of raw items, an encoder that gives token features, and a Gaussian head.

    Args:
        reader: raw items -> inputs.
        encoder: Inputs -> TokenFeatures.
        head: the Gaussian head on them.
        token_dropout: rate of SizeAugment, see :func:`~sfumato.data.size_augment.drop_tokens`: while training the head does
            not see some of the tokens.
    """

    def __init__(self, reader: Reader, encoder: nn.Module, head: GaussianHead, *, token_dropout: float = 0.0) -> None:
        super().__init__()
        self.reader, self.encoder, self.head = reader, encoder, head
        self.token_dropout = token_dropout

    def forward(self, inputs: Inputs) -> GaussianEmbedding:
        """(n, ...) inputs -> n embeddings."""
        tokens: TokenFeatures = self.encoder(inputs)
        if self.training and self.token_dropout:
            present = tokens.mask
            if present is None:
                present = torch.ones(tokens.mean.shape[:2], dtype=torch.bool, device=tokens.mean.device)
            tokens = replace(tokens, mask=drop_tokens(present, rate=self.token_dropout))
        with torch.autocast(tokens.mean.device.type, enabled=False):
            embedding: GaussianEmbedding = self.head(tokens.float())
        return embedding

    @torch.no_grad()
    def embed(
        self,
        store: Store,
        positions: np.ndarray | None = None,
        *,
        batch_size: int = 256,
        progress: Progress | None = None,
    ) -> GaussianEmbedding:
        """Embeddings of everything in a store, in order, on the CPU; in evaluation mode, which is left as it was.

        Args:
            store: the inputs; at least one.
            positions: (k,) only those at these positions.
            batch_size: how many at a time.
            progress: called with the number of items just done.

        Raises:
            ValueError: the store is empty.
        """
        positions = np.arange(len(store)) if positions is None else positions
        if len(positions) == 0:
            raise ValueError("Tower.embed: got no items, nothing to embed")
        training, device = self.training, next(self.parameters()).device
        self.eval()
        parts = []
        for start in range(0, len(positions), batch_size):
            index = positions[start : start + batch_size]
            parts.append(self(store.batch(index).to(device)).to("cpu"))
            if progress:
                progress(len(index))
        self.train(training)
        return GaussianEmbedding.cat(parts)


class DualEncoder(nn.Module):
    """Images and texts as Gaussians in one space.

    Args:
        image: the image tower.
        text: the text tower.
    """

    def __init__(self, image: Tower, text: Tower) -> None:
        super().__init__()
        self.image, self.text = image, text

    def forward(self, images: Inputs, texts: Inputs) -> tuple[GaussianEmbedding, GaussianEmbedding]:
        """Both sides of a batch."""
        return self.image(images), self.text(texts)

    def embed_images(self, pictures: Sequence[bytes], *, batch_size: int = 256) -> GaussianEmbedding:
        """Encoded pictures (the bytes of PNG, JPEG ... files) -> (n, d) embeddings; a bad picture raises its ValueError."""
        store, _ = self.image.reader.read([_constant(p) for p in pictures])
        return self.image.embed(store, batch_size=batch_size)

    def embed_texts(self, texts: Sequence[str], *, batch_size: int = 256) -> GaussianEmbedding:
        """Texts -> (n, d) embeddings."""
        if isinstance(texts, str):
            raise TypeError(f"embed_texts: got one string {texts!r}, expected a list of them: [{texts!r}]")
        store, _ = self.text.reader.read([_constant(t) for t in texts])
        return self.text.embed(store, batch_size=batch_size)


def _constant(value: bytes | str) -> Item:
    return lambda: value
