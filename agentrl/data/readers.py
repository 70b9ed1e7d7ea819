"""Rows of data files, one by one, each with the place it stands at: JSON lines (also compressed), Parquet, and data sets of the Hugging Face hub.

The last two need the `data` extra.
"""

from __future__ import annotations

import gzip
import importlib
import json
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from agentrl.errors import DataError

__all__ = ["HUB", "Row", "jsonl_rows", "read_rows"]

HUB = "hub:"

# A tar archive begins with a block that describes its first file (POSIX.1-1988, ustar).
_TAR_BLOCK_BYTES, _TAR_MAGIC_AT = 512, 257

Row = tuple[str, Any]  # (place, e.g. "tasks.jsonl:12"; the row)


def read_rows(path: str) -> Iterator[Row]:
    """The rows of a `.jsonl`, `.jsonl.gz` or `.parquet` file, or of `hub:ORG/NAME[/CONFIG][:SPLIT]` (split `train` where none is given).

    Raises:
        DataError: it is not there, cannot be read, or needs what is not installed.
    """
    if path.startswith(HUB):
        return _hub_rows(path)
    if path.endswith(".parquet"):
        return _parquet_rows(Path(path))
    return jsonl_rows(Path(path))


def jsonl_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines, by its name `.gz` a compressed one. Empty lines are passed over.

    Raises:
        DataError: naming the line that is not JSON, or not UTF-8.
    """
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _json(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's lines. A compressed one may hold a tar archive under the name of its only file, as Search-R1's wiki-18.jsonl.gz does."""
    if path.suffix != ".gz":
        with path.open("rb") as plain:
            yield plain
        return
    with gzip.open(path, "rb") as unpacked:
        archived = unpacked.read(_TAR_BLOCK_BYTES)[_TAR_MAGIC_AT:].startswith(b"ustar")
    if not archived:
        with gzip.open(path, "rb") as unpacked:
            yield cast(IO[bytes], unpacked)
        return
    with tarfile.open(path, "r|gz") as archive:
        found = next((member for member in archive if member.isfile()), None)
        file = archive.extractfile(found) if found is not None else None
        if file is None:
            raise DataError(f"{path}: an archive without a file")
        with file:
            yield file


def _json(line: bytes, place: str) -> Any:
    try:
        value = json.loads(line.decode("utf-8"))
        if rb"\ud" in line.lower():  # half a surrogate pair is valid JSON, but no text that could be sent or stored
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text: {error.reason if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError)) else error}"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from error
    return value


def _parquet_rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        raise DataError(f"{path}: cannot be read: No such file or directory")
    parquet, arrow = _extra("pyarrow.parquet", str(path)), _extra("pyarrow", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", _plain(row)
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from error


def _hub_rows(path: str) -> Iterator[Row]:
    address, _, split = path.removeprefix(HUB).partition(":")
    organisation, _, rest = address.partition("/")
    name, _, config = rest.partition("/")
    datasets = _extra("datasets", path)
    try:
        rows = datasets.load_dataset(f"{organisation}/{name}" if name else organisation, config or None, split=split or "train")
    except (OSError, ValueError) as error:  # not found, no network, no such split: the library's errors are of these two kinds
        raise DataError(f"{path}: the data set cannot be loaded: {error}") from error
    for number, row in enumerate(rows):
        yield f"{path}: row {number}", _plain(row)


def _extra(module: str, path: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{path}: reading it needs {module.split('.')[0]}: pip install 'agentrl[data]'") from error


def _plain(row: Any) -> Any:
    """A row as JSON would hold it: columns of dates or bytes become text."""
    return json.loads(json.dumps(row, default=str))
