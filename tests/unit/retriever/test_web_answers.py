"""Limits of a paid service, and the file of its answers."""

import asyncio
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from retriever.batching import QueueFull
from retriever.web.answers import Answers
from retriever.web.providers import GoogleCse, QuotaExhausted, Result, SerpApi
from retriever.web.rate import RateLimit

DAY_S = 24 * 60 * 60


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def result(name: str) -> Result:
    return Result(title=name, url=f"https://example.org/{name}", snippet="ä")


def test_a_second_has_its_requests_and_the_rest_wait_in_order():
    clock = Clock()
    limit = RateLimit(per_second=4.0, clock=clock)
    assert [limit.reserve(within_s=10.0) for _ in range(7)] == pytest.approx([0, 0, 0, 0, 0.25, 0.5, 0.75])
    clock.now += 1.0
    assert limit.reserve(within_s=10.0) == pytest.approx(0.0)
    assert limit.reserve(within_s=10.0) == pytest.approx(0.25)
    clock.now += 1000.0
    assert [limit.reserve(within_s=10.0) for _ in range(5)] == pytest.approx([0, 0, 0, 0, 0.25])


def test_a_slow_service_has_one_request_at_a_time():
    limit = RateLimit(per_second=0.5, clock=Clock())
    assert [limit.reserve(within_s=10.0) for _ in range(3)] == pytest.approx([0.0, 2.0, 4.0])


def test_a_turn_beyond_the_deadline_is_refused_and_takes_none():
    limit = RateLimit(per_second=1.0, clock=Clock())
    limit.reserve(within_s=0.0)
    with pytest.raises(QueueFull) as caught:
        limit.reserve(within_s=0.5)
    assert caught.value.retry_after_s == 1
    assert limit.reserve(within_s=1.0) == pytest.approx(1.0)


def test_a_turn_that_is_given_back_is_taken_by_the_next_and_not_a_second_time():
    async def main() -> None:
        limit = RateLimit(per_second=1.0, per_day=6, clock=Clock())
        limit.reserve(within_s=0.0)
        waiting = [asyncio.ensure_future(limit.turn(within_s=10.0)) for _ in range(3)]  # in 1, 2 and 3 seconds of a clock that stands still
        await asyncio.sleep(0)
        for left in waiting[:2]:
            left.cancel()
        await asyncio.wait(waiting[:2])
        assert limit.spent_today == 2
        with pytest.raises(QueueFull):
            limit.reserve(within_s=0.5)
        assert [limit.reserve(within_s=10.0) for _ in range(3)] == pytest.approx([1.0, 2.0, 4.0])
        waiting[2].cancel()

    asyncio.run(main())


def test_no_24_hours_have_more_than_a_days_requests():
    clock = Clock()
    limit = RateLimit(per_second=1e6, per_day=3, clock=clock, spent=[clock.now - DAY_S - 1, clock.now - 1000.0])
    assert limit.spent_today == 1
    limit.reserve(within_s=1.0)
    limit.reserve(within_s=1.0)
    with pytest.raises(QuotaExhausted) as caught:
        limit.reserve(within_s=1.0)
    assert caught.value.retry_after_s == DAY_S - 1000
    clock.now += DAY_S - 999
    limit.reserve(within_s=1.0)
    with pytest.raises(QuotaExhausted):
        limit.reserve(within_s=1.0)


def test_a_turn_that_nobody_waits_for_any_more_is_given_back():
    limit = RateLimit(per_second=1.0, per_day=2, clock=Clock())

    async def main() -> None:
        await limit.turn(within_s=10.0)
        second = asyncio.ensure_future(limit.turn(within_s=10.0))
        await asyncio.sleep(0)
        assert limit.spent_today == 2
        second.cancel()
        await asyncio.wait([second])

    asyncio.run(main())
    assert limit.spent_today == 1
    assert limit.reserve(within_s=10.0) == pytest.approx(1.0)


@pytest.mark.parametrize("per_second", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(per_second: float):
    with pytest.raises(ValueError, match="per_second must be more than 0"):
        RateLimit(per_second=per_second)


@pytest.mark.parametrize("on_disk", [False, True])
def test_answers_expire(tmp_path: Path, on_disk: bool):
    clock = Clock()
    with Answers(tmp_path / "a.jsonl" if on_disk else None, expiry_s=100.0, clock=clock) as answers:
        answers.put("q", 10, (result("a"), result("b")), requests=1)
        clock.now += 99.0
        assert answers.get("q", 10) == (result("a"), result("b"))
        assert answers.get("q", 20) is None
        assert answers.get("r", 10) is None
        clock.now += 1.0
        assert answers.get("q", 10) is None


def test_what_memory_has_no_room_for_is_read_from_the_file(tmp_path: Path):
    with Answers(tmp_path / "a.jsonl", in_memory=2) as answers:
        for number in range(10):
            answers.put(f"q{number}", 10, (result(str(number)),), requests=1)
        assert [answers.get(f"q{number}", 10) for number in range(10)] == [(result(str(number)),) for number in range(10)]
        assert len(answers) == 10
    with Answers(in_memory=2) as answers:
        for number in range(10):
            answers.put(f"q{number}", 10, (), requests=1)
        assert [answers.get(f"q{number}", 10) for number in range(10)] == [None] * 8 + [()] * 2


def test_a_cut_off_line_costs_one_answer_only(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    with Answers(path) as answers:
        answers.put("a", 10, (result("a"),), requests=1)
        answers.put("b", 10, (result("b"),), requests=2)
        assert len(answers.request_times()) == 0  # of those from before
    whole = path.read_bytes()
    for cut in (1, 20, len(whole.splitlines()[1])):
        path.write_bytes(whole[:-cut])
        with Answers(path) as answers:
            assert answers.get("a", 10) == (result("a"),)
            answers.put("c", 10, (result("c"),), requests=1)
        with Answers(path) as answers:
            assert answers.get("a", 10) == (result("a"),)
            assert answers.get("c", 10) == (result("c"),)


def test_what_has_expired_is_dropped_from_the_file(tmp_path: Path):
    clock, path = Clock(), tmp_path / "a.jsonl"
    with Answers(path, expiry_s=100.0, clock=clock) as answers:
        for number in range(10):
            answers.put(f"old{number}", 10, (result("x"),), requests=2)
        clock.now += 100.0
        answers.put("new", 10, (result("new"),), requests=1)
    with Answers(path, expiry_s=100.0, clock=clock) as answers:
        assert len(answers) == 1
        assert answers.get("new", 10) == (result("new"),)
        assert len(answers.request_times()) == 21  # they were paid for all the same
    assert len(path.read_bytes().splitlines()) == 1


def test_a_file_belongs_to_one_process_at_a_time(tmp_path: Path):
    with Answers(tmp_path / "a.jsonl"), pytest.raises(OSError, match="in use by another process: give each server a cache of its own"):
        Answers(tmp_path / "a.jsonl")
    Answers(tmp_path / "a.jsonl").close()


def test_an_answer_is_private_to_its_owner(tmp_path: Path):
    Answers(tmp_path / "a.jsonl").close()
    assert (tmp_path / "a.jsonl").stat().st_mode & 0o077 == 0


def test_a_disk_that_is_full_costs_no_answer(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Answers(tmp_path / "a.jsonl") as answers:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
        try:
            for name in ("a", "b", "c"):
                answers.put(name, 10, (result(name),), requests=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [answers.get(name, 10) for name in ("a", "b", "c")] == [(result(name),) for name in ("a", "b", "c")]
        assert "kept in memory only: [Errno 27] File too large" in answers.write_error
    with Answers(tmp_path / "a.jsonl") as answers:
        assert answers.get("a", 10) == (result("a"),)
        assert answers.get("b", 10) is None


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda below: (
        strategies.lists(below, max_size=4)
        | strategies.dictionaries(strategies.sampled_from(["title", "link", "snippet", "answer", "message", "error", "x"]), below, max_size=4)
    ),
    max_leaves=12,
)
ANSWERS = strategies.dictionaries(strategies.sampled_from(["organic_results", "items", "answer_box", "error", "search_metadata"]), JSON)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, database=None)
@given(answer=ANSWERS, anything=JSON)
def test_whatever_a_service_answers_becomes_results_or_is_refused(answer: dict[str, Any], anything: Any):
    for provider in (SerpApi({"SERPAPI_KEY": "k"}, None), GoogleCse({"GOOGLE_API_KEY": "k", "GOOGLE_CSE_ID": "e"}, None)):
        with suppress(ValueError):  # it says so: a list that is none
            for found in provider.results(answer) or []:
                assert found.url.startswith("http")
                assert found.title.encode().decode() + found.url.encode().decode() + found.snippet.encode().decode()
        assert isinstance(provider.trouble(anything).message, str)
