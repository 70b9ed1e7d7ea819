"""The journal's files: what a crash may leave is repaired, what was altered is named, and one process alone writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.buffer.journal import Journal, read, segments
from agentrl.buffer.records import Record, TaskIssued, TrajectoryAdded, Verdict, VersionSuperseded, decode_record, encode_record
from agentrl.buffer.summary import TrajectorySummary
from agentrl.errors import JournalError
from agentrl.types import Purpose, StopReason, Ticket
from agentrl.wire import pack, unpack

TICKET = Ticket(purpose=Purpose.TRAIN, ordinal=7, k=1, attempt=0)


def record(number: int) -> TaskIssued:
    return TaskIssued(t=float(number), ordinal=number, task=f"t{number}", n=2)


def journal_of(directory: Path, *numbers: int, incarnation: int = 1) -> Path:
    """A closed journal of some records; returns its newest segment."""
    journal = Journal(directory, incarnation=incarnation, lock_deadline_s=0.0)
    for number in numbers:
        journal.append(record(number))
    journal.close()
    return segments(directory)[-1]


def ordinals(directory: Path) -> list[int]:
    return [found.ordinal for _, found in read(directory) if isinstance(found, TaskIssued)]


def test_records_come_back_as_they_were_with_their_places(tmp_path: Path) -> None:
    journal = Journal(tmp_path, incarnation=1)
    summary = TrajectorySummary(k=1, reward=0.5, parts={"right": 0.5}, stop=StopReason.TURN_LIMIT, length=9, generated=4)
    added = TrajectoryAdded(t=1.0, ticket=TICKET, versions=(3, 4), summary=summary, data=b"\0\1", verdict=Verdict(left_out=(1,), drop="filtered"))
    written: list[Record] = [record(0), added, VersionSuperseded(t=2.0, version=5)]
    places = [journal.append(one) for one in written]
    journal.write()
    assert list(read(tmp_path)) == list(zip(places, written, strict=True))
    assert journal.read_at(places[1]) == written[1]
    assert places[-1].end == journal.appended == journal.written == segments(tmp_path)[0].stat().st_size
    journal.close()


def test_a_record_of_a_newer_minor_version_is_read_without_its_new_fields(tmp_path: Path) -> None:
    assert decode_record(pack(unpack(encode_record(record(3))) | {"colour": "red"})) == record(3)
    with pytest.raises(JournalError, match="not a record of this version"):
        decode_record(pack({"kind": "colour", "t": 0.0}))


def test_what_was_not_written_is_gone_and_what_was_written_is_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path, incarnation=1)
    journal.append(record(0))
    journal.write()
    journal.append(record(1))
    journal.abandon()
    assert ordinals(tmp_path) == [0]


@pytest.mark.parametrize("kept", range(1, 20))
def test_a_torn_tail_is_cut_off_and_the_next_segment_goes_on(tmp_path: Path, kept: int) -> None:
    path = journal_of(tmp_path, 0, 1)
    whole = path.read_bytes()
    journal = Journal(tmp_path, incarnation=2)
    journal.append(record(2))
    journal.close()
    torn = segments(tmp_path)[-1]
    torn.write_bytes(torn.read_bytes()[:kept])
    assert ordinals(tmp_path) == [0, 1]
    journal_of(tmp_path, 3, incarnation=3)
    assert path.read_bytes() == whole
    assert ordinals(tmp_path) == [0, 1, 3]


def test_zeros_that_a_power_loss_left_are_cut_off(tmp_path: Path) -> None:
    path = journal_of(tmp_path, 0)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0" * 5000)
    journal_of(tmp_path, 1, incarnation=2)
    assert path.stat().st_size == size
    assert ordinals(tmp_path) == [0, 1]


def test_a_flipped_bit_anywhere_in_a_record_is_named_with_file_and_offset(tmp_path: Path) -> None:
    path = journal_of(tmp_path, 0, 1)
    whole = path.read_bytes()
    first = next(iter(read(tmp_path)))[0]
    second = len(whole) - (len(whole) - first.offset) // 2
    for position in range(first.offset, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        offset = first.offset if position < second else second
        with pytest.raises(JournalError, match=rf"{path.name}: .* at offset {offset} of {len(whole)}"):
            list(read(tmp_path))
        with pytest.raises(JournalError, match=f"at offset {offset}"):
            Journal(tmp_path, incarnation=2)
    assert segments(tmp_path) == [path]


def test_a_torn_tail_anywhere_but_at_the_end_of_the_newest_segment_is_damage(tmp_path: Path) -> None:
    path = journal_of(tmp_path, 0, 1)
    journal_of(tmp_path, 2, incarnation=2)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(JournalError, match=f"{path.name}: an incomplete record at offset"):
        ordinals(tmp_path)


def test_segments_are_named_by_incarnation_and_begin_anew_above_their_size(tmp_path: Path) -> None:
    journal = Journal(tmp_path, incarnation=4, segment_bytes=100)
    places = [journal.append(record(number)) for number in range(5)]
    journal.close()
    assert [path.name for path in segments(tmp_path)] == ["000004-0000.seg", "000004-0001.seg", "000004-0002.seg"]
    assert [place for place, _ in read(tmp_path)] == places
    with pytest.raises(JournalError, match="not older than incarnation 4"):
        Journal(tmp_path, incarnation=4)


@pytest.mark.slow
def test_a_second_process_is_refused_with_the_pid_of_the_first_until_that_dies(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from agentrl.buffer.journal import lock
lock(Path(sys.argv[1]), deadline_s=0)
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(JournalError, match=f"in use by the process with pid {owner.pid}: end that run first"):
            Journal(tmp_path, incarnation=1, lock_deadline_s=0.1)
        assert segments(tmp_path) == []  # nothing was read or written without the lock
        owner.kill()
    Journal(tmp_path, incarnation=1, lock_deadline_s=0.5).close()


@pytest.mark.slow
def test_a_full_disk_loses_nothing_and_writing_goes_on_when_there_is_room(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from agentrl.buffer.journal import Journal, read
from agentrl.buffer.records import TaskIssued
from agentrl.errors import JournalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = Path(sys.argv[1])
journal = Journal(directory, incarnation=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for ordinal in range(50):
    journal.append(TaskIssued(t=0.0, ordinal=ordinal, task="t", n=2))
for _ in range(2):
    try:
        journal.write()
    except JournalError as error:
        print(error)
print(journal.trouble is not None, journal.written, journal.appended > 1000, len(list(read(directory))) < 50)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.write()
print(journal.trouble, [record.ordinal for _, record in read(directory)] == list(range(50)))
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=30, check=True)
    trouble, again, state, after = ended.stdout.splitlines()
    assert trouble == again == f"cannot write {tmp_path}/000001-0000.seg: File too large. Free some space: the run waits and loses nothing"
    assert state == "True 1000 True True"
    assert after == "None True"
