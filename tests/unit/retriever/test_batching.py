import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import pytest

from retriever.batching import Batch, Batcher, BatcherClosed, DeadlinePassed, QueueFull, half_done_s

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


Doubler = Batcher[int, None, int]


def doubler(gate: Gate, **options: Any) -> Doubler:
    return Batcher(lambda items: None, lambda items, nothing: gate(items), **{"max_batch": 8, "max_waiting": 16, **options})


def with_batcher(play: Callable[[Doubler, Gate], Coroutine[Any, Any, None]], *, work: Gate | None = None, **options: Any) -> Gate:
    gate = work or Gate()

    async def main() -> None:
        async with doubler(gate, **options) as batcher:
            try:
                await play(batcher, gate)
            finally:
                gate.open.set()

    asyncio.run(main())
    return gate


async def hold(batcher: Doubler, gate: Gate, group: asyncio.TaskGroup) -> asyncio.Task[list[int]]:
    """Keep the worker busy with one request."""
    gate.open.clear()
    first = group.create_task(batcher.submit([0], deadline_s=FOREVER_S))
    await asyncio.to_thread(gate.busy.wait, FOREVER_S)
    return first


async def queued(batcher: Doubler, group: asyncio.TaskGroup, *requests: list[int]) -> list[asyncio.Task[list[int]]]:
    tasks = [group.create_task(batcher.submit(items, deadline_s=FOREVER_S)) for items in requests]
    await asyncio.sleep(0)
    return tasks


def test_a_lone_request_is_served_at_once():
    async def play(batcher: Doubler, gate: Gate) -> None:
        assert await batcher.submit([1, 2], deadline_s=FOREVER_S) == [2, 4]
        assert await batcher.submit([], deadline_s=FOREVER_S) == []

    assert with_batcher(play).batches == [[1, 2]]


def test_what_waits_while_the_worker_is_busy_becomes_one_batch():
    async def play(batcher: Doubler, gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            tasks = await queued(batcher, group, [1], [2, 3], [4])
            assert batcher.waiting == 4
            gate.open.set()
        assert [task.result() for task in tasks] == [[2], [4, 6], [8]]

    assert with_batcher(play).batches == [[0], [1, 2, 3, 4]]


def test_a_batch_holds_at_most_so_many_items_and_so_much_weight():
    async def play(batcher: Doubler, gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            await queued(batcher, group, [1, 2], [3, 4, 5], [60], [6, 7], [50])
            gate.open.set()

    # a weight is the number itself, at least 1: 60 and 50 do not fit beside anything, and 50 is a batch although it is more than 40
    caps = {"max_batch": 4, "max_weight": 40, "weigh": lambda item: item}
    assert with_batcher(play, **caps).batches == [[0], [1, 2, 3, 4], [5], [60], [6, 7], [50]]


def test_equal_items_that_wait_or_are_worked_on_are_worked_on_once():
    async def play(batcher: Doubler, gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            first = await hold(batcher, gate, group)
            tasks = await queued(batcher, group, [0], [1, 1, 2], [2, 0])
            assert (batcher.waiting, batcher.merged) == (2, 4)
            gate.open.set()
        assert [task.result() for task in (first, *tasks)] == [[0], [0], [2, 2, 4], [4, 0]]
        assert await batcher.submit([1], deadline_s=FOREVER_S) == [2]

    assert with_batcher(play).batches == [[0], [1, 2], [1]]  # it merges what is under way, and keeps nothing


def test_an_item_that_several_wait_for_stays_until_the_last_of_them_leaves():
    async def play(batcher: Doubler, gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            one, two, three, four = await queued(batcher, group, [1], [1], [2], [2, 3])
            for left in (one, three, four):
                left.cancel()
            await asyncio.sleep(0)
            assert (batcher.waiting, batcher.dropped) == (1, 2)
            gate.open.set()
        assert two.result() == [2]

    assert with_batcher(play).batches == [[0], [1]]


def test_one_failed_batch_of_a_large_request_fails_it_and_the_rest_is_not_worked_on():
    class Picky(Gate):
        def __call__(self, items: list[int]) -> Sequence[int]:
            if 1 in items:
                self.busy.set()
                assert self.open.wait(FOREVER_S)
                raise ArithmeticError("1")
            return super().__call__(items)

    async def play(batcher: Doubler, gate: Gate) -> None:
        with pytest.raises(ArithmeticError):
            await batcher.submit([1, 2], deadline_s=FOREVER_S)
        assert await batcher.submit([3], deadline_s=FOREVER_S) == [6]

    assert [3] in with_batcher(play, work=Picky(), max_batch=1).batches


@pytest.mark.parametrize("overlap", [False, True])
def test_an_observer_is_told_of_every_batch(overlap: bool):
    told: list[Batch] = []

    async def play(batcher: Doubler, gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            await queued(batcher, group, [1, 2], [3])
            gate.open.set()

    with_batcher(play, overlap=overlap, observe=told.append, weigh=lambda item: 10)
    assert [(batch.items, batch.weight) for batch in told] == [(1, 10), (3, 30)]
    assert all(batch.queue_s >= 0 and batch.prepare_s >= 0 and batch.work_s >= 0 for batch in told)


def test_where_stages_overlap_a_batch_is_prepared_while_another_is_worked_on():
    working, go = threading.Event(), threading.Event()
    prepared: list[list[int]] = []
    next_is_prepared = threading.Event()

    def prepare(items: list[int]) -> list[int]:
        prepared.append(items)
        if working.is_set():
            next_is_prepared.set()
        return [2 * item for item in items]

    def work(items: list[int], doubled: list[int]) -> list[int]:
        working.set()
        assert go.wait(FOREVER_S)
        return [item + 1 for item in doubled]

    async def main() -> None:
        async with Batcher(prepare, work, max_batch=8, max_waiting=8, overlap=True) as batcher, asyncio.TaskGroup() as group:
            first = group.create_task(batcher.submit([1], deadline_s=FOREVER_S))
            await asyncio.to_thread(working.wait, FOREVER_S)
            second = group.create_task(batcher.submit([2], deadline_s=FOREVER_S))
            await asyncio.to_thread(next_is_prepared.wait, FOREVER_S)
            assert prepared == [[1], [2]]
            go.set()
        assert (first.result(), second.result()) == ([3], [5])

    asyncio.run(main())


def test_what_a_closing_batcher_took_in_is_finished():
    async def main() -> None:
        gate = Gate()
        batcher = doubler(gate)
        batcher.start()
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            [waiting] = await queued(batcher, group, [1])
            closing = group.create_task(batcher.aclose())
            await asyncio.sleep(0)
            with pytest.raises(BatcherClosed):
                await batcher.submit([2], deadline_s=FOREVER_S)
            gate.open.set()
        assert closing.done()
        assert waiting.result() == [2]

    asyncio.run(main())


def test_a_request_nobody_waits_for_is_dropped():
    async def play(batcher: Doubler, gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            left, stayed = await queued(batcher, group, [1], [2])
            left.cancel()
            await asyncio.sleep(0)
            gate.open.set()
        assert stayed.result() == [4]

    assert with_batcher(play).batches == [[0], [2]]


def test_a_full_queue_refuses_and_says_when_to_come_again():
    async def play(batcher: Doubler, gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            await hold(batcher, gate, group)
            await queued(batcher, group, [1, 2, 3])
            with pytest.raises(QueueFull, match="3 items are waiting") as refused:
                await batcher.submit([4, 5], deadline_s=FOREVER_S)
            assert refused.value.retry_after_s == 1
            assert batcher.waiting == 3
            [same] = await queued(batcher, group, [4, 4, 0, 1])  # one more that waits
            assert batcher.waiting == 4
            gate.open.set()
        assert same.result() == [8, 8, 0, 2]

    with_batcher(play, max_waiting=4)


def test_a_request_larger_than_the_queue_is_served_when_the_queue_is_empty():
    async def play(batcher: Doubler, gate: Gate) -> None:
        assert await batcher.submit(range(10), deadline_s=FOREVER_S) == list(range(0, 20, 2))

    with_batcher(play, max_waiting=4)


def test_a_deadline_ends_the_waiting_not_the_batcher():
    async def play(batcher: Doubler, gate: Gate) -> None:
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

    async def play(batcher: Doubler, gate: Gate) -> None:
        with pytest.raises(ArithmeticError):
            await batcher.submit([13], deadline_s=FOREVER_S)
        with pytest.raises(RuntimeError, match="0 results for 1 items"):
            await batcher.submit([14], deadline_s=FOREVER_S)
        assert await batcher.submit([1], deadline_s=FOREVER_S) == [2]

    with_batcher(play, work=Picky())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", ["prepare", "work"])
def test_a_panic_of_a_stage_ends_its_batch_and_not_the_thread(stage: str, overlap: bool):
    class Panic(BaseException):
        """As Rust's, told to Python by PyO3."""

    def run(of: str, items: list[int]) -> list[int]:
        if of == stage and 13 in items:
            raise Panic("13")
        return items

    async def main() -> None:
        prepare, work = partial(run, "prepare"), lambda items, nothing: run("work", items)
        async with Batcher(prepare, work, max_batch=8, max_waiting=8, overlap=overlap) as batcher:
            with pytest.raises(RuntimeError, match="Panic: 13"):
                await batcher.submit([13], deadline_s=FOREVER_S)
            assert await batcher.submit([1], deadline_s=FOREVER_S) == [1]

    asyncio.run(main())


def test_leaving_the_batcher_ends_requests_that_wait_and_refuses_new_ones():
    async def main() -> None:
        gate = Gate()
        async with asyncio.TaskGroup() as group:
            async with doubler(gate) as batcher:
                first = await hold(batcher, gate, group)
                waiting = group.create_task(expect_closed(batcher))
                await asyncio.sleep(0)
                first.cancel()
                gate.open.set()
            await waiting
            with pytest.raises(BatcherClosed):
                await batcher.submit([2], deadline_s=FOREVER_S)

    async def expect_closed(batcher: Doubler) -> None:
        with pytest.raises(BatcherClosed):
            await batcher.submit([1], deadline_s=FOREVER_S)

    asyncio.run(main())


def test_an_item_whose_deadline_passed_is_not_worked_on():
    async def play(batcher: Doubler, gate: Gate) -> None:
        with pytest.raises(DeadlinePassed):
            await batcher.submit([1], deadline_s=0.0)
        assert await batcher.submit([2], deadline_s=FOREVER_S) == [4]
        assert batcher.dropped == 1

    assert with_batcher(play).batches == [[2]]


def test_a_refused_request_is_told_to_come_again_when_half_of_the_queue_is_done():
    assert half_done_s(4096, item_s=0.003) == 7  # 6.1
    assert half_done_s(12, item_s=0.5) == 3
    assert half_done_s(4096, item_s=0.0) == 1  # nothing is known yet
    assert half_done_s(4096, item_s=2.0) == 60
