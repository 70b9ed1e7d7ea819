"""Files of a data set, from the Hugging Face hub or from a place on this machine. Importing it does not import the hub's library.

The hub's library keeps what it downloads in its cache (HF_HOME), goes on with a download that broke off, and answers from the cache where there is
no network.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DataError

__all__ = ["Origin", "from_hub", "from_path"]

_SNAPSHOTS = "snapshots"  # in the cache, files stand below snapshots/<commit>/


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Files, in the order of their pieces, and what names them for good: repository and commit, or path and sha256."""

    paths: tuple[Path, ...]
    identity: dict[str, Any]


def from_hub(repository: str, parts: tuple[str, ...], *, revision: str) -> Origin:
    """Download files of a data set, or find them in the cache.

    Args:
        revision: a branch, a tag or a commit; the commit it stands for is in the answer.

    Raises:
        DataError: the library is missing, the hub cannot be reached, or has no such file; the message has the way by hand.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise DataError("downloading data needs huggingface_hub: pip install 'agentrl[data]'") from error
    paths: list[Path] = []
    for part in parts:
        try:
            paths.append(Path(hub.hf_hub_download(repository, part, repo_type="dataset", revision=revision)))
        except Exception as error:  # a foreign library's network: which library's errors these are has changed from version to version
            raise DataError(_by_hand(repository, parts, part, error)) from error
        revision = _commit(paths[0])  # the other pieces are of the same commit, whatever becomes of the branch meanwhile
    return Origin(paths=tuple(paths), identity={"repository": repository, "files": list(parts), "revision": revision})


def from_path(place: Path, parts: tuple[str, ...]) -> Origin:
    """Files that are here already: `place` is the file itself, or a directory that holds them, by whole name or by the last part of it.

    Raises:
        DataError: they are not there.
    """
    if place.is_dir():
        found = [next((p for p in (place / part, place / Path(part).name) if p.is_file()), None) for part in parts]
        missing = [part for part, path in zip(parts, found, strict=True) if path is None]
        if missing:
            raise DataError(f"{place} has no {' and no '.join(missing)}: give the file itself, or a directory laid out as the repository is")
        paths = tuple(path for path in found if path is not None)
    elif place.is_file():
        paths = (place,)
    else:
        raise DataError(f"--from: no such file or directory: {place}")
    return Origin(paths=paths, identity={"files": [path.name for path in paths], "sha256": [_sha256(path) for path in paths]})


def _commit(path: Path) -> str:
    parts = path.parts
    return parts[parts.index(_SNAPSHOTS) + 1] if _SNAPSHOTS in parts else "unknown"


def _by_hand(repository: str, parts: tuple[str, ...], part: str, error: Exception) -> str:
    told = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return (
        f"{repository}: {part} cannot be downloaded: {told}\n"
        f"By hand: on a machine with a network, download {' and '.join(parts)} from https://huggingface.co/datasets/{repository}"
        f" (hf download {repository} {' '.join(parts)} --repo-type dataset --local-dir DIR), copy DIR here, and add --from DIR"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
