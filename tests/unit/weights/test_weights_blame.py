"""Who is to blame when members and we fail at the same thing, by what is heard and in which order."""

from contextlib import asynccontextmanager
from threading import Event

import pytest
import trio
import trio.testing

from agentrl.config.weights import WeightsRecipe
from agentrl.engine_api import Abilities, EngineClient, ServerInfo
from agentrl.errors import EngineRefused, EngineUnavailable, PublishError
from agentrl.weights.group import UpdateGroup
from agentrl.weights.joint import JointFailure, together
from agentrl.weights.member import Member


@asynccontextmanager
async def members(*ranks: int):
    """Members of so many processes each."""
    found = []
    for index, tensor_parallel in enumerate(ranks):
        info = ServerInfo(version="0.5.23", abilities=Abilities.of("0.5.23"), tensor_parallel=tensor_parallel, context_tokens=None, raw={})
        found.append(Member(EngineClient(f"http://engine-{index}", index), info, WeightsRecipe()))
    try:
        yield found
    finally:
        for member in found:
            await member.engine.aclose()


def blamed(theirs: dict, ours: Exception | None, autojump_clock) -> list[int]:
    """Indices of the guilty, where members do `theirs` by index (an exception, seconds to wait, or nothing) beside us."""

    async def main() -> list[int]:
        async with members(1, 1, 1) as three:

            async def call(member: Member) -> None:
                for act in theirs.get(member.engine.index, ()):
                    if isinstance(act, Exception):
                        raise act
                    await trio.sleep(act)

            with pytest.raises(JointFailure) as failure:
                await together(three, call, lambda: fail(ours))
            return sorted(member.engine.index for member in failure.value.guilty)

    return trio.run(main, clock=autojump_clock)


def fail(error: Exception | None) -> None:
    if error is not None:
        raise error


BROKEN = PublishError("connection closed by peer")


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0.01)


def test_an_engine_that_cannot_be_reached_is_blamed_and_those_that_noticed_are_not(clock):
    assert blamed({0: [EngineRefused("connection closed")], 1: [0.2, EngineUnavailable("reset")]}, None, clock) == [1]


def test_the_first_to_refuse_is_blamed(clock):
    assert blamed({2: [EngineRefused("no such group")], 0: [0.1, EngineRefused("closed")]}, None, clock) == [2]


def test_who_does_not_answer_when_ours_has_failed_is_blamed(clock):
    assert blamed({1: [1000.0], 2: [0.5, EngineRefused("timed out")]}, BROKEN, clock) == [1]


def test_nobody_is_blamed_where_ours_failed_first_and_everybody_answers(clock):
    assert blamed({index: [0.1, EngineRefused("closed")] for index in range(3)}, BROKEN, clock) == []


def test_a_call_that_fails_does_not_wait_for_a_collective_that_hangs():
    hang = Event()

    async def main() -> None:
        async with members(1) as one:

            async def call(member: Member) -> None:
                raise EngineUnavailable("refused")

            with trio.fail_after(5.0), pytest.raises(JointFailure):
                await together(one, call, lambda: hang.wait(20.0) and None)
        hang.set()

    trio.run(main)


def test_ranks_advance_by_the_processes_of_each_engine():
    async def main() -> tuple[tuple[int, ...], int]:
        async with members(2, 1, 4) as three:
            group = UpdateGroup(three, backend="gloo", address="127.0.0.1", deadline_s=1.0)
            return group.offsets, group.world

    assert trio.run(main) == ((1, 3, 4), 8)


def test_groups_have_fresh_names():
    async def main() -> None:
        async with members(1) as one:
            first, second = (UpdateGroup(one, backend="gloo", address="127.0.0.1", deadline_s=1.0) for _ in range(2))
            assert first.name != second.name

    trio.run(main)
