"""The quick start against a real SGLang server: `make test-sglang` sets one up and runs this."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from exactness import gaps, trained_trajectories
from running import ROOT, family, finish, gone, output, start, wait_for

from agentrl.buffer.records import BatchTrained
from agentrl.system.status import status

PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(PYTHON is None, reason="AGENTRL_SGLANG_PYTHON names no Python that has sglang: make test-sglang sets one up"),
]

TOLERANCE = 1e-3  # nats: float32 in two implementations
RUN_S = 900.0
# A tenth of the quick start: SGLang makes some 600 tokens a second without a GPU.
SMALL = ("run.steps=20", "learner.groups_per_batch=8", "eval.every=10", "eval.sets.heldout.tasks[0].limit=100", "weights.keep_snapshots=true")
SGLANG = ("run.launcher=local", "engine.kind=sglang", f"engine.python={PYTHON}", "engine.threads=2")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 20 steps whose every process is gone."""
    directory = tmp_path_factory.mktemp("runs") / "sglang"
    process = start(directory, *SGLANG, *SMALL, recipe=ROOT / "recipes" / "quickstart.yaml")
    wait_for(directory, BatchTrained, 1, process, within_s=RUN_S)
    processes = family(process)
    assert any("sglang" in " ".join(one.cmdline()) for one in processes)
    assert finish(process, directory, deadline_s=RUN_S) == 0, output(directory)
    assert gone(processes)
    return directory


def test_held_out_exact_match_rises(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    print("held-out EM", summary["eval"]["initial"]["em"], "->", summary["eval"]["final"]["em"], "in", round(summary["wall_s"]), "s")
    assert summary["eval"]["final"]["em"] >= summary["eval"]["initial"]["em"] + 0.2


def test_its_ledger_balances(run_dir):
    told = status(run_dir)
    assert (told["phase"], told["step"], told["ledger"]["trained"]) == ("finished", 20, 20 * 8 * 16)


def test_every_token_has_the_logprob_of_its_version_also_where_weights_came_in_mid_episode(run_dir):
    trajectories = trained_trajectories(run_dir)
    assert len(trajectories) == 20 * 8 * 16
    crossing = sum(trajectory.version_count >= 2 for trajectory in trajectories)
    assert crossing >= 100
    found = gaps(run_dir, trajectories)
    print(found, "of", len(trajectories), "trajectories", crossing, "of two or more versions")
    assert found.tokens == sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
    assert found.own <= TOLERANCE
    assert found.others > 10 * TOLERANCE  # the versions do differ: the check above could have failed
