"""Groups with a greedy episode as their baseline (ReMax)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from buffer_play import Player, open_buffer, settings, trained_keys

from agentrl.types import StopReason
from agentrl.wire import decode_trajectory


def begun(directory: Path, **changes: Any) -> Player:
    player = Player(open_buffer(directory, settings=settings(greedy_baseline=True, groups_per_batch=1, **changes)))
    player.start()
    return player


def test_every_group_has_one_sample_more_which_is_played_at_temperature_0_and_comes_last(tmp_path: Path) -> None:
    player = begun(tmp_path, temperature=0.8)
    grants = player.take(3)
    assert [(grant.ticket.k, grant.temperature) for grant in grants] == [(0, 0.8), (1, 0.8), (2, 0.0)]
    for grant in reversed(grants):
        player.finish(grant)
    batch = player.take_batch()
    assert batch is not None
    assert trained_keys(batch) == [(0, 0), (0, 1), (0, 2)]
    assert [decode_trajectory(data).temperature for data in batch.groups[0]] == [0.8, 0.8, 0.0]
    player.train(batch)
    assert player.buffer.state.groups.ledger["trained"] == 3


def test_a_retry_after_a_restart_is_greedy_still_also_where_the_recipe_is_not_any_more(tmp_path: Path) -> None:
    player = begun(tmp_path)
    player.take(3)
    player.buffer.commit()
    player.buffer.journal.abandon()
    player.buffer = open_buffer(tmp_path, incarnation=2, run=2, settings=settings(groups_per_batch=1))
    player.start("restored")
    assert [(g.ticket.name, g.temperature) for g in player.take(4)] == [
        ("train/0/0/1", 1.0),
        ("train/0/1/1", 1.0),
        ("train/0/2/1", 0.0),
        ("train/1/0/0", 1.0),
    ]
    assert len(player.buffer.state.groups.by_ordinal[1].samples) == 2


def test_the_baseline_takes_no_part_in_filter_and_stops(tmp_path: Path) -> None:
    player = begun(tmp_path, filter="mixed", dropped_stops=("turn_limit",))
    player.take(6)
    player.finish_group(1.0, 1.0, 0.0)  # the two sampled ones are alike
    assert player.buffer.state.groups.ledger.dropped() == {"filtered": 3}
    sampled, other, greedy = list(player.open)
    player.finish(sampled, reward=1.0)
    player.finish(other, reward=0.0)
    player.finish(greedy, stop=StopReason.TURN_LIMIT)
    assert player.buffer.state.groups.admission.buffered == 1
    assert player.buffer.state.groups.by_ordinal[1].rewards == (1.0, 0.0)


def test_a_group_without_its_baseline_is_dropped_and_one_of_a_single_sample_beside_it_is_not(tmp_path: Path) -> None:
    player = begun(tmp_path, partial_groups=True, max_attempts=1, max_staleness=3)
    grants = player.take(6)
    player.fail(grants[2])
    assert player.buffer.state.groups.ledger.dropped() == {"group_incomplete": 3}
    player.fail(grants[3])
    player.finish(grants[4])
    player.finish(grants[5])
    batch = player.take_batch()
    assert batch is not None
    assert trained_keys(batch) == [(1, 1), (1, 2)]
