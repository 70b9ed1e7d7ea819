"""Publishing to engines that die, come back and lag: every version reaches those that can be reached, and nobody else is current."""

import pytest
import trio
from publishing_scene import play, snapshot

from agentrl.errors import EngineRefused, EngineUnavailable, PublishError


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


def test_the_only_engine_is_not_waited_for_when_it_dies_while_a_version_is_sent():
    async def act(scene):
        scene.roster.live(0)
        await scene.first()
        await scene.send.send(snapshot(1))
        await trio.sleep(5.0)
        scene.publisher.publish_s = 1.0
        scene.roster.die(0)
        scene.roster.live(0, incarnation=2)
        await trio.sleep(3.0)
        assert scene.publisher.synced == [(0, 0), (0, 0)]
        assert scene.publisher.published == [(1, (0,))]
        assert scene.roster.current == {0: 1}

    play(act, publish_s=1000.0)


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


def test_what_is_said_of_an_engine_arrives_in_order_and_one_that_was_overtaken_is_not_current_in_between():
    async def act(scene):
        real = scene.roster.engine_current

        async def slow(index, incarnation, version):
            if index == 1:
                await trio.sleep(0.5)  # on its way
            return await real(index, incarnation, version)

        scene.roster.engine_current = slow
        scene.roster.live(0)
        await scene.first()
        scene.roster.live(1)  # its cold sync takes 10 s
        await trio.sleep(9.2)
        await scene.send.send(snapshot(1))  # out at 10.2 s, when it is on its way that engine 1 has version 0
        await trio.sleep(1.5)
        assert scene.roster.current == {0: 1}
        await trio.sleep(60.0)
        assert scene.roster.current == {0: 1, 1: 1}

    play(act, sync_s=10.0)


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
