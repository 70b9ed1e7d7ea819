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


def test_what_a_killed_process_left_half_written_is_removed_when_it_is_old_and_not_being_written(tmp_path):
    for name in (".v1.tmp", ".v2.tmp", ".v4.tmp", "v1", "best", ".other.tmp"):
        (tmp_path / name).mkdir()
    trio.run(lambda: SnapshotDirectories(tmp_path, tmp_path, keep=True).tidy(3, read={2}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", ".v2.tmp", ".v4.tmp", "best", "v1"]
    trio.run(lambda: SnapshotDirectories(tmp_path / "never", tmp_path, keep=False).tidy(3, read=set()))
