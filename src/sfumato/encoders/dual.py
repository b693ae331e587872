"""The dual encoder: an image tower and a text tower that meet in one space of Gaussians, and what each of them reads."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from sfumato.data.augment import drop_tokens
from sfumato.encoders.features import Inputs, Store, TokenFeatures
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.processors import Item, Processor, Progress
from sfumato.gaussian import GaussianEmbedding


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
        processor: raw items -> inputs.
        encoder: Inputs -> TokenFeatures.
        head: the Gaussian head on them.
        token_dropout: rate of SizeAugment, see :func:`~sfumato.data.augment.drop_tokens`: while training the head does
            not see some of the tokens.
    """

    def __init__(
        self, processor: Processor, encoder: nn.Module, head: GaussianHead, *, token_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.processor, self.encoder, self.head = processor, encoder, head
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
        store, _ = self.image.processor.read([_constant(p) for p in pictures])
        return self.image.embed(store, batch_size=batch_size)

    def embed_texts(self, texts: Sequence[str], *, batch_size: int = 256) -> GaussianEmbedding:
        """Texts -> (n, d) embeddings."""
        if isinstance(texts, str):
            raise TypeError(f"embed_texts: got one string {texts!r}, expected a list of them: [{texts!r}]")
        store, _ = self.text.processor.read([_constant(t) for t in texts])
        return self.text.embed(store, batch_size=batch_size)


def _constant(value: bytes | str) -> Item:
    return lambda: value
