"""The engines as one worker sees them: which of them an episode sits at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio

from agentrl.engine_api import EngineClient
from agentrl.errors import ConfigError

__all__ = ["Fleet", "Seat"]

SUSPECT_S = 5.0  # how long an engine that failed is avoided, where there is another


class Fleet:
    """Gives every new episode a seat at the engine with the fewest of this worker's episodes.

    An episode stays with its engine, which holds its prefix in its cache, until that engine fails.

    Args:
        first: engine that wins ties, so that workers do not all begin with the same one.
    """

    def __init__(self, engines: Sequence[EngineClient], *, first: int = 0) -> None:
        if not engines:
            raise ConfigError("a rollout worker needs at least one engine")
        self._engines = list(engines)
        self._first = first % len(engines)
        self._episodes = [0] * len(engines)
        self._suspect_until = [float("-inf")] * len(engines)

    @property
    def episodes(self) -> tuple[int, ...]:
        """Seats taken, per engine."""
        return tuple(self._episodes)

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """A seat for one episode."""
        seat = Seat(self, self._sit())
        try:
            yield seat
        finally:
            self._episodes[seat.place] -= 1

    def engine(self, place: int) -> EngineClient:
        """The engine at `place`."""
        return self._engines[place]

    def move(self, place: int) -> int:
        """Leave the engine at `place`, which failed, for the best other one; the same where there is no other."""
        self._suspect_until[place] = trio.current_time() + SUSPECT_S
        self._episodes[place] -= 1
        return self._sit()

    def _sit(self) -> int:
        now = trio.current_time()
        count = len(self._engines)
        place = min(range(count), key=lambda at: (self._suspect_until[at] > now, self._episodes[at], (at - self._first) % count))
        self._episodes[place] += 1
        return place


class Seat:
    """One episode's place at an engine."""

    def __init__(self, fleet: Fleet, place: int) -> None:
        self._fleet = fleet
        self.place = place

    @property
    def engine(self) -> EngineClient:
        """The engine to ask."""
        return self._fleet.engine(self.place)

    def move(self) -> None:
        """The engine failed: go to another, where there is one."""
        self.place = self._fleet.move(self.place)
