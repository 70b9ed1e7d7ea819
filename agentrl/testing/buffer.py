"""A replay buffer for tests of a rollout worker: hands out tickets, keeps outcomes. In-process, no journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from agentrl.buffer_api import Grant, Outcome, TicketGrants
from agentrl.errors import ReplayBufferError, StaleIncarnation
from agentrl.seeds import sample_seed
from agentrl.types import CloseCause, Purpose, Task, Ticket, Trajectory
from agentrl.wire import decode_trajectory

__all__ = ["FakeBuffer"]


class FakeBuffer:
    """What a worker sees of a `BufferClient`. Every task is one group of `samples`; failed attempts are issued again.

    Args:
        max_attempts: of a sample.
        max_granted: tickets per answer.
        delay_s: of every answer.
        purpose: of all tickets.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        samples: int = 1,
        max_attempts: int = 1,
        temperature: float = 1.0,
        max_granted: int = 1024,
        delay_s: float = 0.0,
        purpose: Purpose = Purpose.TRAIN,
    ) -> None:
        self._tasks = list(tasks)
        self._waiting = deque((ordinal, k, 0) for ordinal in range(len(self._tasks)) for k in range(samples))
        self._max_attempts = max_attempts
        self._temperature = temperature
        self._max_granted = max_granted
        self._delay_s = delay_s
        self._purpose = purpose
        self._changed = trio.Event()
        self._cancelled: list[str] = []
        self.open: set[str] = set()  # names of the tickets without an outcome
        self.outcomes: list[Outcome] = []
        self.calls: list[int] = []  # outcomes per close_tickets
        self.asked: list[int] = []  # want per take_tickets
        self.notes: list[dict[str, Any]] = []
        self.alive = True  # the answer to heartbeats
        self.stale = False  # refuse every call: the caller is outdated
        self.stopped = False  # end the tickets though some are open

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those handed in, in order."""
        return [decode_trajectory(outcome.trajectory) for outcome in self.outcomes if outcome.trajectory is not None]

    @property
    def ended(self) -> bool:
        """Whether every sample has its outcome."""
        return self.stopped or not (self._waiting or self.open)

    def stop(self) -> None:
        """End the tickets."""
        self.stopped = True
        self._wake()

    def cancel(self, name: str) -> None:
        """Close a ticket, and tell the worker with its next answer."""
        self.open.discard(name)
        self._cancelled.append(name)
        self._wake()

    async def take_tickets(self, *, request: int, want: int, wait_s: float) -> TicketGrants:
        """As `BufferClient.take_tickets`."""
        await self._answer()
        self.asked.append(want)
        if not ((self._waiting and want) or self._cancelled or self.ended):
            self._changed = trio.Event()
            with trio.move_on_after(wait_s):
                await self._changed.wait()
        count = 0 if self.stopped else min(want, self._max_granted, len(self._waiting))
        cancelled, self._cancelled = self._cancelled, []
        return TicketGrants(grants=tuple(self._grant() for _ in range(count)), ended=self.ended, cancelled=tuple(cancelled))

    async def close_tickets(self, outcomes: Sequence[Outcome]) -> tuple[bool, ...]:
        """As `BufferClient.close_tickets`."""
        await self._answer()
        self.calls.append(len(outcomes))
        accepted = tuple(self._close(outcome) for outcome in outcomes)
        self._wake()
        return accepted

    async def heartbeat(self, note: Mapping[str, Any]) -> bool:
        """As `BufferClient.heartbeat`."""
        await self._answer()
        self.notes.append(dict(note))
        return self.alive

    async def _answer(self) -> None:
        await trio.sleep(self._delay_s)
        if self.stale:
            raise StaleIncarnation("a newer incarnation of this worker is registered")

    def _grant(self) -> Grant:
        ordinal, k, attempt = self._waiting.popleft()
        ticket = Ticket(purpose=self._purpose, ordinal=ordinal, k=k, attempt=attempt)
        self.open.add(ticket.name)
        seed = sample_seed(0, self._purpose, ordinal, k)
        return Grant(ticket=ticket, task=self._tasks[ordinal], temperature=self._temperature, seed=seed)

    def _close(self, outcome: Outcome) -> bool:
        ticket = outcome.ticket
        if ticket.name not in self.open:
            return False
        self.open.remove(ticket.name)
        self.outcomes.append(outcome)
        if outcome.cause in (CloseCause.RUN_END, CloseCause.LOST):
            raise ReplayBufferError(f"a worker closes no ticket as {outcome.cause}")
        if outcome.trajectory is None and ticket.attempt + 1 < self._max_attempts:
            self._waiting.append((ticket.ordinal, ticket.k, ticket.attempt + 1))
        return True

    def _wake(self) -> None:
        self._changed.set()
