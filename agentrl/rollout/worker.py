"""A rollout worker: hundreds of episodes in one trio program, from tickets to acknowledged outcomes.

take loop ──episodes, at most `concurrency` at a time──> finished ──close loop──> buffer
                                                         (bounded)
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import trio

from agentrl import faults
from agentrl.buffer_api import Grant, Outcome, TicketGrants
from agentrl.config.recipe import RolloutRecipe
from agentrl.engine_api import EngineClient
from agentrl.env import Environment
from agentrl.errors import ConfigError, EngineError, EnvironmentFailure, StaleIncarnation
from agentrl.rollout.builder import Assignment
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import run_episode
from agentrl.rollout.fleet import Fleet
from agentrl.rollout.limits import Limits
from agentrl.rollout.over_long import OverLong
from agentrl.rollout.tokens import TokenEncoder
from agentrl.types import CloseCause, Purpose, Trajectory
from agentrl.wire import encode_trajectory

__all__ = ["RolloutWorker", "TicketClient", "cause_of"]

HEARTBEAT_S = 2.0
LONG_POLL_S = 10.0
ASK_AGAIN_S = 1.0  # a full worker asks this often which of its tickets were cancelled
AHEAD_SHARE = 1 / 8  # of `concurrency`: tickets held beyond it, so that a finished episode's place is taken at once
GATHER_S = 0.01  # outcomes that end within this time share a call, which costs as much as several of them; nobody waits for it
FLUSH_S = 10.0  # for the last outcomes, when the tickets have ended
MAX_OUTCOMES = 64  # per call: its acknowledgement is a write of the journal
MAX_DETAIL = 4000  # characters

_CAUSES = frozenset(map(str, CloseCause))
_log = logging.getLogger(__name__)


class TicketClient(Protocol):
    """What a worker needs of `buffer_api.BufferClient`."""

    async def take_tickets(self, *, request: int, want: int, wait_s: float) -> TicketGrants: ...

    async def close_tickets(self, outcomes: Sequence[Outcome]) -> tuple[bool, ...]: ...

    async def heartbeat(self, note: Mapping[str, Any]) -> bool: ...


class RolloutWorker:
    """Plays tickets until they end.

    Args:
        engines: a fleet that somebody keeps up to date, or engines that are always there.
        environment: makes the environment of an episode.
        index: of the worker in the run; also spreads the workers over the engines.
        prefixes_apart: see `EnginePolicy`.
    """

    def __init__(
        self,
        *,
        client: TicketClient,
        engines: Fleet | Sequence[EngineClient],
        environment: Callable[[], Environment],
        encoder: TokenEncoder,
        recipe: RolloutRecipe,
        index: int = 0,
        incarnation: int = 0,
        prefixes_apart: bool = False,
    ) -> None:
        if not isinstance(engines, Fleet):
            engines = Fleet(engines, first=index)
        self._client = client
        self._fleet = engines
        self._environment = environment
        self._encoder = encoder
        self._recipe = recipe
        self._limits = Limits.of(recipe.limits)
        self._over_long = OverLong.of(recipe.over_long)
        self._index = index
        self._incarnation = incarnation
        self._prefixes_apart = prefixes_apart
        ahead = int(recipe.concurrency * AHEAD_SHARE)
        self._hold = recipe.concurrency + ahead
        self._worth_asking = max(ahead // 2, 1)
        self._places = trio.Semaphore(recipe.concurrency)
        self._held: dict[str, trio.CancelScope] = {}  # by the ticket's name
        self._freed = trio.Event()
        self._counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Play until the tickets end, or the buffer says that this worker is over.

        Raises:
            ExceptionGroup: of a `BufferUnavailable` (the buffer did not answer within its client's deadline), another refusal of the
                buffer's, or a `ConfigError` (the environment or the tokenizer cannot do what the recipe asks).
        """
        send, receive = trio.open_memory_channel[Outcome](self._recipe.concurrency)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._heartbeat_loop, nursery.cancel_scope)
                async with trio.open_nursery() as flow:
                    flow.start_soon(self._close_loop, receive)
                    flow.start_soon(self._take_loop, send, flow.cancel_scope)
                nursery.cancel_scope.cancel()
        except* StaleIncarnation as outdated:
            _log.warning("worker %d ends: %s", self._index, _leaf(outdated))

    async def _take_loop(self, finished: trio.MemorySendChannel[Outcome], flow: trio.CancelScope) -> None:
        """Keep `concurrency` episodes going.

        consumes      tickets of the buffer, asked for ahead of need
        produces      episodes; their outcomes go to `finished`
        waits for     the buffer's long poll, or a place
        unblocked by  the end of the tickets, which cancels the episodes still running: nobody wants them
        """
        request = 0
        async with finished, trio.open_nursery() as episodes:
            while True:
                want = await self._wanted()
                granted = await self._client.take_tickets(request=request, want=want, wait_s=LONG_POLL_S if want else 0.0)
                request += 1
                for name in granted.cancelled:
                    self._cancel(name)
                for grant in granted.grants:
                    self._held[grant.ticket.name] = trio.CancelScope()
                    episodes.start_soon(self._play, grant, finished)
                if granted.ended:
                    break
            episodes.cancel_scope.cancel()
        flow.deadline = trio.current_time() + FLUSH_S

    async def _close_loop(self, finished: trio.MemoryReceiveChannel[Outcome]) -> None:
        """Hand outcomes to the buffer, all that are there at a time.

        consumes      finished outcomes
        produces      acknowledged ones: they are in the journal
        waits for     an outcome; then the buffer's answer, at most its client's deadline
        unblocked by  the take loop closing its end, which ends this loop after the last outcome
        """
        async with finished:
            async for outcome in finished:
                await trio.sleep(GATHER_S)
                outcomes = [outcome, *_ready(finished, MAX_OUTCOMES - 1)]
                accepted = await self._client.close_tickets(outcomes)
                self._counts["late"] += accepted.count(False)
                self._counts["acknowledged"] += len(accepted)

    async def _heartbeat_loop(self, worker: trio.CancelScope) -> None:
        """Say what this worker is doing.

        consumes      nothing
        produces      heartbeats
        waits for     the clock, and the buffer's answer
        unblocked by  the worker's end; an answer of no ends the worker
        """
        while True:
            note = {"held": len(self._held), "engines": list(self._fleet.episodes), **self._counts}
            if not await self._client.heartbeat(note):
                worker.cancel()
            await trio.sleep(HEARTBEAT_S)

    async def _wanted(self) -> int:
        """How many tickets to ask for. Waits while there are enough, but not long: the buffer may have cancelled some."""
        with trio.move_on_after(ASK_AGAIN_S):
            while self._hold - len(self._held) < self._worth_asking:
                self._freed = trio.Event()
                await self._freed.wait()
        return self._hold - len(self._held)

    async def _play(self, grant: Grant, finished: trio.MemorySendChannel[Outcome]) -> None:
        name = grant.ticket.name
        try:
            with self._held[name]:
                async with self._places:
                    outcome = await self._outcome(grant)
                faults.point("worker.finished")
                await finished.send(outcome)
        finally:
            del self._held[name]
            self._freed.set()

    async def _outcome(self, grant: Grant) -> Outcome:
        """Play one ticket: its trajectory, or why there is none."""
        trajectory: Trajectory | None = None
        try:
            with trio.move_on_after(self._recipe.episode_deadline_s):
                trajectory = await self._episode(grant)
        except ConfigError:
            raise  # no other attempt could do better
        except Exception as error:  # the blast radius of an episode: an environment may raise anything
            cause = cause_of(error)
            self._counts[f"failed/{cause}"] += 1
            detail = str(error) if isinstance(error, EnvironmentFailure | EngineError) else "".join(traceback.format_exception(error))
            return Outcome(ticket=grant.ticket, cause=cause, detail=detail[-MAX_DETAIL:])
        if trajectory is None:
            self._counts["failed/deadline"] += 1
            detail = f"the episode did not end within {self._recipe.episode_deadline_s:g} s"
            return Outcome(ticket=grant.ticket, cause=CloseCause.DEADLINE, detail=detail)
        self._counts["episodes"] += 1
        self._counts["generated_tokens"] += trajectory.generated
        return Outcome(ticket=grant.ticket, trajectory=encode_trajectory(trajectory))

    async def _episode(self, grant: Grant) -> Trajectory:
        asked = Assignment(
            ticket=grant.ticket,
            task=grant.task,
            seed=grant.seed,
            temperature=grant.temperature,
            worker=self._index,
            incarnation=self._incarnation,
            over_long=self._over_long if grant.ticket.purpose is Purpose.TRAIN else None,  # an evaluation measures answers
        )
        with self._fleet.seat() as seat:
            policy = EnginePolicy(
                seat,
                name=grant.ticket.name,
                seed=grant.seed,
                temperature=grant.temperature,
                decode=self._encoder.decode,
                deadline_s=self._recipe.request_deadline_s,
                apart=self._prefixes_apart,
            )
            return await run_episode(self._environment(), asked, policy, self._encoder, self._limits)

    def _cancel(self, name: str) -> None:
        scope = self._held.get(name)
        if scope is not None:
            self._counts["cancelled"] += 1
            scope.cancel()


def cause_of(error: Exception) -> CloseCause:
    """The cause a ticket closes by when its episode raised `error`. Of a group, the first that says more than "something failed"."""
    if isinstance(error, ExceptionGroup):
        causes = [cause_of(part) for part in error.exceptions if isinstance(part, Exception)]
        return next((cause for cause in causes if cause is not CloseCause.ENVIRONMENT_ERROR), CloseCause.ENVIRONMENT_ERROR)
    if isinstance(error, EnvironmentFailure):
        return CloseCause(error.cause) if error.cause in _CAUSES else CloseCause.ENVIRONMENT_ERROR
    if isinstance(error, EngineError):
        return CloseCause.ENGINE_ERROR
    if isinstance(error, trio.TooSlowError):
        return CloseCause.TOOL_TIMEOUT
    return CloseCause.ENVIRONMENT_ERROR


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _ready(channel: trio.MemoryReceiveChannel[Outcome], limit: int) -> Iterator[Outcome]:
    """What can be received without waiting."""
    for _ in range(limit):
        try:
            yield channel.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return
