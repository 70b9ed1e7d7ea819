"""Runs a command and sees to it that nothing of it outlives its parent: `python -P agentrl/system/guardian.py COMMAND ...`.

Servers such as SGLang are trees of processes, some of them in sessions of their own; whoever started one may be killed at any moment. The
guardian is the command's parent and, on Linux, the parent of all its orphans. It ends the whole tree when its standard input closes (its own
parent ended, or asks for it), when it is told to end (SIGTERM), and when the command ends by itself. It exits as the command did. It is run as a
file and imports nothing of ours: the command's environment is its own, and ours need not be in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys

import psutil

__all__ = ["GRACE_S", "guarded", "main"]

GRACE_S = 8.0  # after SIGTERM: SGLang's schedulers follow their launcher within 3 s
_PR_SET_CHILD_SUBREAPER = 36


def guarded(command: list[str]) -> list[str]:
    """The command line that runs `command` under a guardian. Start it with a pipe as standard input, in a session of its own."""
    return [sys.executable, "-P", __file__, *command]


def main() -> int:
    """Run the command of `sys.argv` to its end, or until nobody wants it any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended, told = os.pipe()
    for number in (signal.SIGTERM, signal.SIGCHLD):  # either makes the pipe readable; what has happened is then looked at
        signal.signal(number, lambda *_: None)
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while command.poll() is None:
        readable, _, _ = select.select([0, ended], [], [])
        if ended not in readable or signal.SIGTERM in os.read(ended, 4096):
            break
    _end(command)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def _end(command: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the command, and SIGKILL to whatever of its tree is there after GRACE_S, or once the command has gone."""
    if command.poll() is None:
        command.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(GRACE_S)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.poll()  # reaps the command; the rest are orphans, and wait for them reaps them
        psutil.wait_procs(left, timeout=1.0)
    command.wait()


if __name__ == "__main__":
    sys.exit(main())
