"""Tickets: which are open and with whom, what became of the others, and what share of them fails."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from agentrl.types import INFRASTRUCTURE_CAUSES, CloseCause, Ticket

__all__ = ["Closed", "OpenTicket", "Tickets", "digest"]

REMEMBERED_OUTCOMES = 1 << 16  # a client sends again for its deadline at most: half a minute of a busy run is a quarter of this
REMEMBERED_REQUESTS = 64  # per worker
REMEMBERED_CANCELLATIONS = 4096  # per worker
MIN_WINDOW = 100  # tickets before their failed share says anything


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """A ticket being played."""

    ticket: Ticket
    worker: int
    incarnation: int  # of the worker
    run: int  # ... and of the run


@dataclass(slots=True)
class Closed:
    """The outcome a ticket had."""

    cause: CloseCause
    digest: bytes = b""  # of the trajectory
    late: bool = False  # a different result came later, and was counted


class Tickets:
    """All attempts, of training and evaluation.

    Args:
        window: how many of the last tickets the failed share is taken of; at least `MIN_WINDOW`.
    """

    def __init__(self, *, window: int) -> None:
        self.open: dict[str, OpenTicket] = {}
        self.issued = 0
        self.closed: Counter[CloseCause] = Counter()
        self.late: Counter[CloseCause] = Counter()  # refused results: they have no place in the balance
        self.cancelled: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=REMEMBERED_CANCELLATIONS))
        self._by_worker: defaultdict[int, dict[str, OpenTicket]] = defaultdict(dict)
        self._outcomes: OrderedDict[str, Closed] = OrderedDict()
        self._requests: defaultdict[tuple[int, int], OrderedDict[int, tuple[Ticket, ...]]] = defaultdict(OrderedDict)
        self._window: deque[CloseCause] = deque(maxlen=max(MIN_WINDOW, window))
        self._failed: Counter[CloseCause] = Counter()  # causes within the window
        self._details: dict[CloseCause, str] = {}

    def issue(self, tickets: Iterable[Ticket], *, worker: int, incarnation: int, request: int, run: int) -> None:
        """A worker's request is answered."""
        granted = tuple(tickets)
        for ticket in granted:
            entry = OpenTicket(ticket=ticket, worker=worker, incarnation=incarnation, run=run)
            self.open[ticket.name] = self._by_worker[worker][ticket.name] = entry
        self.issued += len(granted)
        requests = self._requests[(worker, incarnation)]
        requests[request] = granted
        if len(requests) > REMEMBERED_REQUESTS:
            requests.popitem(last=False)

    def answer(self, worker: int, incarnation: int, request: int) -> tuple[Ticket, ...] | None:
        """What a request was answered with before."""
        return self._requests[(worker, incarnation)].get(request)

    def close(self, ticket: Ticket, cause: CloseCause, *, trajectory: bytes = b"", detail: str = "", told: bool = False) -> None:
        """A ticket has its outcome.

        Args:
            told: by its worker; otherwise the buffer closed it, and the worker is told that it did.
        """
        entry = self.open.pop(ticket.name)
        del self._by_worker[entry.worker][ticket.name]
        if not told:
            self.cancelled[entry.worker].append(ticket.name)
        self.closed[cause] += 1
        self._outcomes[ticket.name] = Closed(cause=cause, digest=digest(trajectory) if trajectory else b"")
        if len(self._outcomes) > REMEMBERED_OUTCOMES:
            self._outcomes.popitem(last=False)
        if cause is CloseCause.TRAJECTORY or cause in INFRASTRUCTURE_CAUSES:
            self._see(cause, detail)

    def outcome(self, ticket: Ticket) -> Closed | None:
        """The outcome of a closed ticket, where it is remembered."""
        return self._outcomes.get(ticket.name)

    def refuse(self, ticket: Ticket, cause: CloseCause) -> None:
        """A result came too late."""
        self.late[cause] += 1
        closed = self._outcomes.get(ticket.name)
        if closed is not None:
            closed.late = True

    def of_worker(self, worker: int) -> list[OpenTicket]:
        """The open tickets of a worker."""
        return list(self._by_worker[worker].values())

    def forget(self, worker: int, incarnation: int) -> None:
        """A worker begins anew: requests of its older incarnations will not be sent again."""
        for key in [key for key in self._requests if key[0] == worker and key[1] < incarnation]:
            del self._requests[key]
        self.cancelled.pop(worker, None)

    def new_window(self) -> None:
        """The run was resumed: what failed before says nothing."""
        self._window.clear()
        self._failed.clear()

    @property
    def failed_share(self) -> float:
        """Share of the last tickets that the infrastructure failed; 0 as long as there are too few to say."""
        return self._failed.total() / len(self._window) if len(self._window) >= MIN_WINDOW else 0.0

    def failures(self) -> str:
        """The causes within the window, with an example of each, for people."""
        causes = [f'{cause} {count} (e.g. "{self._details.get(cause, "")}")' for cause, count in self._failed.most_common() if count]
        return f"{self._failed.total()} of the last {len(self._window)} tickets failed: " + ", ".join(causes)

    def _see(self, cause: CloseCause, detail: str) -> None:
        if len(self._window) == self._window.maxlen and self._window[0] is not CloseCause.TRAJECTORY:
            self._failed[self._window[0]] -= 1
        self._window.append(cause)
        if cause is not CloseCause.TRAJECTORY:
            self._failed[cause] += 1
            self._details[cause] = detail.strip().rpartition("\n")[2][:300]  # of a traceback the last line: what was raised


def digest(trajectory: bytes) -> bytes:
    """What identifies a trajectory's bytes."""
    return blake2b(trajectory, digest_size=16).digest()
