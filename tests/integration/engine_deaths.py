"""What a run's journal says of its engines, for tests in which some of them die."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import psutil
from running import output, records

from agentrl.buffer.records import BatchTrained, IncarnationBegun, TrajectoryAdded, VersionPublished
from agentrl.system.status import status
from agentrl.types import Turn
from agentrl.wire import decode_trajectory

GOES_ON_WITHIN_S = 30.0
COMES_BACK_WITHIN_S = 120.0


def urls_of_engines(run_dir: Path) -> dict[int, list[str]]:
    """By engine, oldest incarnation first."""
    found: dict[int, list[str]] = {}
    for record in records(run_dir):
        if isinstance(record, IncarnationBegun) and record.role == "engine" and record.url:
            found.setdefault(record.index, []).append(record.url)
    return found


def published(run_dir: Path) -> list[tuple[int, ...]]:
    """The engines that each version reached, oldest first."""
    return [record.engines for record in records(run_dir) if isinstance(record, VersionPublished)]


def turns(run_dir: Path) -> list[tuple[Turn, Sequence[int]]]:
    """All turns, with the versions of their tokens."""
    found = []
    for record in records(run_dir):
        if isinstance(record, TrajectoryAdded):
            trajectory = decode_trajectory(record.data)
            found += [(turn, trajectory.versions[slice(*turn.completion)].tolist()) for turn in trajectory.turns]
    return found


def longest_pause_s(run_dir: Path) -> float:
    """Between two steps."""
    ended = [record.t for record in records(run_dir) if isinstance(record, BatchTrained)]
    return max(later - earlier for earlier, later in pairwise(ended))


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str], run_dir: Path, *, within_s: float = COMES_BACK_WITHIN_S) -> None:
    """Until something is true of a run that goes on."""
    deadline = time.monotonic() + within_s
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()  # its children end with it
            raise AssertionError(f"not within {within_s} s, or the run ended early:\n{output(run_dir)}")
        time.sleep(0.1)


def returned(run_dir: Path) -> bool:
    """Whether an engine was missing in a version and the newest one reached both."""
    reached = published(run_dir)
    return reached[-1:] == [(0, 1)] and any(engines != (0, 1) for engines in reached)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def the_engine(index: int, processes: Sequence[psutil.Process], run_dir: Path) -> psutil.Process:
    """The process that writes `logs/engine-<index>.log`."""
    log = run_dir / "logs" / f"engine-{index}.log"
    return next(p for p in processes if p.is_running() and Path(f"/proc/{p.pid}/fd/1").resolve() == log)


def assert_nothing_lost(run_dir: Path) -> None:
    """A stopped run's ledger balances, and no sample was dropped: turns of dead engines went on elsewhere, or waited."""
    told = status(run_dir)
    assert told["phase"] == "stopping"
    ledger = told["ledger"]
    accounts = sum(ledger[name] for name in ("not_issued", "in_flight", "buffered", "training", "trained")) + sum(ledger["dropped_by_cause"].values())
    assert ledger["wanted"] == accounts
    assert ledger["dropped_by_cause"] == {}


def assert_fenced_until_current(run_dir: Path, *, dead: int) -> None:
    """The restarted engine has served, and nothing older than what was out when it came back: its own model is that of version 0."""
    first, again = urls_of_engines(run_dir)[dead]
    missed = published(run_dir).index((1 - dead,))
    served = [versions for turn, versions in turns(run_dir) if turn.engine == again]
    assert served
    assert min(min(versions) for versions in served) >= missed
    assert any(turn.engine == first for turn, _ in turns(run_dir))
