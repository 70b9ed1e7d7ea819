"""The file that a corpus is read from, row by row, in bounded memory: JSON lines (also compressed, also in a tar archive) or Parquet.

What a file is, it says itself by its first bytes, whatever it is called.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from retriever.corpora.row import CorpusError

__all__ = ["Row", "Source", "SourceFile"]

_CHUNK_BYTES = 256 << 10  # read at a time; more is slower, as it no longer fits into a core's cache
# A longer line is no passage, and a file without line breaks (an array of all rows, say) must not be read into memory whole.
MAX_LINE_BYTES = 16 << 20
_PARQUET_ROWS = 512  # turned into Python objects at a time
_PARQUET_BUFFER_BYTES = 1 << 20  # of a column, read at a time: without, a group of rows is read whole, often a million of them
_GZIP, _PARQUET, _ZSTANDARD = b"\x1f\x8b", b"PAR1", b"\x28\xb5\x2f\xfd"
# A tar archive begins with a block that describes its first file (POSIX.1-1988, ustar).
_TAR_BLOCK_BYTES, _TAR_MAGIC_AT = 512, 257


# A row that is not empty, and where it stands. A tuple: a record takes longer to make than a line takes to read.
#   number   of its line, or of a table's row, from 1
#   start    the byte of the (unpacked) file at which its line begins; of a table, 0
#   content  a line of JSON without the white space around it, or the cells of a table's row
Row = tuple[int, int, bytes | Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """What a corpus was made of."""

    name: str
    bytes: int
    sha256: str


class Source:
    """A file of rows, read once from its start to its end.

    Args:
        path: `.jsonl`, `.jsonl.gz` (Search-R1's wiki-18.jsonl.gz, which holds a tar archive, too) or `.parquet`.

    Raises:
        CorpusError: it is of another kind, or not whole.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _HashedFile(path)
        self.size = path.stat().st_size
        self._of_table: int | None = None  # bytes, if rows of a table were all as long
        with path.open("rb") as file:
            self._magic = file.read(4)

    @property
    def is_plain(self) -> bool:
        """Lines as they stand in the file: not compressed, no table."""
        return not self._magic.startswith((_GZIP, _PARQUET, _ZSTANDARD))

    @property
    def done(self) -> int:
        """Bytes of the file that were read so far."""
        return min(self._file.position, self.size) if self._of_table is None else self._of_table

    def rows(self) -> Iterator[Row]:
        """The rows in the file's order. Empty lines are passed over."""
        if self._magic == _ZSTANDARD:
            raise CorpusError(f"{self.path}: zstandard is not read here: unpack it (zstd -d), or compress it with gzip")
        if self._magic == _PARQUET or self.path.suffix == ".parquet":
            yield from self._table_rows()
            return
        try:
            with _unpacked(self.path, self._file, self._magic) as file:
                yield from self._line_rows(file)
        except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
            raise CorpusError(f"{self.path}: the archive is not whole or damaged ({error}): fetch it again") from error

    @property
    def unit(self) -> str:
        """What a row is, for people."""
        return "row" if self._magic == _PARQUET else "line"

    def place(self, number: int) -> str:
        """Where a row stands, for people."""
        return f"{self.path}: row {number}" if self._magic == _PARQUET else f"{self.path}:{number}"

    def file(self) -> SourceFile:
        """What was read. Called after the last row."""
        return SourceFile(name=self.path.name, bytes=self._file.drain(), sha256=self._file.sha256.hexdigest())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _line_rows(self, file: IO[bytes]) -> Iterator[Row]:
        number, start = 1, 0
        for line in self._lines(file):
            row = _row(number, start, line)
            if row is not None:
                yield row
            number += 1
            start += len(line) + 1

    def _lines(self, file: IO[bytes]) -> Iterator[bytes]:
        """Without their line breaks. What follows the last one is a line, too."""
        pieces: list[bytes] = []  # of the line that has not ended yet
        count, size = 0, 0  # lines so far; bytes of the pieces
        while chunk := file.read(_CHUNK_BYTES):
            head, end, tail = chunk.partition(b"\n")
            pieces.append(head)
            size += len(head)
            if end:
                *lines, rest = [b"".join(pieces), *tail.split(b"\n")]
                yield from lines
                count += len(lines)
                pieces, size = [rest], len(rest)
            elif size > MAX_LINE_BYTES:
                raise CorpusError(f"{self.place(count + 1)}: the line is longer than {MAX_LINE_BYTES} bytes: is this a file of JSON lines?")
        yield b"".join(pieces)

    def _table_rows(self) -> Iterator[Row]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise CorpusError(f"{self.path}: reading Parquet needs pyarrow: pip install 'agentrl[retriever]'") from error
        if self._magic != _PARQUET:
            raise CorpusError(f"{self.path} is no Parquet file, though it is called one: its first bytes are {self._magic!r}")
        self._file.drain()  # for the hash: a table is read from its end
        try:
            with parquet.ParquetFile(self.path, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False) as file:
                first, total = 0, max(1, file.metadata.num_rows)
                for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                    self._of_table = self.size * (first + len(batch)) // total
                    for number, content in enumerate(self._cells(batch, first), start=first + 1):
                        yield number, 0, content
                    first += len(batch)
        except (pyarrow.ArrowException, OSError) as error:
            raise CorpusError(f"{self.path}: not a Parquet file that can be read: {error}") from error

    def _cells(self, batch: Any, first: int) -> list[Mapping[str, Any]]:
        """The rows of a part of a table."""
        try:
            return batch.to_pylist()  # type: ignore[no-any-return]
        except ValueError as error:  # text that is not UTF-8, or a time that Python has none for
            raise CorpusError(f"{self.path}: rows {first + 1} to {first + len(batch)}: a cell cannot be read: {error}") from error


def _row(number: int, start: int, line: bytes) -> Row | None:
    if number == 1 and line.startswith(codecs.BOM_UTF8):
        start, line = start + len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
    content = line.strip()
    return (number, start, content) if content else None


@contextmanager
def _unpacked(path: Path, file: _HashedFile, magic: bytes) -> Iterator[IO[bytes]]:
    """The lines of a file. Of a compressed one that holds a tar archive, those of the archive's only file."""
    if not magic.startswith(_GZIP):
        yield cast(IO[bytes], file)
        return
    with gzip.open(path, "rb") as first:
        archived = first.read(_TAR_BLOCK_BYTES)[_TAR_MAGIC_AT:].startswith(b"ustar")
    with gzip.GzipFile(fileobj=cast(IO[bytes], file), mode="rb") as unpacked:
        if not archived:
            yield cast(IO[bytes], unpacked)
            return
        with tarfile.open(fileobj=unpacked, mode="r|", bufsize=_CHUNK_BYTES) as archive:
            yield from _only_file(path, archive)
        while unpacked.read(_CHUNK_BYTES):  # what fills the archive up: the checksum is behind it
            pass


def _only_file(path: Path, archive: tarfile.TarFile) -> Iterator[IO[bytes]]:
    name = None
    for member in archive:
        if not member.isfile():
            continue
        if name is not None:
            raise CorpusError(f"{path}: an archive of more than one file ({name}, {member.name}, ...): unpack it, and name the one that is meant")
        name = member.name
        yield cast(IO[bytes], archive.extractfile(member))
    if name is None:
        raise CorpusError(f"{path}: an archive without a file")


class _HashedFile:
    """A file that is read from its start to its end, hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self.sha256 = hashlib.sha256()
        self.position = 0  # bytes read

    def read(self, size: int) -> bytes:
        data = self._file.read(size) or b""
        self.sha256.update(data)
        self.position += len(data)
        return data

    def drain(self) -> int:
        """Read what is left, e.g. what follows an archive's end. Returns the size of the file."""
        while self.read(_CHUNK_BYTES):
            pass
        return self.position

    def close(self) -> None:
        self._file.close()
