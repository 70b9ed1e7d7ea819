"""What many callers do when their server fails: the shared budget of further attempts, and the breaker."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from retriever.breaker import CircuitBreaker
from retriever.client import RetrieverClient, RetrieverError, RetrieverTimeout
from retriever.retries import RetryBudget


class Server(httpx.AsyncBaseTransport):
    """Refuses connections, answers a status, or hangs (None), as a function of the time says. The clock of a test starts at 0."""

    def __init__(self, at: Callable[[float], Any], *, latency_s: float = 0.0) -> None:
        self._at, self._latency_s = at, latency_s
        self.times: list[float] = []
        self.headers: list[httpx.Headers] = []
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.times.append(trio.current_time())
        self.headers.append(request.headers)
        self.bodies.append(body)
        await trio.sleep(self._latency_s)
        act = self._at(trio.current_time())
        if act is None:
            await trio.sleep_forever()
        if isinstance(act, Exception):
            raise act
        status, headers = act if isinstance(act, tuple) else (act, {})
        hits = [[{"document": {"id": query, "contents": "x"}, "score": 1}] for query in body["queries"]]
        return httpx.Response(status, json={"result": hits}, headers=headers)


def run(main: Callable[[], Any]) -> Any:
    return trio.run(main, clock=MockClock(autojump_threshold=0))


def play(server: Server, callers: int, *, deadline_s: float = 30.0, every_s: float = 0.0, **options: Any) -> list[tuple[Any, float]]:
    """What every caller gets, and when, in seconds from the start."""
    outcomes: list[tuple[Any, float]] = []

    async def main() -> None:
        started = trio.current_time()

        async def call(number: int) -> None:
            await trio.sleep(number * every_s)
            try:
                outcome: Any = await client.retrieve([f"q{number}"], topk=1, deadline_s=deadline_s)
            except RetrieverError as error:
                outcome = error
            outcomes.append((outcome, trio.current_time() - started))

        async with RetrieverClient("http://r", transport=server, **options) as client, trio.open_nursery() as nursery:
            for number in range(callers):
                nursery.start_soon(call, number)

    run(main)
    return outcomes


REFUSED = httpx.ConnectError("refused")


def until(second: float, before: Any, after: Any = 200) -> Callable[[float], Any]:
    return lambda now: before if now < second else after


@pytest.mark.parametrize("failure", [REFUSED, 503])
def test_a_server_that_starts_late_costs_no_call_and_is_not_stormed(failure: Any):
    server = Server(until(10.0, failure), latency_s=0.01)
    outcomes = play(server, 150)
    assert [kind for kind, _ in outcomes if isinstance(kind, RetrieverError)] == []
    asked_in_vain = [second for second in server.times if second < 10.0 - 0.01]
    # The first attempts of all, and then a probe at a time: after 0.25, 0.5, 1, 2, 2, 2, 2 s. Without a breaker 150 callers make some 1200.
    assert len(asked_in_vain) <= 150 + 10
    assert all(seconds < 10.0 + 2.0 + 1.0 for _, seconds in outcomes)  # found out by the next probe, and nobody waits for the budget


def test_who_waits_for_a_breaker_waits_as_long_as_its_deadline_and_is_told_of_what_and_since_when():
    outcomes = play(Server(lambda now: REFUSED), 40, deadline_s=6.0)
    assert {type(error) for error, _ in outcomes} == {RetrieverError}
    assert min(seconds for _, seconds in outcomes) > 6.0 - 3.0  # a lone caller gives up when its next pause, of 3 s at most, passes its deadline
    waited = [error for error, seconds in outcomes if seconds == pytest.approx(6.0)]
    assert waited
    for error in waited:
        asked, waited_only = "http://r cannot be reached: refused; its circuit", "http://r had no turn within 6 s: its circuit"
        assert asked in str(error) or waited_only in str(error)
        assert " failures in a row since 20" in str(error)
        assert str(error).endswith("UTC, the last: ConnectError: refused")


def test_a_call_that_comes_while_the_breaker_is_open_has_the_same_chance():
    server = Server(until(8.0, REFUSED))
    outcomes = play(server, 80, every_s=0.1, deadline_s=5.0)  # they come over 8 seconds
    lost = [seconds for outcome, seconds in outcomes if isinstance(outcome, RetrieverError)]
    assert 0 < len(lost) < 60  # those whose deadline passed before the server was there, and no others
    assert max(lost) < 8.0 + 2.0
    late = [
        error for error, _ in outcomes if isinstance(error, RetrieverError) and "had no turn within 5 s: its circuit breaker is open" in str(error)
    ]
    assert late, "some never got a turn, and were told why"


def test_a_probe_that_hangs_holds_nobody_up():
    def at(now: float) -> Any:
        return REFUSED if now < 1.0 else None if now < 4.0 else 200

    outcomes = play(Server(at), 32, deadline_s=20.0)
    got = [outcome for outcome, seconds in outcomes if not isinstance(outcome, RetrieverError)]
    assert len(got) >= 24  # all but the probes that hang: without a breaker all 32 of them would
    assert all(isinstance(outcome, RetrieverTimeout) for outcome, _ in outcomes if isinstance(outcome, RetrieverError))


def test_a_busy_server_is_no_broken_one():
    server = Server(until(3.0, (503, {"retry-after": "1"})))
    outcomes = play(server, 20)
    assert all(not isinstance(outcome, RetrieverError) for outcome, _ in outcomes)
    assert len(server.times) == 20 * 4  # at 0, 1, 2 and 3 seconds: no probes


def test_half_of_the_answers_failing_opens_nothing():
    count = iter(range(10_000))
    server = Server(lambda now: 500 if next(count) % 2 else 200)
    outcomes = play(server, 50)
    assert all(not isinstance(outcome, RetrieverError) for outcome, _ in outcomes)


def test_ten_failures_in_a_row_open_a_breaker_and_one_success_closes_it():
    async def main() -> None:
        breaker = CircuitBreaker()
        for _ in range(9):
            breaker.failed("down")
        breaker.succeeded()
        for _ in range(9):
            breaker.failed("down")
        assert not breaker.is_open
        assert breaker.state == ""
        breaker.failed("down")
        assert breaker.is_open
        started = trio.current_time()
        for pause_s in (0.25, 0.5, 1.0, 2.0, 2.0):
            await breaker.admission()
            assert trio.current_time() - started == pytest.approx(pause_s)
            started = trio.current_time()
            breaker.failed("down")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(breaker.admission)
            nursery.start_soon(breaker.admission)
            await trio.lowlevel.checkpoint()
            breaker.succeeded()  # from an attempt of before, say
        assert trio.current_time() == started
        await breaker.admission()

    run(main)


def test_failures_spread_over_more_than_the_window_open_nothing():
    async def main() -> None:
        breaker = CircuitBreaker(failures=3, window_s=10.0)
        for _ in range(9):
            breaker.failed("down")
            await trio.sleep(5.1)
        assert not breaker.is_open

    run(main)


def test_what_was_on_its_way_when_the_breaker_opened_does_not_lengthen_its_pause():
    async def main() -> None:
        breaker = CircuitBreaker(failures=2)
        for _ in range(100):
            breaker.failed("down")
        started = trio.current_time()
        await breaker.admission()
        assert trio.current_time() - started == pytest.approx(0.25)

    run(main)


def test_the_budget_is_a_fifth_of_the_calls_and_ten_attempts_a_second():
    async def main() -> None:
        budget = RetryBudget()
        started = trio.current_time()
        for _ in range(100):  # ten seconds' worth are there
            await budget.withdraw()
        assert trio.current_time() == started
        for _ in range(20):
            await budget.withdraw()
        assert trio.current_time() - started == pytest.approx(2.0)
        for _ in range(50):
            budget.deposit()
        for _ in range(10):
            await budget.withdraw()
        assert trio.current_time() - started == pytest.approx(2.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(budget.withdraw)
            await trio.lowlevel.checkpoint()
            budget.pay_back()
        assert trio.current_time() - started == pytest.approx(2.0)
        await trio.sleep(1000.0)
        started = trio.current_time()
        for _ in range(101):  # credit does not pile up
            await budget.withdraw()
        assert trio.current_time() - started == pytest.approx(0.1)

    run(main)


def test_a_token_goes_into_the_header_and_into_nothing_else():
    server = Server(lambda now: 401)
    [(error, _)] = play(server, 1, token="s3cret")
    assert server.headers[0]["authorization"] == "Bearer s3cret"
    assert "answered 401" in str(error)
    assert "s3cret" not in str(error)
    for wrong in ("", "two words", "line\nbreak", "ключ"):
        with pytest.raises(ValueError, match="printable ASCII") as caught:
            RetrieverClient("http://r", token=wrong)
        assert not wrong or wrong not in str(caught.value)


def test_mode_and_rerank_are_asked_for_where_they_are_set():
    server = Server(lambda now: 200)
    play(server, 1)
    play(server, 1, mode="hybrid", rerank=True)
    assert [sorted(body) for body in server.bodies] == [["queries", "return_scores", "topk"], ["mode", "queries", "rerank", "return_scores", "topk"]]
    assert (server.bodies[1]["mode"], server.bodies[1]["rerank"]) == ("hybrid", True)
