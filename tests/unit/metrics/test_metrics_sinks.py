"""metrics.jsonl always, trackers by the registry, and none of them in the way of training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.config.recipe import Recipe
from agentrl.metrics.sinks import JsonLines, open_sinks


class Kept:
    """A tracker that remembers."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    """A tracker whose server is gone."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("no route to host")


class Unopenable(Kept):
    """A tracker that wants an account."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        raise PermissionError("log in first")


class Missing(Kept):
    """A tracker that is not installed."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        raise ModuleNotFoundError("No module named 'swanlab'")


def _recipe(*sinks: str) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "metrics-test",
            "run": {"steps": 1},
            "model": {"path": "somewhere"},
            "tasks": {"train": [{"path": "tasks.jsonl"}]},
            "env": {"factory": "module:Class"},
            "metrics": {"sinks": list(sinks)},
        }
    )


def _lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_a_line_in_the_file_at_once(tmp_path: Path) -> None:
    with open_sinks(_recipe(), tmp_path) as sinks:
        sinks.step(1, {"batch/reward_mean": 0.5})
        sinks.step(2, {"batch/reward_mean": 0.75})
        assert [(line["step"], line["metrics"]) for line in _lines(tmp_path)] == [(1, {"batch/reward_mean": 0.5}), (2, {"batch/reward_mean": 0.75})]


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl", clock=lambda: 12.5)
    lines.step(3, {"b": float("nan"), "a": float("inf"), "c": 1})
    lines.close()
    assert _lines(tmp_path) == [{"step": 3, "time": 12.5, "metrics": {"b": None, "a": None, "c": 1.0}, "nonfinite": ["a", "b"]}]


def test_a_line_torn_by_a_kill_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1, "metrics": {}}\n{"step": 2, "ti')
    lines = JsonLines(tmp_path / "metrics.jsonl", clock=lambda: 0.0)
    lines.step(2, {})
    lines.close()
    written = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert written[1:] == ['{"step": 2, "ti', '{"step": 2, "time": 0.0, "metrics": {}}']


def test_a_full_disk_warns_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    lines = JsonLines(Path("/dev/full"))
    lines.step(1, {"a": 1.0})
    lines.step(2, {"a": 1.0})
    lines.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_tracker_that_fails_is_dropped_with_one_warning_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(_recipe(), tmp_path)
    sinks = open_sinks(_recipe("wandb", "tensorboard"), tmp_path, registry={"wandb": Broken, "tensorboard": lambda recipe, run_dir: kept})
    for step in (1, 2, 3):
        sinks.step(step, {"a": float(step), "b": float("nan")})
    assert sinks.names == ("tensorboard",)
    assert kept.steps == [(1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0})]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "wandb failed" in caplog.text
    assert "no route to host" in caplog.text
    sinks.close()
    sinks.close()
    assert kept.closed == 1
    assert len(_lines(tmp_path)) == 3


def test_a_tracker_that_cannot_be_opened_is_left_out_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sinks = open_sinks(_recipe("wandb", "swanlab"), tmp_path, registry={"wandb": Unopenable, "swanlab": Missing})
    assert sinks.names == ()
    assert "log in first" in caplog.text
    assert "pip install 'agentrl[swanlab]'" in caplog.text
    sinks.close()


TRACK = """
import json, sys
from pathlib import Path
from agentrl.config.recipe import Recipe
from agentrl.metrics.sinks import open_sinks
with open_sinks(Recipe.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2])) as sinks:
    sinks.step(2, {"batch/reward_mean": 0.5})
    sinks.step(1, {"batch/reward_mean": 0.25})
    print("open:", *sinks.names)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern"), [("wandb", "wandb/offline-run-*/*.wandb"), ("tensorboard", "tensorboard/events*"), ("swanlab", "swanlab/run-*/*")]
)
def test_a_real_tracker_keeps_the_run_without_account_network_or_question(tmp_path: Path, name: str, pattern: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed (the extra agentrl[{name}])")
    recipe = _recipe(name).model_dump_json()
    without_account = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "SWANLAB_"))} | {"HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", TRACK, recipe, str(tmp_path)],
        env=without_account,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"open: {name}" in ran.stdout, ran.stderr
    assert any(path.stat().st_size > 0 for path in tmp_path.glob(pattern))
