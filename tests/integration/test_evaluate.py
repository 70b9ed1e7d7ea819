"""`agentrl evaluate` and exports: what a run leaves behind is the model it evaluated last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import TINY, finish, output, start
from transformers import AutoModelForCausalLM

from agentrl.learner.export import export_checkpoint
from agentrl.metrics.evaluation import compare

pytestmark = pytest.mark.slow

HELDOUT = 'eval.sets.heldout.tasks=[{path: "prepared:heldout.jsonl"}]'
SIZE = "prepare.options.heldout_tasks=120"
DEADLINE_S = 120.0


def evaluated(runs: Path, checkpoint: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", "evaluate", str(TINY), "--checkpoint", str(checkpoint)]
    return subprocess.run(
        [*command, f"run.dir={runs}", "name=again", *overrides],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_last_checkpoint_loads_elsewhere_and_plays_the_runs_last_evaluation_again(tmp_path):
    run_dir = tmp_path / "evaluated"
    process = start(run_dir, "run.steps=2", "checkpoint.every=2", "algorithm.entropy.coefficient=1.0", SIZE, HELDOUT)
    assert finish(process, run_dir) == 0, output(run_dir)
    (checkpoint,) = (run_dir / "checkpoints").glob("*-s00000002")

    exported = export_checkpoint(checkpoint, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.config.model_type == "qwen2"
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) > 100_000

    process = evaluated(tmp_path, exported, SIZE, HELDOUT)
    assert process.returncode == 0, process.stderr
    again = tmp_path / "again.eval" / "exported-1"
    numbers = json.loads((again / "evaluation.json").read_text())["sets"]["heldout"]
    assert (numbers["trajectories"], numbers["failures"]) == (120, {})
    before, last, repeated = (rows(path) for path in (run_dir / "eval/step_0.jsonl", run_dir / "eval/step_2.jsonl", again / "eval/step_0.jsonl"))
    assert compare(last, repeated)["agreement"] >= 0.99
    assert compare(last, before)["agreement"] < 0.5  # training changed what is said: agreement is no accident


def test_evaluating_without_evaluation_sets_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    process = evaluated(tmp_path, tmp_path / "model")
    assert process.returncode == 2
    assert "no eval.sets" in process.stderr


def test_a_directory_that_holds_no_model_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "model").mkdir()
    process = evaluated(tmp_path, tmp_path / "model", HELDOUT)
    assert process.returncode == 2
    assert "neither a checkpoint" in process.stderr
    assert not (tmp_path / "again.eval").exists()
