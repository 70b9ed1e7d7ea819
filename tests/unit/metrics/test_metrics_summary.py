"""summary.json from a run's files, and the history it is read from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl.metrics.history import read_history, read_rows
from agentrl.metrics.overlap import measure_overlap
from agentrl.metrics.summary import summarise


def _line(step: int, metrics: Mapping[str, float | None], time: float = 0.0) -> str:
    return json.dumps({"step": step, "time": time, "metrics": metrics}) + "\n"


def _trained(step: int, reward: float, **more: float) -> str:
    return _line(step, {"batch/groups": 2.0, "batch/trajectories": 4.0, "batch/reward_mean": reward, **more}, time=10.0 * step)


def _numbers(name: str, step: int, em: float, stage: str) -> dict[str, object]:
    return {"set": name, "step": step, "stage": stage, "em": em, "interval": [em - 0.1, em + 0.1], "by_source": {"1-hop": {"em": em}}}


def _evaluated(run_dir: Path, step: int, stage: str, **em: float) -> None:
    (run_dir / "eval").mkdir(exist_ok=True)
    (run_dir / "eval" / f"step_{step}.json").write_text(json.dumps({name: _numbers(name, step, value, stage) for name, value in em.items()}))


def test_a_rollback_replaces_the_steps_it_took_back(tmp_path: Path) -> None:
    lines = [_trained(1, 0.1), _trained(2, 0.2), _trained(3, 0.3), _trained(2, 0.25), _line(1, {"seconds/publish": 0.5})]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    history = read_history(tmp_path)
    assert history.steps == 2
    assert [array.tolist() for array in history.series("batch/reward_mean")] == [[1.0, 2.0], [0.1, 0.25]]
    assert history.series("seconds/publish")[1].tolist() == [0.5], "a later line without a batch adds to its step"


def test_half_a_line_and_values_that_were_not_finite_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(_trained(1, 0.5) + '{"step": 2, "ti\n' + _line(2, {"batch/groups": 2.0, "learner/loss": None}))
    history = read_history(tmp_path)
    assert history.steps == 2
    assert history.series("learner/loss")[1].tolist() == []


def test_the_summary_of_a_run_by_hand(tmp_path: Path) -> None:
    first = {"batch/response_tokens": 10.0, "batch/staleness_mean": 0.0, "batch/staleness_max": 0.0, "batch/staleness/0": 1.0}
    second = {
        "batch/response_tokens": 30.0,
        "batch/staleness_mean": 1.5,
        "batch/staleness_max": 2.0,
        "batch/staleness/1": 0.5,
        "batch/staleness/2": 0.5,
    }
    pace_1 = {"idle/engine": 0.2, "seconds/step": 1.0, "run/elapsed_s": 11.0, "learner/tokens": 40.0, "batch/multi_version_share": 0.0}
    pace_2 = {"idle/engine": 0.6, "seconds/step": 3.0, "run/elapsed_s": 21.0, "learner/tokens": 120.0, "batch/multi_version_share": 0.5}
    (tmp_path / "metrics.jsonl").write_text(_trained(1, 0.1, **first, **pace_1) + _trained(2, 0.2, **second, **pace_2))
    (tmp_path / "run.json").write_text(json.dumps({"name": "mine", "recipe": {"eval": {"headline": "b", "sets": {"a": {}, "b": {}}}}}))
    _evaluated(tmp_path, 0, "initial", a=0.3, b=0.4)
    _evaluated(tmp_path, 2, "final", a=0.8, b=0.9)
    overlap = measure_overlap([(0.0, 10.0, 40)], [(4.0, 7.0)])
    summary = summarise(tmp_path, ledger={"wanted": 8}, overlap=overlap, extra={"phase": "finished"})
    assert (summary["steps"], summary["wall_s"], summary["phase"], summary["ledger"]) == (2, 21.0, "finished", {"wanted": 8})
    assert summary["eval"]["set"] == "b"
    assert (summary["eval"]["initial"]["em"], summary["eval"]["final"]["em"]) == (0.4, 0.9)
    assert summary["eval"]["final"]["interval"] == pytest.approx([0.8, 1.0])
    assert summary["eval"]["sets"]["a"]["final"]["by_source"]["1-hop"]["em"] == 0.8
    assert summary["staleness"] == {"mean": pytest.approx(1.5 * 0.75), "max": 2.0, "histogram": {"0": 0.25, "1": 0.375, "2": 0.375}}
    assert summary["idle"] == {"engine": pytest.approx((0.2 * 1 + 0.6 * 3) / 4), "learner": None}
    assert summary["multi_version_share"] == 0.25
    assert summary["tokens_trained"] == 160.0
    assert summary["overlap"]["share"] == pytest.approx(0.3)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_a_run_that_has_not_reached_its_end_has_no_last_evaluation(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(_trained(1, 0.1) + _trained(2, 0.2))
    _evaluated(tmp_path, 0, "initial", heldout=0.3)
    _evaluated(tmp_path, 1, "final", heldout=0.5)  # of a shorter run that goes on
    _evaluated(tmp_path, 7, "final", heldout=0.9)  # of a history that a rollback took back
    evaluations = summarise(tmp_path)["eval"]
    assert evaluations["initial"]["em"] == 0.3
    assert evaluations["final"] is None


def test_evaluations_without_training_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    _evaluated(tmp_path, 50, "final", heldout=0.9)
    evaluations = summarise(tmp_path)["eval"]
    assert evaluations["initial"] is None
    assert evaluations["final"]["em"] == 0.9


def test_an_empty_directory_has_a_summary_of_nothing(tmp_path: Path) -> None:
    summary = summarise(tmp_path)
    assert (summary["steps"], summary["eval"]["initial"], summary["staleness"]["mean"], summary["overlap"]) == (0, None, None, None)


def test_the_rows_of_a_set_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    rows = [{"set": name, "task_id": str(number)} for number, name in enumerate("abab")]
    (tmp_path / "eval" / "step_4.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["task_id"] for row in read_rows(tmp_path, 4, "b")] == ["1", "3"]
    assert read_rows(tmp_path, 5, "b") == []
