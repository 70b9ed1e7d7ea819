"""Engines that share the learner's GPUs: asleep while it trains, awake for everything else, whatever happens in between."""

import threading
from pathlib import Path

import pytest
import trio
from publishing_scene import play, snapshot

from agentrl.config.load import load_recipe
from agentrl.errors import EngineRefused, EngineUnavailable
from agentrl.system.colocation import Turns, engines_sleep
from agentrl.system.sglang import launch_command

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


class FakeEngines:
    """Clients that note what they are told, and fail at the calls in `failing` (index, call)."""

    def __init__(self):
        self.said, self.failing, self.unready = [], {}, set()

    def __call__(self, url, index):
        return FakeEngine(self, index)

    def of(self, index):
        return [call for who, call in self.said if who == index]


class FakeEngine:
    def __init__(self, engines, index):
        self.engines, self.index = engines, index

    async def pause(self, mode):
        await self._note(f"pause {mode}")

    async def release_memory(self):
        await self._note("release")

    async def resume_memory(self):
        await self._note("resume")

    async def continue_(self):
        await self._note("continue")

    async def ready(self):
        return self.index not in self.engines.unready

    async def aclose(self):
        return

    async def _note(self, call):
        self.engines.said.append((self.index, call))
        await trio.sleep(0.25)
        if (error := self.engines.failing.get((self.index, call))) is not None:
            raise error


NIGHT = ["pause retract", "release", "resume", "continue"]


def share(act, **options):
    engines = FakeEngines()
    play(lambda scene: act(scene, engines), connect=engines, sharing="release", **options)


def test_while_engines_sleep_nothing_is_published_and_one_that_comes_waits():
    async def act(scene, engines):
        scene.roster.live(0, 1)
        await scene.first()
        await scene.publishing.lie_down()
        scene.roster.live(2)
        await scene.send.send(snapshot(1))
        await trio.sleep(100.0)
        assert (scene.publisher.published, sorted(scene.publisher.synced)) == ([], [(0, 0), (1, 0)])
        await scene.publishing.rise()
        await trio.sleep(10.0)
        assert [engines.of(index) for index in (0, 1, 2)] == [NIGHT, NIGHT, []]
        assert scene.publisher.published == [(1, (0, 1))]
        assert scene.roster.current == {0: 1, 1: 1, 2: 1}

    share(act)


def test_engines_do_not_fall_asleep_before_what_was_handed_over_is_out_and_heard():
    async def act(scene, engines):
        scene.roster.live(0)
        await scene.first()
        scene.publishing.expect(1)
        await scene.send.send(snapshot(1))
        await scene.publishing.lie_down()  # at once: the publish loop has not even begun
        assert (scene.heard[-1], scene.roster.current) == ((1, [0]), {0: 1})
        await scene.publishing.rise()

    share(act)


def test_with_every_engine_dead_the_learner_waits_for_the_restart_and_not_for_ever():
    async def act(scene, engines):
        scene.roster.live(0)
        await scene.first()
        scene.roster.die(0)
        scene.publishing.expect(1)
        await scene.send.send(snapshot(1))
        with trio.move_on_after(50.0) as waited:
            await scene.publishing.lie_down()
        assert waited.cancelled_caught
        await scene.publishing.rise()  # of a night that never came
        scene.roster.live(0, incarnation=2)
        await scene.publishing.lie_down()
        assert scene.publisher.published == [(1, (0,))]
        await scene.publishing.rise()
        assert engines.of(0) == NIGHT

    share(act)


@pytest.mark.parametrize("call", ["release", "resume"])
def test_an_engine_that_does_not_obey_is_fenced_woken_and_cold_synced(call):
    async def act(scene, engines):
        scene.roster.live(0, 1)
        await scene.first()
        engines.failing[1, call] = EngineUnavailable("it hangs")
        await scene.publishing.lie_down()
        engines.unready |= {0, 1}
        await scene.publishing.rise()
        told = "did not fall asleep" if call == "release" else "did not wake up"
        assert ("fenced", 1, f"it {told}: it hangs") in scene.roster.said
        assert scene.roster.current == {0: 0}
        engines.failing.clear()
        await trio.sleep(30.0)
        assert scene.roster.current == {0: 0, 1: 0}
        assert (engines.of(0), engines.of(1)[-1]) == (NIGHT, "resume")

    share(act)


@pytest.mark.parametrize("call", ["pause retract", "release"])
def test_an_engine_that_has_released_nothing_is_not_told_to_take_it_back(call):
    async def act(scene, engines):
        scene.roster.live(0, 1)
        await scene.first()
        engines.failing[1, call] = EngineRefused("not now")
        engines.unready |= {1}  # as one that is paused
        await scene.publishing.lie_down()
        await scene.publishing.rise()
        engines.failing.clear()
        await trio.sleep(30.0)
        assert scene.roster.current == {0: 0, 1: 0}
        assert "resume" not in engines.of(1)

    share(act)


def test_an_engine_that_dies_asleep_is_not_called_again_and_its_successor_waits_for_the_morning():
    async def act(scene, engines):
        scene.roster.live(0, 1)
        await scene.first()
        await scene.publishing.lie_down()
        scene.roster.die(1)
        await trio.sleep(1.0)
        scene.roster.live(1, incarnation=7)
        await trio.sleep(60.0)
        assert scene.publisher.synced[2:] == []
        await scene.publishing.rise()
        await trio.sleep(5.0)
        assert (engines.of(1), scene.publisher.synced[2:]) == (NIGHT[:2], [(1, 0)])

    share(act)


def test_an_engine_that_refuses_for_good_is_given_up_as_any_other():
    async def act(scene, engines):
        scene.roster.live(0)
        await scene.first()
        engines.failing[0, "pause retract"] = EngineRefused("no")
        for _ in range(3):
            await scene.publishing.lie_down()
            await scene.publishing.rise()
        assert [said[0] for said in scene.roster.said if said[1] == 0][-3:] == ["fenced", "fenced", "given up"]

    share(act)


@pytest.mark.parametrize(("device", "flags"), [("cuda", 2), ("cpu", 0)])
def test_an_sglang_server_on_a_shared_gpu_is_started_able_to_give_its_memory_away_and_to_keep_its_weights(device, flags):
    given = ["engine.kind=sglang", "engine.python=py", "resources.colocate=true", f"engine.device={device}", f"learner.device={device}"]
    recipe = load_recipe([QUICKSTART], given)
    command = launch_command(recipe, Path("/model"), host="127.0.0.1", port=1)
    assert len({"--enable-memory-saver", "--enable-weights-cpu-backup"} & set(command)) == flags
    assert engines_sleep(recipe) == ("release" if flags else "pause")


class Meeting:
    """A broadcast from rank 0 between threads."""

    def __init__(self, ranks):
        self._barrier, self._value = threading.Barrier(ranks, timeout=10.0), 0.0

    def agree(self, rank, value):
        if rank == 0:
            self._value = value
        self._barrier.wait()
        told = self._value
        self._barrier.wait()
        return told


class Night:
    """What rank 0 has of Publishing: it takes three rounds until engines sleep."""

    def __init__(self, story):
        self.story = story

    async def lie_down(self):
        await trio.sleep(0.03)
        self.story.append("asleep")

    async def rise(self):
        self.story.append("awake")


def test_every_rank_trains_between_the_last_engines_sleep_and_the_first_ones_waking():
    story, meeting = [], Meeting(3)

    async def rank(number):
        turns = Turns(lambda value: meeting.agree(number, value), round_s=0.01)
        for _ in range(2):
            async with turns.training(Night(story) if number == 0 else None):
                story.append("train")

    async def main():
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(rank, number)

    trio.run(main)
    assert story == ["asleep", "train", "train", "train", "awake"] * 2


def test_engines_wake_up_when_training_fails():
    story = []

    async def main():
        async with Turns(lambda value: value, round_s=1.0).training(Night(story)):
            raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        trio.run(main)
    assert story == ["asleep", "awake"]
