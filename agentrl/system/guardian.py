"""Runs a command and sees to it that nothing of it outlives its parent: `python -P agentrl/system/guardian.py COMMAND ...`.

Servers such as SGLang are trees of processes, some of them in sessions of their own; whoever started one may be killed at any moment. The
guardian is the command's parent and, on Linux, the parent of all its orphans. It ends the whole tree when it is asked to (`let_go`, or SIGTERM),
when the command ends by itself, and at once, without a grace, when its standard input closes unasked: its own parent was killed, and whoever
replaces it may need the GPU. It exits as the command did. It is run as a file and imports nothing of ours: the command's environment is its own,
and ours need not be in it.

Who guards the guardian: a second process, started before and nobody's child, that waits for the guardian's end and kills whatever of the tree is left
then, known by a mark in its environment. Ray kills the children of an actor that dies, the guardian among them, and not their children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys

import psutil

__all__ = ["GRACE_S", "guarded", "let_go", "main"]

GRACE_S = 8.0  # after SIGTERM: SGLang's schedulers follow their launcher within 3 s
_GENTLY = b"g"  # on its standard input: end the tree, with a grace
_PR_SET_CHILD_SUBREAPER = 36
_MARK = "AGENTRL_GUARDED"  # in the environment of the command and of all that it starts


def guarded(command: list[str]) -> list[str]:
    """The command line that runs `command` under a guardian. Start it with a pipe as standard input, in a session of its own."""
    return [sys.executable, "-P", __file__, *command]


def let_go(guardian: subprocess.Popen[bytes]) -> None:
    """Ask a guardian to end its tree gently. Harmless where it was asked before, or has ended."""
    asks, guardian.stdin = guardian.stdin, None
    if asks is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(asks.fileno(), _GENTLY)
        asks.close()


def main() -> int:
    """Run the command of `sys.argv` to its end, or until nobody wants it any more."""
    os.environ[_MARK] = secrets.token_hex(16)
    os.environ["SPT_NOENV"] = "1"  # setproctitle, which SGLang's processes use, then leaves the mark where it can be read
    beside = _stand_by()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended, told = os.pipe()
    for number in (signal.SIGTERM, signal.SIGCHLD):  # either makes the pipe readable; what has happened is then looked at
        signal.signal(number, lambda *_: None)
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    gently = True
    while command.poll() is None:
        readable, _, _ = select.select([0, ended], [], [])
        if 0 in readable:
            gently = os.read(0, 1) == _GENTLY
            break
        if signal.SIGTERM in os.read(ended, 4096):
            break
    _end(command, gently=gently)
    os.close(beside)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def _end(command: subprocess.Popen[bytes], *, gently: bool) -> None:
    """SIGKILL to whatever of the tree is there; gently, after SIGTERM to the command and GRACE_S, or once the command has gone."""
    if gently and command.poll() is None:
        command.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(GRACE_S)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.wait()  # before the orphans are reaped, and with them whatever else has ended: its code would be lost
        psutil.wait_procs(left, timeout=1.0)
    command.wait()


def _stand_by() -> int:
    """Start the second process. Returns the pipe's end by whose closing it sees this one's end."""
    sees, told = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            os.setsid()
            os.close(told)
            os.close(0)
            os.read(sees, 1)
            _end_marked(os.environ[_MARK])
        os._exit(0)
    os.waitpid(between, 0)
    os.close(sees)
    return told


def _end_marked(mark: str) -> None:
    """SIGKILL to every process of the tree, until there is none."""
    while left := [process for process in psutil.process_iter() if process.pid != os.getpid() and _has(process, mark)]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark
    except psutil.Error:  # it is gone, a zombie, or another user's
        return False


if __name__ == "__main__":
    sys.exit(main())
