"""What the tests of the buffer play with: tasks, trajectories, a clock that stands still, and small drivers of a ReplayBuffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.buffer.buffer import BufferSettings, Caller, ReplayBuffer
from agentrl.buffer_api import BatchGrant, Grant, Outcome
from agentrl.types import CloseCause, Reward, StopReason, Task, Ticket, Trajectory, Turn
from agentrl.wire import decode_trajectory, encode_trajectory

__all__ = ["EVAL_TASKS", "LEARNER", "WORKER", "Clock", "Player", "Tasks", "episode", "open_buffer", "settings", "taken_ordinals", "trained_keys"]

WORKER = Caller(role="worker", index=0, incarnation=1)
LEARNER = Caller(role="learner", index=0, incarnation=1)
EVAL_TASKS = {"heldout": [Task(id=f"h{i}", prompt=f"held out {i}?") for i in range(3)]}


class Tasks:
    """Tasks t0, t1, ... without end."""

    size = 1000

    def task(self, ordinal: int) -> Task:
        return Task(id=f"t{ordinal}", prompt=f"question {ordinal}?")


@dataclass
class Clock:
    """Seconds that pass when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def settings(**changes: Any) -> BufferSettings:
    """Groups of 2, batches of 2 groups, K=1, 3 steps."""
    return BufferSettings(**({"group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "total_steps": 3, "debug": True} | changes))


def open_buffer(directory: Path, *, incarnation: int = 1, run: int = 1, **options: Any) -> ReplayBuffer:
    """A buffer over the tasks above."""
    chosen = {"tasks": Tasks(), "eval_tasks": EVAL_TASKS, "clock": Clock(), "lock_deadline_s": 0.0} | options
    return ReplayBuffer(directory, chosen.pop("settings", settings()), incarnation=incarnation, run=run, **chosen)


def episode(
    ticket: Ticket,
    *,
    version: int = 0,
    versions: tuple[int, ...] = (),
    reward: float = 1.0,
    parts: dict[str, float] | None = None,
    stop: StopReason = StopReason.ANSWERED,
    temperature: float = 1.0,
    worker: int = 0,
) -> bytes:
    """The bytes of a trajectory: a prompt of 2 tokens, then one generated token per version."""
    written = versions or (version,)
    length = 2 + len(written)
    trajectory = Trajectory(
        ticket=ticket,
        task_id=f"t{ticket.ordinal}",
        source="default",
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.array([0, 0] + [1] * len(written), dtype=np.uint8),
        behaviour_logprobs=np.array([0.0, 0.0] + [-0.5] * len(written), dtype=np.float32),
        versions=np.array([-1, -1, *written], dtype=np.int32),
        turns=(
            Turn(
                completion=(2, length),
                observation=(length, length),
                action="answer",
                argument="",
                stop="eos",
                engine="engine-0",
                started_s=0.0,
                generated_s=1.0,
                ended_s=1.0,
            ),
        ),
        reward=Reward(total=reward, parts=parts or {}, tokens=(length - 1,), amounts=(reward,)),
        stop=stop,
        dispatched_s=0.0,
        finished_s=1.0,
        worker=worker,
        incarnation=1,
        temperature=temperature,
    )
    return encode_trajectory(trajectory)


def trained_keys(grant: BatchGrant) -> list[tuple[int, int]]:
    """(ordinal, k) of every trajectory of a batch, in order."""
    return [decode_trajectory(data).ticket.sample for group in grant.groups for data in group]


def taken_ordinals(grant: BatchGrant | None) -> list[int]:
    """Ordinals of a batch's groups, in order."""
    assert grant is not None
    return [decode_trajectory(group[0]).ticket.ordinal for group in grant.groups]


@dataclass
class Player:
    """A worker and a learner in one, who do as they are told."""

    buffer: ReplayBuffer
    worker: Caller = WORKER
    learner: Caller = LEARNER
    requests: int = 0
    batches: int = 0
    open: list[Grant] = field(default_factory=list)

    def start(self, reason: str = "initial") -> int:
        """Publish the first version: admission opens."""
        version = self.buffer.reserve_version(self.learner, reason=reason)
        self.publish(version)
        return version

    def publish(self, version: int) -> None:
        self.buffer.version_published(version=version, engines=[0], seconds=0.1, bytes=10)

    def take(self, want: int = 100) -> list[Grant]:
        """Tickets; they stay in `open` until they are closed."""
        grants = list(self.buffer.take_tickets(self.worker, request=self.requests, want=want).grants)
        self.requests += 1
        self.open += grants
        return grants

    def finish(self, grant: Grant, **details: Any) -> bool:
        """Hand in a trajectory of the newest published version."""
        self.open.remove(grant)
        details.setdefault("temperature", grant.temperature)
        details.setdefault("version", self.buffer.state.versions.published or 0)
        return self.buffer.close_tickets([Outcome(ticket=grant.ticket, trajectory=episode(grant.ticket, **details))])[0]

    def fail(self, grant: Grant, cause: CloseCause = CloseCause.TOOL_ERROR, detail: str = "no answer") -> bool:
        self.open.remove(grant)
        return self.buffer.close_tickets([Outcome(ticket=grant.ticket, cause=cause, detail=detail)])[0]

    def finish_group(self, *rewards: float, **details: Any) -> None:
        """Play the oldest open group: its samples earn these rewards, by k."""
        ordinal = min(grant.ticket.ordinal for grant in self.open)
        group = sorted((grant for grant in self.open if grant.ticket.ordinal == ordinal), key=lambda grant: grant.ticket.k)
        for grant, reward in zip(group, rewards, strict=True):
            self.finish(grant, reward=reward, **details)

    def finish_all(self) -> None:
        """Play whatever there is to play, evaluations included."""
        while self.open or self.take() or self.report():
            for grant in list(self.open):
                self.finish(grant)

    def report(self) -> bool:
        """Do what the server does with a finished evaluation."""
        result = self.buffer.evaluation_due()
        if result is None:
            return False
        hook = self.buffer.on_evaluation
        self.buffer.evaluation_ended(result.evaluation, hook(result) if hook is not None else {})
        return True

    def take_batch(self) -> BatchGrant | None:
        grant = self.buffer.take_batch(self.learner, number=self.batches)
        if grant is not None and grant.end is None:
            self.batches += 1
        return grant

    def train(self, grant: BatchGrant | None, *, updates_done: int = 1, publish: bool = True) -> int | None:
        """Report a batch and publish the version it makes."""
        assert grant is not None
        assert grant.end is None
        reply = self.buffer.batch_trained(
            self.learner, batch=grant.batch, updates_done=updates_done, updates_skipped=0, seconds=(1.0, 2.0), metrics={"learner/loss": 0.5}
        )
        if publish and reply.version is not None:
            self.publish(reply.version)
        return reply.version

    def step(self, **details: Any) -> BatchGrant:
        """One whole step: play, train, publish."""
        self.finish_all()
        grant = self.take_batch()
        assert grant is not None
        self.train(grant, **details)
        return grant
