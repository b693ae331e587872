"""Images are decoded in processes of their own.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Generic, TypeVar

import numpy as np

from sfumato.encoders.dual import Tower
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.processors import PixelProcessor
from sfumato.serve import decode_worker
from sfumato.serve.decode_worker import Message
from sfumato.serve.problems import Refusal, busy

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
