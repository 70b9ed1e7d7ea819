"""What stands beside a prepared data file, `NAME.manifest.json`: where it came from, how much of it there is, and its sha256."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DataError

__all__ = ["FORMAT", "DataManifest"]

FORMAT = 1  # of the files that are written: another one means that they are written anew


@dataclass(frozen=True, kw_only=True, slots=True)
class DataManifest:
    """Of one file.

    Args:
        origin: repository, files and revision; or files and their sha256, where they came from this machine.
        limit: only this many rows of the source were taken.
        count: rows, or the bytes of an index.
    """

    dataset: str
    split: str
    origin: dict[str, Any]
    limit: int | None
    count: int
    size_bytes: int
    sha256: str
    licence: str
    agentrl: str
    format: int = FORMAT

    @staticmethod
    def path(file: Path) -> Path:
        """Where the manifest of a file is."""
        return file.with_name(f"{file.name}.manifest.json")

    @classmethod
    def read(cls, file: Path) -> DataManifest:
        """The manifest of a file, and a look at the file: it must be the one that is described.

        Raises:
            DataError: there is none, it is not one, or the file was changed.
        """
        path = cls.path(file)
        remedy = f"{file} is in the way: move it, or choose another --out"
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise DataError(f"{remedy} (it was not made here: it has no {path.name})") from error
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{remedy} ({path.name} cannot be read: {error})") from error
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != found.sha256:
                raise DataError(f"{remedy} (it was changed: its sha256 is not the one in {path.name})")
        return found

    def write(self, file: Path) -> None:
        """Put it beside `file`."""
        path = self.path(file)
        beside = path.with_name(f".{path.name}.partial")
        beside.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        beside.replace(path)
