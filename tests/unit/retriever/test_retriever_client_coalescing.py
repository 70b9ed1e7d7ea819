"""Queries of concurrent calls in one request."""

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from retriever.client import Passage, RetrieverClient, RetrieverError, RetrieverTimeout
from retriever.coalescing import Coalescer


class Server(httpx.AsyncBaseTransport):
    """Answers each query with itself, after a second; refuses a request with a query `bad`; hangs on one request, by number."""

    def __init__(self, *, hanging: int | None = None) -> None:
        self.requests: list[list[str]] = []
        self.most = self._now = 0
        self._hanging = hanging

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append(body["queries"])
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await trio.sleep(1000.0 if len(self.requests) - 1 == self._hanging else 1.0)
        finally:
            self._now -= 1
        if "bad" in body["queries"]:
            return httpx.Response(422, json={"detail": "a bad query"})
        hits = [[{"document": {"id": f"{query}/{body['topk']}", "contents": "x"}, "score": 1}] for query in body["queries"]]
        return httpx.Response(200, json={"result": hits})


def run(server: Server, main: Callable[[RetrieverClient, trio.Nursery], Any], *, coalesce: int = 1) -> float:
    """Seconds that it took."""

    async def whole() -> float:
        started = trio.current_time()
        async with RetrieverClient("http://r", transport=server, coalesce=coalesce) as client, trio.open_nursery() as nursery:
            await main(client, nursery)
        return trio.current_time() - started

    return trio.run(whole, clock=MockClock(autojump_threshold=0))


async def ask(client: RetrieverClient, *queries: str, topk: int = 1, deadline_s: float = 30.0) -> None:
    found = await client.retrieve(list(queries), topk=topk, deadline_s=deadline_s)
    assert found == [[Passage(id=f"{query}/{topk}", contents="x", score=1.0)] for query in queries]


def test_what_waits_goes_out_together_and_equal_queries_are_asked_once():
    server = Server()

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        nursery.start_soon(ask, client, "a")
        await trio.sleep(0.5)
        for query in ("b", "c", "b", "a"):  # a is on its way
            nursery.start_soon(ask, client, query)
        nursery.start_soon(ask, client, "d", "c", "d")

    assert run(server, main) == 2.0
    assert server.requests[0] == ["a"]
    assert sorted(server.requests[1]) == ["b", "c", "d"]
    assert len(server.requests) == 2


def test_callers_that_are_answered_together_ask_together_again():
    server = Server()

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        async def turns(number: int) -> None:
            for turn in range(3):
                await ask(client, f"{number}.{turn}")

        for number in range(20):
            nursery.start_soon(turns, number)

    assert run(server, main) == 3.0
    assert [len(queries) for queries in server.requests] == [20, 20, 20]


def test_a_lone_call_does_not_wait():
    server = Server()

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        await ask(client, "a")
        await ask(client, "b")

    assert run(server, main, coalesce=2) == 2.0
    assert server.requests == [["a"], ["b"]]


def test_no_more_requests_are_in_flight_than_were_allowed():
    server = Server()

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        for number in range(50):
            nursery.start_soon(ask, client, str(number))
            await trio.sleep(0.05)

    run(server, main, coalesce=3)
    assert server.most == 3
    assert len(server.requests) < 15


def test_queries_for_other_numbers_of_passages_go_in_other_requests():
    server = Server()

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        for topk in (1, 2, 1, 2):
            nursery.start_soon(lambda topk=topk: ask(client, "q", "r", topk=topk))

    run(server, main)
    assert [sorted(queries) for queries in server.requests] == [["q", "r"], ["q", "r"]]


async def in_line(nursery: trio.Nursery, *calls: Callable[[], Any]) -> None:
    """Start calls one after the other, while the first of them is on its way: the second leads the rest."""
    for call in calls:
        nursery.start_soon(call)
        await trio.sleep(0.1)


def test_a_leader_that_is_cancelled_hands_over():
    server = Server(hanging=1)

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        leader = trio.CancelScope()

        async def lead() -> None:
            with leader:
                await ask(client, "a")

        await in_line(nursery, partial(ask, client, "first"), lead, partial(ask, client, "b"), partial(ask, client, "a"))
        await trio.sleep(4.6)
        leader.cancel()

    assert run(server, main) == pytest.approx(6.0)
    assert server.requests == [["first"], ["a", "b"], ["a", "b"]]


def test_the_shortest_deadline_ends_one_call_only():
    server = Server(hanging=1)

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        async def late() -> None:
            with pytest.raises(RetrieverTimeout, match="did not answer within 3 s"):
                await ask(client, "a", deadline_s=3.0)

        await in_line(nursery, partial(ask, client, "first"), late, partial(ask, client, "b"))

    assert run(server, main) == pytest.approx(0.1 + 3.0 + 1.0)
    assert server.requests == [["first"], ["a", "b"], ["b"]]


def test_what_everybody_has_given_up_is_not_asked():
    server = Server()

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        nursery.start_soon(ask, client, "a")
        await trio.sleep(0.1)
        with trio.move_on_after(0.1):
            await ask(client, "given up")
        await ask(client, "b")

    run(server, main)
    assert server.requests == [["a"], ["b"]]


def test_a_query_that_is_refused_harms_its_own_call_alone():
    server = Server()
    errors = []

    async def main(client: RetrieverClient, nursery: trio.Nursery) -> None:
        async def wrong() -> None:
            with pytest.raises(RetrieverError, match=r"answered 422: .*a bad query") as caught:
                await ask(client, "also mine", "bad")
            errors.append(caught.value)

        nursery.start_soon(ask, client, "first")  # leads
        await trio.sleep(0.1)
        for query in ("a", "b"):
            nursery.start_soon(ask, client, query)
        nursery.start_soon(wrong)
        nursery.start_soon(ask, client, "c")

    run(server, main)
    assert len(errors) == 1
    assert sorted(server.requests[1]) == ["a", "also mine", "b", "bad", "c"]
    assert sorted(sorted(queries) for queries in server.requests[2:]) == [["a"], ["also mine", "bad"], ["b"], ["c"]]


def test_many_queries_go_out_in_several_requests():
    asked: list[int] = []

    async def double(queries: Any, topk: int) -> list[str]:
        asked.append(len(queries))
        await trio.sleep(1.0)
        return [query + query for query in queries]

    async def main() -> None:
        coalescer = Coalescer(double, requests=2, max_queries=10)
        started = trio.current_time()
        numbers = [str(number) for number in range(35)]
        assert await coalescer.get(numbers, topk=1) == [number + number for number in numbers]
        assert trio.current_time() - started == 4.0  # one caller leads one request at a time
        long = ["x" * 100_000 + str(number) for number in range(3)]
        await coalescer.get(long, topk=1)
        assert await coalescer.get([], topk=1) == []

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert asked == [10, 10, 10, 5, 1, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_cancelled_everybody_else_is_answered(seed: int):
    dice = random.Random(seed)

    async def flaky(queries: Any, topk: int) -> list[str]:
        await trio.sleep(dice.uniform(0.0, 1.0))
        if dice.random() < 0.2:
            raise RetrieverError("down")
        return [query + query for query in queries]

    async def main() -> int:
        coalescer = Coalescer(flaky, requests=2, max_queries=5)
        answered = 0

        async def call() -> None:
            nonlocal answered
            await trio.sleep(dice.uniform(0.0, 3.0))
            queries = [str(dice.randrange(12)) for _ in range(dice.randrange(4))]
            with trio.move_on_after(dice.choice([0.2, 0.5, 1000.0])) as scope:
                try:
                    assert await coalescer.get(queries, topk=1) == [query + query for query in queries]
                    answered += 1
                except RetrieverError:
                    answered += 1
            answered += scope.cancelled_caught

        with trio.fail_after(500.0):  # nobody is forgotten
            async with trio.open_nursery() as nursery:
                for _ in range(60):
                    nursery.start_soon(call)
        assert not coalescer._open
        assert coalescer._free == 2
        return answered

    assert trio.run(main, clock=MockClock(autojump_threshold=0)) == 60


def test_a_negative_number_of_requests_is_refused():
    with pytest.raises(ValueError, match="coalesce must be 0 or more requests, got -1"):
        RetrieverClient("http://r", coalesce=-1)
