"""Where an index is built: a directory beside its place, `.NAME.building`, that becomes the index by rename. One build at a time is in it.

.wiki-18.building/
    documents.jsonl ...       as in the index
    build/lock                held (flock) by the process that builds: a killed one gives it back
    build/job.json            what is being built, of what: a build that goes on must be of the same
    build/00000.npy .done     row shards, and the mark that each is whole
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retriever.manifest import BUILD, MANIFEST, IndexFault

__all__ = ["Workshop", "workshop", "write_array", "write_whole"]

JOB = "job.json"
LOCK = "lock"
NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
REMOVALS = 1000  # by others, while one locks: there are as many at most as processes that wait


class Workshop:
    """The directory of one build, held by this process."""

    def __init__(self, directory: Path, out: Path) -> None:
        self.directory = directory
        self.out = out
        self.build = directory / BUILD

    @classmethod
    def beside(cls, out: Path) -> Workshop:
        """Where `out` is built, without holding it."""
        return cls(out.parent / f".{out.name}.building", out)

    def job(self) -> dict[str, Any] | None:
        """What is being built here since an earlier run; None at the beginning."""
        try:
            found = json.loads((self.build / JOB).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    @property
    def bytes(self) -> int:
        """Of all files that are here."""
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())

    def keep(self, job: Mapping[str, Any]) -> None:
        """Write down what is being built, for the run that goes on after this one."""
        write_whole(self.build / JOB, json.dumps(dict(job), indent=2).encode())

    def finish(self) -> None:
        """The directory becomes the index. Its files are on the disk before its name is there."""
        for path in self.build.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        _sync(self.directory)
        self.directory.rename(self.out)
        _sync_one(self.out.parent)
        shutil.rmtree(self.out / BUILD)  # the lock goes last: whoever waits for it finds the index in place

    def drop_unless_worth_keeping(self, error: BaseException) -> None:
        """After a failure: what has a finished shard is gone on from, and so are the documents where somebody stopped the build.

        Raises:
            IndexFault: there is no room for what is built; with what is kept.
        """
        stopped = isinstance(error, KeyboardInterrupt) and self.job() is not None
        worth = stopped or any(self.build.glob("*.done")) or (self.directory / MANIFEST).exists()
        if not worth:
            self.drop()
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            kept = "finished shards are kept, and the same command goes on from there" if worth else "nothing is kept"
            raise IndexFault(f"{error.filename or self.directory}: {error.strerror}. Make room: {kept}") from error

    def drop(self) -> None:
        """Nothing of it is kept."""
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def workshop(out: Path, *, wait: bool = False) -> Iterator[Workshop | None]:
    """Hold the directory in which `out` is built; None if `out` is there by the time that it is held.

    Args:
        wait: for another build of `out` to end, instead of refusing.

    Raises:
        IndexFault: another process is building `out`.
    """
    held = Workshop.beside(out)
    descriptor = _locked(held.build / LOCK, wait)
    try:
        if out.exists():
            held.drop()
            yield None
        else:
            yield held
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is either there with all of its bytes, on the disk, or not there."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    _sync_one(path.parent)


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """`write_whole` of an .npy file."""
    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    write_whole(path, data.getvalue())


def _sync(directory: Path) -> None:
    """Bring a directory's files to the disk: what follows must not overtake them."""
    for path in (*(path for path in directory.rglob("*") if not path.is_symlink()), directory):
        _sync_one(path)


def _locked(lock: Path, wait: bool) -> int:
    while True:
        descriptor = _opened(lock)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(lock, descriptor):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise IndexFault(f"{lock.parent.parent} is being built by another process: wait for it, or end it and build again") from error
        os.close(descriptor)  # the directory was finished while we waited: its lock is that of nothing


def _opened(lock: Path) -> int:
    """The file, made where it is not there. Whoever finds the index in place removes the directory, at any moment of these."""
    for _ in range(REMOVALS):
        with suppress(FileNotFoundError, FileExistsError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    lock.parent.mkdir(parents=True, exist_ok=True)
    return os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
