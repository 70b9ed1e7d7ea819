"""The order of an update's calls, and what is called when it does not come to its end. Engines note what they are asked; nothing is sent."""

from contextlib import suppress

import pytest
import torch
import trio
import trio.testing

from agentrl.config.weights import WeightsRecipe
from agentrl.engine_api import Abilities, ServerInfo
from agentrl.errors import EngineRefused, EngineUnavailable
from agentrl.weights import Snapshot
from agentrl.weights.member import Member
from agentrl.weights.transfer import Transfer

PAUSE, BEGIN, BUCKET, END, CONTINUE = "pause", "begin", "bucket", "end", "continue"


class Engine:
    """Notes calls. `failing` raise; `hanging` never end."""

    index = 0

    def __init__(self, failing=(), hanging=()):
        self.calls, self.ends, self.called = [], [], trio.Event()
        self._failing, self._hanging = failing, hanging

    async def _call(self, name):
        self.calls.append(name)
        called, self.called = self.called, trio.Event()
        called.set()
        if name in self._failing:
            raise EngineUnavailable(f"{name} failed")
        if name in self._hanging:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()

    async def until(self, name):
        while name not in self.calls:
            await self.called.wait()

    async def pause(self, mode, **options):
        await self._call(PAUSE)

    async def begin_update(self, **options):
        await self._call(BEGIN)

    async def update_from_distributed(self, header, **options):
        await self._call(BUCKET)

    async def end_update(self, *, checksums=None, **options):
        self.ends.append(checksums)
        await self._call(END)

    async def update_from_disk(self, path, **options):
        await self._call("load")

    async def continue_(self, **options):
        await self._call(CONTINUE)


class Group:
    """Nobody is in it but members."""

    name, deadline_s, piece_bytes = "group", 10.0, None

    def __init__(self, *members):
        self.members, self.dissolved = members, 0

    def broadcast(self, flat):
        return

    async def dissolve(self):
        self.dissolved += 1


def member(engine, *, staged) -> Member:
    abilities = Abilities.of("0.5.23", staged_update=staged)
    return Member(engine, ServerInfo(version="0.5.23", abilities=abilities, tensor_parallel=1, context_tokens=None, raw={}), WeightsRecipe())


def snapshot() -> Snapshot:
    return Snapshot.of(1, 1, [[("a", torch.ones(2))], [("b", torch.ones(2))]])


def transfer(group, snapshot) -> Transfer:
    return Transfer(group, snapshot, WeightsRecipe())


def test_an_engine_that_pauses_for_an_update_generates_until_all_is_gathered_and_one_that_does_not_is_sent_to_meanwhile():
    async def heard_while_gathering(staged) -> list[str]:
        engine, gathering = Engine(), Snapshot(version=1, step=1)
        heard = []

        def gathered():
            yield [("a", torch.ones(2))]
            trio.from_thread.run(settled)
            heard.extend(engine.calls)
            yield [("b", torch.ones(2))]

        async def settled() -> None:
            if staged:
                await engine.until(BEGIN)
            else:
                await trio.testing.wait_all_tasks_blocked()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: transfer(Group(member(engine, staged=staged)), gathering).run(formed=True))
            await trio.to_thread.run_sync(gathering.fill, gathered())
        assert engine.calls == ([BEGIN, BUCKET, BUCKET, END] if staged else [PAUSE, BEGIN, BUCKET, BUCKET, END, CONTINUE])
        return heard

    assert trio.run(heard_while_gathering, True) == [BEGIN]
    assert trio.run(heard_while_gathering, False) == []


@pytest.mark.parametrize("hanging", [PAUSE, BEGIN, BUCKET, END, CONTINUE])
def test_an_engine_that_pauses_goes_on_where_the_run_is_stopped_in_mid_update(hanging):
    async def main() -> None:
        engine = Engine(hanging={hanging})
        group = Group(member(engine, staged=False))
        with trio.CancelScope() as stop:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: transfer(group, snapshot()).run(formed=True))
                await engine.until(hanging)
                stop.cancel()
        assert engine.calls[-2:] == [END, CONTINUE]
        assert group.dissolved == 1

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))


def test_an_engine_that_pauses_stays_paused_after_a_bucket_failed():
    engine = Engine(failing={BUCKET})
    failures = trio.run(lambda: transfer(Group(member(engine, staged=False)), snapshot()).run(formed=True))
    assert failures.any
    assert (engine.calls[-2:], engine.ends) == ([BUCKET, END], [None])


@pytest.mark.parametrize("failing", [END, None])
def test_a_session_that_is_settled_is_told_checksums_that_no_buckets_have(failing):
    async def main() -> None:
        engine, wanted = Engine(failing={failing}), snapshot()
        sums = [wanted.bucket_checksum(0), wanted.bucket_checksum(1)]
        if failing:
            await transfer(Group(member(engine, staged=True)), wanted).run(formed=True)
            assert engine.ends == [sums, ("nothing",)]
        else:
            await member(engine, staged=True).load("v1", 1)
            assert engine.ends == [("nothing",)]

    trio.run(main)


@pytest.mark.slow
def test_an_engine_goes_on_where_the_run_is_stopped_while_it_loads_and_stays_paused_where_it_cannot():
    async def stopped(hanging: str) -> list[str]:
        engine = Engine(hanging={hanging})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(member(engine, staged=False).load, "v1", 1)
            await engine.until(hanging)
            nursery.cancel_scope.cancel()
        return engine.calls

    async def failed() -> list[str]:
        engine = Engine(failing={"load"})
        with suppress(EngineRefused, EngineUnavailable):
            await member(engine, staged=False).load("v1", 1)
        return engine.calls

    assert trio.run(stopped, "load") == [PAUSE, END, "load", CONTINUE]
    assert trio.run(stopped, PAUSE) == [PAUSE, CONTINUE]
    assert trio.run(failed) == [PAUSE, END, "load"]
