"""Micro-batches: what several requests ask of the model at about the same time is computed together.

Knows nothing of models: it collects items, calls one function with a list of them in a thread, and hands each its result.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Full(Exception):
    """Too many items wait already."""


class Closed(Exception):
    """The service is going down."""


class Batcher(Generic[Item, Result]):
    """Start it in a running event loop, submit from any number of tasks.

    Args:
        compute: items -> as many results; an exception in the place of a result fails that item alone. If it raises for several,
            it is called again for each alone.
        executor: where it is called.
        size: most items of a call.
        window: seconds that the first item waits for others, if it does not have to wait for the thread anyway.
        waiting: most items that wait.
        observe: called with the size of each batch.
        workers: calls at the same time.
    """

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
        """Items that wait."""
        return len(self._queue)

    def start(self) -> None:
        """Begin to work."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._work()) for _ in range(self._workers)]

    async def submit(self, items: Sequence[Item]) -> list[Result | BaseException]:
        """Results in the order of the items, or what went wrong with each; cancelled, it takes its items along.

        Raises:
            Full: there is no room for all of them.
            Closed: the batcher is.
        """
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
        """Stop; what waits fails with Closed."""
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
                if future.done():  # Whoever asked has gone.
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _next(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        """The oldest items that somebody still waits for."""
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
