"""Embeds the texts, image files and vectors of requests: they share micro-batches, and no text waits for an image."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from sfumato.arrays import set_threads
from sfumato.data.image_inputs import regions_to_bytes
from sfumato.encoders.encoder_protocol import BaseTower, TwoTowers
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.processors import EmbeddingProcessor, PixelProcessor
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import embedding_steps
from sfumato.serve.decoding import HEADER, Decoders, Task, Unavailable, bytes_of, closing
from sfumato.serve.guard import Budget
from sfumato.serve.monitoring import Metrics
from sfumato.serve.problems import Refusal, wrong
from sfumato.serve.schemas import Modality, QueryKinds
from sfumato.serve.settings import Settings, Sources

Given = TypeVar("Given")
Result = TypeVar("Result")

_FULL = "The service is busy; send the request again in a moment"


class Batcher(Generic[Given, Result]):
    """Collects items of several tasks and computes them together. Start it in a running event loop."""

    def __init__(
        self,
        compute: Callable[[list[Given]], Sequence[Result]],
        executor: Executor,
        *,
        size: int,
        window: float,
        waiting: int,
        observe: Callable[[int], None] = lambda size: None,
        company: Callable[[], bool] = lambda: True,
        workers: int = 1,
    ) -> None:
        self.compute, self.executor, self.size, self.window, self.waiting = compute, executor, size, window, waiting
        self._observe, self._company, self._workers = observe, company, workers  # company: whether others may come
        self._queue: deque[tuple[Given, asyncio.Future[Result]]] = deque()
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        """Number of waiting items."""
        return len(self._queue)

    def start(self) -> None:
        """Begin to compute."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]

    async def submit(self, items: Sequence[Given]) -> list[Result | BaseException]:
        """Compute items. If the caller is cancelled, its waiting items are dropped."""
        if all(task.done() for task in self._tasks):
            raise closing()
        if len(self._queue) + len(items) > self.waiting:
            raise Unavailable(_FULL)
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in items]
        self._queue.extend(zip(items, futures, strict=True))
        self._some.set()
        if len(self._queue) >= self.size:
            self._enough.set()
        return await asyncio.gather(*futures, return_exceptions=True)

    async def close(self) -> None:
        """Stop; waiting items fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        _fail(list(self._queue))
        self._queue.clear()

    async def _work(self) -> None:
        while True:
            await self._some.wait()
            if self.window and self._company() and len(self._queue) < self.size:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), self.window)
            if not (batch := self._next()):
                continue
            self._observe(len(batch))
            try:
                results = await self._results([item for item, _ in batch])
            except BaseException:
                _fail(batch)
                raise
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # The caller was cancelled.
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _next(self) -> list[tuple[Given, asyncio.Future[Result]]]:
        """The oldest items whose callers still wait."""
        batch: list[tuple[Given, asyncio.Future[Result]]] = []
        while self._queue and len(batch) < self.size:
            item, future = self._queue.popleft()
            if not future.done():
                batch.append((item, future))
        if not self._queue:
            self._some.clear()
        if len(self._queue) < self.size:
            self._enough.clear()
        return batch

    async def _results(self, items: list[Given]) -> list[Result | Exception]:
        """The results of a batch; if it fails, of each item alone, so that a bad one fails alone."""
        loop = asyncio.get_running_loop()
        try:
            results = list[Result | Exception](await loop.run_in_executor(self.executor, self.compute, items))
            assert len(results) == len(items)
            return results
        except Exception as error:
            if len(items) == 1:
                return [error]
        return [result for item in items for result in await self._results([item])]


def _fail(batch: Sequence[tuple[object, "asyncio.Future[Any]"]]) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(closing())


class Embedder:
    """The model behind two queues, one for texts and one for images: no text waits for an image."""

    def __init__(self, sources: Sources, settings: Settings, metrics: Metrics) -> None:
        self.model, self.settings = sources.model, settings
        self.pixels = Budget(settings.pixel_budget, "images to decode")
        names = "embed texts", "embed images"
        self._threads = [ThreadPoolExecutor(1, name, set_threads, (settings.threads,)) for name in names]
        # Graphs keep the number of threads of the thread that reads them.
        self.vector_sides = self._threads[0].submit(vector_sides, self.model, sources.d).result()
        self.asking = Budget(settings.max_requests, "simultaneous searches")
        batcher: Callable[..., Batcher[Any, GaussianEmbedding]] = functools.partial(
            Batcher, size=settings.batch_size, window=settings.batch_window_ms / 1000, waiting=settings.queue,
            company=lambda: self.asking.used > 1,
        )  # fmt: skip
        observe = metrics.batch.labels("text").observe
        self.texts = batcher(lambda texts: _rows(self.model.embed_texts(texts)), self._threads[0], observe=observe)
        # The same two steps as at ingestion: decode an image in a process, encode a batch in the thread of images.
        self._prepare, encode = embedding_steps(self.model.image, "images")
        self._task = None if self.model.image.processor.reads else input_task(self.model.image, self._prepare)
        memory = settings.decode_memory_mb * 1_000_000
        self.decoders = Decoders(settings.workers, seconds=settings.decode_timeout, memory_bytes=memory)
        self.decoding = 0
        observe = metrics.batch.labels("image").observe
        self.images = batcher(lambda images: _rows(encode(images)), self._threads[1], observe=observe)

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

    def kinds(self) -> QueryKinds:
        """The kinds of queries that the model can answer."""
        vector = {side.modality: side.channels for side in self.vector_sides.values() if side.channels is not None}
        text, image = (not tower.processor.reads for tower in (self.model.text, self.model.image))
        return QueryKinds(text=text, image=image, id=True, vector=vector)

    def refuse_features(self, side: Modality, where: Sequence[str]) -> None:
        """Refuse the images or texts of a request if the model reads features instead of them."""
        features = (self.model.image if side == "image" else self.model.text).processor.reads
        if where and features:
            kinds = self.kinds()
            ways = [*["by text"] * kinds.text, *["by vector"] * bool(kinds.vector), "by item"]
            reads = f"the model of this service reads {features}, not {side}s; search {' or '.join(ways)}"
            raise wrong((where[0], reads))

    async def embed_texts(self, texts: Sequence[str | bytes], where: Sequence[str]) -> list[GaussianEmbedding]:
        """Embed texts. where: their places in the request. Returns one (1, d) embedding of each."""
        return usable(await self.texts.submit(texts), where)

    async def embed_images(self, images: Sequence[bytes], where: Sequence[str]) -> list[GaussianEmbedding]:
        """Decode and embed image files. where: their places in the request. Returns one (1, d) embedding of each."""
        if self.decoding + len(self.images) + len(images) > self.settings.queue:
            raise Unavailable(_FULL)
        self.decoding += len(images)
        try:
            prepared = await self._prepared(images)
        finally:
            self.decoding -= len(images)
        decoded = [one for one in prepared if not isinstance(one, BaseException)]
        rows = iter(await self.images.submit(decoded) if decoded else ())
        return usable([one if isinstance(one, BaseException) else next(rows) for one in prepared], where)

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

    @contextlib.asynccontextmanager
    async def checked_images(self, images: Sequence[bytes], where: Sequence[str]) -> AsyncIterator[None]:
        """Check image files by their headers, and take their pixels from the budget of all requests."""
        self.refuse_features("image", where)
        for place, data in zip(where, images, strict=True):
            if len(data) > (most := self.settings.max_upload_bytes):
                raise Refusal(413, f"{place}: {len(data)} bytes are more than the limit of {most}")
        headers = await self.decoders.all(HEADER, images)
        total, limit = 0, self.settings.max_pixels
        for place, (header, _) in zip(where, usable(headers, where), strict=True):
            width, height = header["width"], header["height"]
            total += width * height
            if width * height > limit:
                reason = f"{width} x {height} are more pixels than the limit of {limit}; send a smaller copy"
                raise Refusal(413, f"{place}: {reason}")
            if total > limit:
                found = f"with this image the request has {total} pixels, more than the limit of {limit} for all"
                raise Refusal(413, f"{place}: {found} images of a request; send fewer at a time, or smaller copies")
        with self.pixels.taken(total):
            yield

    async def embed_vectors(self, vectors: Sequence[tuple[Modality, np.ndarray, str]]) -> list[GaussianEmbedding]:
        """Embed vectors: (modality, (c,) numbers, place in the request). Returns one (1, d) embedding of each."""
        sides = [self.vector_sides[modality] for modality, _, _ in vectors]
        found = [side.reason or side.error(vector) for side, (_, vector, _) in zip(sides, vectors, strict=True)]
        if bad := [(where, error) for (_, _, where), error in zip(vectors, found, strict=True) if error]:
            raise wrong(*bad)
        rows: dict[int, GaussianEmbedding] = {}
        for modality, side in self.vector_sides.items():
            chosen = [i for i, one in enumerate(sides) if one is side]
            if chosen and side.reads:
                files = [regions_to_bytes(vectors[i][1].reshape(1, -1)) for i in chosen]
                embed = self.embed_texts if modality == "text" else self.embed_images
                rows |= dict(zip(chosen, await embed(files, [vectors[i][2] for i in chosen]), strict=True))
            elif chosen:
                points = side.points([vectors[i][1] for i in chosen])
                rows |= {i: points[k : k + 1] for k, i in enumerate(chosen)}
        for i, (_, _, where) in enumerate(vectors):
            if not np.isfinite((rows[i].mean ** 2).sum() + rows[i].total_variance):
                expected = "expected numbers like the model's data"
                raise wrong((where, f"the embedding of this vector by the model is not finite; {expected}"))
        return [rows[i] for i in range(len(vectors))]


def _rows(embeddings: GaussianEmbedding) -> list[GaussianEmbedding]:
    own = embeddings.numpy()
    return [own[i : i + 1] for i in range(own.n)]


def usable(found: Sequence[Result | BaseException], where: Sequence[str]) -> list[Result]:
    """What was found of each part of a request; a part that cannot be read is refused with its place."""
    bad = [(place, error) for place, error in zip(where, found, strict=True) if isinstance(error, BaseException)]
    for _, error in bad:
        if not isinstance(error, ValueError | OSError):
            raise error
    if bad:
        raise wrong(*((place, str(error)) for place, error in bad))
    return [one for one in found if not isinstance(one, BaseException)]


_REDUCED_SIDE = 1536
"""Side down to which images are reduced for a frozen backbone: four times the usual 384 pixels of its input."""


def input_task(tower: BaseTower, prepare: Callable[[bytes], Any]) -> Task[Any]:
    """The task that makes the input of an image tower."""
    processor = tower.processor
    if isinstance(processor, PixelProcessor) and hasattr(processor, "fit"):  # Others resize in ways of their own.
        shape = (3, processor.size, processor.size)
        options = {"size": processor.size, "fit": processor.fit}
        return Task("square", options, lambda answer: np.frombuffer(answer[1], np.uint8).reshape(shape))
    if isinstance(processor, FrozenProcessor):
        return Task("rgb", {"side": _REDUCED_SIDE}, bytes_of)
    return Task("rgb", {"side": None}, lambda answer: prepare(answer[1]))


@dataclass(frozen=True)
class VectorSide:
    """The vectors of one modality."""

    modality: Modality  # what they are embeddings of
    channels: int | None  # c numbers of a vector; None if the model cannot be searched by one
    reads: bool = False
    normalize: bool = False  # whether means are scaled to unit length, as the model does
    reason: str = ""  # why the model cannot be searched by one; "" if it can

    def error(self, vector: np.ndarray) -> str:
        """What is wrong with a vector. vector (k,)."""
        if len(vector) != self.channels:
            what = "an image" if self.modality == "image" else "a text"
            return f"has {len(vector)} numbers, expected the {self.channels} of an embedding of {what}"
        if len(bad := np.flatnonzero(~np.isfinite(vector))):
            return f"number {bad[0]} (from 0) is {vector[bad[0]]} in float32, expected finite numbers"
        if not vector.any():
            return "holds zeros alone, which have no direction; expected a number other than 0"
        length = float(np.linalg.norm(vector.astype(np.float64)))
        if not 1e-12 <= length <= 1e18:  # Within which float32 can scale it to unit length.
            return f"has the Euclidean length {length:.3g}, expected 1e-12 to 1e+18"
        return ""

    def points(self, vectors: Sequence[np.ndarray]) -> GaussianEmbedding:
        """Vectors as embeddings in the space of the gallery. Returns (n, d)."""
        mean = np.stack(vectors)
        length = np.linalg.norm(mean, axis=1, keepdims=True) if self.normalize else 1
        return GaussianEmbedding.point(mean / np.maximum(length, 1e-12).astype(mean.dtype))


def vector_sides(model: TwoTowers, d: int) -> dict[Modality, VectorSide]:
    """The vectors that a model can be searched by."""
    towers = zip(get_args(Modality), (model.text, model.image), strict=True)
    return {name: _side(tower, name, d) for name, tower in towers}


def _side(tower: BaseTower, modality: Modality, d: int) -> VectorSide:
    if isinstance(tower.processor, EmbeddingProcessor):
        return VectorSide(modality, tower.processor.channels, reads=True)
    if not (tower.variances or tower.has_offset) and tower.dim == d:
        return VectorSide(modality, d, normalize=tower.normalize)
    more = "with a variance, which a vector has not" if tower.variances else "as more than one vector"
    reason = f"this model embeds each {modality} {more}; search by the {modality} itself, or by an item"
    return VectorSide(modality, None, reason=reason)
