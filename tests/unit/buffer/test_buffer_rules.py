"""The rules of tickets, groups and batches, one small scenario each."""

from __future__ import annotations

from pathlib import Path

import pytest
from buffer_play import WORKER, Clock, Player, episode, open_buffer, settings, taken_ordinals, trained_keys

from agentrl.buffer.buffer import Caller
from agentrl.buffer_api import Outcome, VersionInfo
from agentrl.errors import ReplayBufferError, StaleIncarnation, WireError
from agentrl.seeds import sample_seed
from agentrl.types import CloseCause, Purpose, Ticket
from agentrl.wire import decode_trajectory, encode_trajectory


def started(directory: Path, **changes: object) -> Player:
    player = Player(open_buffer(directory, settings=settings(**changes)))
    player.start()
    return player


def test_a_grant_names_task_temperature_and_the_samples_seed(tmp_path: Path) -> None:
    player = started(tmp_path, temperature=0.7, seed=5)
    grant = player.take()[3]
    assert (grant.ticket.name, grant.task.id, grant.temperature) == ("train/1/1/0", "t1", 0.7)
    assert grant.seed == sample_seed(5, Purpose.TRAIN, 1, 1)


def test_finished_groups_are_taken_oldest_dispatched_first_and_sorted_by_ordinal_and_k(tmp_path: Path) -> None:
    player = started(tmp_path)
    by_name = {grant.ticket.name: grant for grant in player.take()}
    for name in ("train/3/1/0", "train/3/0/0", "train/2/0/0", "train/1/1/0", "train/1/0/0", "train/0/0/0"):
        player.finish(by_name[name])
    grant = player.take_batch()  # groups 1 and 3 are complete: 0 and 2 wait for a sibling
    assert grant is not None
    assert trained_keys(grant) == [(1, 0), (1, 1), (3, 0), (3, 1)]
    player.train(grant)
    player.finish(by_name["train/2/1/0"])
    player.finish(by_name["train/0/1/0"])
    assert taken_ordinals(player.take_batch()) == [0, 2]


def test_a_failed_attempt_is_followed_by_the_next_and_the_last_one_drops_the_group(tmp_path: Path) -> None:
    player = started(tmp_path, max_attempts=2)
    first = player.take(2)
    player.fail(first[0])
    retry = player.take(1)[0]
    assert retry.ticket.name == "train/0/0/1"
    assert retry.seed == first[0].seed
    player.fail(retry)
    ledger = player.buffer.state.groups.ledger
    assert ledger.balance() == {
        "wanted": 2,
        "not_issued": 0,
        "in_flight": 0,
        "buffered": 0,
        "training": 0,
        "trained": 0,
        "dropped/group_incomplete": 2,
    }
    assert not player.finish(first[1])  # its sibling's ticket closed with the group
    assert player.buffer.status()["tickets"]["late"] == {"trajectory": 1}


def test_a_dropped_group_is_replaced_by_the_next_ordinal_so_that_batches_fill(tmp_path: Path) -> None:
    player = started(tmp_path, max_attempts=1, max_staleness=0)
    grants = player.take()
    assert [grant.ticket.ordinal for grant in grants] == [0, 0, 1, 1]
    player.fail(grants[0])
    assert [grant.ticket.ordinal for grant in player.take()] == [2, 2]
    player.open.remove(grants[1])
    for grant in list(player.open):
        player.finish(grant)
    assert taken_ordinals(player.take_batch()) == [1, 2]


def test_the_worker_is_told_once_which_of_its_tickets_the_buffer_closed(tmp_path: Path) -> None:
    player = started(tmp_path, max_attempts=1)
    grants = player.take(2)
    player.fail(grants[0])
    told = player.buffer.take_tickets(WORKER, request=50, want=0)
    assert told.cancelled == ("train/0/1/0",)
    assert player.buffer.take_tickets(WORKER, request=51, want=0).cancelled == ()


def test_partial_groups_are_trained_from_two_trajectories_on(tmp_path: Path) -> None:
    player = started(tmp_path, group_size=4, groups_per_batch=1, max_attempts=1, partial_groups=True)
    grants = player.take(8)
    for grant in grants[:2] + grants[4:7]:
        player.fail(grant)
    assert player.buffer.state.groups.ledger.dropped() == {"sample_exhausted": 4, "group_incomplete": 2}
    for grant in grants[2:4]:
        player.finish(grant)
    grant = player.take_batch()
    assert grant is not None
    assert trained_keys(grant) == [(0, 2), (0, 3)]
    player.train(grant)
    assert player.buffer.state.groups.ledger["trained"] == 2


def test_a_lost_attempt_counts_neither_as_attempt_nor_as_failure_but_has_its_own_bound(tmp_path: Path) -> None:
    player = started(tmp_path, max_attempts=1, max_lost=3, groups_per_batch=1, max_staleness=0)
    for attempt in range(3):
        assert player.take(1)[0].ticket.attempt == attempt
        assert player.buffer.state.groups.ledger.dropped() == {}
        player.buffer.worker_died(0)
    assert player.buffer.state.groups.ledger.dropped() == {"group_incomplete": 2}
    assert player.buffer.status()["tickets"]["closed"] == {"lost": 3}


def test_a_prompt_over_its_limit_is_not_tried_again(tmp_path: Path) -> None:
    player = started(tmp_path)
    player.fail(player.take(1)[0], CloseCause.PROMPT_LIMIT)
    assert player.buffer.state.groups.ledger.dropped() == {"group_incomplete": 2}


def test_an_outcome_sent_again_is_confirmed_and_another_one_is_late_and_counted_once(tmp_path: Path) -> None:
    player = started(tmp_path)
    ticket = player.take(1)[0].ticket
    first, other = (Outcome(ticket=ticket, trajectory=episode(ticket, reward=reward)) for reward in (1.0, 0.0))
    failed = Outcome(ticket=ticket, cause=CloseCause.DEADLINE)
    answers = [player.buffer.close_tickets([outcome])[0] for outcome in (first, first, other, other, failed, first)]
    assert answers == [True, True, False, False, False, True]
    assert player.buffer.status()["tickets"]["late"] == {"trajectory": 1}
    assert player.buffer.state.groups.ledger["buffered"] == 1


def test_outcomes_that_are_not_what_the_ticket_wants_are_refused_whole(tmp_path: Path) -> None:
    player = started(tmp_path)
    one, other = (grant.ticket for grant in player.take(2))
    altered = bytearray(episode(one))
    altered[-20] ^= 1
    good = Outcome(ticket=other, trajectory=episode(other))
    refused: list[tuple[type[Exception], str, Outcome]] = [
        (WireError, "does not match its hash", Outcome(ticket=one, trajectory=bytes(altered))),
        (WireError, "is one of train/0/1/0", Outcome(ticket=one, trajectory=episode(other))),
        (WireError, "tokens of version 7, but the newest is 0", Outcome(ticket=one, trajectory=episode(one, version=7))),
        (ReplayBufferError, "cannot close a ticket as lost", Outcome(ticket=one, cause=CloseCause.LOST)),
        (ReplayBufferError, "never issued", Outcome(ticket=Ticket(purpose=Purpose.TRAIN, ordinal=9, k=0, attempt=0), cause=CloseCause.DEADLINE)),
    ]
    for kind, text, outcome in refused:
        with pytest.raises(kind, match=text):
            player.buffer.close_tickets([good, outcome])
    assert player.buffer.state.groups.ledger["buffered"] == 0
    assert player.buffer.close_tickets([good]) == (True,)


def test_the_run_ends_when_too_many_of_the_last_tickets_fail_and_says_why(tmp_path: Path) -> None:
    player = started(tmp_path, group_size=50, groups_per_batch=1, max_attempts=9, max_failed_share=0.2, debug=False)
    grants = player.take(100)
    for grant in grants[:79]:
        player.finish(grant)
    for number, grant in enumerate(grants[79:]):
        assert player.buffer.state.phase == "training"
        player.fail(grant, CloseCause.TOOL_ERROR if number % 3 else CloseCause.DEADLINE, detail=f"trouble {number}")
    status = player.buffer.status()
    assert status["phase"] == "failed"
    assert status["halt"]["reason"] == (
        'TooManyFailures: 21 of the last 100 tickets failed: tool_error 14 (e.g. "trouble 20"), deadline 7 (e.g. "trouble 18"); '
        "the recipe allows 20% (buffer.max_failed_share). More is in logs/worker-*.log"
    )
    assert [event["kind"] for event in player.buffer.events(0)][-2:] == ["failure", "phase"]
    assert player.buffer.take_tickets(WORKER, request=99, want=1).ended
    end = player.take_batch()
    assert end is not None
    assert end.end == "stopped"
    assert not player.buffer.heartbeat(WORKER, {})


def test_lost_attempts_are_no_failures_of_the_run(tmp_path: Path) -> None:
    player = started(tmp_path, group_size=100, groups_per_batch=1, max_failed_share=0.0, debug=False)
    for _ in range(3):
        player.take(100)
        player.buffer.worker_died(0)
    assert player.buffer.state.phase == "training"


def test_a_batch_without_a_finite_update_counts_its_samples_as_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    player = started(tmp_path)
    player.step(updates_done=0)
    assert player.buffer.state.groups.ledger.dropped() == {"nonfinite": 4}
    grant = player.step()
    assert grant.step == 1
    assert taken_ordinals(grant) == [2, 3]


def test_a_batch_that_publishes_nothing_leaves_at_once_and_one_of_a_superseded_version_with_the_next(tmp_path: Path) -> None:
    player = started(tmp_path, publish_every=2, total_steps=8, max_staleness=3)  # at most 8 groups alive
    admission = player.buffer.state.groups.admission
    left = []
    for _ in range(4):
        player.finish_all()
        grant = player.take_batch()
        assert grant is not None
        version = player.train(grant, publish=False)
        left.append((grant.publishes, version, admission.training))
    assert left == [(False, None, 0), (True, 1, 2), (False, None, 2), (True, 2, 4)]
    player.buffer.version_superseded(1)
    assert admission.training == 4
    player.publish(2)
    assert admission.training == 0


def test_the_last_step_publishes_whatever_publish_every_says(tmp_path: Path) -> None:
    player = started(tmp_path, publish_every=5)
    assert [player.step().publishes for _ in range(3)] == [False, False, True]


def test_admission_closes_with_the_last_batch_and_the_run_is_over_when_its_version_is_published(tmp_path: Path) -> None:
    player = started(tmp_path, total_steps=1, max_staleness=0)
    player.finish_all()
    version = player.train(player.take_batch(), publish=False)
    assert version == 1
    assert player.take() == []
    assert player.buffer.state.phase == "training"
    player.publish(version)
    assert player.buffer.state.phase == "finished"


def test_tickets_that_run_when_the_last_version_is_published_close_as_run_end(tmp_path: Path) -> None:
    player = started(tmp_path, total_steps=1)
    player.take()
    for grant in player.open[:4]:
        player.finish(grant)
    player.train(player.take_batch())
    status = player.buffer.status()
    assert status["tickets"]["closed"] == {"trajectory": 4, "run_end": 4}
    assert status["ledger"]["not_issued"] == 4
    player.buffer.close()
    longer = Player(open_buffer(tmp_path, incarnation=2, run=2, settings=settings(total_steps=2)))
    longer.worker = Caller(role="worker", index=0, incarnation=2)
    longer.start("restored")
    assert [grant.ticket.name for grant in longer.take(4)] == ["train/2/0/1", "train/2/1/1", "train/3/0/1", "train/3/1/1"]


def test_the_versions_of_a_batch_say_at_which_step_they_were_made(tmp_path: Path) -> None:
    player = started(tmp_path, group_size=1, max_staleness=0)
    player.step()
    player.step()
    player.take()
    player.finish(player.open[0], versions=(0, 2, 0))
    player.finish(player.open[0], versions=(1,))
    grant = player.take_batch()
    assert grant is not None
    assert grant.step == 2
    assert grant.versions == {v: VersionInfo(step=v, age_versions=2 - v) for v in (0, 1, 2)}


def test_an_older_incarnation_is_refused(tmp_path: Path) -> None:
    player = started(tmp_path)
    player.buffer.register(role="worker", index=0, incarnation=2)
    with pytest.raises(StaleIncarnation, match="worker 0 incarnation 1 was replaced by incarnation 2"):
        player.buffer.check(WORKER)
    player.buffer.check(Caller(role="worker", index=0, incarnation=2))
    player.buffer.check(Caller(role="worker", index=1, incarnation=0))
    with pytest.raises(StaleIncarnation):
        player.buffer.register(role="worker", index=0, incarnation=1)


def test_registering_a_worker_anew_loses_the_tickets_of_its_older_incarnations_only(tmp_path: Path) -> None:
    player = started(tmp_path)
    player.take(2)
    other = Caller(role="worker", index=1, incarnation=1)
    player.buffer.take_tickets(other, request=0, want=1)
    player.buffer.register(role="worker", index=0, incarnation=1)
    assert len(player.buffer.state.tickets.open) == 3
    player.buffer.register(role="worker", index=0, incarnation=2)
    assert list(player.buffer.state.tickets.open) == ["train/1/0/0"]


def test_a_run_by_hours_ends_by_the_time_spent_training(tmp_path: Path) -> None:
    clock = Clock()
    player = Player(open_buffer(tmp_path, clock=clock, settings=settings(total_steps=None, hours=0.5, publish_every=10)))
    clock.now += 5000.0  # start-up does not count
    player.start()
    seen = []
    for _ in range(3):
        player.finish_all()
        clock.now += 900.0
        grant = player.take_batch()
        assert grant is not None
        seen.append((grant.end, grant.progress, grant.publishes))
        if grant.end is None:
            player.train(grant)
    assert seen == [(None, 0.5, False), (None, 1.0, True), ("finished", 1.0, False)]
    assert player.buffer.state.phase == "finished"


def test_stopping_ends_tickets_and_batches_until_the_run_is_resumed(tmp_path: Path) -> None:
    player = started(tmp_path)
    player.buffer.stop("Ctrl-C")
    assert player.buffer.state.phase == "stopping"
    assert player.buffer.take_tickets(WORKER, request=0, want=1).ended
    end = player.take_batch()
    assert end is not None
    assert end.end == "stopped"
    player.buffer.close()
    again = open_buffer(tmp_path, incarnation=2, run=1)
    assert again.state.phase == "stopping"
    again.close()
    resumed = open_buffer(tmp_path, incarnation=3, run=2)
    assert resumed.state.phase == "starting"


def test_trajectories_reach_the_learner_byte_for_byte(tmp_path: Path) -> None:
    player = started(tmp_path)
    sent = {}
    for grant in player.take():
        sent[grant.ticket.sample] = episode(grant.ticket, reward=0.25)
        player.buffer.close_tickets([Outcome(ticket=grant.ticket, trajectory=sent[grant.ticket.sample])])
    batch = player.take_batch()
    assert batch is not None
    assert [data for group in batch.groups for data in group] == [sent[0, 0], sent[0, 1], sent[1, 0], sent[1, 1]]
    assert encode_trajectory(decode_trajectory(batch.groups[0][0])) == sent[0, 0]


def test_every_rank_of_the_learner_gets_the_same_batch_by_the_same_number(tmp_path: Path) -> None:
    player = started(tmp_path)
    for rank, incarnation in ((0, 4), (1, 5)):
        player.buffer.register(role="learner", index=rank, incarnation=incarnation)
    player.finish_all()
    first = player.buffer.take_batch(Caller(role="learner", index=1, incarnation=5), number=0)
    assert first is not None
    assert player.buffer.take_batch(Caller(role="learner", index=0, incarnation=4), number=0) == first
