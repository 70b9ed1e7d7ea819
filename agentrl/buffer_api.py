"""The replay buffer's protocol: the messages, and the client that workers, learner ranks and the driver speak it with.

Every call is a POST of a msgpack map to `/<name>`, naming its caller as (role, index, incarnation). It has a total deadline, and a key
made of its natural names (ticket; worker incarnation and request; learner incarnation and batch number), which is in the journal record
it causes: sent again after a lost reply, or to a restarted buffer, it gets the same answer. An answer means: in the journal.

    409  StaleIncarnation: the caller is an older incarnation of its role and must end itself
    4xx  the error named in the body: a mistake, never retried
    5xx  retried until the deadline; where the journal cannot be written (the disk is full), for ten minutes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal

import httpx
import trio

from agentrl import errors
from agentrl.errors import AgentRLError, BufferUnavailable, Failure, JournalError, ReplayBufferError, StaleIncarnation, WireError
from agentrl.types import CloseCause, Task, Ticket, Trajectory
from agentrl.wire import decode_task, decode_ticket, encode_task, encode_ticket, pack, unpack
from retriever.transport import Answer, TrioClient, trio_client

__all__ = [
    "BatchGrant",
    "BufferClient",
    "EngineEntry",
    "EngineRoster",
    "EvaluationResult",
    "Grant",
    "JournalMark",
    "Outcome",
    "RollbackReply",
    "TicketGrants",
    "TrainedReply",
    "VersionInfo",
]

CONNECTIONS = 16  # calls of one client at a time: ticket polls, outcomes, heartbeats, event polls
FIRST_PAUSE_S = 0.05  # between attempts of a call, doubled up to ...
LONGEST_PAUSE_S = 1.0
DISK_PATIENCE_S = 600.0  # while the buffer says that its disk is full, a call waits longer than its deadline: time to make room


class BufferClient:
    """The buffer as seen from a trio program. An async context manager.

    Args:
        url: of the buffer, e.g. `http://127.0.0.1:4711`.
        role: "driver", "worker", "learner", ...; with `index` and `incarnation` it names the caller in every call.
        deadline_s: total time of a call, its attempts and pauses included; a long poll has its `wait_s` on top.
        http: used instead of a client of its own, which is closed with this one; a given one is not.

    Every method raises `BufferUnavailable` where no answer came before the deadline, `StaleIncarnation` where the caller is outdated, and
    the error the buffer names (`ReplayBufferError`, `CheckpointError`, `WireError`, ...) where it refused.
    """

    def __init__(self, url: str, *, role: str, index: int, incarnation: int, deadline_s: float = 30.0, http: TrioClient | None = None) -> None:
        self._url, self._deadline_s = url.rstrip("/"), deadline_s
        self._caller = {"role": str(role), "index": index, "incarnation": incarnation}
        self._own = None if http is not None else trio_client(max_connections=CONNECTIONS)
        self._http = http if http is not None else self._own

    async def __aenter__(self) -> BufferClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._own is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self._own.aclose()

    async def take_tickets(self, *, request: int, want: int, wait_s: float) -> TicketGrants:
        """Up to `want` tickets; none where nothing came within `wait_s`. Idempotent by (worker incarnation, `request`): count it up."""
        return TicketGrants.from_plain(await self._call("take_tickets", {"request": request, "want": want}, wait_s=wait_s))

    async def close_tickets(self, outcomes: Sequence[Outcome]) -> tuple[bool, ...]:
        """Hand in the outcome of each ticket. False: refused, the ticket had its outcome already (too late). Idempotent by ticket."""
        return tuple(await self._call("close_tickets", {"outcomes": [outcome.to_plain() for outcome in outcomes]}))

    async def take_batch(self, *, number: int, wait_s: float) -> BatchGrant | None:
        """The learner group's `number`-th batch (0, 1, ...); None where it is not there within `wait_s`.

        Idempotent by (learner incarnation, `number`): every rank asks with the same number and gets the same batch.
        """
        reply = await self._call("take_batch", {"number": number}, wait_s=wait_s)
        return None if reply is None else BatchGrant.from_plain(reply)

    async def batch_trained(
        self, *, batch: int, updates_done: int, updates_skipped: int, seconds: tuple[float, float], metrics: Mapping[str, float]
    ) -> TrainedReply:
        """Say that a batch has been trained on. The reply names the version it makes, reserved in the same record.

        Args:
            seconds: (started_s, ended_s), seconds since the epoch.
        """
        body = {
            "batch": batch,
            "updates_done": updates_done,
            "updates_skipped": updates_skipped,
            "seconds": list(seconds),
            "metrics": dict(metrics),
        }
        return TrainedReply(**await self._call("batch_trained", body))

    async def reserve_version(self, *, reason: str) -> int:
        """A version for weights no batch made. Idempotent by (caller's incarnation, reason).

        Args:
            reason: `initial`, `restored`, or `rollback-<n>` for the run's n-th rollback.
        """
        return int(await self._call("reserve_version", {"reason": reason}))

    async def version_published(self, *, version: int, engines: Sequence[int], seconds: float, bytes: int) -> None:
        """Say that every live engine, those of `engines`, reports `version`."""
        await self._call("version_published", {"version": version, "engines": list(engines), "seconds": seconds, "bytes": bytes})

    async def version_superseded(self, version: int) -> None:
        """Say that `version` will never be published: a newer one was there first."""
        await self._call("version_superseded", {"version": version})

    async def sync_journal(self) -> JournalMark:
        """Bring the journal to the disk. Returns what a checkpoint's manifest keeps of it."""
        return JournalMark.from_plain(await self._call("sync_journal", {}))

    async def checkpoint_committed(self, manifest: Mapping[str, Any]) -> None:
        """Say that a checkpoint is in its place. Needs `id`, `step` and `consumed` of the manifest. Idempotent by id."""
        await self._call("checkpoint_committed", {"manifest": dict(manifest)})

    async def rollback(self, manifest: Mapping[str, Any] | None, *, bad_after: int | None = None) -> RollbackReply:
        """Take back every batch the manifest does not name consumed. None: back to the very start.

        Args:
            bad_after: of the weights that are abandoned, those of later steps than this are bad: groups with tokens of theirs are dropped.

        Raises:
            CheckpointError: the manifest's batches do not stand in the journal's surviving history: use an older checkpoint.
        """
        body = {"manifest": None if manifest is None else dict(manifest), "bad_after": bad_after}
        return RollbackReply(**await self._call("rollback", body))

    async def heartbeat(self, note: Mapping[str, Any]) -> bool:
        """Say what the caller is doing. False: the run is over for it, it should end itself."""
        return bool(await self._call("heartbeat", {"note": dict(note)}))

    async def register(self, *, role: str, index: int, incarnation: int, url: str = "") -> None:
        """Announce a process before it works (driver only). Closes the open tickets of older incarnations of a worker as lost.

        Args:
            url: of an engine that answers: from now on it is on the roster, fenced until `engine_current`.
        """
        await self._call("register", {"who": [str(role), index, incarnation], "url": url})

    async def worker_died(self, index: int) -> None:
        """Close the open tickets of worker `index` as lost (driver only)."""
        await self._call("worker_died", {"worker": index})

    async def engine_died(self, index: int, incarnation: int) -> None:
        """Take an engine off the roster (driver only). Of a newer incarnation nothing is changed."""
        await self._call("engine_died", {"engine": [index, incarnation]})

    async def engine_current(self, index: int, incarnation: int, version: int) -> bool:
        """Say that an engine holds `version`, the newest that is published (learner only). False: it is gone, or there anew."""
        return bool(await self._call("engine_current", {"engine": [index, incarnation], "version": version}))

    async def engine_fenced(self, index: int, incarnation: int, reason: str, *, give_up: bool = False) -> bool:
        """Say that no episode may sit at an engine, and why (learner only). False: it is gone, or there anew.

        Args:
            give_up: the learner cannot bring it to the newest version: the driver restarts it, where it is the run's own.
        """
        return bool(await self._call("engine_fenced", {"engine": [index, incarnation], "reason": reason, "give_up": give_up}))

    async def engines(self, *, after: int, wait_s: float) -> EngineRoster:
        """The engines that live, as soon as the roster has another revision than `after` (0: it has changed at all), or after `wait_s`."""
        return EngineRoster.from_plain(await self._call("engines", {"after": after}, wait_s=wait_s))

    async def stop(self, reason: str) -> None:
        """End the run here: no more tickets and no more batches."""
        await self._call("stop", {"reason": reason})

    async def fail(self, failure: Failure) -> None:
        """End the run with a cause."""
        await self._call("fail", {"failure": asdict(failure)})

    async def status(self) -> dict[str, Any]:
        """All counters (see `ReplayBuffer.status`)."""
        return dict(await self._call("status", {}))

    async def events(self, *, after: int, wait_s: float) -> tuple[list[dict[str, Any]], int]:
        """What happened since event number `after` (0 at first), and the number to ask with next."""
        found, last = await self._call("events", {"after": after}, wait_s=wait_s)
        return found, last

    async def _call(self, name: str, body: dict[str, Any], *, wait_s: float = 0.0) -> Any:
        content = pack(self._caller | {"wait_s": wait_s} | body)
        pause_s, trouble = FIRST_PAUSE_S, "no attempt was made"
        assert self._http is not None
        began = trio.current_time()
        with trio.CancelScope(deadline=began + self._deadline_s + wait_s) as scope:
            while True:
                try:
                    answer = await self._http.exchange("POST", f"{self._url}/{name}", content)
                except httpx.TransportError as error:
                    trouble = f"{type(error).__name__}: {error}"
                else:
                    if answer.status_code < 500:
                        return _reply(name, answer)
                    kind, text = _error(answer)
                    trouble = f"HTTP {answer.status_code}: {text}"
                    if kind == JournalError.__name__:  # it lives, and waits for its disk
                        scope.deadline = min(trio.current_time() + pause_s + self._deadline_s, began + DISK_PATIENCE_S)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        waited_s = trio.current_time() - began
        raise BufferUnavailable(f"{name}: the buffer at {self._url} gave no answer within {waited_s:.1f} s; last: {trouble}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEntry:
    """An engine that lives."""

    index: int
    incarnation: int
    url: str
    version: int | None = None  # it holds, as far as the learner knows
    current: bool = False  # that is the newest one; else the engine is fenced: no episode sits at it
    reason: str = ""  # why it is fenced, where something went wrong
    given_up: bool = False  # the learner cannot bring it to the newest version


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRoster:
    """The answer to `engines`: all engines that live, by index."""

    revision: int
    engines: tuple[EngineEntry, ...]

    def to_plain(self) -> dict[str, Any]:
        """As a plain map."""
        return {"revision": self.revision, "engines": [asdict(engine) for engine in self.engines]}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> EngineRoster:
        """Of `to_plain`."""
        return cls(revision=value["revision"], engines=tuple(EngineEntry(**engine) for engine in value["engines"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """One ticket to play."""

    ticket: Ticket
    task: Task
    temperature: float  # 0 is greedy
    seed: int  # of the sample; a turn's is `seeds.turn_seed` of it


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketGrants:
    """The answer to `take_tickets`."""

    grants: tuple[Grant, ...] = ()
    ended: bool = False  # no more tickets will ever come
    cancelled: tuple[str, ...] = ()  # names of this worker's tickets the buffer closed (run_end, group_closed): playing on is no use. Told once

    def to_plain(self) -> dict[str, Any]:
        """As a plain map."""
        grants = [[encode_ticket(g.ticket), encode_task(g.task), g.temperature, g.seed] for g in self.grants]
        return {"grants": grants, "ended": self.ended, "cancelled": list(self.cancelled)}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> TicketGrants:
        """Of `to_plain`."""
        grants = tuple(
            Grant(ticket=decode_ticket(ticket), task=decode_task(task), temperature=temperature, seed=seed)
            for ticket, task, temperature, seed in value["grants"]
        )
        return cls(grants=grants, ended=value["ended"], cancelled=tuple(value["cancelled"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a ticket: a trajectory's bytes (cause `trajectory`), or why there is none."""

    ticket: Ticket
    trajectory: bytes | None = None
    cause: CloseCause = CloseCause.TRAJECTORY
    detail: str = ""  # for people: the error's text

    def __post_init__(self) -> None:
        if (self.trajectory is None) == (self.cause is CloseCause.TRAJECTORY):
            raise ReplayBufferError(f"{self.ticket.name}: an outcome is either a trajectory or a cause, got cause {self.cause}")

    def to_plain(self) -> list[Any]:
        """As a plain list."""
        return [encode_ticket(self.ticket), self.trajectory, str(self.cause), self.detail]

    @classmethod
    def from_plain(cls, value: Sequence[Any]) -> Outcome:
        """Of `to_plain`."""
        try:
            ticket, trajectory, cause, detail = value
            return cls(ticket=decode_ticket(ticket), trajectory=trajectory, cause=CloseCause(cause), detail=str(detail))
        except (TypeError, ValueError) as error:
            raise WireError(f"not an outcome: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionInfo:
    """What is known of a version of the weights."""

    step: int  # it was made at: staleness = the batch's step - this
    abandoned: bool = False  # made in a history that was rolled back: its tokens' age is `age_versions`
    age_versions: int = 0  # versions reserved since

    def staleness(self, step: int) -> int:
        """Of a token of this version that is trained on in a batch starting at `step`."""
        return self.age_versions if self.abandoned else step - self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGrant:
    """A batch to train on, or (`end` is set) the news that none follows."""

    end: Literal["finished", "stopped"] | None = None
    batch: int = -1  # its number in the run: never reused
    step: int = 0  # of the learner, at the batch's start
    groups: tuple[tuple[bytes, ...], ...] = ()  # encoded trajectories; groups by ordinal, within a group by k
    versions: Mapping[int, VersionInfo] = field(default_factory=dict)  # of every generated token of the batch
    total_steps: int | None = None  # None: the run ends by hours
    progress: float = 0.0  # share of the run that is done at the batch's start
    publishes: bool = False  # the step makes a version

    def to_plain(self) -> dict[str, Any]:
        """As a plain map."""
        return {
            "end": self.end,
            "batch": self.batch,
            "step": self.step,
            "groups": [list(group) for group in self.groups],
            "versions": {version: [info.step, info.abandoned, info.age_versions] for version, info in self.versions.items()},
            "total_steps": self.total_steps,
            "progress": self.progress,
            "publishes": self.publishes,
        }

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> BatchGrant:
        """Of `to_plain`."""
        groups = tuple(tuple(group) for group in value["groups"])
        versions = {
            version: VersionInfo(step=step, abandoned=abandoned, age_versions=age) for version, (step, abandoned, age) in value["versions"].items()
        }
        return cls(**(dict(value) | {"groups": groups, "versions": versions}))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedReply:
    """The answer to `batch_trained`."""

    version: int | None  # the version the batch makes; None where it publishes nothing
    step: int  # after it


@dataclass(frozen=True, kw_only=True, slots=True)
class RollbackReply:
    """The answer to `rollback`."""

    step: int
    annulled: int = 0  # batches taken back


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalMark:
    """A place in the journal, and what stands before it: what a checkpoint's manifest keeps."""

    offset: int  # bytes of the journal up to here, over all segments
    consumed: tuple[tuple[int, int], ...]  # [first, last] ranges of the batches trained in the surviving history
    frontier: int  # ordinals below it were issued
    step: int

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> JournalMark:
        """Of `dataclasses.asdict`."""
        return cls(**(dict(value) | {"consumed": tuple((first, last) for first, last in value["consumed"])}))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """A finished evaluation of one set: what the `on_evaluation` hook gets."""

    evaluation: str  # its id, e.g. "heldout@20"
    set: str
    step: int  # it was opened at
    stage: str  # initial, periodic or final
    versions: tuple[int, int]  # lowest and highest version of its tokens, (-1, -1) where there are none
    rows: tuple[tuple[Task, Trajectory | CloseCause], ...]  # each wanted sample in (task, k) order: its trajectory, or why it has none


def _reply(name: str, answer: Answer) -> Any:
    if answer.status_code == 200:
        return unpack(answer.content)
    kind, text = _error(answer)
    if answer.status_code == 409:
        raise StaleIncarnation(text)
    error = getattr(errors, kind, None)
    if isinstance(error, type) and issubclass(error, AgentRLError):
        raise error(text)
    raise ReplayBufferError(f"{name}: HTTP {answer.status_code}: {text}")


def _error(answer: Answer) -> tuple[str, str]:
    """(kind, text) of an error response, ("", its beginning as text) where it is not one of ours."""
    try:
        body = unpack(answer.content)
        return str(body["kind"]), str(body["error"])
    except (WireError, TypeError, KeyError):
        return "", answer.text[:200]
