"""Files of others, as an index takes them in: a copy that shares its blocks where the file system can (Btrfs, XFS, ...), and otherwise all bytes.

An index that used a file of others where it lies would be another one whenever somebody writes to that file, and a mapped file that gets shorter
ends the process that reads it (SIGBUS). A link is made where it is asked for (`linked`).
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from retriever.query import Progress

__all__ = ["copied", "linked", "shares_blocks"]

FICLONE = 0x40049409  # linux/fs.h: make a file share another's blocks until one of the two is written to
COPIED_AT_A_TIME = 64 << 20  # bytes between two words of progress


def copied(source: Path, target: Path, progress: Progress) -> None:
    """Copy a file, over whatever a killed run left there."""
    target.unlink(missing_ok=True)  # it may be a link to the source
    with source.open("rb") as read, target.open("xb") as written:
        size, done = os.fstat(read.fileno()).st_size, 0
        if _cloned(read, written):
            return
        while data := read.read(COPIED_AT_A_TIME):
            written.write(data)
            done += len(data)
            progress(f"{source.name}: bytes copied", done, size)


def shares_blocks(source: Path, directory: Path) -> bool:
    """Whether a copy in `directory` takes no disk: tried."""
    with source.open("rb") as read, tempfile.TemporaryFile(dir=directory) as written:
        return _cloned(read, written)


def linked(source: Path, target: Path) -> bool:
    """Give a file another name. False where it cannot have one: on another disk, or on one that knows no links."""
    target.unlink(missing_ok=True)  # of a run that was killed
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _cloned(source: IO[bytes], target: IO[bytes]) -> bool:
    try:
        fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
    except OSError:
        return False
    return True
