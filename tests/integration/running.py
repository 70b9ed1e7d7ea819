"""Starting the real command as a user does, and reading what a run left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from agentrl.buffer import journal
from agentrl.buffer.records import BatchTaken, BatchTrained, Record, Rollback, TrajectoryAdded
from agentrl.system.status import status
from agentrl.types import Purpose

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).parent / "recipes" / "tiny.yaml"
START_DEADLINE_S = 120.0


# What the preparing stage makes is the same for most runs of the tests: made once per session.
_CACHE = tempfile.TemporaryDirectory(prefix="agentrl-tests-")

# Half the quick start's warm start, made once for all tests that learn: held-out exact match is then about .2 instead of .4.
SHORT_WARM_START = ("prepare.options.warm_start_steps=600", "warm_start.steps=600", "prepare.options.heldout_tasks=200")


def start(run_dir: Path, *overrides: str, recipe: Path = TINY, flags: Sequence[str] = (), own_cache: bool = False) -> subprocess.Popen[str]:
    """`agentrl run` in the background, its lines in `run_dir.log`."""
    if not own_cache:
        share_cache(run_dir.parent)
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", "run", str(recipe), f"run.dir={run_dir.parent}", f"name={run_dir.name}"]
    with open(run_dir.with_suffix(".log"), "a", encoding="utf-8") as log:
        return subprocess.Popen(
            [*command, *flags, *overrides], stdout=log, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def share_cache(runs_dir: Path) -> None:
    """Let runs in this directory find what other tests have made."""
    cache = runs_dir / ".cache"
    if not cache.exists():
        cache.symlink_to(_CACHE.name)


def finish(process: subprocess.Popen[str], run_dir: Path, *, deadline_s: float = 150.0) -> int:
    """Wait for its end; its exit code."""
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise AssertionError(f"the run did not end within {deadline_s} s:\n{output(run_dir)}") from None


def output(run_dir: Path) -> str:
    """What it said."""
    return run_dir.with_suffix(".log").read_text(encoding="utf-8")


def records(run_dir: Path) -> Iterator[Record]:
    """The journal."""
    return (record for _, record in journal.read(run_dir / "journal"))


def wait_for(run_dir: Path, kind: type[Record], count: int, process: subprocess.Popen[str], *, within_s: float = START_DEADLINE_S) -> None:
    """Until the journal holds `count` records of a kind."""
    deadline = time.monotonic() + within_s
    while not (run_dir / "journal").exists() or sum(isinstance(record, kind) for record in records(run_dir)) < count:
        assert process.poll() is None, f"the run ended early:\n{output(run_dir)}"
        assert time.monotonic() < deadline, f"no {count} {kind.__name__} within {within_s} s:\n{output(run_dir)}"
        time.sleep(0.1)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes a run has started."""
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: Sequence[psutil.Process], *, within_s: float = 10.0) -> bool:
    """Whether all of them have ended."""
    return not psutil.wait_procs(processes, timeout=within_s)[1]


def surviving_uses(run_dir: Path) -> Counter[int]:
    """How often each group is in a batch of the surviving history: folded here again, from the records alone."""
    taken: dict[int, BatchTaken] = {}
    trained: dict[int, int] = {}  # batch -> step
    for record in records(run_dir):
        if isinstance(record, BatchTaken):
            taken[record.batch] = record
        elif isinstance(record, BatchTrained):
            trained[record.batch] = record.step
        elif isinstance(record, Rollback):
            kept = {batch for first, last in record.consumed for batch in range(first, last + 1)}
            taken = {batch: one for batch, one in taken.items() if batch in kept}
            trained = {batch: step for batch, step in trained.items() if batch in kept}
    assert sorted(trained.values()) == list(range(1, len(trained) + 1)), "surviving steps have a gap or a double"
    return Counter(ordinal for one in taken.values() for ordinal, _, _ in one.groups)


def assert_books_balance(run_dir: Path, *, steps: int) -> None:
    """A finished run of the tiny recipe has trained on every group once, and every sample is in one account."""
    told = status(run_dir)
    assert (told["phase"], told["step"]) == ("finished", steps)
    ledger = told["ledger"]
    accounts = sum(ledger[name] for name in ("not_issued", "in_flight", "buffered", "training", "trained")) + sum(ledger["dropped_by_cause"].values())
    assert ledger["wanted"] == accounts
    assert ledger["trained"] == steps * 6 * 4
    assert set(surviving_uses(run_dir).values()) == {1}
    names = [record.ticket.name for record in records(run_dir) if isinstance(record, TrajectoryAdded) and record.ticket.purpose is Purpose.TRAIN]
    assert len(names) == len(set(names))
