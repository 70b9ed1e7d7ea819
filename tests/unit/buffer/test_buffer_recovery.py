"""What a restart, a resume and a rollback keep, give back and never use again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from buffer_play import LEARNER, WORKER, Player, Tasks, episode, open_buffer, settings, taken_ordinals, trained_keys

from agentrl.buffer.buffer import Caller, ReplayBuffer
from agentrl.buffer_api import Outcome, VersionInfo
from agentrl.errors import CheckpointError, ReplayBufferError
from agentrl.types import CloseCause, Task

SECOND_LEARNER = Caller(role="learner", index=0, incarnation=2)


def manifest(buffer: ReplayBuffer, identity: str) -> dict[str, Any]:
    mark = buffer.mark()
    found = {"id": identity, "step": mark.step, "consumed": mark.consumed, "offset": mark.offset, "learner_incarnation": 1}
    buffer.checkpoint_committed(found)
    return found


def killed(player: Player, *, incarnation: int, run: int = 1, **options: Any) -> Player:
    """The player with a buffer that was killed after its last acknowledgement and restarted."""
    player.buffer.commit()
    player.buffer.journal.abandon()
    player.buffer = open_buffer(player.buffer._directory, incarnation=incarnation, run=run, **options)
    return player


def begun(directory: Path, **changes: Any) -> Player:
    player = Player(open_buffer(directory, settings=settings(**changes)))
    player.start()
    return player


def test_a_restarted_buffer_gives_the_same_answers_to_the_same_calls(tmp_path: Path) -> None:
    player = begun(tmp_path)
    buffer = player.buffer
    tickets = buffer.take_tickets(WORKER, request=7, want=4)
    outcomes = [Outcome(ticket=grant.ticket, trajectory=episode(grant.ticket)) for grant in tickets.grants]
    assert buffer.close_tickets(outcomes) == (True,) * 4
    batch = buffer.take_batch(LEARNER, number=0)
    trained = buffer.batch_trained(LEARNER, batch=0, updates_done=1, updates_skipped=0, seconds=(0.0, 1.0), metrics={"x": 1.0})
    again = killed(player, incarnation=2).buffer
    assert again.take_tickets(WORKER, request=7, want=4).grants == tickets.grants
    assert again.close_tickets(outcomes) == (True,) * 4
    assert again.take_batch(LEARNER, number=0) == batch
    assert again.batch_trained(LEARNER, batch=0, updates_done=1, updates_skipped=0, seconds=(0.0, 1.0), metrics={"x": 1.0}) == trained
    assert again.reserve_version(LEARNER, reason="initial") == 0
    assert again.events(0) == buffer.events(0)
    assert again.status()["tickets"]["late"] == {}


def test_a_restart_of_the_buffer_alone_leaves_tickets_and_batches_as_they_are(tmp_path: Path) -> None:
    player = begun(tmp_path)
    for grant in player.take(6)[:4]:
        player.finish(grant)
    player.take_batch()
    killed(player, incarnation=2)
    assert [player.finish(grant) for grant in list(player.open)] == [True, True]
    assert player.buffer.status()["batch"] == 0
    assert player.buffer.state.phase == "training"


def test_a_resume_of_the_run_loses_open_tickets_and_waits_for_a_version_before_it_admits(tmp_path: Path) -> None:
    player = begun(tmp_path)
    grants = player.take(3)
    killed(player, incarnation=2, run=2)
    assert player.buffer.status()["tickets"]["closed"] == {"lost": 3}
    assert player.buffer.state.phase == "starting"
    assert not player.finish(grants[0])
    player.learner = SECOND_LEARNER
    player.buffer.rollback(SECOND_LEARNER, None)
    player.start("restored")
    player.worker = Caller(role="worker", index=0, incarnation=2)
    assert [grant.ticket.name for grant in player.take(4)] == ["train/0/0/1", "train/0/1/1", "train/1/0/1", "train/1/1/0"]


def test_a_rollback_gives_back_every_batch_the_manifest_does_not_name(tmp_path: Path) -> None:
    player = begun(tmp_path, group_size=1, total_steps=9)
    player.step()
    checkpoint = manifest(player.buffer, "one")
    player.step()
    player.step(updates_done=0)
    player.finish_all()
    taken = player.take_batch()
    assert taken is not None
    state = player.buffer.state
    assert (state.batches.step, state.groups.ledger["trained"], state.groups.ledger["training"]) == (3, 4, 2)
    reply = player.buffer.rollback(SECOND_LEARNER, checkpoint)
    assert (reply.step, reply.annulled) == (1, 3)
    assert state.groups.ledger.balance() == {
        "wanted": 10,  # three batches of 2 left admission, then 4 places: 1 batch taken, 1 buffered
        "not_issued": 0,
        "in_flight": 0,
        "buffered": 8,
        "training": 0,
        "trained": 2,
        "dropped/nonfinite": 0,
    }
    assert state.groups.admission.alive == 8
    assert state.groups.admission.room == 0
    with pytest.raises(ReplayBufferError, match="was annulled"):
        player.buffer.batch_trained(LEARNER, batch=3, updates_done=1, updates_skipped=0, seconds=(0.0, 1.0), metrics={})
    player.learner, player.batches = SECOND_LEARNER, 0
    assert player.start("restored") == 4
    again = player.take_batch()
    assert again is not None
    assert (again.batch, again.step, taken_ordinals(again)) == (4, 1, [2, 3])
    # versions 2 and 3 were made in the history that is gone; group 2 and 3 were played under version 0 and 1
    assert {version: info.abandoned for version, info in again.versions.items()} == dict.fromkeys(again.versions, False)


def test_tokens_of_abandoned_versions_age_by_the_versions_reserved_since(tmp_path: Path) -> None:
    player = begun(tmp_path, group_size=1, groups_per_batch=1, max_staleness=0, total_steps=9)
    checkpoint = manifest(player.buffer, "zero")
    player.step()
    player.step()  # played under version 1, made by step 1
    player.buffer.rollback(SECOND_LEARNER, checkpoint)
    player.learner, player.batches = SECOND_LEARNER, 0
    assert player.start("restored") == 3
    player.train(player.take_batch())
    grant = player.take_batch()
    assert grant is not None
    assert taken_ordinals(grant) == [1]
    assert grant.versions == {1: VersionInfo(step=1, abandoned=True, age_versions=3)}  # 2, 3 and 4 came after it
    assert grant.versions[1].staleness(grant.step) == 3
    assert VersionInfo(step=0).staleness(grant.step) == 1


def test_annulled_trajectories_come_back_byte_for_byte_also_after_a_restart(tmp_path: Path) -> None:
    player = begun(tmp_path)
    checkpoint = manifest(player.buffer, "zero")
    first = player.step()
    player.step()
    killed(player, incarnation=2)
    player.buffer.rollback(SECOND_LEARNER, checkpoint)
    player.learner, player.batches = SECOND_LEARNER, 0
    player.start("restored")
    again = player.take_batch()
    assert again is not None
    assert again.groups == first.groups


def test_a_rollback_sent_again_changes_nothing(tmp_path: Path) -> None:
    player = begun(tmp_path)
    checkpoint = manifest(player.buffer, "zero")
    player.step()
    assert player.buffer.rollback(SECOND_LEARNER, checkpoint).annulled == 1
    written = player.buffer.journal.appended
    assert player.buffer.rollback(SECOND_LEARNER, checkpoint).step == 0
    assert player.buffer.journal.appended == written


def test_a_checkpoint_of_a_history_that_was_rolled_back_is_refused(tmp_path: Path) -> None:
    player = begun(tmp_path)
    zero = manifest(player.buffer, "zero")
    player.step()
    one = manifest(player.buffer, "one")
    player.buffer.rollback(SECOND_LEARNER, zero)
    with pytest.raises(
        CheckpointError, match=r"checkpoint one was made from batches \[\(0, 0\)\], but in the journal's surviving history stand \[\]"
    ):
        player.buffer.rollback(Caller(role="learner", index=0, incarnation=3), one)


def test_trained_groups_are_forgotten_once_every_kept_checkpoint_names_them_and_an_older_one_still_works(tmp_path: Path) -> None:
    player = begun(tmp_path, total_steps=9, keep_checkpoints=2)
    zero = manifest(player.buffer, "zero")
    batches = []
    for step in range(4):
        batches.append(player.step())
        manifest(player.buffer, f"step {step}")
    state = player.buffer.state
    assert sorted(state.batches.by_id) == [3]
    assert min(state.groups.by_ordinal) == 6
    assert player.buffer.rollback(SECOND_LEARNER, zero).annulled == 4
    player.learner, player.batches = SECOND_LEARNER, 0
    player.start("restored")
    again = player.take_batch()
    assert again is not None
    assert trained_keys(again) == trained_keys(batches[0])
    killed(player, incarnation=2, settings=settings(total_steps=9, keep_checkpoints=2))
    assert player.take_batch() is None
    assert player.buffer.status()["batch"] == 4


def test_dropped_groups_stay_dropped_over_a_rollback(tmp_path: Path) -> None:
    player = begun(tmp_path, max_attempts=1)
    checkpoint = manifest(player.buffer, "zero")
    player.fail(player.take(1)[0])
    player.step()
    player.buffer.rollback(SECOND_LEARNER, checkpoint)
    assert player.buffer.state.groups.ledger.dropped() == {"group_incomplete": 2}
    assert 0 not in player.buffer.state.groups.by_ordinal


def test_a_learner_that_did_not_roll_back_gets_no_batch_beside_its_predecessors(tmp_path: Path) -> None:
    player = begun(tmp_path)
    player.finish_all()
    player.take_batch()
    with pytest.raises(ReplayBufferError, match="batch 0 of an earlier learner is neither trained nor annulled: roll back first"):
        player.buffer.take_batch(SECOND_LEARNER, number=0)


def test_changed_task_files_are_noticed_when_a_task_is_played_again(tmp_path: Path) -> None:
    class Others(Tasks):
        def task(self, ordinal: int) -> Task:
            return Task(id=f"other {ordinal}", prompt="?")

    player = begun(tmp_path)
    player.take(2)
    killed(player, incarnation=2, run=2, tasks=Others())
    player.start("restored")
    with pytest.raises(ReplayBufferError, match="task 0 of the run was 't0' and is now 'other 0'"):
        player.take(2)


def test_settings_of_a_later_run_do_not_change_what_was_recorded(tmp_path: Path) -> None:
    player = begun(tmp_path, group_size=4, max_attempts=3)
    player.fail(player.take(8)[0], CloseCause.ENGINE_ERROR)
    before = player.buffer.state.groups.ledger.balance()
    killed(player, incarnation=2, settings=settings(group_size=2, max_attempts=1, groups_per_batch=1, max_staleness=0))
    assert player.buffer.state.groups.ledger.balance() == before
    assert [grant.ticket.name for grant in player.take(8)] == ["train/0/0/1"]  # two old groups hold more than the new limit of one
