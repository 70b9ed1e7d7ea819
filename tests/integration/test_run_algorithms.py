"""Whole runs of the quick start by other methods: each learns to search."""

import json
import time

import pytest
from running import ROOT, SHORT_WARM_START, finish, output, start

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"

METHODS = {
    "ppo": ["critic.learning_rate=1e-3", "algorithm.advantage.estimator=gae"],
    "grpo": [],
    "rloo": ["algorithm.advantage.estimator=rloo"],
    "reinforce_plus_plus": ["algorithm.advantage.estimator=reinforce_plus_plus"],
    "gspo": ["algorithm.loss.name=gspo", "algorithm.loss.clip_low=3e-3", "algorithm.loss.clip_high=4e-3"],
}
SECONDS = 240.0


def summary_of(run_dir, *overrides, deadline_s):
    process = start(run_dir, "run.launcher=local", "metrics.console=plain", "eval.every=null", *overrides, recipe=QUICKSTART)
    assert finish(process, run_dir, deadline_s=deadline_s) == 0, output(run_dir)
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.slow
def test_ppo_with_a_critic_learns_in_45_seconds(tmp_path):
    told = summary_of(tmp_path / "ppo", *METHODS["ppo"], *SHORT_WARM_START, "run.steps=null", f"run.hours={45 / 3600}", deadline_s=300)
    assert told["eval"]["final"]["em"] > told["eval"]["initial"]["em"] + 0.1
    last = json.loads((tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()[-2])["metrics"]
    assert {"critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/clip_share"} <= last.keys()


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_every_method_raises_held_out_exact_match_by_three_tenths_within_four_minutes(tmp_path, method):
    """All from the same warm start, which is not counted; start-up and both evaluations are."""
    summary_of(tmp_path / "warm", "run.steps=1", "eval.initial=false", "eval.final=false", deadline_s=600)
    started = time.monotonic()
    told = summary_of(tmp_path / method, *METHODS[method], "run.steps=25", deadline_s=600)
    assert time.monotonic() - started < SECONDS
    assert told["eval"]["final"]["em"] >= told["eval"]["initial"]["em"] + 0.3
