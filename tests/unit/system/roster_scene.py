"""A buffer's roster in-process, with what was said of engines written down."""

from __future__ import annotations

import trio

from agentrl.buffer.engines import Engines
from agentrl.buffer_api import EngineRoster


class Roster:
    """What driver, learner and workers see of a `BufferClient` where engines are concerned."""

    def __init__(self) -> None:
        self.engine_list = Engines()
        self.said: list[tuple] = []
        self._changed = trio.Event()

    def incarnation(self, index: int) -> int:
        return next(entry.incarnation for entry in self.engine_list.roster.engines if entry.index == index)

    @property
    def current(self) -> dict[int, int | None]:
        """Versions of current engines, by index."""
        return {entry.index: entry.version for entry in self.engine_list.roster.engines if entry.current}

    def live(self, *indexes: int, incarnation: int = 1) -> None:
        for index in indexes:
            self.engine_list.live(index, incarnation, f"http://engine-{index}")
        self._wake()

    def die(self, index: int) -> None:
        self.engine_list.dead(index, self.incarnation(index))
        self._wake()

    async def register(self, *, role: str, index: int, incarnation: int, url: str = "") -> None:
        self.said.append(("register", f"{role}-{index}", incarnation, url))
        if role == "engine" and url:
            self.engine_list.live(index, incarnation, url)
            self._wake()

    async def engine_died(self, index: int, incarnation: int) -> None:
        self.said.append(("died", index, incarnation))
        self.engine_list.dead(index, incarnation)
        self._wake()

    async def engine_current(self, index: int, incarnation: int, version: int) -> bool:
        self.said.append(("current", index, version))
        told = self.engine_list.current(index, incarnation, version)
        self._wake()
        return told

    async def engine_fenced(self, index: int, incarnation: int, reason: str, *, give_up: bool = False) -> bool:
        self.said.append(("given up" if give_up else "fenced", index, reason))
        told = self.engine_list.fenced(index, incarnation, reason, give_up=give_up)
        self._wake()
        return told

    async def engines(self, *, after: int, wait_s: float) -> EngineRoster:
        with trio.move_on_after(wait_s):
            while self.engine_list.roster.revision == after:
                await self._changed.wait()
        return self.engine_list.roster

    async def version_published(self, *, version: int, engines: list[int], seconds: float, bytes: int) -> None:
        self.said.append(("published", version, sorted(engines)))

    async def status(self) -> dict:
        return {"heartbeats": {}, "engines": self.engine_list.roster.to_plain()["engines"]}

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
