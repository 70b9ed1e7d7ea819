"""Batching for asyncio servers: take what is queued when the worker is free.

    async with Batcher(prepare, work, max_batch=64, max_waiting=4096) as batcher:
        results = await batcher.submit(items, deadline_s=30.0)

`prepare` and `work` run in a thread, on the items that wait at that moment. There is no timer: a lone item is served at once, and under
load the batches grow by themselves. The thread takes its next batch itself, so that it never waits for the event loop. Equal items that
wait or are worked on at the same time are worked on once. An item that nobody waits for any more, because its client left or its deadline
passed, leaves the queue at once. With `overlap`, `work` runs in a second thread, beside `prepare` of the next batch: worth it where the two
do not share one core.

    BatcherError
    ├── QueueFull          too much is waiting already: try again after `retry_after_s`
    ├── DeadlinePassed     the deadline of this request passed
    └── BatcherClosed      the server is ending
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Generic, Self, TypeVar

from retriever.query import Refused

__all__ = ["Batch", "Batcher", "BatcherClosed", "BatcherError", "DeadlinePassed", "QueueFull", "half_done_s"]

LONGEST_RETRY_S = 60
SMOOTHING = 0.1  # of the time that an item takes: about the last 10 batches count

Item = TypeVar("Item", bound=Hashable)
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


class BatcherError(Refused):
    """A request was not served."""


class QueueFull(BatcherError):
    """Too much is waiting already."""

    def __init__(self, waiting: int, retry_after_s: int = 1) -> None:
        super().__init__(f"{waiting} items are waiting already: try again in {retry_after_s} s", retry_after_s=retry_after_s)


class DeadlinePassed(BatcherError):
    """The deadline of a request passed before its turn came, or while it was worked on."""

    status = 504


class BatcherClosed(BatcherError):
    """The batcher ended before the request's turn came."""

    def __init__(self) -> None:
        super().__init__("the server is ending", retry_after_s=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """How a batch went."""

    items: int
    weight: int
    queue_s: float  # that its items had waited, on average
    prepare_s: float
    work_s: float


class Batcher(Generic[Item, Prepared, Result]):
    """Runs `prepare`, then `work`, on the items that are waiting, one batch at a time. Enter it before use.

    Args:
        prepare: the first stage, called in the worker thread.
        work: the second: as many results as items, in their order.
        max_batch: items of a batch.
        max_weight: sum of their weights; a heavier item is a batch of its own. None: no limit.
        max_waiting: items that may wait; further requests are refused. An empty queue takes any request.
        weigh: the weight of an item.
        overlap: run `work` in a thread of its own.
        observe: told of every batch, in the event loop.
    """

    def __init__(
        self,
        prepare: Callable[[list[Item]], Prepared],
        work: Callable[[list[Item], Prepared], Sequence[Result]],
        *,
        max_batch: int,
        max_waiting: int,
        max_weight: int | None = None,
        weigh: Callable[[Item], int] = lambda item: 1,
        overlap: bool = False,
        observe: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self._prepare, self._work = prepare, work
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._max_weight = float("inf") if max_weight is None else max_weight
        self._weigh, self._overlap, self._observe = weigh, overlap, observe
        # Changed by the event loop and by the worker: both hold this lock.
        self._changed = threading.Condition(threading.Lock())
        self._waking = False  # the thread is about to be woken
        self._queue: OrderedDict[Item, _Job[Item, Result]] = OrderedDict()
        self._working: dict[Item, _Job[Item, Result]] = {}
        self._closed = True
        self._item_s = 0.0  # lately
        self.merged = 0  # items that joined an equal one
        self.dropped = 0  # items whose last waiting request left or ran out of time before their turn

    @property
    def waiting(self) -> int:
        """Items in the queue. Somebody waits for each of them."""
        return len(self._queue)

    async def submit(self, items: Sequence[Item], *, deadline_s: float) -> list[Result]:
        """The results of `items`. Cancelled, it takes them out of the queue.

        Raises:
            QueueFull, DeadlinePassed, BatcherClosed: see above.
            Exception: what `prepare` or `work` raised.
        """
        loop = asyncio.get_running_loop()
        request: _Request[Item, Result] = _Request(done=loop.create_future())
        self._enqueue(request, items, deadline_s)
        if not request.unfinished:
            return []
        timer = loop.call_later(deadline_s, request.expire, deadline_s)
        try:
            await request.done
        except BaseException:  # cancelled, late, or what the work raised
            self._leave(request)
            raise
        finally:
            timer.cancel()
        return [job.result for job in request.jobs]

    def start(self) -> None:
        """Start its thread, in the running event loop. `aclose` ends it."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._second = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batcher-work") if self._overlap else None
        self._second_is_free = threading.Semaphore(1)
        self._first = threading.Thread(target=self._run, name="batcher")
        self._first.start()

    async def aclose(self) -> None:
        """Take nothing more, finish what waits, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.shield(asyncio.to_thread(self._join))

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            refused = list(self._queue.values())
            self._queue.clear()
        for job in refused:
            job.fail(BatcherClosed())
        await self.aclose()

    def _join(self) -> None:
        self._first.join()
        if self._second is not None:
            self._second.shutdown()

    def _enqueue(self, request: _Request[Item, Result], items: Sequence[Item], deadline_s: float) -> None:
        now = perf_counter()
        with self._changed:
            if self._closed:
                raise BatcherClosed()
            fresh = {item for item in items if item not in self._queue and item not in self._working}
            if self._queue and len(self._queue) + len(fresh) > self._max_waiting:
                raise QueueFull(len(self._queue), half_done_s(len(self._queue), self._item_s))
            for item in items:
                job = self._queue.get(item) or self._working.get(item)
                if job is None:
                    job = self._queue[item] = _Job(item, self._weigh(item), now)
                else:
                    self.merged += 1
                job.join(request, now + deadline_s)
            if not self._waking:
                self._waking = True
                self._loop.call_soon(self._wake, 0)

    def _wake(self, seen: int) -> None:
        """Wake the thread once the event loop has read what came at the same moment, or the first of many requests would be a batch of its own.

        Measured with 64 clients who ask each query 8 times: a third more queries a second, and no longer for a lone client.
        """
        waiting = len(self._queue)
        if seen < waiting < self._max_batch:
            self._loop.call_soon(self._wake, waiting)
            return
        self._waking = False
        with self._changed:
            self._changed.notify()

    def _leave(self, request: _Request[Item, Result]) -> None:
        """What only this request waited for need not be done."""
        with self._changed:
            for job in request.jobs:
                if request in job.requests:
                    job.requests.remove(request)
                    if not job.requests and self._queue.get(job.item) is job:
                        del self._queue[job.item]
                        self.dropped += 1

    def _run(self) -> None:
        """Serve batches, in the worker thread.

        consumes      the queue
        produces      results, or the exception that a stage raised on its batch
        waits for     an item; where stages overlap, for the second one to be free
        unblocked by  `aclose`, once the queue is empty
        """
        while jobs := self._take():
            started = perf_counter()
            try:
                prepared = self._prepare([job.item for job in jobs])
            except BaseException as error:  # the blast radius is this batch
                self._loop.call_soon_threadsafe(self._fail, jobs, _raised(error))
                continue
            taken = _Taken(jobs=jobs, prepared=prepared, started=started, prepare_s=perf_counter() - started)
            if self._second is None:
                self._finish(taken)
            else:
                self._second_is_free.acquire()  # or batches would pile up between the stages
                self._second.submit(self._finish, taken)

    def _take(self) -> list[_Job[Item, Result]]:
        """The next batch; an empty one at the end."""
        with self._changed:
            jobs: list[_Job[Item, Result]] = []
            weight = 0
            while not jobs:
                while not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()
                now = perf_counter()
                while self._queue and len(jobs) < self._max_batch:
                    item, job = self._queue.popitem(last=False)
                    if jobs and weight + job.weight > self._max_weight:
                        self._queue[item] = job
                        self._queue.move_to_end(item, last=False)
                        break
                    if job.deadline < now:  # the event loop is late: it tells those who wait
                        self.dropped += 1
                        continue
                    self._working[item] = job
                    jobs.append(job)
                    weight += job.weight
        return jobs

    def _finish(self, taken: _Taken[Item, Prepared, Result]) -> None:
        jobs, started = taken.jobs, perf_counter()
        try:
            results = self._work([job.item for job in jobs], taken.prepared)
            if len(results) != len(jobs):
                raise RuntimeError(f"the work function gave {len(results)} results for {len(jobs)} items")
        except BaseException as error:  # the blast radius is this batch
            self._loop.call_soon_threadsafe(self._fail, jobs, _raised(error))
        else:
            batch = Batch(
                items=len(jobs),
                weight=sum(job.weight for job in jobs),
                queue_s=sum(taken.started - job.since for job in jobs) / len(jobs),
                prepare_s=taken.prepare_s,
                work_s=perf_counter() - started,
            )
            self._loop.call_soon_threadsafe(self._deliver, jobs, results, batch)
        finally:
            if self._second is not None:
                self._second_is_free.release()

    def _deliver(self, jobs: list[_Job[Item, Result]], results: Sequence[Result], batch: Batch) -> None:
        with self._changed:
            for job, result in zip(jobs, results, strict=True):
                del self._working[job.item]
                job.succeed(result)
        latest = (batch.prepare_s + batch.work_s) / batch.items
        self._item_s = latest if not self._item_s else self._item_s + SMOOTHING * (latest - self._item_s)
        self._observe(batch)

    def _fail(self, jobs: list[_Job[Item, Result]], error: Exception) -> None:
        with self._changed:
            for job in jobs:
                del self._working[job.item]
                job.fail(error)


def _raised(error: BaseException) -> Exception:
    """What the requests of a batch get. A panic in Rust, as in the tokenizers, is no Exception in Python: it would end the thread."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def half_done_s(waiting: int, item_s: float) -> int:
    """When to come again: until half of what waits is done, in whole seconds from 1 to 60.

    Args:
        item_s: seconds that an item takes.
    """
    return min(max(math.ceil(waiting * item_s / 2), 1), LONGEST_RETRY_S)


@dataclass(eq=False, kw_only=True, slots=True)
class _Request(Generic[Item, Result]):
    done: asyncio.Future[None]
    jobs: list[_Job[Item, Result]] = field(default_factory=list)  # one per item, in their order
    unfinished: int = 0

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def expire(self, deadline_s: float) -> None:
        self.fail(DeadlinePassed(f"not served within {deadline_s:g} s"))


class _Job(Generic[Item, Result]):
    """An item, and the requests that wait for it."""

    __slots__ = ("deadline", "item", "requests", "result", "since", "weight")

    def __init__(self, item: Item, weight: int, since: float) -> None:
        self.item, self.weight, self.since = item, weight, since
        self.requests: list[_Request[Item, Result]] = []
        self.deadline = since
        self.result: Result

    def join(self, request: _Request[Item, Result], deadline: float) -> None:
        request.jobs.append(self)
        self.deadline = max(self.deadline, deadline)
        if not self.requests or self.requests[-1] is not request:  # it may name an item twice
            self.requests.append(request)
            request.unfinished += 1

    def succeed(self, result: Result) -> None:
        self.result = result
        for request in self.requests:
            request.unfinished -= 1
            if not request.unfinished and not request.done.done():
                request.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        for request in self.requests:
            request.fail(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken(Generic[Item, Prepared, Result]):
    """A batch between its stages."""

    jobs: list[_Job[Item, Result]]
    prepared: Prepared
    started: float
    prepare_s: float
