"""Publishing to engines that die, come back and lag: every version reaches those that can be reached, and nobody else is current."""

import pytest
import torch
import trio
import trio.testing
from roster_scene import Roster

from agentrl.engine_api import EngineClient
from agentrl.errors import EngineRefused, EngineUnavailable, PublishError
from agentrl.system.publishing import Publishing
from agentrl.weights import Published, Snapshot


class FakePublisher:
    """Brings engines to versions in `publish_s` and `sync_s` seconds, unless they are in `unreachable` (by index)."""

    def __init__(self, publish_s=1.0, sync_s=1.0):
        self.publish_s, self.sync_s = publish_s, sync_s
        self.clients = ()
        self.unreachable = {}  # index -> error
        self.published = []  # (version, engines)
        self.synced = []  # (engine, version)
        self.syncing = set()

    def set_engines(self, clients):
        self.clients = tuple(clients)

    async def publish(self, snapshot):
        indexes = [client.index for client in self.clients]
        assert not self.syncing & set(indexes), "an engine is loaded from disk while it takes part in a publishing"
        await trio.sleep(self.publish_s)
        indexes = [client.index for client in self.clients]  # those that left meanwhile take no part in the second attempt
        reached = tuple(index for index in indexes if index not in self.unreachable)
        if not reached:
            raise PublishError(f"version {snapshot.version} could not be brought to any engine")
        self.published.append((snapshot.version, reached))
        fenced = {index: "it was late" for index in indexes if index not in reached}
        return Published(version=snapshot.version, engines=reached, fenced=fenced, seconds=self.publish_s, nbytes=snapshot.nbytes)

    async def cold_sync(self, engine, version, path):
        assert path == f"v{version}"
        self.syncing.add(engine.index)
        try:
            await trio.sleep(self.sync_s)
        finally:
            self.syncing.remove(engine.index)
        if engine.index in self.unreachable:
            raise self.unreachable[engine.index]
        self.synced.append((engine.index, version))

    async def aclose(self):
        return


class FakeDirectories:
    """Versions that are on disk."""

    def __init__(self):
        self.kept = set()

    async def path(self, snapshot):
        self.kept.add(snapshot.version)
        return f"v{snapshot.version}"

    async def tidy(self, newest, *, read):
        self.kept = {version for version in self.kept if version >= newest or version in read}


class Scene:
    def __init__(self, **publisher):
        self.roster, self.publisher, self.heard, self.directories = Roster(), FakePublisher(**publisher), [], FakeDirectories()
        self.publishing = Publishing(self.roster, self.publisher, self.directories, connect=EngineClient, listen=self.hear)
        self.send, self.receive = trio.open_memory_channel(1)

    async def hear(self, snapshot, engines):
        self.heard.append((snapshot.version, [engine.index for engine in engines]))

    async def first(self, version=0):
        await self.publishing.first(snapshot(version))


def snapshot(version):
    return Snapshot.of(version, version, [[("w", torch.full((2,), float(version)))]])


def play(act, **publisher):
    async def main():
        scene = Scene(**publisher)
        with trio.fail_after(10_000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.publishing.follow_loop)
                nursery.start_soon(scene.publishing.publish_loop, scene.receive)
                await act(scene)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_first_weights_go_to_all_engines_by_disk_and_then_versions_to_all_at_once():
    async def act(scene):
        scene.roster.live(0, 1)
        await scene.first()
        assert scene.roster.current == {0: 0, 1: 0}
        await scene.send.send(snapshot(1))
        await trio.sleep(2.0)
        assert scene.roster.current == {0: 1, 1: 1}
        assert scene.publisher.synced in ([(0, 0), (1, 0)], [(1, 0), (0, 0)])
        assert [said for said in scene.roster.said if said[0] == "published"] == [("published", 0, [0, 1]), ("published", 1, [0, 1])]
        assert scene.heard == [(0, [0, 1]), (1, [0, 1])]
        assert scene.directories.kept == set()  # of version 0 nobody has any use

    play(act)


def test_an_engine_that_comes_is_cold_synced_to_the_newest_version_and_takes_part_in_the_next():
    async def act(scene):
        scene.roster.live(0)
        await scene.first()
        await scene.send.send(snapshot(1))
        await trio.sleep(2.0)
        scene.roster.live(1, incarnation=4)
        await trio.sleep(2.0)
        assert scene.publisher.synced[-1] == (1, 1)
        assert scene.roster.current == {0: 1, 1: 1}
        assert scene.directories.kept == {1}
        await scene.send.send(snapshot(2))
        await trio.sleep(2.0)
        assert scene.publisher.published[-1] == (2, (0, 1))

    play(act)


def test_an_engine_that_a_publishing_does_not_reach_is_fenced_cold_synced_and_current_again():
    async def act(scene):
        scene.roster.live(0, 1)
        await scene.first()
        scene.publisher.unreachable[1] = EngineUnavailable("late")
        await scene.send.send(snapshot(1))
        await trio.sleep(1.5)
        assert scene.roster.current == {0: 1}
        assert ("fenced", 1, "it was late") in scene.roster.said
        scene.publisher.unreachable.clear()
        await trio.sleep(2.0)
        assert scene.roster.current == {0: 1, 1: 1}

    play(act)


def test_after_three_failures_in_a_row_an_engine_is_given_up_and_goes_on_being_tried():
    async def act(scene):
        scene.roster.live(0, 1)
        scene.publisher.unreachable[1] = EngineUnavailable("its disk is broken")
        await scene.first()
        assert scene.roster.current == {0: 0}
        await trio.sleep(10.0)
        told = [said[0] for said in scene.roster.said if said[1] == 1]
        assert told == ["fenced", "fenced", "given up"]  # after 1, 3 and 6 seconds; the next is at 12
        scene.publisher.unreachable.clear()
        await trio.sleep(60.0)
        assert scene.roster.current == {0: 0, 1: 0}

    play(act)


def test_with_all_engines_dead_a_version_waits_for_the_restart_and_is_then_published():
    async def act(scene):
        scene.roster.live(0)
        await scene.first()
        scene.roster.die(0)
        await scene.send.send(snapshot(1))
        await trio.sleep(100.0)
        assert scene.publisher.published == []
        scene.roster.live(0, incarnation=2)
        await trio.sleep(5.0)
        assert scene.publisher.published == [(1, (0,))]
        assert scene.roster.current == {0: 1}

    play(act)


def test_an_engine_that_dies_while_a_version_is_sent_takes_no_further_part_in_it():
    async def act(scene):
        scene.roster.live(0, 1)
        await scene.first()
        await scene.send.send(snapshot(1))
        await trio.sleep(0.5)
        scene.roster.die(1)
        await trio.sleep(1.0)
        assert scene.publisher.published == [(1, (0,))]
        assert scene.roster.current == {0: 1}

    play(act)


def test_an_engine_that_lags_behind_versions_that_come_faster_than_it_loads_is_brought_along_by_one_of_them():
    async def act(scene):
        scene.roster.live(0)
        await scene.first()
        scene.roster.live(1)
        for version in range(1, 6):
            await scene.send.send(snapshot(version))
            await trio.sleep(6.0)
        assert scene.publisher.synced == [(0, 0), (1, 0)]  # 10 s: until after version 2 has begun
        assert scene.publisher.published[:3] == [(1, (0,)), (2, (0,)), (3, (0, 1))]
        assert scene.roster.current == {0: 5, 1: 5}

    play(act, sync_s=10.0)


def test_an_engine_that_was_overtaken_by_the_last_version_is_cold_synced_once_more():
    async def act(scene):
        scene.roster.live(0)
        await scene.first()
        scene.roster.live(1)
        await trio.sleep(0.5)
        await scene.send.send(snapshot(1))
        await trio.sleep(1.2)
        assert scene.roster.current == {0: 1}
        await trio.sleep(5.0)
        assert scene.publisher.synced == [(0, 0), (1, 0), (1, 1)]
        assert scene.roster.current == {0: 1, 1: 1}

    play(act)


def test_first_weights_that_every_engine_refuses_end_the_run_with_what_they_said():
    async def act(scene):
        scene.roster.live(0, 1)
        scene.publisher.unreachable |= {0: EngineRefused("another architecture"), 1: EngineRefused("another architecture")}
        with pytest.raises(PublishError, match="version 0: every engine refuses it: another architecture"):
            await scene.first()

    play(act)


def test_a_version_that_no_engine_takes_ends_the_run_after_six_attempts():
    async def act(scene):
        scene.roster.live(0)
        await scene.first()
        scene.publisher.publish = refuse
        await scene.send.send(snapshot(1))
        await trio.sleep(1000.0)

    async def refuse(snapshot):
        raise PublishError("version 1 could not be brought to any engine: no")

    with pytest.raises(ExceptionGroup) as raised:
        play(act)
    assert raised.group_contains(PublishError, match="to any engine: no")
