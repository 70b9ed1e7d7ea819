"""The local launcher: plain subprocesses of this machine. For tests, debugging, and machines without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import trio

from agentrl.errors import Failure, ProcessDied
from agentrl.ports import free_port
from agentrl.system.address import LOOPBACK
from agentrl.system.child import READY_FD
from agentrl.system.gpus import GPUs, visible_gpus
from agentrl.system.process import Exit, ProcessSpec

__all__ = ["LocalLauncher", "LocalProcess"]

LAST_WORDS_S = 2.0  # what a process said is in the pipe when it has ended


class LocalLauncher:
    """Starts `python -m agentrl.system.child` per process. Use it from the main thread: children die with the thread that started them."""

    def __init__(self, *, python_path: str = "") -> None:
        self._environment = os.environ | ({"PYTHONPATH": python_path} if python_path else {})
        self._started: list[LocalProcess] = []
        self._gpus: GPUs | None = None  # looked for when first asked for

    async def __aenter__(self) -> LocalLauncher:
        return self

    async def __aexit__(self, *exc: object) -> None:
        with trio.CancelScope(shield=True):
            for process in self._started:
                process.kill()
            for process in self._started:
                await process.wait()

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        """Start a child; its output goes to `spec.log`."""
        receive, send = os.pipe()
        popen = subprocess.Popen(  # noqa: ASYNC220  from this very thread: the child dies with the thread that started it
            [sys.executable, "-m", "agentrl.system.child"],
            stdin=subprocess.PIPE,
            pass_fds=(send,),
            env=self._environment | self._gpus_of(spec) | spec.environment | {READY_FD: str(send)},
            start_new_session=True,  # Ctrl-C in the terminal is for the driver alone
        )
        os.close(send)
        assert popen.stdin is not None
        with popen.stdin:
            popen.stdin.write(json.dumps({"spec": spec.to_json(), "parent": os.getpid()}).encode() + b"\n")
        process = LocalProcess(spec=spec, popen=popen, messages=_Lines(trio.lowlevel.FdStream(receive)))
        self._started.append(process)
        return process

    def _gpus_of(self, spec: ProcessSpec) -> dict[str, str]:
        if not spec.gpus:
            return {}
        self._gpus = self._gpus or GPUs(visible_gpus())
        taken = self._gpus.take(spec.pair, 1.0) if spec.pair else self._gpus.take(spec.name, spec.gpus)
        return {"CUDA_VISIBLE_DEVICES": ",".join(taken)}

    async def rendezvous(self, name: str) -> str:
        """Where the group of processes meets whose first is `name`: `host:port`, at that process's machine."""
        return f"{LOOPBACK}:{free_port()}"


@dataclass
class LocalProcess:
    """A child process."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    messages: _Lines
    failure: Failure | None = None
    _end: trio.Lock = field(default_factory=trio.Lock)

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self.popen.pid

    async def ready(self) -> dict[str, Any]:
        """What the child says when it can be used."""
        message = await self.messages.next()
        if message is not None and "ready" in message:
            ready: dict[str, Any] = message["ready"]
            return ready
        self._note(message)
        end = await self.wait()
        raise end.refusal() or ProcessDied(f"{self.spec.name} (pid {self.pid}) ended before it was ready: {end}. Log: {self.spec.log}")

    async def wait(self) -> Exit:
        """Wait for the child's end."""
        async with self._end:
            if self.popen.returncode is None:
                descriptor = os.pidfd_open(self.popen.pid)
                try:
                    await trio.lowlevel.wait_readable(descriptor)
                finally:
                    os.close(descriptor)
                self._kill_group()  # what its tools have started and left behind
                self.popen.wait()
            with trio.move_on_after(LAST_WORDS_S):
                while (message := await self.messages.next()) is not None:
                    self._note(message)
        return Exit(code=self.popen.returncode, failure=self.failure)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`."""
        if self.popen.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.popen.pid, signal.SIGTERM)
            with trio.move_on_after(grace_s):
                await self.wait()
        self.kill()

    def kill(self) -> None:
        """SIGKILL to it and to what it has started."""
        if self.popen.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        """Its pid is its own until `popen.wait`: no other group can be meant."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def _note(self, message: dict[str, Any] | None) -> None:
        if message is not None and "failure" in message:
            self.failure = Failure(**message["failure"])


class _Lines:
    """JSON lines from a pipe; None at its end."""

    def __init__(self, stream: trio.lowlevel.FdStream) -> None:
        self._stream, self._buffer = stream, b""

    async def next(self) -> dict[str, Any] | None:
        while b"\n" not in self._buffer:
            try:
                chunk = await self._stream.receive_some()
            except trio.ClosedResourceError:
                return None
            if not chunk:
                await self._stream.aclose()
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
