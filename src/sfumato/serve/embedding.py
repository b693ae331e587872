"""Texts and pictures to Gaussians, many at a time, in the one thread that owns the model."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from sfumato.encoders.dual import DualEncoder, FrozenReader, Tower
from sfumato.encoders.features import RaggedStore, Store
from sfumato.gaussian import GaussianEmbedding
from sfumato.serve.batching import Batcher, Closed, Full
from sfumato.serve.metrics import Metrics
from sfumato.serve.problems import busy
from sfumato.serve.settings import Settings

Asked = TypeVar("Asked")
Found = TypeVar("Found")

Embedded = list[GaussianEmbedding | BaseException]
"""One embedding, or what is wrong, for each item."""


class Embedder:
    """The model behind two queues, one for texts and one for pictures.

    Args:
        model: in evaluation mode; nobody else may use it meanwhile.
        settings: sizes of batches and queues.
        metrics: told of every batch.
    """

    def __init__(self, model: DualEncoder, settings: Settings, metrics: Metrics) -> None:
        self.model = model
        self._thread = ThreadPoolExecutor(1, "model", torch.set_num_threads, (settings.threads,))
        self.texts: Batcher[str, GaussianEmbedding] = Batcher(
            self._embed_texts, self._thread, size=settings.batch_size, window=settings.batch_window,
            waiting=settings.max_waiting, observe=metrics.batch("text"),
        )  # fmt: skip
        self.pictures: Batcher[bytes, GaussianEmbedding] = Batcher(
            self._embed_pictures, self._thread, size=settings.batch_size, window=settings.batch_window,
            waiting=settings.max_waiting, observe=metrics.batch("image"),
        )  # fmt: skip

    def start(self) -> None:
        """Begin to work, in a running event loop."""
        self.texts.start()
        self.pictures.start()

    async def close(self) -> None:
        """Stop; what waits fails."""
        await self.texts.close()
        await self.pictures.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def embed_texts(self, texts: Sequence[str]) -> Embedded:
        """(1, d) of each.

        Raises:
            Refusal: 503, the queue is full.
        """
        return await submitted(self.texts, texts)

    async def embed_pictures(self, pictures: Sequence[bytes]) -> Embedded:
        """(1, d) of each file, or a ValueError in its place if it cannot be decoded.

        Raises:
            Refusal: 503, the queue is full.
        """
        return await submitted(self.pictures, pictures)

    def _embed_texts(self, texts: list[str]) -> list[GaussianEmbedding | Exception]:
        return _rows(self.model.embed_texts(texts))

    def _embed_pictures(self, pictures: list[bytes]) -> list[GaussianEmbedding | Exception]:
        errors: dict[int, Exception] = {}
        store = _read(self.model.image, pictures, errors)
        rows = iter(_rows(self.model.image.embed(store)) if len(store) else ())
        return [errors[i] if i in errors else next(rows) for i in range(len(pictures))]


def _read(tower: Tower, pictures: list[bytes], errors: dict[int, Exception]) -> Store:
    if isinstance(tower.reader, FrozenReader):
        # Straight through the backbone: what users ask does not belong into the cache of the training data.
        features = tower.reader.backbone(pictures)
        lengths = torch.tensor([len(f) for f in features]).numpy()
        rows = torch.cat([torch.from_numpy(f) for f in features]).numpy()
        return RaggedStore(rows, lengths.cumsum() - lengths, lengths)
    items = [lambda data=data: data for data in pictures]
    return tower.reader.read(items, on_error=lambda i, error: errors.__setitem__(i, error))[0]


def _rows(embeddings: GaussianEmbedding) -> list[GaussianEmbedding | Exception]:
    return [embeddings[i : i + 1] for i in range(embeddings.n)]


async def submitted(batcher: Batcher[Asked, Found], items: Sequence[Asked]) -> list[Found | BaseException]:
    """What a batcher says to all of these.

    Raises:
        Refusal: 503, it has too much to do or is closed.
    """
    try:
        return await batcher.submit(items)
    except Full:
        raise busy("The service has too much to do; ask again in a moment") from None
    except Closed:
        raise busy("The service is going down", 5) from None
