"""Embeds queries and new items: requests share micro-batches, and no text waits for an image."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from sfumato.encoders.dual import DualEncoder
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import embedding_steps
from sfumato.serve.decoding import Decoders, input_task
from sfumato.serve.metrics import Metrics
from sfumato.serve.problems import Refusal, busy
from sfumato.serve.settings import Settings

Item = TypeVar("Item")
Result = TypeVar("Result")


class Full(Exception):
    """Too many items are waiting."""


class Closed(Exception):
    """The service is shutting down."""


class Batcher(Generic[Item, Result]):
    """Collects items of several tasks and computes them together. Start it in a running event loop."""

    def __init__(
        self,
        compute: Callable[[list[Item]], Sequence[Result | Exception]],
        executor: Executor,
        *,
        size: int,
        window: float,
        waiting: int,
        observe: Callable[[int], None] = lambda size: None,
        workers: int = 1,
    ) -> None:
        self.compute, self.executor, self.size, self.window, self.waiting = compute, executor, size, window, waiting
        self._observe, self._workers = observe, workers
        self._queue: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        """Number of waiting items."""
        return len(self._queue)

    def start(self) -> None:
        """Begin to compute."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._work()) for _ in range(self._workers)]

    async def submit(self, items: Sequence[Item]) -> list[Result | BaseException]:
        """Compute items. If the caller is cancelled, its waiting items are dropped."""
        if not self._tasks or all(task.done() for task in self._tasks):
            raise Closed
        if len(self._queue) + len(items) > self.waiting:
            raise Full
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in items]
        self._queue.extend(zip(items, futures, strict=True))
        self._some.set()
        if len(self._queue) >= self.size:
            self._enough.set()
        return await asyncio.gather(*futures, return_exceptions=True)

    async def close(self) -> None:
        """Stop; waiting items fail with Closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, future in self._queue:
            if not future.done():
                future.set_exception(Closed())
        self._queue.clear()

    async def _work(self) -> None:
        while True:
            await self._some.wait()
            if self.window and len(self._queue) < self.size:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), self.window)
            batch = self._next()
            if not batch:
                continue
            self._observe(len(batch))
            try:
                results = await self._results([item for item, _ in batch])
            except BaseException:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(Closed())
                raise
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # The caller was cancelled.
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _next(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        """The oldest items whose callers still wait."""
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        while self._queue and len(batch) < self.size:
            item, future = self._queue.popleft()
            if not future.done():
                batch.append((item, future))
        if not self._queue:
            self._some.clear()
        if len(self._queue) < self.size:
            self._enough.clear()
        return batch

    async def _results(self, items: list[Item]) -> list[Result | Exception]:
        loop = asyncio.get_running_loop()
        try:
            results = list(await loop.run_in_executor(self.executor, self.compute, items))
            if len(results) != len(items):
                raise AssertionError(f"{len(results)} results of {len(items)} items")
            return results
        except Exception as error:
            if len(items) == 1:
                return [error]
        return [result for item in items for result in await self._results([item])]


Embedded = list[GaussianEmbedding | BaseException]
"""For each item its embedding, or the exception."""


class Embedder:
    """The model behind two queues, one for texts and one for images: no text waits for an image."""

    def __init__(self, model: DualEncoder, settings: Settings, metrics: Metrics) -> None:
        self.model = model
        self._threads = [
            ThreadPoolExecutor(1, f"embed {side}", torch.set_num_threads, (settings.threads,))
            for side in ("texts", "images")
        ]
        self.texts: Batcher[str | bytes, GaussianEmbedding] = Batcher(
            self._embed_texts, self._threads[0], size=settings.batch_size, window=settings.batch_window_ms / 1000,
            waiting=settings.queue, observe=metrics.batch("text"),
        )  # fmt: skip
        # The same two steps as at ingestion: decode an image in a process, encode a batch in the thread of images.
        self._prepare, self._encode = embedding_steps(model.image, "images")
        self._task = None if model.image.processor.reads else input_task(model.image, self._prepare)
        self.decoders = Decoders(
            settings.workers, seconds=settings.decode_timeout, memory_bytes=settings.decode_memory_mb * 1_000_000
        )
        self.decoding, self._max_waiting = 0, settings.queue
        self.images: Batcher[Any, GaussianEmbedding] = Batcher(
            self._embed_images, self._threads[1], size=settings.batch_size, window=settings.batch_window_ms / 1000,
            waiting=settings.queue, observe=metrics.batch("image"),
        )  # fmt: skip

    def start(self) -> None:
        """Begin to compute, in a running event loop."""
        self.texts.start()
        self.images.start()

    async def close(self) -> None:
        """Stop; waiting items fail."""
        await self.texts.close()
        await self.images.close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        self.decoders.close()

    async def embed_texts(self, texts: Sequence[str | bytes]) -> Embedded:
        """Embed texts. Returns one (1, d) embedding of each."""
        return await submitted(self.texts, texts)

    async def embed_images(self, images: Sequence[bytes]) -> Embedded:
        """Decode and embed image files. Returns one (1, d) embedding of each."""
        if self.decoding + len(self.images) + len(images) > self._max_waiting:
            raise _full()
        self.decoding += len(images)
        try:
            prepared = await self._prepared(images)
        finally:
            self.decoding -= len(images)
        decoded = [one for one in prepared if not isinstance(one, BaseException)]
        rows = iter(await submitted(self.images, decoded) if decoded else ())
        return [one if isinstance(one, BaseException) else next(rows) for one in prepared]

    async def _prepared(self, images: Sequence[bytes]) -> list[Any | BaseException]:
        """The input of the image tower for each file, or the exception."""
        if self._task is not None:
            return await self.decoders.all(self._task, images)
        found: list[Any | BaseException] = []
        for image in images:  # Vectors, which are small and cost nothing to read.
            try:
                found.append(self._prepare(image))
            except ValueError as error:
                found.append(error)
        return found

    def _embed_texts(self, texts: list[Any]) -> list[GaussianEmbedding | Exception]:
        return _rows(self.model.embed_texts(texts))

    def _embed_images(self, images: list[Any]) -> list[GaussianEmbedding | Exception]:
        return _rows(self._encode(images))


def _rows(embeddings: GaussianEmbedding) -> list[GaussianEmbedding | Exception]:
    return [embeddings[i : i + 1] for i in range(embeddings.n)]


def _full() -> Refusal:
    return busy("The service is busy; send the request again in a moment")


async def submitted(batcher: Batcher[Item, Result], items: Sequence[Item]) -> list[Result | BaseException]:
    """Submit items to a batcher."""
    try:
        return await batcher.submit(items)
    except Full:
        raise _full() from None
    except Closed:
        raise busy("The service is shutting down", 5) from None
