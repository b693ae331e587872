"""Texts and pictures to Gaussians, many at a time, in the one thread that owns the model; pictures are decoded beside it."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sfumato.encoders.dual import DualEncoder
from sfumato.gaussian import GaussianEmbedding
from sfumato.serve.batching import Batcher, Closed, Full
from sfumato.serve.metrics import Metrics
from sfumato.serve.problems import Refusal, busy
from sfumato.serve.settings import Settings
from sfumato.training.ingest import embedding_steps

Asked = TypeVar("Asked")
Found = TypeVar("Found")
Done = TypeVar("Done")

Embedded = list[GaussianEmbedding | BaseException]
"""One embedding, or what is wrong, for each item."""


class Embedder:
    """The model behind two queues, one for texts and one for pictures.

    Args:
        model: in evaluation mode; nobody else may use it meanwhile.
        settings: sizes of batches and queues.
        metrics: told of every batch.

    Attributes:
        decoding: pictures that are being decoded, or wait for it.
    """

    def __init__(self, model: DualEncoder, settings: Settings, metrics: Metrics) -> None:
        self.model = model
        self._thread = ThreadPoolExecutor(1, "model", torch.set_num_threads, (settings.threads,))
        self.texts: Batcher[str, GaussianEmbedding] = Batcher(
            self._embed_texts, self._thread, size=settings.batch_size, window=settings.batch_window,
            waiting=settings.max_waiting, observe=metrics.batch("text"),
        )  # fmt: skip
        # What ingestion does with a picture in its workers, and with a batch of these in the model's thread.
        self._prepare, self._encode = embedding_steps(model.image, "images")
        self._workers = ThreadPoolExecutor(settings.workers, "decode")
        self.decoding, self._max_waiting = 0, settings.max_waiting
        self.pictures: Batcher[Any, GaussianEmbedding] = Batcher(
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
        self._workers.shutdown(wait=False, cancel_futures=True)

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
        if self.decoding + len(self.pictures) + len(pictures) > self._max_waiting:
            raise _full()
        self.decoding += len(pictures)
        try:
            prepared = await self.beside(self._prepare, pictures)
        finally:
            self.decoding -= len(pictures)
        decoded = [one for one in prepared if not isinstance(one, BaseException)]
        rows = iter(await submitted(self.pictures, decoded) if decoded else ())
        return [one if isinstance(one, BaseException) else next(rows) for one in prepared]

    async def beside(self, work: Callable[[Asked], Done], pictures: Sequence[Asked]) -> list[Done | BaseException]:
        """work(picture) of each, or what it raised, in threads beside that of the model; cancelled, what has not begun never does."""
        loop = asyncio.get_running_loop()
        try:
            going = [loop.run_in_executor(self._workers, work, picture) for picture in pictures]
        except RuntimeError:
            raise busy("The service is going down", 5) from None
        found = await asyncio.gather(*going, return_exceptions=True)
        if any(isinstance(one, asyncio.CancelledError) for one in found):
            raise busy("The service is going down", 5)
        return found

    def _embed_texts(self, texts: list[str]) -> list[GaussianEmbedding | Exception]:
        return _rows(self.model.embed_texts(texts))

    def _embed_pictures(self, pictures: list[Any]) -> list[GaussianEmbedding | Exception]:
        return _rows(self._encode(pictures))


def _rows(embeddings: GaussianEmbedding) -> list[GaussianEmbedding | Exception]:
    return [embeddings[i : i + 1] for i in range(embeddings.n)]


def _full() -> Refusal:
    return busy("The service has too much to do; ask again in a moment")


async def submitted(batcher: Batcher[Asked, Found], items: Sequence[Asked]) -> list[Found | BaseException]:
    """What a batcher says to all of these.

    Raises:
        Refusal: 503, it has too much to do or is closed.
    """
    try:
        return await batcher.submit(items)
    except Full:
        raise _full() from None
    except Closed:
        raise busy("The service is going down", 5) from None
