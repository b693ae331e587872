"""Embeds queries and new items: images are decoded in processes of their own, and requests share micro-batches.

The processes have limits of time, memory and pixels; one that fails is replaced. They are plain subprocesses: a pool of
`concurrent.futures` breaks as a whole when one process dies and cannot stop one that hangs, a spawned process of
multiprocessing imports the program that runs the service, with torch, again, and both unpickle what comes back.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Generic, TypeVar

import numpy as np
import torch

from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.feature_rows import features_read
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.processors import PixelProcessor
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import embedding_steps
from sfumato.serve import decode_worker
from sfumato.serve.decode_worker import Message
from sfumato.serve.guard import Metrics
from sfumato.serve.schemas import Refusal, busy
from sfumato.serve.settings import Settings

Item = TypeVar("Item")
Result = TypeVar("Result")


class Threads:
    """A few threads. Work waits for one in the task of its caller: if he leaves, it is dropped."""

    def __init__(self, n: int, name: str, initializer: Callable[[], object] | None = None) -> None:
        self.pool = ThreadPoolExecutor(n, name, initializer)
        self._free = asyncio.Semaphore(n)

    async def run(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run work in a thread; work that has begun continues if the caller stops waiting."""
        await self._free.acquire()
        try:
            running = asyncio.wrap_future(self.pool.submit(work, *arguments))
        except RuntimeError:
            self._free.release()
            raise busy("The service is shutting down", 5) from None
        # The thread is free when the work is done, whether or not the caller still waits then.
        task = asyncio.ensure_future(self._until_free(running))
        task.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # By the shutdown, not by the caller.
                raise busy("The service is shutting down", 5) from None
            raise

    async def _until_free(self, running: "asyncio.Future[Result]") -> Result:
        try:
            return await running
        finally:
            self._free.release()


def _retrieve(task: "asyncio.Task[Result]") -> None:
    """Take the error of work whose caller has left; asyncio would write a traceback into the log."""
    if not task.cancelled():
        task.exception()


_REDUCED_SIDE = 1536
"""Side down to which images are reduced for a frozen backbone: four times the usual 384 pixels of its input."""

PATIENCE = 1.25
"""Time by the clock that a task may take, in multiples of its processor time: other work may have the processor. So one
image after another in the same process is refused before the time limit of requests."""


def message_of(answer: Message) -> Message:
    """The answer of a process as it is."""
    return answer


def bytes_of(answer: Message) -> bytes:
    """The file that a process answers with."""
    return answer[1]


@dataclass(frozen=True)
class Task(Generic[Result]):
    """What a process does with an image, see :data:`~sfumato.serve.decode_worker.TASKS`."""

    name: str  # key in TASKS
    options: Mapping[str, Any]  # of the task
    finish: Callable[[Message], Result]  # converts the answer, in a thread of the service


HEADER = Task("header", {}, message_of)
"""Reads format, width and height."""


def input_task(tower: Tower, prepare: Callable[[bytes], Any]) -> Task[Any]:
    """The task that makes the input of an image tower."""
    processor = tower.processor
    if isinstance(processor, PixelProcessor) and hasattr(processor, "fit"):  # Others resize in ways of their own.
        shape = (3, processor.size, processor.size)
        options = {"size": processor.size, "fit": processor.fit}
        return Task("square", options, lambda answer: np.frombuffer(answer[1], np.uint8).reshape(shape))
    if isinstance(processor, FrozenProcessor):
        return Task("rgb", {"side": _REDUCED_SIDE}, bytes_of)
    return Task("rgb", {"side": None}, lambda answer: prepare(answer[1]))


class Decoders:
    """A few processes that decode images, one image each at a time."""

    def __init__(self, n: int, *, seconds: float, memory_bytes: int) -> None:
        self._threads = Threads(n, "decode")
        self._processes = [_Process(seconds, memory_bytes) for _ in range(n)]
        self._idle = list(self._processes)

    async def run(self, task: Task[Result], data: bytes) -> Result:
        """Do a task in a process."""
        return await self._threads.run(self._do, task, data)

    async def all(self, task: Task[Result], images: Sequence[bytes]) -> list[Result | BaseException]:
        """Do a task with several images."""
        found = await asyncio.gather(*(self.run(task, image) for image in images), return_exceptions=True)
        for one in found:
            if isinstance(one, Refusal):
                raise one
        return found

    def close(self) -> None:
        """End the processes; running tasks fail."""
        self._threads.pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _do(self, task: Task[Result], data: bytes) -> Result:
        process = self._idle.pop()  # There are as many as threads.
        try:
            return process.do(task, data)
        finally:
            self._idle.append(process)


class _Process:
    """One process, started when it is needed. Used by one thread at a time, but for close()."""

    def __init__(self, seconds: float, memory_bytes: int) -> None:
        self.seconds, self.memory_bytes, self.closed = seconds, memory_bytes, False
        self.child: subprocess.Popen[bytes] | None = None

    def do(self, task: Task[Result], data: bytes) -> Result:
        """See Decoders.run."""
        for _ in range(2):  # A process that ended for a reason of its own is replaced, and the image tried again.
            answer = self._ask(task, data)
            if answer is not None:
                break
        else:
            raise ValueError("cannot be decoded: it stops the program that decodes images; save it in another format")
        if "error" in answer[0]:
            raise ValueError(str(answer[0]["error"]))
        return task.finish(answer)

    def close(self) -> None:
        """End the process."""
        self.closed = True
        self._end()

    def _ask(self, task: Task[Any], data: bytes) -> Message | None:
        """The answer; None if the process has ended without one."""
        child, own_time = self._started(), decode_worker.KNOWS_ITS_TIME
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(self.seconds * (PATIENCE if own_time else 1), stop)
        timer.start()
        try:
            request = {"task": task.name, "options": dict(task.options), "seconds": self.seconds}
            decode_worker.send(_pipe(child.stdin), (request, data))
            return decode_worker.receive(_pipe(child.stdout))
        except (OSError, EOFError, ValueError):
            self._end()
            if own_time and child.returncode == -signal.SIGPROF:
                raise ValueError(
                    f"takes more than {self.seconds:g} seconds of the processor to decode; send a smaller copy"
                ) from None
            if late.is_set() and own_time:
                raise busy("The computer is too busy to decode an image; send the request again later", 5) from None
            if late.is_set():
                raise ValueError(f"takes more than {self.seconds:g} seconds to decode; send a smaller copy") from None
            return None
        finally:
            timer.cancel()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self.child is None or self.child.poll() is not None:
            self._end()
            if self.closed:
                raise busy("The service is shutting down", 5)
            # One thread; and memory that was freed goes back to the system (a GNU C library keeps it otherwise).
            alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            lean = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", decode_worker.__name__, str(self.memory_bytes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, **alone, **lean},
            )  # fmt: skip
        return self.child

    def _end(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    _pipe(pipe).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


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
        self._task = None if features_read(model.image) else input_task(model.image, self._prepare)
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
