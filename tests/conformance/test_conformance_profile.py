"""Profiles of an engine's forward passes."""

from __future__ import annotations

import gzip
import json

import pytest
from engine_calls import wait_until

pytestmark = pytest.mark.slow


def traces(directory):
    """What is written so far; a file that is being written is none yet."""
    found = []
    for path in directory.glob("here*json*"):
        data = path.read_bytes()
        try:
            found.append(json.loads(gzip.decompress(data) if path.suffix == ".gz" else data))
        except (ValueError, EOFError):
            continue
    return found


def test_a_profile_ends_by_itself_and_names_operations(engine, tmp_path):
    assert engine.post("/start_profile", output_dir=str(tmp_path), num_steps=4, profile_prefix="here", activities=["CPU"]).status_code == 200
    engine.generate(new=20)
    wait_until(lambda: bool(traces(tmp_path)))
    [trace] = traces(tmp_path)
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])
    engine.generate(new=2)  # it goes on serving
