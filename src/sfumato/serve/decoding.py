"""Images are decoded in processes of their own: this module is both ends of their pipes.

The processes have limits of time, memory and pixels; one that fails is replaced. They are plain subprocesses: a pool of
`concurrent.futures` breaks as a whole when one process dies and cannot stop one that hangs, a spawned process of
multiprocessing imports the program that runs the service, with torch, again, and both unpickle what comes back.

A process answers one request after the other on its standard input. It imports numpy and Pillow, and nothing of the
model or the service: this module must not either. A message is two lengths, a JSON object and bytes. Nothing is
pickled: the service must not trust what comes back.
"""

import asyncio
import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Generic, TypeVar

import numpy as np
from PIL import Image, ImageOps

from sfumato.data.image_decoding import PIXELS, Fit, decode_image, n_pixels, opened_image
from sfumato.data.photographs import describe_image

Result = TypeVar("Result")

MAX_SCANS = 100
"""Scans of a progressive JPEG file; usual ones have ten. Each costs as much time as a whole image."""

PATIENCE = 1.25
"""Time by the clock that a task may take, in multiples of its processor time: other work may have the processor. So one
image after another in the same process is refused before the time limit of requests."""

KNOWS_ITS_TIME = hasattr(signal, "setitimer")
"""Whether the system ends a process that has used the processor for too long; Windows does not."""

Message = tuple[Mapping[str, Any], bytes]
"""A JSON object and bytes."""

_LENGTHS = struct.Struct(">IQ")
_SHOWN = {name: f"image/{name.lower()}" for name in ("PNG", "JPEG", "WEBP", "GIF", "AVIF")} | {"MPO": "image/jpeg"}
"""Formats that browsers show; others are re-encoded."""

_PHOTOGRAPHS = ("JPEG", "MPO", "HEIF", "AVIF", "TIFF")
"""Formats that become a JPEG file, unless something is transparent; others become a PNG file."""


def header(data: bytes) -> Message:
    """Read the header of an image file; nothing is decoded."""
    with opened_image(data, max_pixels=None) as image:
        return {"format": str(image.format), "width": image.width, "height": image.height}, b""


def square(data: bytes, size: int, fit: Fit) -> Message:
    """Decode an image to a square, see :func:`~sfumato.data.image_decoding.decode_image`. Returns (3, size, size)."""
    return {}, decode_image(data, size, fit=fit, reduced=True).tobytes()


def rgb(data: bytes, side: int | None) -> Message:
    """Decode an image of any format to one that is simple: upright, in RGB, uncompressed."""
    if side is not None:
        data = _drafted(data, side)
    image = Image.fromarray(decode_image(data, None).transpose(1, 2, 0))
    factor = 1 if side is None else min(image.size) // side
    return {}, _encoded(image.reduce(factor) if factor > 1 else image, "BMP")


def stored(data: bytes) -> Message:
    """Re-encode an image file, upright and in RGB, without its metadata, and give some of these as payload fields.

    The location of the camera is none of them.
    """
    with opened_image(data) as image:
        format = "PNG" if image.format == "TIFF" or image.format not in _PHOTOGRAPHS else "JPEG"
    pixels = np.ascontiguousarray(decode_image(data, None).transpose(1, 2, 0))
    return {"fields": {**describe_image(data), PIXELS: str(n_pixels(data))}}, _encoded(Image.fromarray(pixels), format)


def shown(data: bytes, size: int | None, copied: bool = False) -> Message:
    """Convert a stored image for a browser; without a size it is as it is, unless it must be copied."""
    with opened_image(data) as image:
        kind = str(image.format)
        if size is None and kind in _SHOWN and not copied:
            return {"type": _SHOWN[kind]}, b""
        if size is not None:
            image.draft(None, (2 * size, 2 * size))
        kind = "JPEG" if kind in _PHOTOGRAPHS and not image.has_transparency_data else "PNG"
        if kind == "JPEG" and image.format not in ("JPEG", "MPO"):  # Scans of 16 bits, say.
            upright = Image.fromarray(decode_image(data, None).transpose(1, 2, 0))
        else:
            upright = ImageOps.exif_transpose(image)
        if size is not None:
            upright.thumbnail((size, size), Image.Resampling.BICUBIC)
        return {"type": _SHOWN[kind]}, _encoded(upright.convert("RGB" if kind == "JPEG" else "RGBA"), kind)


TASKS: dict[str, Callable[..., Message]] = {task.__name__: task for task in (header, square, rgb, stored, shown)}
"""What the process can do with the bytes of an image file."""


def done(task: str, options: Mapping[str, Any], data: bytes) -> Message:
    """Do one task."""
    try:
        scans = data.count(b"\xff\xda") if data.startswith(b"\xff\xd8") else 0
        if scans > MAX_SCANS:
            raise ValueError(f"a JPEG file with {scans} scans, more than the limit of {MAX_SCANS}; save it again")
        return TASKS[task](data, **options)
    except MemoryError:
        return {"error": "takes too much memory to decode; send a smaller copy"}, b""
    except ValueError as error:
        return {"error": str(error)}, b""


def send(pipe: IO[bytes], message: Message) -> None:
    """Write a message."""
    text, data = json.dumps(message[0]).encode(), message[1]
    pipe.write(_LENGTHS.pack(len(text), len(data)) + text)
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """Read a message."""
    of_text, of_data = _LENGTHS.unpack(_exactly(pipe, _LENGTHS.size))
    return json.loads(_exactly(pipe, of_text)), _exactly(pipe, of_data)


def _exactly(pipe: IO[bytes], n: int) -> bytes:
    data = pipe.read(n)
    if len(data) < n:
        raise EOFError
    return data


def _drafted(data: bytes, side: int) -> bytes:
    """A large JPEG file decoded at a half, a quarter or an eighth of its size; anything else as it is."""
    with opened_image(data) as image:
        if image.format not in ("JPEG", "MPO") or min(image.size) < 2 * side:
            return data
        image.draft(None, (side, side))
        return _encoded(ImageOps.exif_transpose(image).convert("RGB"), "BMP")


def _encoded(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.info.pop("comment", None)  # Of metadata this one is written again unasked.
    image.save(file, format, quality=90)
    return file.getvalue()


class Unavailable(Exception):
    """The service cannot do this now; the caller should send the request again in a few seconds."""

    def __init__(self, detail: str, seconds: int = 1, code: str = "busy") -> None:
        super().__init__(detail)
        self.seconds, self.code = seconds, code


def closing() -> Unavailable:
    """The error of what comes too late."""
    return Unavailable("The service is shutting down", 5, "not-ready")


class Threads:
    """A few threads. Work waits for one in the task of its caller: if he leaves, it is dropped."""

    def __init__(self, n: int, name: str, initializer: Callable[[], object] | None = None) -> None:
        self.pool = ThreadPoolExecutor(n, name, initializer)
        self._free = asyncio.Semaphore(n)

    async def run(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run work in a thread; work that has begun continues if the caller stops waiting."""
        loop = asyncio.get_running_loop()

        def release(done: "Future[Result]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._free.release)

        await self._free.acquire()
        try:
            running = self.pool.submit(work, *arguments)
        except RuntimeError:
            self._free.release()
            raise closing() from None
        running.add_done_callback(release)  # The thread is free when the work is done, whoever still waits then.
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # By the shutdown, not by the caller.
                raise closing() from None
            raise


@dataclass(frozen=True)
class Task(Generic[Result]):
    """What a process does with an image, see :data:`TASKS`."""

    name: str  # key in TASKS
    options: Mapping[str, Any]  # of the task
    finish: Callable[[Message], Result]  # converts the answer, in a thread of the service


def message_of(answer: Message) -> Message:
    """The answer of a process as it is."""
    return answer


def bytes_of(answer: Message) -> bytes:
    """The file that a process answers with."""
    return answer[1]


HEADER = Task("header", {}, message_of)
"""Reads format, width and height."""


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
        return await asyncio.gather(*(self.run(task, image) for image in images), return_exceptions=True)

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
            if (answer := self._ask(task, data)) is not None:
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
        child, own_time = self._started(), KNOWS_ITS_TIME
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(self.seconds * (PATIENCE if own_time else 1), stop)
        timer.start()
        try:
            request = {"task": task.name, "options": dict(task.options), "seconds": self.seconds}
            send(_pipe(child.stdin), (request, data))
            return receive(_pipe(child.stdout))
        except (OSError, EOFError, ValueError):
            self._end()
            if own_time and child.returncode == -signal.SIGPROF:
                reason = f"takes more than {self.seconds:g} seconds of the processor to decode; send a smaller copy"
                raise ValueError(reason) from None
            if late.is_set() and own_time:
                reason = "The computer is too busy to decode an image; send the request again later"
                raise Unavailable(reason, 5) from None
            if late.is_set():
                raise ValueError(f"takes more than {self.seconds:g} seconds to decode; send a smaller copy") from None
            return None
        finally:
            timer.cancel()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self.child is None or self.child.poll() is not None:
            self._end()
            if self.closed:
                raise closing()
            # One thread; and memory that was freed goes back to the system (a GNU C library keeps it otherwise).
            alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            lean = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "sfumato.serve.decoding", str(self.memory_bytes)],
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


def _limit(memory_bytes: int) -> None:
    """Leave the computer to others: little memory, low priority, and no interest in Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if KNOWS_ITS_TIME:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # Ends the process.
    if hasattr(os, "nice"):
        os.nice(10)
    with contextlib.suppress(ImportError, OSError, ValueError):  # No such limit, or a stricter one holds already.
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _end_after(seconds: float) -> None:
    """End this process after so much time of the processor, where the system can; 0 for never."""
    if KNOWS_ITS_TIME:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main(memory_bytes: int) -> None:
    """Answer requests until the service closes the pipe."""
    _limit(memory_bytes)
    Image.MAX_IMAGE_PIXELS = None  # The service decides by the header.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # Nothing else may write there.
        while True:
            try:
                request, data = receive(sys.stdin.buffer)
            except EOFError:
                return
            _end_after(request["seconds"])
            answer = done(request["task"], request["options"], data)
            _end_after(0)
            del data
            send(answers, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
