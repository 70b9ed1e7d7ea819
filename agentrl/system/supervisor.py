"""Starts the processes of a run, watches them, restarts workers and engines, and turns any other death into one clear cause.

A worker that dies has its tickets closed as `lost` and comes back with a new incarnation. An engine that dies leaves the roster, so that its
turns move to others, and comes back fenced. Every other role ends the run: the journal and the last checkpoint let the same command go on. A
process that lives but does not answer (frozen, deadlocked) is killed, and then counts as dead: neither Ray nor the kernel notices it. So is an
engine that the learner has given up. Servers that the run is attached to are asked, and never killed.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import psutil
import trio

from agentrl.buffer_api import BufferClient, EngineEntry
from agentrl.errors import Failure, ProcessDied
from agentrl.system.attached import AttachedEngines
from agentrl.system.process import Exit, Launcher, Process, ProcessSpec, Role
from retriever.transport import trio_client

__all__ = ["Supervisor"]

log = logging.getLogger(__name__)

SILENT_AFTER_S = 60.0  # longer than any pause of a healthy process: a learner step runs beside its heartbeats
PROBE_EVERY_S = 5.0
STOP_GRACE_S = 10.0
RESTARTS_PER_WINDOW = 5  # of all processes of a role
# An engine takes minutes to load a large model: one that dies whenever it has loaded it must run out of restarts, too.
RESTART_WINDOW_S = {Role.WORKER: 120.0, Role.ENGINE: 1800.0}
BACKOFF_S = (0.2, 1.0, 3.0, 8.0)
# An SGLang server takes the GPU memory that is free when it starts: its guardian kills its predecessor at once, and the driver takes seconds over it.
SGLANG_LEAVES_S = 5.0

_SERVERS = frozenset({Role.RETRIEVER, Role.ENGINE, Role.BUFFER})
_PLURAL = {Role.WORKER: "rollout workers", Role.ENGINE: "engines"}
_FOLLOWS = {
    Role.WORKER: "its tickets are lost and issued anew",
    Role.ENGINE: "its turns go on at the others, or wait; it is fenced until it has the newest weights",
}


@dataclass
class _Watched:
    process: Process
    url: str | None = None
    ready: bool = False  # and not dead
    last_answer: float = field(default_factory=trio.current_time)
    killed_for: str = ""  # why this supervisor killed it


class Supervisor:
    """All processes of a run.

    Args:
        nursery: watchers live here; a death that ends the run leaves it as `ProcessDied`.
        first_incarnation: larger than any incarnation of an earlier start of this run.
    """

    def __init__(self, launcher: Launcher, nursery: trio.Nursery, *, first_incarnation: int) -> None:
        self._launcher, self._nursery = launcher, nursery
        self._incarnations = itertools.count(first_incarnation)
        self._watched: dict[str, _Watched] = {}
        self._restarts: dict[Role, deque[float]] = {role: deque() for role in RESTART_WINDOW_S}
        self._ending = False
        self.deaths: Counter[Role] = Counter()  # that were followed by a restart, and of attached engines those that stopped answering
        self.buffer: BufferClient | None = None  # once it is up: incarnations are registered there before a process works
        self.attached: AttachedEngines | None = None  # engines that this run uses and did not start

    def next_incarnation(self) -> int:
        """A number larger than any before."""
        return next(self._incarnations)

    async def rendezvous(self, name: str) -> str:
        """Where the group of processes meets whose first is `name`: `host:port`, at that process's machine."""
        return await self._launcher.rendezvous(name)

    async def start(self, spec: ProcessSpec) -> dict[str, Any]:
        """Register, start, wait until ready, watch. An engine is then on the roster. Returns what the process said."""
        await self._register(spec)
        process = await self._launcher.start(spec)
        watched = self._watched[spec.name] = _Watched(process=process)
        try:
            with trio.move_on_after(spec.ready_deadline_s) as deadline:
                info = await process.ready()
            if deadline.cancelled_caught:
                raise ProcessDied(f"{spec.name} was not ready within {spec.ready_deadline_s:.0f} s. Log: {spec.log}")
            if spec.role is Role.ENGINE:
                await self._register(spec, info["url"])
            watched.url, watched.ready, watched.last_answer = info.get("url"), True, trio.current_time()
        finally:
            if not watched.ready:
                process.kill()  # an actor outlives its program: what it has booked is its successor's
        self._nursery.start_soon(self._watch, watched)
        return info

    async def probe(self) -> None:
        """Find processes that live but do not work.

        consumes      health answers of servers; heartbeats of workers and learner ranks, and the roster of engines, as the buffer keeps them
        produces      SIGKILL to a process silent for SILENT_AFTER_S and to an engine the learner gave up; attached engines on and off the roster
        waits for     its own interval
        unblocked by  cancellation at the end of the run
        """
        async with trio_client() as http:
            while True:
                await trio.sleep(PROBE_EVERY_S)
                await self._hear_servers(http)
                if self.buffer is not None:
                    status = await self.buffer.status()
                    self._hear_clients(status["heartbeats"])
                    await self._heed([EngineEntry(**engine) for engine in status["engines"]])
                for watched in list(self._watched.values()):
                    if watched.ready and trio.current_time() - watched.last_answer > SILENT_AFTER_S:
                        self._kill(watched, f"it had not answered for {SILENT_AFTER_S:.0f} s")

    async def stop(self, *roles: Role) -> None:
        """End the processes of these roles (all by default), gently, then not."""
        self._ending = True
        chosen = [w.process for w in self._watched.values() if not roles or w.process.spec.role in roles]
        async with trio.open_nursery() as nursery:
            for process in chosen:
                nursery.start_soon(process.stop, STOP_GRACE_S)
        if self.attached is not None:
            await self.attached.aclose()

    async def join(self, *roles: Role) -> None:
        """Wait until the processes of these roles have ended by themselves."""
        for watched in [w for w in self._watched.values() if w.process.spec.role in roles]:
            await watched.process.wait()

    def memory_mb(self) -> dict[str, float]:
        """Resident memory by process, of those on this machine. An engine's is that of all its processes."""
        found: dict[str, float] = {}
        for name, watched in self._watched.items():
            if not watched.ready:
                continue
            try:
                process = psutil.Process(watched.process.pid)
                tree = [process, *process.children(recursive=True)] if watched.process.spec.role is Role.ENGINE else [process]
                found[name] = sum(one.memory_info().rss for one in tree) / 2**20
            except psutil.NoSuchProcess:
                continue  # on another machine, or just gone
        return found

    async def _register(self, spec: ProcessSpec, url: str = "") -> None:
        if self.buffer is not None:
            await self.buffer.register(role=spec.role, index=spec.index, incarnation=spec.incarnation, url=url)

    async def _watch(self, watched: _Watched) -> None:
        """Wait for one process's end and act on it."""
        process = watched.process
        end, spec = await process.wait(), process.spec
        watched.ready = False
        if self._ending:
            return
        if spec.role is Role.ENGINE or (spec.role is Role.WORKER and not end.clean):
            process.kill()  # an actor outlives its program, and what it has booked with it
            if spec.role is Role.ENGINE and self.buffer is not None:
                await self.buffer.engine_died(spec.index, spec.incarnation)
            await self._restart(spec, end, watched.killed_for)
        elif not end.clean or spec.role in _SERVERS:
            raise end.refusal() or ProcessDied(_obituary(watched, end))

    async def _restart(self, spec: ProcessSpec, end: Exit, killed_for: str = "") -> None:
        """Start a successor; and one of that, where it dies before it is ready: one more death, counted like any other."""
        while not self._ending:
            await self._await_turn(spec, f"{end}, because {killed_for}" if killed_for else str(end))
            if self._ending:
                return
            try:
                await self.start(replace(spec, incarnation=self.next_incarnation()))
                return
            except ProcessDied as error:
                end, killed_for = Exit(failure=Failure.of(error)), ""

    async def _await_turn(self, spec: ProcessSpec, why: str) -> None:
        """Count a death, and wait until a successor may start.

        Raises:
            ProcessDied: the restarts of its role are spent.
        """
        role, now = spec.role, trio.current_time()
        self.deaths[role] += 1
        restarts, window_s = self._restarts[role], RESTART_WINDOW_S[role]
        while restarts and now - restarts[0] > window_s:
            restarts.popleft()
        if len(restarts) >= RESTARTS_PER_WINDOW:
            raise ProcessDied(
                f"{_PLURAL[role]} died {RESTARTS_PER_WINDOW + 1} times within {window_s:.0f} s, the last: {spec.name}: {why}. Its log: {spec.log}"
            )
        restarts.append(now)
        log.warning("%s died (%s): %s; restarting it", spec.name, why, _FOLLOWS[role])
        least_s = SGLANG_LEAVES_S if role is Role.ENGINE and spec.recipe.get("engine", {}).get("kind") == "sglang" else 0.0
        await trio.sleep(max(least_s, BACKOFF_S[min(len(restarts), len(BACKOFF_S)) - 1]))

    def _kill(self, watched: _Watched, reason: str) -> None:
        if not watched.killed_for:
            log.error("killing %s: %s", watched.process.spec.name, reason)
            watched.killed_for = reason
            watched.process.kill()

    async def _heed(self, engines: Sequence[EngineEntry]) -> None:
        """Kill engines that the learner has given up, and ask attached ones."""
        for entry in engines:
            watched = self._watched.get(f"{Role.ENGINE}-{entry.index}")
            if entry.given_up and watched is not None and watched.ready and watched.process.spec.incarnation == entry.incarnation:
                self._kill(watched, f"the learner could not bring it to the newest weights: {entry.reason}")
        if self.attached is not None:
            self.deaths[Role.ENGINE] += await self.attached.look(engines)

    async def _hear_servers(self, http: httpx.AsyncClient) -> None:
        async def ask(watched: _Watched) -> None:
            with trio.move_on_after(PROBE_EVERY_S):
                try:
                    if (await http.get(f"{watched.url}/health")).status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                        watched.last_answer = trio.current_time()
                except httpx.TransportError as error:
                    log.debug("%s: %r", watched.process.spec.name, error)

        await _all(ask, [w for w in self._watched.values() if w.ready and w.url is not None])

    def _hear_clients(self, heartbeats: dict[str, Any]) -> None:
        for name, watched in self._watched.items():
            if watched.url is None and name in heartbeats:
                watched.last_answer = max(watched.last_answer, trio.current_time() - heartbeats[name]["age_s"])


def _obituary(watched: _Watched, end: Exit) -> str:
    spec, because = watched.process.spec, f", because {watched.killed_for}" if watched.killed_for else ""
    return f"{spec.name} (pid {watched.process.pid}) died: {end}{because}. Last lines: {spec.log}. Go on with the same command"


async def _all(act: Callable[[_Watched], Awaitable[None]], watched: list[_Watched]) -> None:
    async with trio.open_nursery() as nursery:
        for one in watched:
            nursery.start_soon(act, one)
