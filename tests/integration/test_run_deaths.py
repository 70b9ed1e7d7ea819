"""What a run does when one of its processes is killed: a worker comes back (engines: test_run_engine_deaths.py), others end it with one cause."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from running import family, finish, gone, output, records, start, wait_for

from agentrl.buffer.records import BatchTrained, IncarnationBegun, TicketClosed
from agentrl.system.status import status
from agentrl.types import CloseCause

pytestmark = pytest.mark.slow


def the(role: str, processes: list[psutil.Process], run_dir: Path) -> psutil.Process:
    """The process that writes `logs/<role>-0.log`."""
    log = str(run_dir / "logs" / f"{role}-0.log")
    return next(p for p in processes if Path(f"/proc/{p.pid}/fd/1").resolve() == Path(log))


def test_a_killed_worker_comes_back_and_its_tickets_are_issued_anew(tmp_path):
    run_dir = tmp_path / "worker"
    process = start(run_dir, "run.steps=8", "rollout.max_staleness=1")
    wait_for(run_dir, BatchTrained, 2, process)
    the("worker", family(process), run_dir).send_signal(signal.SIGKILL)
    assert finish(process, run_dir) == 0, output(run_dir)

    begun = [record for record in records(run_dir) if isinstance(record, IncarnationBegun) and record.role == "worker"]
    assert len(begun) == 2
    assert begun[0].incarnation < begun[1].incarnation
    lost = [record for record in records(run_dir) if isinstance(record, TicketClosed) and record.cause is CloseCause.LOST]
    assert all(record.next == record.ticket.attempt + 1 for record in lost)
    told = status(run_dir)
    assert (told["phase"], told["step"], told["ledger"]["trained"]) == ("finished", 8, 8 * 6 * 4)
    assert told["ledger"]["dropped_by_cause"] == {}  # a lost attempt is no failure


def test_a_killed_retriever_ends_the_run_with_one_cause_that_names_it(tmp_path):
    run_dir = tmp_path / "retriever"
    process = start(run_dir, "run.steps=5")
    wait_for(run_dir, BatchTrained, 1, process)
    processes = family(process)
    the("retriever", processes, run_dir).send_signal(signal.SIGKILL)
    assert finish(process, run_dir) == 1, output(run_dir)
    assert gone(processes)
    said = output(run_dir)
    assert "Traceback" not in said
    assert "retriever-0" in said
    assert "killed by signal 9" in said
    assert "logs/retriever-0.log" in said
    assert "Go on with the same command" in said


@pytest.mark.soak
def test_after_a_learners_death_the_same_command_goes_on_to_the_end(tmp_path):
    run_dir = tmp_path / "again"
    process = start(run_dir, "run.steps=5")
    wait_for(run_dir, BatchTrained, 1, process)
    the("learner", family(process), run_dir).send_signal(signal.SIGKILL)
    assert finish(process, run_dir) == 1, output(run_dir)
    assert finish(start(run_dir, "run.steps=5"), run_dir) == 0, output(run_dir)
    assert (status(run_dir)["phase"], status(run_dir)["step"]) == ("finished", 5)
