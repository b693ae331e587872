"""The dual encoder: an image tower and a text tower that embed into one space as Gaussians."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data.transforms import drop_tokens
from sfumato.encoders.encoder_protocol import Encoder, Inputs, Item, Processor, Progress, Store
from sfumato.encoders.heads import GaussianHead
from sfumato.gaussian import GaussianEmbedding

Pieces = Callable[[Sequence[str]], list[int]]
"""Words -> the number of subword pieces of each."""

_QUERIES = 256
"""Number of texts that are embedded without the cache of frozen features: it would keep what people search for."""


class Tower(nn.Module):
    """One side of a model: a processor of raw items, an encoder and a Gaussian head."""

    def __init__(
        self, processor: Processor, encoder: Encoder, head: GaussianHead, *, token_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.processor, self.encoder, self.head = processor, encoder, head
        self.token_dropout = token_dropout

    @property
    def device(self) -> torch.device:
        """The device of its weights; the CPU if it has none."""
        return self.new_zeros(0).device

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros on the device of the weights, in their dtype; without weights in float32 on the CPU."""
        weights = itertools.chain(self.parameters(), self.buffers())
        return next(weights, torch.empty(0)).new_zeros(shape)

    def forward(self, inputs: Inputs) -> GaussianEmbedding:
        """Embed a batch. Returns (n, d)."""
        tokens = self.encoder(inputs)
        if self.training and self.token_dropout:
            present = tokens.mask
            if present is None:
                present = torch.ones(tokens.mean.shape[:2], dtype=torch.bool, device=tokens.mean.device)
            tokens = replace(tokens, mask=drop_tokens(present, rate=self.token_dropout))
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
        """Embed the items of a store in evaluation mode; the previous mode is restored afterwards.

        positions (k,) -> (n, d).
        """
        positions = np.arange(len(store)) if positions is None else positions
        if len(positions) == 0:
            raise ValueError("Tower.embed: got no items, nothing to embed")
        training, device = self.training, self.device
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
        """Embed both sides of a batch.

        Args:
            images: n images.
            texts: m texts.

        Returns:
            (n, d) embeddings of the images and (m, d) embeddings of the texts.
        """
        return self.image(images), self.text(texts)

    def embed_images(self, images: Sequence[bytes], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed images.

        Args:
            images: the bytes of n image files (PNG, JPEG ...).
            batch_size: number of images at a time.

        Returns:
            (n, d) embeddings on the CPU. A damaged file raises a ValueError.
        """
        store, _ = self.image.processor.read([_constant(image) for image in images])
        return self.image.embed(store, batch_size=batch_size)

    def embed_texts(self, texts: Sequence[str] | Sequence[bytes], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed texts.

        Args:
            texts: n texts; of a model that reads embeddings the bytes of n .npy files.
            batch_size: number of texts at a time.

        Returns:
            (n, d) embeddings on the CPU.

        Raises:
            TypeError: texts is a single string.
        """
        if isinstance(texts, str):
            raise TypeError(f"embed_texts: got one string {texts!r}, expected a list of them: [{texts!r}]")
        processor = self.text.processor
        if 0 < len(texts) <= _QUERIES:
            store = processor.stack([processor.prepare(text) for text in texts])
        else:
            store, _ = processor.read([_constant(text) for text in texts])
        return self.text.embed(store, batch_size=batch_size)


def _constant(value: bytes | str) -> Item:
    return lambda: value


def piece_counter(model: DualEncoder) -> Pieces | None:
    """The function that counts the subword pieces of words as the text side of a model does."""
    processor = model.text.processor
    counter: Pieces | None = getattr(getattr(processor, "backbone", processor), "pieces", None)
    return counter
