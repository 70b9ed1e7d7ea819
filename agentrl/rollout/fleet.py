"""The engines as one worker sees them: which of them an episode sits at, as they come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from agentrl.buffer_api import EngineEntry
from agentrl.engine_api import EngineClient
from agentrl.errors import ConfigError, EngineUnavailable

__all__ = ["Fleet", "Seat"]

SUSPECT_S = 5.0  # how long an engine that failed is avoided, where there is another


class Fleet:
    """Gives every new episode a seat at the engine with the fewest of this worker's episodes.

    An episode stays with its engine, which holds its prefix in its cache, until that engine fails or leaves. Where there is no engine at all,
    episodes wait for one.

    Args:
        engines: there from the beginning, each under its `index`.
        first: engine that wins ties, so that workers do not all begin with the same one.
        connect: makes the client of an engine that `update` brings, from its URL and index. None: `engines` are all there ever are.
    """

    def __init__(self, engines: Sequence[EngineClient] = (), *, first: int = 0, connect: Callable[[str, int], EngineClient] | None = None) -> None:
        if not engines and connect is None:
            raise ConfigError("a rollout worker needs at least one engine")
        self._first, self._connect = first, connect
        self._places = [_Place(engine) for engine in engines]
        self._clients: dict[tuple[int, int], EngineClient] = {}  # by (index, incarnation): those that `connect` made
        self._arrived = trio.Event()

    @property
    def episodes(self) -> tuple[int, ...]:
        """Seats taken, per engine."""
        return tuple(place.episodes for place in self._places)

    def update(self, entries: Iterable[EngineEntry]) -> list[EngineClient]:
        """Follow the roster: seats are at current engines only, and whoever waits for an answer of another one is sent on at once.

        Returns:
            The clients of engines that are gone, for the caller to close.
        """
        assert self._connect is not None, "a fleet of given engines stays as it is"
        live = {(entry.index, entry.incarnation): entry for entry in entries}
        for key, entry in live.items():
            if key not in self._clients:
                self._clients[key] = self._connect(entry.url, entry.index)
        gone = [self._clients.pop(key) for key in list(self._clients) if key not in live]
        seated = {place.engine: place for place in self._places}
        current = [self._clients[key] for key in sorted(live) if live[key].current]
        self._places = [seated.pop(engine) if engine in seated else _Place(engine) for engine in current]
        for place, entry in zip(self._places, (live[key] for key in sorted(live) if live[key].current), strict=True):
            place.version = entry.version
        for left in seated.values():
            left.leave()
        if self._places:
            arrived, self._arrived = self._arrived, trio.Event()
            arrived.set()
        return gone

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """A seat for one episode."""
        seat = Seat(self)
        try:
            yield seat
        finally:
            seat.leave()

    def sit(self) -> _Place | None:
        """The best place there is, with one episode more."""
        if not self._places:
            return None
        now, count = trio.current_time(), len(self._places)
        best = min(range(count), key=lambda at: (self._places[at].suspect_until > now, self._places[at].episodes, (at - self._first) % count))
        self._places[best].episodes += 1
        return self._places[best]

    async def arrival(self) -> None:
        """Wait until there is an engine again."""
        await self._arrived.wait()


@dataclass(slots=True, eq=False)
class _Place:
    """An engine with this worker's episodes."""

    engine: EngineClient
    version: int | None = None  # of its weights, as far as the learner knows
    episodes: int = 0
    suspect_until: float = float("-inf")
    gone: bool = False
    asked: set[trio.CancelScope] = field(default_factory=set)  # requests in flight

    def leave(self) -> None:
        self.gone = True
        for scope in self.asked:
            scope.cancel()


class Seat:
    """One episode's place at an engine."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._place: _Place | None = None
        self._counted = False  # among the episodes of its place
        self._sit()

    @property
    def engine(self) -> EngineClient:
        """The engine it is at, or was at last.

        Raises:
            EngineUnavailable: there has been none yet.
        """
        if self._place is None:
            raise EngineUnavailable("no engine has the newest weights yet")
        return self._place.engine

    @property
    def version(self) -> int | None:
        """Of that engine's weights, as the roster has it."""
        return None if self._place is None else self._place.version

    @property
    def stands(self) -> bool:
        """Whether its engine is one of the fleet's."""
        return self._place is not None and not self._place.gone

    async def settle(self, deadline_s: float) -> EngineClient:
        """The engine to ask now: the same as before while it is one of the fleet's. Waits while there is none.

        Raises:
            EngineUnavailable: there was none for `deadline_s`.
        """
        if not self.stands:
            with trio.move_on_after(max(0.0, deadline_s)):
                while not self._sit():
                    await self._fleet.arrival()
        if not self.stands:
            raise EngineUnavailable(f"no engine had the newest weights for {deadline_s:.1f} s")
        return self.engine

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While a request is under way: it is given up when the engine leaves the fleet.

        Raises:
            EngineUnavailable: it left.
        """
        place = self._place
        assert place is not None, "settle() comes first"
        with trio.CancelScope() as scope:
            place.asked.add(scope)
            try:
                yield
            finally:
                place.asked.discard(scope)
        if scope.cancelled_caught:
            raise EngineUnavailable(f"{place.engine} died or is fenced")

    def move(self) -> None:
        """The engine failed: go to another, where there is one."""
        if self._place is not None:
            self._place.suspect_until = trio.current_time() + SUSPECT_S
        self._sit()

    def leave(self) -> None:
        """Give the place up."""
        if self._place is not None and self._counted:
            self._place.episodes -= 1
        self._counted = False

    def _sit(self) -> bool:
        self.leave()
        found = self._fleet.sit()
        if found is not None:
            self._place, self._counted = found, True
        return found is not None
