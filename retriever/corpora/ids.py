"""Which row has an id. Ids that are their row's number ("0", "1", ...) need no table. For others it is `uint64 [2, n]`: sorted
hashes, and their rows.

A hash is 64 bits of the id's BLAKE2b. Two ids may share one: what is found is compared with the id that the document itself holds.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["IdCollector", "IdTable", "candidates", "duplicate", "hash_of", "is_row"]

IdTable = npt.NDArray[np.uint64]  # [2, n]: hashes in ascending order; the row of each, ascending where hashes are equal

_HASH_BYTES = 8


def hash_of(id: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest(), "little")


def is_row(id: str, count: int) -> bool:
    """Is it a row's number below `count`, as str() writes it?"""
    return id.isascii() and id.isdecimal() and len(id) <= len(str(count)) and str(int(id)) == id and int(id) < count


class IdCollector:
    """The ids of documents as they come. Takes no memory while each is its row's number; 8 bytes each from the first that is not."""

    def __init__(self) -> None:
        self.count = 0
        self._numbered = 0  # so many at the start are their rows' numbers
        self._hashes = array("Q")  # of those behind

    def add(self, id: str) -> None:
        if not self._hashes and id == str(self.count):
            self._numbered += 1
        else:
            self._hashes.append(hash_of(id))
        self.count += 1

    def table(self) -> IdTable | None:
        """None where all ids are their rows' numbers. Takes 32 bytes per id while it is made, 16 when it is. Asked once."""
        if not self._hashes:
            return None
        table = np.empty((2, self.count), np.uint64)
        table[0, : self._numbered] = np.fromiter((hash_of(str(row)) for row in range(self._numbered)), np.uint64, self._numbered)
        table[0, self._numbered :] = self._hashes
        self._hashes = array("Q")
        order = np.argsort(table[0], kind="stable")
        table[0], table[1] = table[0, order], order
        return table


def duplicate(table: IdTable, id_of: Callable[[int], str]) -> tuple[int, int] | None:
    """The first row whose id an earlier row has, too, with that earlier row before it; None where ids are unique.

    Args:
        id_of: the id of a row. Asked of rows that share a hash.
    """
    hashes, rows = table
    repeated = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
    for place in repeated[np.argsort(rows[repeated])]:
        id = id_of(int(rows[place]))
        for earlier in rows[np.searchsorted(hashes, hashes[place]) : place]:
            if id_of(int(earlier)) == id:
                return int(earlier), int(rows[place])
    return None


def candidates(table: IdTable, id: str) -> Iterator[int]:
    """The rows whose ids have this id's hash."""
    hashes, rows = table
    sought = np.uint64(hash_of(id))  # of the table's own type: another would convert the table
    place = int(np.searchsorted(hashes, sought))
    while place < len(hashes) and hashes[place] == sought:
        yield int(rows[place])
        place += 1
