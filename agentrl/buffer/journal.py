"""The journal: the append-only log of a run, and its lock.

    journal/LOCK                    held (flock) by the one process that writes; holds its pid
    journal/000003-0000.seg         segments: by the buffer's incarnation, then counted
        AGRLJ001                    8 bytes: format
        length u4 | crc32(length) u4 | crc32(payload) u4 | payload        little-endian, repeated; a payload is a record

A process killed in mid-write leaves an incomplete last frame, a machine that lost power may leave zeros instead of the end: such a torn
tail of the newest segment is cut off when the journal is opened, because nothing in it was ever acknowledged. Anything else that does
not fit its checksum was altered after it was written, and is an error that names the file and the offset. The length has a checksum of
its own, so that a flipped bit in it is not taken for a torn tail.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from agentrl.buffer.records import Record, decode_record, encode_record
from agentrl.errors import JournalError
from agentrl.faults import point

__all__ = ["Journal", "Location", "lock", "read", "segments"]

MAGIC = b"AGRLJ001"
_HEADER = struct.Struct("<III")
_SECTOR = 512  # what a disk writes whole: zeros left by a power loss reach over whole sectors
_LOCK_RETRY_S = 0.05


class Location(NamedTuple):
    """Where a record stands."""

    segment: str  # file name
    offset: int  # of its frame in the file
    end: int  # bytes of the whole journal up to and including it


class Journal:
    """The writing end. `append` is in memory, `write` brings it to the file, `sync` to the disk.

    Args:
        directory: made where it does not exist.
        incarnation: of the buffer; names the segments. Must be newer than any in the directory.
        segment_bytes: a new segment begins above this size.
        lock_deadline_s: how long to wait for a dying owner to let go.

    Raises:
        JournalError: another process holds the journal, or a record was altered.
    """

    def __init__(self, directory: Path, *, incarnation: int, segment_bytes: int = 64 << 20, lock_deadline_s: float = 5.0) -> None:
        self._directory, self._incarnation, self._segment_bytes = directory, incarnation, segment_bytes
        self._lock = lock(directory, deadline_s=lock_deadline_s)
        self._pending: list[bytes] = []  # appended, not yet in the file
        self._pending_bytes = 0
        self._index = 0
        self._switching = threading.Lock()  # a sync in another thread must not meet a file that is being closed
        self.trouble: OSError | None = None  # the last write failed; cleared by the next that does not
        self._broken: JournalError | None = None  # a sync failed: for good, because a second one would say that all is well
        try:
            self._repair()
            self._base = sum(path.stat().st_size for path in segments(directory))  # bytes of all earlier segments
            self._path, self._file = self._start_segment()
            self._size = len(MAGIC)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                raise JournalError(f"cannot open the journal {directory}: {error}") from error
            raise

    @property
    def appended(self) -> int:
        """Bytes of the whole journal, appended ones included."""
        return self._base + self._size

    @property
    def written(self) -> int:
        """Bytes of the whole journal that are in its files."""
        return self._base + self._size - self._pending_bytes

    def append(self, record: Record) -> Location:
        """Add a record. It is safe once `written` (or a `sync`) reaches the location's end."""
        if self._size >= self._segment_bytes:
            self._rotate()
        frame = _frame(encode_record(record))
        location = Location(segment=self._path.name, offset=self._size, end=self.appended + len(frame))
        self._pending.append(frame)
        self._pending_bytes += len(frame)
        self._size += len(frame)
        return location

    def write(self) -> None:
        """Bring everything appended to the file in one go: it survives the death of this process.

        Raises:
            JournalError: the disk is full or broken. Nothing is lost: the next `write` goes on where this one ended.
        """
        if self._broken is not None:
            raise self._broken
        if not self._pending:
            return
        point("journal.before_write")
        data = b"".join(self._pending)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.trouble = error
            raise JournalError(f"cannot write {self._path}: {error.strerror}. Free some space: the run waits and loses nothing") from error
        finally:
            self._pending, self._pending_bytes = ([data] if data else []), len(data)
        self.trouble = None
        point("journal.appended")

    def sync(self) -> None:
        """Bring what `write` wrote to the disk: it survives the loss of power. May run in another thread than `append` and `write`.

        Raises:
            JournalError: the disk is broken. Nothing is written after that: nobody knows what is on it.
        """
        if self._broken is not None:
            raise self._broken
        try:
            with self._switching:
                os.fsync(self._file)
        except OSError as error:
            self.trouble = error
            self._broken = JournalError(f"cannot bring {self._path} to the disk: {error.strerror}")
            raise self._broken from error

    def read_at(self, location: Location) -> Record:
        """The record at a location."""
        self.write()
        path = self._directory / location.segment
        with path.open("rb") as file:
            file.seek(location.offset)
            header = file.read(_HEADER.size)
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
            payload = file.read(length)
        if _fault(header, payload):
            raise JournalError(f"{path}: the record at offset {location.offset} was altered")
        return decode_record(payload)

    def close(self) -> None:
        """Write, sync and let go of the lock."""
        try:
            self.write()
            self.sync()
        finally:
            with self._switching:
                os.close(self._file)
            os.close(self._lock)

    def abandon(self) -> None:
        """Let go as a killed process does: what was not written is gone."""
        os.close(self._file)
        os.close(self._lock)

    def _repair(self) -> None:
        paths = segments(self._directory)
        if paths and paths[-1].name >= _name(self._incarnation, 0):
            raise JournalError(f"{paths[-1]} is not older than incarnation {self._incarnation} of the buffer: give a newer one")
        for path in paths[-1:]:
            end = max((location.offset + size for location, size, _ in _scan(path, base=0, torn_tail=True)), default=len(MAGIC))
            if path.stat().st_size < len(MAGIC):
                path.unlink()
            elif path.stat().st_size > end:
                with path.open("r+b") as file:
                    file.truncate(end)
                    os.fsync(file.fileno())

    def _start_segment(self) -> tuple[Path, int]:
        path = self._directory / _name(self._incarnation, self._index)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, MAGIC)
            directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            os.fsync(directory)  # the file's name must survive as well as its content
            os.close(directory)
        except OSError:
            os.close(file)
            path.unlink()
            raise
        return path, file

    def _rotate(self) -> None:
        try:
            self.write()
            self.sync()
            self._index += 1
            path, file = self._start_segment()
        except (JournalError, OSError):
            self._index = _index_of(self._path)
            return  # the segment grows until the disk is well again
        with self._switching:
            os.close(self._file)
            self._path, self._file = path, file
        self._base += self._size
        self._size = len(MAGIC)


def lock(directory: Path, *, deadline_s: float) -> int:
    """Take the exclusive lock on a journal; returns the file descriptor that holds it.

    Raises:
        JournalError: another process holds it still after `deadline_s`; names its pid.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise JournalError(f"cannot open the journal {directory}: {error}") from error
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_LOCK_RETRY_S)
                continue
            owner = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise JournalError(f"{directory} is in use by the process with pid {owner}: end that run first") from None
        os.truncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        return file


def segments(directory: Path) -> list[Path]:
    """The segments of a journal, oldest first."""
    return sorted(directory.glob("*.seg"))


def read(directory: Path) -> Iterator[tuple[Location, Record]]:
    """Every record of a journal, oldest first. A torn tail is passed over, also that of a record being written right now.

    Raises:
        JournalError: a record was altered.
    """
    base, paths = 0, segments(directory)
    for path in paths:
        for location, _, payload in _scan(path, base=base, torn_tail=path == paths[-1]):
            yield location, decode_record(payload)
        base += path.stat().st_size


def _scan(path: Path, *, base: int, torn_tail: bool) -> Iterator[tuple[Location, int, bytes]]:
    """(location, bytes of the frame, payload) of each record of a segment."""
    data = path.read_bytes()
    if data[: len(MAGIC)] != MAGIC:
        if torn_tail and len(data) < len(MAGIC):
            return
        raise JournalError(f"{path}: not a journal segment of this version: it begins with {data[:8]!r}")
    offset = len(MAGIC)
    while offset < len(data):
        header = data[offset : offset + _HEADER.size]
        length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
        end = offset + _HEADER.size + length
        payload = data[offset + _HEADER.size : end]
        fault = _fault(header, payload)
        if fault:
            if torn_tail and _torn(data, offset, fault):
                return
            raise JournalError(f"{path}: {fault} at offset {offset} of {len(data)}: the file was altered or damaged")
        yield Location(segment=path.name, offset=offset, end=base + end), end - offset, payload
        offset = end


def _fault(header: bytes, payload: bytes) -> str:
    """What is wrong with a frame; "" where nothing is."""
    if len(header) < _HEADER.size:
        return "an incomplete header"
    length, check, crc = _HEADER.unpack(header)
    if crc32(header[:4]) != check:
        return "a record's length does not match its checksum"
    if len(payload) < length:
        return "an incomplete record"
    return "" if crc32(payload) == crc else "a record does not match its checksum"


def _torn(data: bytes, offset: int, fault: str) -> bool:
    """Whether a faulty frame is the end of an interrupted write: incomplete, or zeros from some sector on to the end of the file."""
    if fault.startswith("an incomplete"):
        return True
    written = len(data.rstrip(b"\0"))
    first_zero_sector = -(-written // _SECTOR) * _SECTOR
    frame_length, check, _ = _HEADER.unpack(data[offset : offset + _HEADER.size])
    reaches_end = crc32(data[offset : offset + 4]) != check or offset + _HEADER.size + frame_length >= len(data)
    return reaches_end and (written <= offset or first_zero_sector < len(data))


def _frame(payload: bytes) -> bytes:
    length = struct.pack("<I", len(payload))
    return _HEADER.pack(len(payload), crc32(length), crc32(payload)) + payload


def _index_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _name(incarnation: int, index: int) -> str:
    return f"{incarnation:06d}-{index:04d}.seg"
