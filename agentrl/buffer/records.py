"""The journal's records: what can happen to a run. The state of the buffer is the fold of these and of nothing else.

Every record carries `t`, seconds since the epoch. On disk a record is a msgpack map of its fields and its `kind`; unknown fields are
ignored, an unknown kind is an error.

    incarnation        a process is about to work; older incarnations of it are refused from here on
    task_issued        a group is admitted: n samples are wanted
    ticket_issued      a worker's request is answered with these tickets
    trajectory         a ticket's outcome is a trajectory; where it completes its group, the same record says what becomes of the group
    ticket_closed      ... is none, by cause; the same record says what follows: another attempt, the sample given up (and what becomes of
                       the group, where that completes it), the group dropped
    ticket_late        a result came for a ticket that had its outcome
    batch_taken        groups go into training, in this order
    batch_trained      ... and have been trained on; reserves the version the batch makes
    version_reserved   a version for weights no batch made (initial, restored)
    version_published  every live engine has it
    version_superseded it will never be published
    checkpoint         a checkpoint is in its place
    rollback           every batch not named consumed is annulled
    evaluation_opened  a held-out set is being played
    evaluation_ended   ... was, with these numbers
    halt               the run was stopped or failed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from agentrl.buffer.summary import TrajectorySummary
from agentrl.errors import JournalError, WireError
from agentrl.types import CloseCause, Ticket
from agentrl.wire import decode_ticket, encode_ticket, pack, unpack

__all__ = [
    "BatchTaken",
    "BatchTrained",
    "Checkpoint",
    "EvaluationEnded",
    "EvaluationOpened",
    "Halt",
    "IncarnationBegun",
    "Ranges",
    "Record",
    "Rollback",
    "TaskIssued",
    "TicketClosed",
    "TicketLate",
    "TicketsIssued",
    "TrajectoryAdded",
    "Verdict",
    "VersionPublished",
    "VersionReserved",
    "VersionSuperseded",
    "decode_record",
    "encode_record",
]

Ranges = tuple[tuple[int, int], ...]  # [first, last] of batch ids, ascending, disjoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What becomes of a group when it is complete. It is part of the record that completes the group, so a crash leaves both or neither."""

    left_out: tuple[int, ...] = ()  # k of trajectories dropped from it by their stops
    drop: str = ""  # the cause the rest is dropped by; "" keeps it


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Something that happened."""

    kind: ClassVar[str]
    t: float


@dataclass(frozen=True, kw_only=True, slots=True)
class IncarnationBegun(Record):
    """A process is about to work. Role "driver" is the run itself: every open ticket of before is lost."""

    kind: ClassVar[str] = "incarnation"
    role: str
    index: int
    incarnation: int
    url: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskIssued(Record):
    """A group is admitted."""

    kind: ClassVar[str] = "task_issued"
    ordinal: int
    task: str  # its id
    n: int  # samples, a greedy one included
    greedy: bool = False  # the last sample is played at temperature 0: the group's baseline, never trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketsIssued(Record):
    """A worker's request is answered."""

    kind: ClassVar[str] = "ticket_issued"
    tickets: tuple[Ticket, ...]
    worker: int
    incarnation: int
    request: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryAdded(Record):
    """A ticket's outcome is a trajectory."""

    kind: ClassVar[str] = "trajectory"
    ticket: Ticket
    versions: tuple[int, ...]  # distinct versions of its generated tokens, ascending
    summary: TrajectorySummary
    data: bytes  # as the worker sent it
    verdict: Verdict | None = None  # on its group; None where that is not complete


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketClosed(Record):
    """A ticket's outcome is none.

    Exactly one of three follows: `next` is the sample's next attempt; or `drop` is the cause the whole group is dropped by, which closes
    its other open tickets as `group_closed`; or neither, and the sample alone is given up.
    """

    kind: ClassVar[str] = "ticket_closed"
    ticket: Ticket
    cause: CloseCause
    detail: str = ""
    next: int | None = None
    drop: str = ""
    verdict: Verdict | None = None  # on its group, where giving up the sample completes it


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketLate(Record):
    """A result was refused: the ticket had its outcome."""

    kind: ClassVar[str] = "ticket_late"
    ticket: Ticket
    cause: CloseCause  # of the refused result


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTaken(Record):
    """Groups go into training."""

    kind: ClassVar[str] = "batch_taken"
    batch: int
    step: int  # at its start
    incarnation: int  # of the learner group ...
    number: int  # ... whose request this answers
    groups: tuple[tuple[int, int, int], ...]  # (ordinal, use, staleness): use 0 is the first; staleness is of the oldest token
    newest: int  # version: what ages are counted from
    progress: float  # share of the run done
    last: bool  # the run ends with it
    publishes: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTrained(Record):
    """A batch was trained on. The version it makes is reserved by this record."""

    kind: ClassVar[str] = "batch_trained"
    batch: int
    step: int  # after it
    updates_done: int
    updates_skipped: int
    version: int | None
    started_s: float
    ended_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionReserved(Record):
    """A version for weights no batch made."""

    kind: ClassVar[str] = "version_reserved"
    version: int
    reason: str  # initial, restored, rollback-<n>
    step: int
    role: str  # of who asked, with its incarnation
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionPublished(Record):
    """Every live engine has it."""

    kind: ClassVar[str] = "version_published"
    version: int
    engines: tuple[int, ...]
    seconds: float
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSuperseded(Record):
    """It will never be published."""

    kind: ClassVar[str] = "version_superseded"
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint(Record):
    """A checkpoint is in its place."""

    kind: ClassVar[str] = "checkpoint"
    id: str
    step: int
    consumed: Ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback(Record):
    """Every batch not in `consumed` is annulled."""

    kind: ClassVar[str] = "rollback"
    id: str  # of the manifest; "" for the very start
    step: int
    consumed: Ranges
    incarnation: int  # of the learner group that goes on from there
    bad_after: int | None = None  # step: of the abandoned weights, later ones are bad; groups with tokens of theirs are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOpened(Record):
    """A held-out set is being played."""

    kind: ClassVar[str] = "evaluation_opened"
    evaluation: str
    set: str
    step: int
    stage: str  # initial, periodic, final
    tasks: int
    n: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationEnded(Record):
    """A held-out set was played."""

    kind: ClassVar[str] = "evaluation_ended"
    evaluation: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt(Record):
    """The run was stopped or failed. A resume of the run undoes it."""

    kind: ClassVar[str] = "halt"
    phase: str  # stopping, failed
    reason: str
    failure: Mapping[str, str] = field(default_factory=dict)


_KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in Record.__subclasses__()}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in _KINDS.values()}


def _pairs(value: Any) -> Any:
    return tuple(tuple(item) for item in value)


def _read_verdict(value: Any) -> Verdict | None:
    return None if value is None else Verdict(left_out=tuple(value[0]), drop=value[1])


def _write_verdict(verdict: Verdict | None) -> list[Any] | None:
    return None if verdict is None else [list(verdict.left_out), verdict.drop]


_READ: dict[str, Callable[[Any], Any]] = {
    "ticket": decode_ticket,
    "tickets": lambda value: tuple(decode_ticket(item) for item in value),
    "cause": CloseCause,
    "versions": tuple,
    "engines": tuple,
    "groups": _pairs,
    "consumed": _pairs,
    "summary": TrajectorySummary.from_plain,
    "verdict": _read_verdict,
}
_WRITE: dict[str, Callable[[Any], Any]] = {
    "ticket": encode_ticket,
    "tickets": lambda value: [encode_ticket(item) for item in value],
    "cause": str,
    "summary": TrajectorySummary.to_plain,
    "verdict": _write_verdict,
}


def encode_record(record: Record) -> bytes:
    """The bytes of a record."""
    body: dict[str, Any] = {"kind": record.kind}
    for name in _FIELDS[type(record)]:
        value = getattr(record, name)
        body[name] = _WRITE[name](value) if name in _WRITE else value
    return pack(body)


def decode_record(data: bytes) -> Record:
    """The record of `encode_record`.

    Raises:
        JournalError: a kind or a content that this version does not know.
    """
    try:
        body = unpack(data)
        kind = _KINDS[body["kind"]]
        return kind(**{name: _READ[name](body[name]) if name in _READ else body[name] for name in _FIELDS[kind] if name in body})
    except (WireError, KeyError, TypeError, ValueError) as error:
        raise JournalError(f"not a record of this version: {error!r}") from error
