"""A rollback because of bad weights: what they wrote is dropped by cause, what others wrote stays."""

from __future__ import annotations

from pathlib import Path

from buffer_play import Player, open_buffer, settings, taken_ordinals

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer_api import JournalMark


def rolled_back(buffer: ReplayBuffer, mark: JournalMark, *, bad_after: int | None) -> int:
    """Back to the checkpoint `mark` is of. Returns the number of annulled batches."""
    manifest = {"id": f"s{mark.step}", "step": mark.step, "consumed": mark.consumed}
    return buffer.rollback(Player(buffer).learner, manifest, bad_after=bad_after).annulled


def begun(directory: Path) -> tuple[Player, JournalMark]:
    """Groups of 2, batches of 2, K=1. Steps 1 and 2 are trained, with versions 1 and 2; the mark is of step 1."""
    player = Player(open_buffer(directory, settings=settings(total_steps=9)))
    player.start()
    player.step()
    mark = player.buffer.mark()
    player.step()
    return player, mark


def balance(player: Player) -> dict[str, int]:
    return dict(player.buffer.state.groups.ledger.balance())


def test_groups_that_bad_weights_had_a_part_in_go_and_the_annulled_batch_of_good_ones_is_trained_again(tmp_path: Path) -> None:
    player, mark = begun(tmp_path)
    assert balance(player)["buffered"] == 2 * 2  # two groups by versions 0 and 1 wait
    player.take()
    first, second = sorted({grant.ticket.ordinal for grant in player.open})
    player.finish_group(1.0, 0.0, versions=(1, 2))  # the bad ones wrote the end
    player.finish(player.open[0], version=2)  # one of two: its group cannot become good any more
    assert rolled_back(player.buffer, mark, bad_after=1) == 1
    state = player.buffer.state
    assert balance(player)["buffered"] == 2 * 2 + 2 * 2  # and the batch that was given back
    assert state.groups.ledger.dropped() == {"bad_weights": 4}
    assert not {first, second} & state.groups.by_ordinal.keys()
    assert not player.finish(player.open[0], version=2)  # its ticket was closed with its group: late
    player.start("rollback-1")
    assert taken_ordinals(player.take_batch()) == [2, 3]


def test_an_episode_that_bad_weights_end_after_the_rollback_takes_its_group_with_it_and_counts_for_no_filter(tmp_path: Path) -> None:
    player, mark = begun(tmp_path)
    player.take()
    rolled_back(player.buffer, mark, bad_after=1)
    before = player.buffer.state.groups.admission.alive
    player.finish_group(1.0, 0.0, version=2)
    assert player.buffer.state.groups.ledger.dropped() == {"bad_weights": 2}
    assert player.buffer.state.groups.admission.alive == before - 1  # its place is free
    assert player.buffer.state.groups.filtered == 0
    player.finish_group(1.0, 0.0, version=1)
    assert player.buffer.state.groups.ledger.dropped() == {"bad_weights": 2}


def test_without_bad_weights_a_rollback_drops_nothing(tmp_path: Path) -> None:
    player, mark = begun(tmp_path)
    player.take()
    player.finish_group(1.0, 0.0, version=2)
    rolled_back(player.buffer, mark, bad_after=None)
    assert player.buffer.state.groups.ledger.dropped() == {}


def test_two_rollbacks_to_one_checkpoint_both_count_and_each_has_a_version_of_its_own(tmp_path: Path) -> None:
    player, mark = begun(tmp_path)
    assert rolled_back(player.buffer, mark, bad_after=1) == 1
    assert rolled_back(player.buffer, mark, bad_after=1) == 0  # the same call again, its reply was lost
    first = player.start("rollback-1")
    assert player.buffer.reserve_version(player.learner, reason="rollback-1") == first
    player.step()
    assert rolled_back(player.buffer, mark, bad_after=1) == 1
    second = player.start("rollback-2")
    assert second > first
    player.step()
    assert player.buffer.state.batches.step == 2


def test_a_restarted_buffer_knows_which_weights_were_bad(tmp_path: Path) -> None:
    player, mark = begun(tmp_path)
    player.take()
    rolled_back(player.buffer, mark, bad_after=1)
    player.buffer.commit()
    player.buffer.close()
    again = open_buffer(tmp_path, settings=settings(total_steps=9), incarnation=2)
    assert again.state.versions.bad([2])
    assert not again.state.versions.bad([0, 1])
    player.buffer = again
    player.finish_group(1.0, 0.0, version=2)
    assert again.state.groups.ledger.dropped() == {"bad_weights": 2}
