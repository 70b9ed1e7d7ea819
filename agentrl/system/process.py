"""What a process of a run is, and the seam between the driver and whatever starts processes (Ray or plain subprocesses).

A role is a program `main(spec, on_ready, stop)` in `system.roles`: it works until its work or `stop` ends it. The same programs run
under both launchers; logic lives in the packages they compose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import trio

from agentrl.errors import AgentRLError, ConfigError, DataError, Failure, HealthError

__all__ = ["Exit", "Launcher", "OnReady", "Process", "ProcessSpec", "Role", "StopSignal"]

OnReady = Callable[[dict[str, Any]], None]


class Role(StrEnum):
    """What a process does."""

    RETRIEVER = "retriever"
    ENGINE = "engine"
    BUFFER = "buffer"
    WORKER = "worker"
    LEARNER = "learner"
    PREPARE = "prepare"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """All that a process is told when it starts. Plain values: it travels as JSON."""

    role: Role
    index: int
    incarnation: int
    run_dir: str
    recipe: dict[str, Any]
    payload: dict[str, Any] = field(default_factory=dict)  # what this role needs besides: URLs, ports, directories
    cpus: float = 0.0
    gpus: float = 0.0
    pair: str = ""  # those of one pair share a GPU
    ready_deadline_s: float = 600.0  # from its start: a large model may take minutes to load
    environment: dict[str, str] = field(default_factory=dict)  # variables of the recipe for this role

    @property
    def name(self) -> str:
        """E.g. `worker-0`: names the log file and every message about the process."""
        return f"{self.role}-{self.index}"

    @property
    def log(self) -> Path:
        """Where its standard output and error go."""
        return Path(self.run_dir) / "logs" / f"{self.name}.log"

    def to_json(self) -> dict[str, Any]:
        """As a plain map."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProcessSpec:
        """The spec of `to_json`."""
        return cls(**(value | {"role": Role(value["role"])}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a process ended. `failure` is the exception that left its program, where it could still tell."""

    code: int | None = None  # negative: killed by that signal
    failure: Failure | None = None

    @property
    def clean(self) -> bool:
        """It ended by itself and without an error."""
        return self.failure is None and self.code in (None, 0)

    def refusal(self) -> AgentRLError | None:
        """The ConfigError, DataError or HealthError it ended by: told as it is, without an obituary."""
        kinds = {"ConfigError": ConfigError, "DataError": DataError, "HealthError": HealthError}
        if self.failure is None or self.failure.kind not in kinds:
            return None
        return kinds[self.failure.kind](self.failure.message)

    def __str__(self) -> str:
        if self.failure is not None:
            return f"{self.failure.kind}: {self.failure.message}"
        if self.code is not None and self.code < 0:
            return f"killed by signal {-self.code}"
        return f"exit code {self.code}"


class Process(Protocol):
    """A started process."""

    @property
    def spec(self) -> ProcessSpec:
        """What it was told."""

    @property
    def pid(self) -> int | None:
        """Its process id, once known."""

    async def ready(self) -> dict[str, Any]:
        """What it says when it can be used, e.g. {"url": ..., "pid": ...}. Raises ProcessDied where it ends before."""

    async def wait(self) -> Exit:
        """Wait for its end."""

    async def stop(self, grace_s: float) -> None:
        """Ask it to end; kill it after `grace_s` seconds."""

    def kill(self) -> None:
        """End it now."""


class Launcher(Protocol):
    """Starts processes. An async context manager: what it started is gone when it closes."""

    async def __aenter__(self) -> Launcher: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def start(self, spec: ProcessSpec) -> Process:
        """Start a process; returns before it is ready."""

    async def rendezvous(self, name: str) -> str:
        """Where the group of processes meets whose first is `name`: `host:port`, at that process's machine."""


class StopSignal:
    """A one-way switch across threads and event loops: subscribers are called once, when it is set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._subscribers: list[Callable[[], object]] = []

    def set(self) -> None:
        """Call all subscribers, present and future."""
        with self._lock:
            if self._set:
                return
            self._set, waiting = True, self._subscribers
        for subscriber in waiting:
            subscriber()

    def cancels(self, scope: trio.CancelScope) -> None:
        """Have `scope` of the trio program that calls this cancelled when the switch is set."""
        token = trio.lowlevel.current_trio_token()

        def cancel() -> None:
            with suppress(trio.RunFinishedError):  # the program has ended by itself
                token.run_sync_soon(scope.cancel)

        self.subscribe(cancel)

    def subscribe(self, callback: Callable[[], object]) -> None:
        """Have `callback` called when the switch is set, at once where it already is."""
        with self._lock:
            if not self._set:
                self._subscribers.append(callback)
                return
        callback()
