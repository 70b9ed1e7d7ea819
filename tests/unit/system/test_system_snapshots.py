"""Snapshots on disk: written once, removed when nobody can want them."""

import torch
import trio

from agentrl.system.snapshots import SnapshotDirectories
from agentrl.weights import Snapshot


def snapshot(version):
    return Snapshot.of(version, version, [[("w", torch.full((2,), float(version)))]])


def test_versions_are_written_when_asked_for_and_older_ones_removed_but_for_those_being_read(tmp_path):
    weights, model = tmp_path / "weights", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    async def main(directories):
        for version in (1, 2, 3):
            path = await directories.path(snapshot(version))
            assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
        await directories.tidy(3, read={1})

    trio.run(main, SnapshotDirectories(weights, model, keep=False))
    assert sorted(path.name for path in weights.iterdir()) == ["v1", "v3"]
    trio.run(main, SnapshotDirectories(weights, model, keep=True))
    assert sorted(path.name for path in weights.iterdir()) == ["v1", "v2", "v3"]
