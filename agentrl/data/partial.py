"""A file that is written piece by piece beside its place, appears there when it is complete, and is gone on with where it broke off."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["PartialFile"]

_CHUNK_BYTES = 1 << 20


class PartialFile:
    """`.NAME.DIGEST.partial` beside the file `NAME`, named by what it is made of: another source or limit begins another file.

    What is there already is read once, for its sha256. Of lines, only complete ones are kept.

    Args:
        target: where the file appears.
        identity: what decides every byte of it.
        lines: it is made of lines; without, of bytes.
    """

    def __init__(self, target: Path, identity: Mapping[str, Any], *, lines: bool) -> None:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        self._target, self._lines = target, lines
        self.path = target.with_name(f".{target.name}.{digest}.partial")
        self.count, self.size = 0, 0  # rows (bytes where there are no lines) that are there; bytes
        self._sha256 = hashlib.sha256()
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        self._take_up()

    def append(self, data: bytes) -> None:
        """Write a line with its end, or some bytes."""
        self._file.write(data)
        self._add(data)

    def finish(self) -> str:
        """Bring it to the disk. Returns its sha256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._sha256.hexdigest()

    def appear(self) -> None:
        """Put it in its place."""
        self._file.close()
        self.path.replace(self._target)

    def close(self) -> None:
        """Leave it for the next time."""
        self._file.close()

    def _take_up(self) -> None:
        self._file.seek(0)
        if self._lines:
            for line in self._file:
                if line.endswith(b"\n"):
                    self._add(line)
        else:
            while chunk := self._file.read(_CHUNK_BYTES):
                self._add(chunk)
        self._file.truncate(self.size)

    def _add(self, data: bytes) -> None:
        self._sha256.update(data)
        self.size += len(data)
        self.count += 1 if self._lines else len(data)
