"""Files of a run written whole or not at all, and JSON that every reader takes.

JSON has no NaN and no infinity: both are written as null. Text is UTF-8, with what UTF-8 cannot hold (lone surrogates) as JSON escapes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["replacing", "to_json", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path` in one step, durable once it returns."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends; an error in the block leaves `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def to_json(value: object, *, indent: int | None = None) -> bytes:
    """Strict JSON of plain values, without a line end unless indented."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=indent, allow_nan=False).encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
