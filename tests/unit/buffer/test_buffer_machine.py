"""Random runs through the replay buffer, with crashes of everybody: what must hold, holds at every instant, and every run can be finished."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from buffer_play import Clock, Tasks, episode
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.buffer.buffer import BufferSettings, Caller, EvalSettings, ReplayBuffer
from agentrl.buffer_api import BatchGrant, Grant, Outcome
from agentrl.data.curriculum import Curriculum, CurriculumOrder
from agentrl.types import CloseCause, StopReason, Task, Trajectory
from agentrl.wire import decode_trajectory

CAUSES = [CloseCause.TOOL_ERROR, CloseCause.ENGINE_ERROR, CloseCause.DEADLINE]
WORKERS = 2


TASKS = tuple(Task(id=f"t{index}", prompt="?") for index in range(5))


class Diary(Curriculum):
    """Chooses by all it was told, and keeps it."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__(tasks)
        self.told: list[Any] = []

    def next(self, ordinal: int) -> int:
        return (ordinal + sum(len(line) for line in self.told)) % len(self.tasks)

    def issued(self, ordinal: int, index: int) -> None:
        self.told.append((ordinal, index))

    def finished(self, index: int, rewards: Sequence[float]) -> None:
        self.told.append((index, *rewards, "finished"))


class Run(RuleBasedStateMachine):
    """A buffer, two workers, a learner and a driver; what they know survives or is lost as their own processes do."""

    @initialize(
        shape=st.fixed_dictionaries(
            {
                "group_size": st.integers(1, 3),
                "groups_per_batch": st.integers(1, 3),
                "max_staleness": st.integers(0, 2),
                "publish_every": st.integers(1, 3),
                "partial_groups": st.booleans(),
                "reuse": st.integers(1, 3),
                "fresh": st.sampled_from([1.0, 0.5, 0.0]),
                "select": st.sampled_from(["oldest", "uniform"]),
                "keep_checkpoints": st.integers(1, 2),
                "max_attempts": st.integers(1, 2),
                "max_lost": st.integers(1, 3),
                "eval_every": st.sampled_from([None, 2]),
                "total_steps": st.integers(1, 6),
                "filter": st.sampled_from(["none", "mixed"]),
                "over_sample": st.sampled_from([0.0, 0.4]),
                "dropped_stops": st.sampled_from([(), ("turn_limit",)]),
                "greedy_baseline": st.booleans(),
            }
        ),
        adaptive=st.booleans(),
    )
    def begin(self, shape: dict[str, Any], adaptive: bool) -> None:
        if shape["filter"] == "mixed":
            shape["group_size"] = max(2, shape["group_size"])
        self.folder = Path(tempfile.mkdtemp())
        bounds: dict[str, Any] = {"max_failed_share": 1.0, "max_filtered_in_row": 10_000}
        self.settings = BufferSettings(**shape, **bounds, eval_sets={"heldout": EvalSettings()}, debug=True)
        self.adaptive = adaptive
        self.kind = random.Random(0)
        self.clock, self.incarnation, self.run = Clock(), 0, 1
        self.buffer = self.reopen()
        self.workers = [0] * WORKERS  # incarnations
        self.requests = [0] * WORKERS
        self.playing: list[list[Grant]] = [[] for _ in range(WORKERS)]
        self.learner, self.number = 0, 0
        self.batch: BatchGrant | None = None
        self.unpublished: list[int] = []
        self.versions: list[int] = []  # every version ever told, in order
        self.batches: list[int] = []  # ... and every batch id
        self.surviving: dict[int, list[tuple[int, int, int]]] = {}  # batch -> (ordinal, k, use) of the surviving history
        self.manifests: list[dict[str, Any]] = [{"id": "0.0", "step": 0, "consumed": ()}]
        self.was_alive = 0
        self.boot("initial")

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            try:
                self.finish_run()
            finally:
                self.buffer.journal.abandon()
                shutil.rmtree(self.folder)

    # -- everybody's programs -----------------------------------------------------------------------------------------------------

    def reopen(self) -> ReplayBuffer:
        self.incarnation += 1
        tasks = {"heldout": [Task(id=f"h{i}", prompt="?") for i in range(2)]}
        self.diary = Diary(TASKS)
        return ReplayBuffer(
            self.folder,
            self.settings,
            tasks=CurriculumOrder(TASKS, self.diary) if self.adaptive else Tasks(),
            eval_tasks=tasks,
            incarnation=self.incarnation,
            run=self.run,
            clock=self.clock,
            lock_deadline_s=0.0,
        )

    def worker(self, index: int) -> Caller:
        return Caller(role="worker", index=index, incarnation=self.workers[index])

    @property
    def learning(self) -> Caller:
        return Caller(role="learner", index=0, incarnation=self.learner)

    def boot(self, reason: str) -> None:
        """The learner starts: its weights become a version."""
        version = self.buffer.reserve_version(self.learning, reason=reason)
        assert self.buffer.reserve_version(self.learning, reason=reason) == version
        self.tell_version(version)
        self.buffer.version_published(version=version, engines=[0], seconds=0.0, bytes=0)
        self.buffer.commit()

    def tell_version(self, version: int) -> None:
        assert version > max(self.versions, default=-1)
        self.versions.append(version)

    def take(self, index: int, want: int) -> list[Grant]:
        frontier = self.buffer.state.groups.frontier
        request = self.requests[index]
        grants = self.buffer.take_tickets(self.worker(index), request=request, want=want)
        if grants.grants:
            self.requests[index] += 1
            again = self.buffer.take_tickets(self.worker(index), request=request, want=want)
            assert again.grants == grants.grants
        if self.buffer.state.groups.frontier > frontier:
            assert self.buffer.state.groups.admission.alive <= self.buffer.state.groups.admission.limit
        self.playing[index] += grants.grants
        return list(grants.grants)

    def close(self, index: int, grant: Grant, cause: CloseCause | None) -> None:
        self.playing[index].remove(grant)
        if cause is None:
            details: dict[str, Any] = {"reward": float(self.kind.random() < 0.5), "temperature": grant.temperature}
            details["stop"] = StopReason.TURN_LIMIT if self.kind.random() < 0.2 else StopReason.ANSWERED
            version = self.buffer.state.versions.published or 0
            outcome = Outcome(ticket=grant.ticket, trajectory=episode(grant.ticket, version=version, **details))
        else:
            outcome = Outcome(ticket=grant.ticket, cause=cause)
        was_open = grant.ticket.name in self.buffer.state.tickets.open
        assert self.buffer.close_tickets([outcome]) == (was_open,)
        assert self.buffer.close_tickets([outcome]) == (was_open,)  # sent again after a lost reply
        self.report()

    def report(self) -> bool:
        if (result := self.buffer.evaluation_due()) is None:
            return False
        assert len(result.rows) == 2
        if result.stage != "periodic":
            assert result.versions[0] == result.versions[1]
        self.buffer.evaluation_ended(result.evaluation, {})
        return True

    def take_batch(self) -> BatchGrant | None:
        grant = self.buffer.take_batch(self.learning, number=self.number)
        assert grant == self.buffer.take_batch(self.learning, number=self.number)
        if grant is None or grant.end is not None:
            return None
        self.batch = grant
        if grant.batch not in self.surviving:
            assert grant.batch > max(self.batches, default=-1)
            self.batches.append(grant.batch)
        for group in grant.groups:
            self.check_group([decode_trajectory(data) for data in group])
        keys = [decode_trajectory(data).ticket for group in grant.groups for data in group]
        assert [t.sample for t in keys] == sorted(t.sample for t in keys)
        uses = {ordinal: use for ordinal, use, _ in self.buffer.state.batches.by_id[grant.batch].taken.groups}
        self.surviving[grant.batch] = [(t.ordinal, t.k, uses[t.ordinal]) for t in keys]
        return grant

    def check_group(self, group: list[Trajectory]) -> None:
        """What a group that is trained on must be."""
        sampled = [trajectory for trajectory in group if trajectory.temperature > 0]
        assert [trajectory.ticket.k for trajectory in group if trajectory.temperature == 0] == [
            self.settings.group_size
        ] * self.settings.greedy_baseline
        assert all(trajectory.stop not in self.settings.dropped_stops for trajectory in sampled)
        assert len(sampled) >= (1 if self.settings.greedy_baseline else min(2, self.settings.group_size))
        if self.settings.filter == "mixed":
            assert len({trajectory.reward.total for trajectory in sampled}) > 1

    def train(self, grant: BatchGrant, updates_done: int) -> None:
        step = self.buffer.state.batches.step
        assert grant.step == step
        arguments: dict[str, Any] = {"batch": grant.batch, "updates_done": updates_done, "updates_skipped": 0, "seconds": (0.0, 1.0), "metrics": {}}
        reply = self.buffer.batch_trained(self.learning, **arguments)
        assert self.buffer.batch_trained(self.learning, **arguments) == reply
        assert reply.step == step + 1
        last = reply.step == self.settings.total_steps
        assert (reply.version is not None) == (last or reply.step % self.settings.publish_every == 0)
        if reply.version is not None:
            self.tell_version(reply.version)
            self.unpublished.append(reply.version)
        self.batch, self.number = None, self.number + 1

    def publish(self) -> None:
        version = self.unpublished.pop()
        for older in self.unpublished:
            self.buffer.version_superseded(older)
        self.unpublished.clear()
        self.buffer.version_published(version=version, engines=[0], seconds=0.0, bytes=0)

    # -- rules --------------------------------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, WORKERS - 1), want=st.integers(1, 6))
    def a_worker_takes_tickets(self, index: int, want: int) -> None:
        self.take(index, want)
        self.buffer.commit()

    @rule(index=st.integers(0, WORKERS - 1), which=st.integers(0, 20), cause=st.sampled_from([None, None, None, *CAUSES]), count=st.integers(1, 4))
    def a_worker_closes_tickets(self, index: int, which: int, cause: CloseCause | None, count: int) -> None:
        for _ in range(min(count, len(self.playing[index]))):
            self.close(index, self.playing[index][which % len(self.playing[index])], cause)
        self.buffer.commit()

    @rule(index=st.integers(0, WORKERS - 1), count=st.integers(4, 16))
    def a_worker_plays_many_episodes(self, index: int, count: int) -> None:
        self.take(index, count)
        for grant in self.playing[index][:count]:
            self.close(index, grant, None)
        self.buffer.commit()

    @rule(index=st.integers(0, WORKERS - 1))
    def a_worker_dies(self, index: int) -> None:
        dead, self.playing[index] = self.playing[index], []
        self.buffer.worker_died(index)
        self.workers[index] += 1
        self.requests[index] = 0
        self.buffer.register(role="worker", index=index, incarnation=self.workers[index])
        assert all(grant.ticket.name not in self.buffer.state.tickets.open for grant in dead)
        self.buffer.commit()

    @precondition(lambda self: self.batch is None)
    @rule()
    def the_learner_takes_a_batch(self) -> None:
        self.take_batch()
        self.buffer.commit()

    @precondition(lambda self: self.batch is not None)
    @rule(updates_done=st.sampled_from([1, 1, 1, 0]))
    def the_learner_trains(self, updates_done: int) -> None:
        assert self.batch is not None
        self.train(self.batch, updates_done)
        self.buffer.commit()

    @precondition(lambda self: self.unpublished)
    @rule()
    def the_learner_publishes(self) -> None:
        self.publish()
        self.buffer.commit()

    @precondition(lambda self: self.batch is None)
    @rule()
    def the_learner_commits_a_checkpoint(self) -> None:
        mark = self.buffer.mark()
        assert mark.step == self.buffer.state.batches.step
        self.manifests.append({"id": f"{mark.step}.{len(self.manifests)}", "step": mark.step, "consumed": mark.consumed})
        self.buffer.checkpoint_committed(self.manifests[-1])
        self.buffer.commit()

    @rule(age=st.integers(0, 3))
    def the_learner_restarts(self, age: int) -> None:
        self.roll_back(age)

    def roll_back(self, age: int) -> None:
        self.learner += 1
        self.buffer.register(role="learner", index=0, incarnation=self.learner)
        manifest = self.manifests[max(0, len(self.manifests) - 1 - age)]
        reply = self.buffer.rollback(self.learning, manifest)
        assert self.buffer.rollback(self.learning, manifest).step == reply.step == manifest["step"]
        kept = {number for first, last in manifest["consumed"] for number in range(first, last + 1)}
        self.surviving = {number: keys for number, keys in self.surviving.items() if number in kept}
        self.manifests = [m for m in self.manifests if m["step"] <= manifest["step"]]
        self.batch, self.number, self.unpublished = None, 0, []
        self.boot("restored")

    @rule(torn=st.one_of(st.just(0), st.integers(1, 200)))
    def the_buffer_is_killed(self, torn: int) -> None:
        """Nothing acknowledged is lost, and what was in the middle of being written never was."""
        before, told = comparable(self.buffer), list(self.diary.told)
        unacknowledged = self.buffer.take_tickets(self.worker(0), request=self.requests[0], want=2)
        pending = b"".join(self.buffer.journal._pending)
        newest = sorted(self.folder.glob("*.seg"))[-1]
        self.buffer.journal.abandon()
        with newest.open("ab") as file:
            file.write(pending[: min(torn, len(pending) - 1)] if pending else b"")
        self.buffer = self.reopen()
        after = comparable(self.buffer)
        assert [after[name] for name in ("dropped", "filter", "step")] == [before[name] for name in ("dropped", "filter", "step")]
        if not unacknowledged.grants or not torn:
            assert after == before
            assert self.diary.told == told

    @rule(age=st.integers(0, 2))
    def the_run_is_killed_and_resumed(self, age: int) -> None:
        self.buffer.commit()
        self.buffer.journal.abandon()
        told = list(self.diary.told)
        self.run += 1
        self.buffer = self.reopen()
        assert self.diary.told[: len(told)] == told  # more where a lost ticket was a sample's last
        assert self.buffer.state.tickets.open == {}
        assert self.buffer.state.phase == "starting"
        for index in range(WORKERS):
            self.playing[index], self.requests[index] = [], 0
            self.workers[index] += 1
            self.buffer.register(role="worker", index=index, incarnation=self.workers[index])
        self.roll_back(age)

    # -- what holds ---------------------------------------------------------------------------------------------------------------

    @invariant()
    def no_trajectory_is_in_two_surviving_batches(self) -> None:
        if not hasattr(self, "buffer"):
            return
        uses = Counter((ordinal, k) for keys in self.surviving.values() for ordinal, k, _ in keys)
        assert max(uses.values(), default=1) <= self.settings.reuse
        first = Counter((ordinal, k) for keys in self.surviving.values() for ordinal, k, use in keys if use == 0)
        assert max(first.values(), default=1) == 1

    @invariant()
    def the_ledger_balances(self) -> None:
        if not hasattr(self, "buffer"):
            return
        state = self.buffer.state
        state.check()
        gone = state.groups.ledger["trained"] + state.groups.ledger["dropped/nonfinite"] + state.groups.ledger["training"]
        assert gone == sum(use == 0 for keys in self.surviving.values() for _, _, use in keys)

    @invariant()
    def every_group_is_told_of_when_it_is_issued_and_when_it_ends(self) -> None:
        if hasattr(self, "buffer") and self.adaptive:
            finished = sum(line[-1] == "finished" for line in self.diary.told)
            assert len(self.diary.told) - finished == self.buffer.state.groups.frontier
            assert finished + self.buffer.state.groups.admission.running == self.buffer.state.groups.frontier

    @invariant()
    def more_groups_than_the_limit_are_alive_only_after_a_rollback_and_ever_fewer(self) -> None:
        if not hasattr(self, "buffer"):
            return
        admission = self.buffer.state.groups.admission
        if admission.alive > admission.limit:
            assert self.learner > 0

    def finish_run(self) -> None:
        """From wherever the run is, honest processes bring it to its end."""
        for _ in range(1000):
            if self.buffer.state.phase == "finished":
                return
            busy = self.report()
            for index in range(WORKERS):
                busy |= bool(self.take(index, 4))
                while self.playing[index]:
                    self.close(index, self.playing[index][0], None)
                    busy = True
            grant = self.batch or self.take_batch()
            if grant is not None:
                self.train(grant, 1)
                busy = True
            if self.unpublished:
                self.publish()
                busy = True
            assert busy or self.buffer.state.phase == "finished", f"deadlock: {self.buffer.status()}"
        raise AssertionError(f"no end: {self.buffer.status()}")


def comparable(buffer: ReplayBuffer) -> dict[str, Any]:
    """What a restart of the buffer alone must not change."""
    told = buffer.status()
    del told["journal"], told["heartbeats"], told["incarnations"]["buffer-0"]
    groups = [
        (g.ordinal, g.state, g.uses, [(s.attempt, s.open, s.failures, s.lost) for s in g.samples]) for g in buffer.state.groups.by_ordinal.values()
    ]
    return told | {"groups": sorted(groups), "events": buffer.events(0)}


TestRun = pytest.mark.slow(Run.TestCase)
TestRun.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
