"""Seats at engines that come and go."""

import numpy as np
import pytest
import trio
import trio.testing

from agentrl.buffer_api import EngineEntry
from agentrl.errors import EngineUnavailable
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.fleet import Fleet
from agentrl.testing.engine import FakeEngine, turns
from agentrl.testing.tokenizer import word_encoder

ENCODER = word_encoder(["one", "two", "three"])
PROMPT = np.array([3, 4, 5], dtype=np.int32)


class Engines:
    """Fake engines by index, and the roster that a fleet follows. A token takes a second."""

    def __init__(self):
        self.fakes = {index: FakeEngine(turns(ENCODER, "one two three"), encoder=ENCODER, token_s=1.0) for index in range(3)}
        self.fleet = Fleet(first=0, connect=lambda url, index: self.fakes[index].client(index))

    def are(self, *current, fenced=(), incarnation=1):
        every = {index: index in current for index in (*current, *fenced)}
        return self.fleet.update(
            [
                EngineEntry(index=i, incarnation=incarnation, url=f"http://engine-{i}", version=1, current=is_current)
                for i, is_current in every.items()
            ]
        )

    def play(self, beside, *, deadline_s=60.0):
        """One turn, `beside` running along. Returns (the engine that wrote it, seconds)."""

        async def main():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(beside)
                with self.fleet.seat() as seat:
                    policy = EnginePolicy(seat, name="n", seed=0, temperature=1.0, decode=ENCODER.decode, deadline_s=deadline_s)
                    completion = await policy.complete(PROMPT, stop_strings=(), budget=5)
                assert completion.text == "one two three"
                return completion.engine, trio.current_time()

        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_seats_are_given_at_current_engines_only():
    engines = Engines()

    async def main():
        engines.are(0, fenced=(1, 2))
        with engines.fleet.seat() as a, engines.fleet.seat() as b:
            assert (a.engine.index, b.engine.index, engines.fleet.episodes) == (0, 0, (2,))
            engines.are(0, 1, fenced=(2,))
            with engines.fleet.seat() as c:
                assert (c.engine.index, engines.fleet.episodes) == (1, (2, 1))
                assert (a.stands, (await a.settle(1.0)).index) == (True, 0)  # it keeps its place
        assert engines.fleet.episodes == (0, 0)

    trio.run(main)


def test_an_episode_moves_when_its_engine_is_fenced_and_is_counted_once():
    engines = Engines()

    async def main():
        engines.are(0, 1)
        with engines.fleet.seat() as seat:
            engines.are(1, fenced=(0,))
            assert not seat.stands
            assert (await seat.settle(1.0)).index == 1
            assert engines.fleet.episodes == (1,)
            engines.are(0, 1)
            assert engines.fleet.episodes == (0, 1)
        assert engines.fleet.episodes == (0, 0)

    trio.run(main)


def test_the_client_of_a_fenced_engine_is_kept_and_that_of_a_dead_one_given_back_to_be_closed():
    engines = Engines()
    assert engines.are(0, 1) == []
    assert engines.are(0, fenced=(1,)) == []
    (gone,) = engines.are(0)
    assert gone.index == 1
    restarted = engines.are(0, incarnation=2)
    assert [client.index for client in restarted] == [0]


def test_a_turn_at_an_engine_that_leaves_goes_on_at_another_at_once():
    engines = Engines()
    engines.are(0, 1)

    async def fence():
        await trio.sleep(2.0)
        assert engines.fakes[0].running == 1
        engines.fakes[0].frozen = True  # no answer and no error will ever come of it
        engines.are(1)

    assert engines.play(fence) == ("http://engine-1", 5.0)  # two seconds lost, and the turn's own three


def test_a_turn_waits_while_there_is_no_engine_and_goes_on_when_one_comes():
    engines = Engines()
    engines.are(0)

    async def restart():
        await trio.sleep(1.0)
        engines.are()
        await trio.sleep(30.0)
        engines.are(fenced=(0,), incarnation=2)
        await trio.sleep(4.0)
        engines.are(0, incarnation=2)

    assert engines.play(restart) == ("http://engine-0", 38.0)


def test_without_an_engine_a_turn_is_given_up_after_its_deadline():
    engines = Engines()

    async def main():
        with engines.fleet.seat() as seat:
            policy = EnginePolicy(seat, name="n", seed=0, temperature=1.0, decode=ENCODER.decode, deadline_s=20.0)
            with pytest.raises(EngineUnavailable, match=r"no engine had the newest weights for 20\.0 s"):
                await policy.complete(PROMPT, stop_strings=(), budget=5)
        return trio.current_time()

    assert trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)) == 20.0
