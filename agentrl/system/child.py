"""The inside of every process of a run: finds the role's program and runs it. `python -m agentrl.system.child` is the local launcher's child.

The local child reads its spec as one JSON line from standard input, writes one JSON line to the file descriptor AGENTRL_READY_FD when
it is ready and another when it fails. It is killed by the kernel when its parent dies (Linux), so that no driver leaves orphans.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
from typing import Any

from agentrl.errors import ConfigError, Failure
from agentrl.system.process import OnReady, ProcessSpec, StopSignal

__all__ = ["READY_FD", "die_with_parent", "main", "redirect_output", "run_role"]

READY_FD = "AGENTRL_READY_FD"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # opened here: not after a fork


def run_role(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Run the program of `spec.role` to its end."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {spec.name} %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _require_environment(spec)
    program = importlib.import_module(f"agentrl.system.roles.{spec.role}")
    program.main(spec, on_ready, stop)


def _require_environment(spec: ProcessSpec) -> None:
    """A cluster may have passed on other variables than the recipe's."""
    for name, value in spec.environment.items():
        if (found := os.environ.get(name)) != value:
            raise ConfigError(f"resources.environment.{spec.role}.{name} is {value!r}, and in {spec.name} it is {found!r}")


def redirect_output(spec: ProcessSpec) -> None:
    """Send this process's standard output and error to its log file."""
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux only); end at once where it already has.

    The signal follows the parent's *thread* that started this process: the launcher starts processes from its main thread.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    """The local child."""
    hello = json.loads(sys.stdin.readline())
    die_with_parent(hello["parent"])
    spec, stop = ProcessSpec.from_json(hello["spec"]), StopSignal()
    redirect_output(spec)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ready = int(os.environ.pop(READY_FD))
    os.set_inheritable(ready, False)  # a tool's program that outlives this process must not keep the pipe open
    with os.fdopen(ready, "w", buffering=1) as pipe:

        def tell(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message) + "\n")

        try:
            run_role(spec, lambda info: tell({"ready": info | {"pid": os.getpid()}}), stop)
        except Exception as error:  # the blast-radius line of a process: told to the driver, then the process ends
            logging.getLogger("agentrl").exception("%s failed", spec.name)
            failure = Failure.of(error)
            tell({"failure": {"kind": failure.kind, "message": failure.message, "trace": failure.trace}})
            return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Without the interpreter's tear-down: gloo's threads may abort in it (signal 6), and a clean end would look like a death.
    os._exit(code)
