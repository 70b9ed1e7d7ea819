import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from retriever.batching import Batcher, BatcherClosed, DeadlinePassed, QueueFull

FOREVER_S = 60.0


class Gate:
    """Work that doubles numbers, records its batches, and waits where it is held."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.busy = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def __call__(self, items: list[int]) -> Sequence[int]:
        self.batches.append(items)
        self.busy.set()
        assert self.open.wait(FOREVER_S)
        return [2 * item for item in items]


def with_batcher(
    play: Callable[[Batcher[int, int], Gate], Coroutine[Any, Any, None]], *, work: Gate | None = None, max_batch: int = 8, max_waiting: int = 16
) -> Gate:
    gate = work or Gate()

    async def main() -> None:
        async with Batcher[int, int](gate, max_batch=max_batch, max_waiting=max_waiting) as batcher:
            try:
                await play(batcher, gate)
            finally:
                gate.open.set()

    asyncio.run(main())
    return gate


async def hold(batcher: Batcher[int, int], gate: Gate, group: asyncio.TaskGroup) -> asyncio.Task[list[int]]:
    """Keep the worker busy with one request."""
    gate.open.clear()
    first = group.create_task(batcher.submit([0], deadline_s=FOREVER_S))
    await asyncio.to_thread(gate.busy.wait, FOREVER_S)
    return first


async def queued(batcher: Batcher[int, int], group: asyncio.TaskGroup, *requests: list[int]) -> list[asyncio.Task[list[int]]]:
    tasks = [group.create_task(batcher.submit(items, deadline_s=FOREVER_S)) for items in requests]
    await asyncio.sleep(0)
    return tasks


def test_a_lone_request_is_served_at_once():
    async def play(batcher: Batcher[int, int], gate: Gate) -> None:
        assert await batcher.submit([1, 2], deadline_s=FOREVER_S) == [2, 4]
        assert await batcher.submit([], deadline_s=FOREVER_S) == []

    assert with_batcher(play).batches == [[1, 2], []]


def test_what_waits_while_the_worker_is_busy_becomes_one_batch():
    async def play(batcher: Batcher[int, int], gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            tasks = await queued(batcher, group, [1], [2, 3], [4])
            assert batcher.waiting == 4
            gate.open.set()
        assert [task.result() for task in tasks] == [[2], [4, 6], [8]]

    assert with_batcher(play).batches == [[0], [1, 2, 3, 4]]


def test_a_batch_holds_at_most_so_many_items_but_a_large_request_stays_whole():
    async def play(batcher: Batcher[int, int], gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            await queued(batcher, group, [1, 2], [3], [4, 5, 6, 7], [8])
            gate.open.set()

    assert with_batcher(play, max_batch=3).batches == [[0], [1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_request_nobody_waits_for_is_dropped():
    async def play(batcher: Batcher[int, int], gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            left, stayed = await queued(batcher, group, [1], [2])
            left.cancel()
            await asyncio.sleep(0)
            gate.open.set()
        assert stayed.result() == [4]

    assert with_batcher(play).batches == [[0], [2]]


def test_a_full_queue_refuses_and_says_when_to_come_again():
    async def play(batcher: Batcher[int, int], gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            await queued(batcher, group, [1, 2, 3])
            with pytest.raises(QueueFull, match="3 items are waiting") as refused:
                await batcher.submit([4, 5], deadline_s=FOREVER_S)
            assert refused.value.retry_after_s == 1
            assert batcher.waiting == 3
            gate.open.set()

    with_batcher(play, max_waiting=4)


def test_a_request_larger_than_the_queue_is_served_when_the_queue_is_empty():
    async def play(batcher: Batcher[int, int], gate: Gate) -> None:
        assert await batcher.submit([1] * 10, deadline_s=FOREVER_S) == [2] * 10

    with_batcher(play, max_waiting=4)


def test_a_deadline_ends_the_waiting_not_the_batcher():
    async def play(batcher: Batcher[int, int], gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            with pytest.raises(DeadlinePassed, match=r"not served within 0 s"):
                await batcher.submit([1], deadline_s=0.0)
            gate.open.set()
        assert await batcher.submit([2], deadline_s=FOREVER_S) == [4]

    assert with_batcher(play).batches == [[0], [2]]


def test_an_exception_reaches_the_requests_of_its_batch_only():
    class Picky(Gate):
        def __call__(self, items: list[int]) -> Sequence[int]:
            if 13 in items:
                raise ArithmeticError("13")
            return items[:-1] if 14 in items else super().__call__(items)

    async def play(batcher: Batcher[int, int], gate: Gate) -> None:
        with pytest.raises(ArithmeticError):
            await batcher.submit([13], deadline_s=FOREVER_S)
        with pytest.raises(RuntimeError, match="0 results for 1 items"):
            await batcher.submit([14], deadline_s=FOREVER_S)
        assert await batcher.submit([1], deadline_s=FOREVER_S) == [2]

    with_batcher(play, work=Picky())


def test_leaving_the_batcher_ends_requests_that_wait_and_refuses_new_ones():
    async def main() -> None:
        gate = Gate()
        async with asyncio.TaskGroup() as group:
            async with Batcher[int, int](gate, max_batch=8, max_waiting=8) as batcher:
                first = await hold(batcher, gate, group)
                waiting = group.create_task(expect_closed(batcher))
                await asyncio.sleep(0)
                first.cancel()
                gate.open.set()
            await waiting
            with pytest.raises(BatcherClosed):
                await batcher.submit([2], deadline_s=FOREVER_S)

    async def expect_closed(batcher: Batcher[int, int]) -> None:
        with pytest.raises(BatcherClosed):
            await batcher.submit([1], deadline_s=FOREVER_S)

    asyncio.run(main())
