"""Batching for asyncio servers: take what is queued when the worker is free.

    async with Batcher(work, max_batch=64, max_waiting=4096) as batcher:
        results = await batcher.submit(items, deadline_s=30.0)

`work` runs in one thread, on the items of all requests that wait at that moment. There is no timer: a lone request is served at once,
and under load the batches grow by themselves.

    BatcherError
    ├── QueueFull          too much is waiting already: try again after `retry_after_s`
    ├── DeadlinePassed     the deadline of this request passed
    └── BatcherClosed      the server is ending
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

__all__ = ["Batcher", "BatcherClosed", "BatcherError", "DeadlinePassed", "QueueFull"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class BatcherError(Exception):
    """A request was not served."""


class QueueFull(BatcherError):
    """Too much is waiting already."""

    def __init__(self, waiting: int, retry_after_s: int = 1) -> None:
        super().__init__(f"{waiting} items are waiting already: try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class DeadlinePassed(BatcherError):
    """The deadline of a request passed before its turn came, or while it was worked on."""


class BatcherClosed(BatcherError):
    """The batcher ended before the request's turn came."""


class Batcher(Generic[Item, Result]):
    """Runs `work` on the items of all requests that are waiting, one batch at a time.

    Args:
        work: as many results as items, in their order. Called in the worker thread.
        max_batch: items of a batch. Only a single request that brings more makes a larger one.
        max_waiting: items that may wait; further requests are refused. An empty queue takes any request.
    """

    def __init__(self, work: Callable[[list[Item]], Sequence[Result]], *, max_batch: int, max_waiting: int) -> None:
        self._work = work
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._queue: deque[_Request[Item, Result]] = deque()
        self._waiting = 0
        self._arrived = asyncio.Event()
        self._closed = True

    @property
    def waiting(self) -> int:
        """Items in the queue, abandoned ones included."""
        return self._waiting

    async def submit(self, items: Sequence[Item], *, deadline_s: float) -> list[Result]:
        """The results of `items`. Cancelled, it takes them out of the queue.

        Raises:
            QueueFull, DeadlinePassed, BatcherClosed: see above.
            Exception: what `work` raised.
        """
        if self._closed:
            raise BatcherClosed("the server is ending")
        if self._queue and self._waiting + len(items) > self._max_waiting:
            raise QueueFull(self._waiting)
        results: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        request = _Request(items=list(items), results=results)
        self._queue.append(request)
        self._waiting += len(items)
        self._arrived.set()
        try:
            async with asyncio.timeout(deadline_s):
                return await request.results  # a cancelled future is skipped by the loop
        except TimeoutError as error:
            raise DeadlinePassed(f"not served within {deadline_s:g} s") from error

    async def __aenter__(self) -> Self:
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batcher")
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._loop_task = self._tasks.create_task(self._serve())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed = True
        self._loop_task.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            self._thread.shutdown()
            while self._queue:
                self._queue.popleft().fail(BatcherClosed("the server is ending"))

    async def _serve(self) -> None:
        """Serve batches.

        consumes      requests
        produces      their results, or the exception that `work` raised on their batch
        waits for     a request; then the worker thread
        unblocked by  cancellation, when the batcher is left
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            batch = self._take()
            if not batch:
                continue
            items = [item for request in batch for item in request.items]
            try:
                results = list(await loop.run_in_executor(self._thread, self._work, items))
                if len(results) != len(items):
                    raise RuntimeError(f"the work function gave {len(results)} results for {len(items)} items")
            except asyncio.CancelledError:
                for request in batch:
                    request.fail(BatcherClosed("the server is ending"))
                raise
            except Exception as error:  # the blast radius is this batch
                for request in batch:
                    request.fail(error)
            else:
                done = 0
                for request in batch:
                    request.succeed(results[done : done + len(request.items)])
                    done += len(request.items)

    def _take(self) -> list[_Request[Item, Result]]:
        """The requests of the next batch. Those that nobody waits for any more are dropped."""
        batch: list[_Request[Item, Result]] = []
        size = 0
        while self._queue and (not batch or size + len(self._queue[0].items) <= self._max_batch):
            request = self._queue.popleft()
            self._waiting -= len(request.items)
            if not request.results.done():
                batch.append(request)
                size += len(request.items)
        if not self._queue:
            self._arrived.clear()
        return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request(Generic[Item, Result]):
    items: list[Item]
    results: asyncio.Future[list[Result]]

    def succeed(self, results: list[Result]) -> None:
        if not self.results.done():
            self.results.set_result(results)

    def fail(self, error: BaseException) -> None:
        if not self.results.done():
            self.results.set_exception(error)
