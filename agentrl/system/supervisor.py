"""Starts the processes of a run, watches them, restarts workers, and turns any other death into one clear cause.

A worker that dies has its tickets closed as `lost` and comes back with a new incarnation. Every other role ends the run: the journal and
the last checkpoint let the same command go on. A process that lives but does not answer (frozen, deadlocked) is killed, and then counts
as dead: neither Ray nor the kernel notices it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import psutil
import trio

from agentrl.buffer_api import BufferClient
from agentrl.errors import Failure, ProcessDied
from agentrl.system.process import Exit, Launcher, Process, ProcessSpec, Role
from retriever.transport import trio_client

__all__ = ["Supervisor"]

log = logging.getLogger(__name__)

SILENT_AFTER_S = 60.0  # longer than any pause of a healthy process: a learner step runs beside its heartbeats
PROBE_EVERY_S = 5.0
READY_DEADLINE_S = 600.0  # a large model may take minutes to load
STOP_GRACE_S = 10.0
RESTARTS_PER_WINDOW = 5
RESTART_WINDOW_S = 120.0
BACKOFF_S = (0.2, 1.0, 3.0, 8.0)

_SERVERS = frozenset({Role.RETRIEVER, Role.ENGINE, Role.BUFFER})


@dataclass
class _Watched:
    process: Process
    url: str | None = None
    started: float = field(default_factory=time.monotonic)
    last_answer: float = field(default_factory=time.monotonic)
    silent: bool = False


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
        self._restarts: deque[float] = deque()
        self._ending = False
        self.buffer: BufferClient | None = None  # once it is up: incarnations are registered there before a process works

    def next_incarnation(self) -> int:
        """A number larger than any before."""
        return next(self._incarnations)

    async def start(self, spec: ProcessSpec) -> dict[str, Any]:
        """Register, start, wait until ready, watch. Returns what the process said."""
        if self.buffer is not None:
            await self.buffer.register(role=spec.role, index=spec.index, incarnation=spec.incarnation)
        process = await self._launcher.start(spec)
        with trio.move_on_after(READY_DEADLINE_S) as deadline:
            info = await process.ready()
        if deadline.cancelled_caught:
            process.kill()
            raise ProcessDied(f"{spec.name} was not ready within {READY_DEADLINE_S:.0f} s. Log: {spec.log}")
        self._watched[spec.name] = _Watched(process=process, url=info.get("url"))
        self._nursery.start_soon(self._watch, process)
        return info

    async def probe(self) -> None:
        """Find processes that live but do not answer.

        consumes      health answers of servers; heartbeats of workers and learner ranks, as the buffer keeps them
        produces      SIGKILL to a process silent for SILENT_AFTER_S
        waits for     its own interval
        unblocked by  cancellation at the end of the run
        """
        async with trio_client() as http:
            while True:
                await trio.sleep(PROBE_EVERY_S)
                await self._hear_servers(http)
                await self._hear_clients()
                for name, watched in list(self._watched.items()):
                    if time.monotonic() - watched.last_answer > SILENT_AFTER_S and not watched.silent:
                        log.error("%s has not answered for %.0f s: killing it", name, SILENT_AFTER_S)
                        watched.silent = True
                        watched.process.kill()

    async def stop(self, *roles: Role) -> None:
        """End the processes of these roles (all by default), gently, then not."""
        self._ending = True
        chosen = [w.process for w in self._watched.values() if not roles or w.process.spec.role in roles]
        async with trio.open_nursery() as nursery:
            for process in chosen:
                nursery.start_soon(process.stop, STOP_GRACE_S)

    async def join(self, *roles: Role) -> None:
        """Wait until the processes of these roles have ended by themselves."""
        for watched in [w for w in self._watched.values() if w.process.spec.role in roles]:
            await watched.process.wait()

    def memory_mb(self) -> dict[str, float]:
        """Resident memory by process, of those on this machine."""
        found: dict[str, float] = {}
        for name, watched in self._watched.items():
            try:
                found[name] = psutil.Process(watched.process.pid).memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue  # on another machine, or just gone
        return found

    async def _watch(self, process: Process) -> None:
        """Wait for one process's end and act on it."""
        end = await process.wait()
        spec = process.spec
        if self._ending:
            return
        if spec.role is Role.WORKER and not end.clean:
            await self._restart(spec, end)
        elif not end.clean or spec.role in _SERVERS:
            raise end.refusal() or ProcessDied(self._obituary(spec, process, end))

    async def _restart(self, spec: ProcessSpec, end: Exit) -> None:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= RESTARTS_PER_WINDOW:
            raise ProcessDied(f"rollout workers died {RESTARTS_PER_WINDOW + 1} times within {RESTART_WINDOW_S:.0f} s, the last: {spec.name}: {end}")
        self._restarts.append(now)
        log.warning("%s died (%s): its tickets are lost and issued anew; restarting it", spec.name, end)
        await trio.sleep(BACKOFF_S[min(len(self._restarts), len(BACKOFF_S)) - 1])
        try:
            await self.start(replace(spec, incarnation=self.next_incarnation()))
        except ProcessDied as error:  # before it was ready: one more death, counted like any other
            await self._restart(spec, Exit(failure=Failure.of(error)))

    def _obituary(self, spec: ProcessSpec, process: Process, end: Exit) -> str:
        silent = f" after it had not answered for {SILENT_AFTER_S:.0f} s" if self._watched[spec.name].silent else ""
        return f"{spec.name} (pid {process.pid}) died{silent}: {end}. Last lines: {spec.log}. Go on with the same command"

    async def _hear_servers(self, http: httpx.AsyncClient) -> None:
        async def ask(watched: _Watched) -> None:
            with trio.move_on_after(PROBE_EVERY_S):
                try:
                    await http.get(f"{watched.url}/health")
                    watched.last_answer = time.monotonic()
                except httpx.TransportError as error:
                    log.debug("%s: %r", watched.process.spec.name, error)

        await _all(ask, [w for w in self._watched.values() if w.url is not None])

    async def _hear_clients(self) -> None:
        if self.buffer is None:
            return
        heartbeats = (await self.buffer.status())["heartbeats"]
        for name, watched in self._watched.items():
            if watched.url is None and name in heartbeats:
                watched.last_answer = max(watched.last_answer, time.monotonic() - heartbeats[name]["age_s"])


async def _all(act: Callable[[_Watched], Awaitable[None]], watched: list[_Watched]) -> None:
    async with trio.open_nursery() as nursery:
        for one in watched:
            nursery.start_soon(act, one)
