"""Snapshots on disk, for engines to load: written when the first one asks, removed when none can want them any more."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

import trio

from agentrl.weights import Snapshot, save_snapshot

__all__ = ["SnapshotDirectories"]

_NAME = re.compile(r"(?P<half>\.)?v(?P<version>\d+)(?(half)\.tmp)")  # half: what `save_snapshot` has not yet renamed


class SnapshotDirectories:
    """`directory/v<version>`, each a Hugging Face model directory.

    Args:
        model_dir: where everything besides the weights is copied from.
        keep: whether they stay for ever (`weights.keep_snapshots`).
    """

    def __init__(self, directory: Path, model_dir: Path, *, keep: bool) -> None:
        self._directory, self._model_dir, self._keep = directory, model_dir, keep
        self._writing = trio.Lock()

    async def path(self, snapshot: Snapshot) -> Path:
        """Where `snapshot` is. Raises PublishError where it cannot be written."""
        async with self._writing:
            return await trio.to_thread.run_sync(save_snapshot, snapshot, self._directory / f"v{snapshot.version}", self._model_dir)

    async def tidy(self, newest: int, *, read: Collection[int]) -> None:
        """Remove versions older than `newest`, but for those in `read`: somebody is loading them. What a killed process half wrote goes too."""
        for path in self._directory.iterdir() if self._directory.exists() else ():
            found = _NAME.fullmatch(path.name)
            if found is None or (self._keep and not found["half"]):
                continue
            if int(found["version"]) < newest and int(found["version"]) not in read:
                await trio.to_thread.run_sync(shutil.rmtree, path, True)
