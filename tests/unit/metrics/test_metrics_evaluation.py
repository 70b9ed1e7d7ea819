"""What an evaluation writes down, and how two of them are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from metrics_episodes import episode

from agentrl.buffer_api import EvaluationResult
from agentrl.metrics.catalogue import unknown
from agentrl.metrics.evaluation import compare, evaluation_metrics, write_evaluation
from agentrl.types import CloseCause, StopReason, Task, Trajectory

Rows = Sequence[tuple[Task, Trajectory | CloseCause]]


def _result(rows: Rows, *, set: str, step: int, versions: tuple[int, int]) -> EvaluationResult:
    return EvaluationResult(evaluation=f"{set}@{step}", set=set, step=step, stage="periodic", versions=versions, rows=tuple(rows))


def _decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _task(ordinal: int, source: str = "nq") -> Task:
    return Task(id=f"task-{ordinal}", prompt=f"question {ordinal}?", answers=("Paris",), source=source)


def _evaluated(name: str = "heldout", step: int = 20) -> EvaluationResult:
    """Three scored episodes of two tasks, out of order, and one failure."""
    right = episode(("search", [4, 4]), ("answer", [5]), reward=1.0, sample=(0, 0))
    wrong = episode(("answer", [5]), reward=0.0, sample=(0, 1))
    other = episode(("answer", [5, 5, 5]), reward=1.0, sample=(1, 0), source="hotpot", stop=StopReason.TURN_LIMIT)
    rows: Rows = [(_task(1, "hotpot"), other), (_task(0), wrong), (_task(0), right), (_task(2), CloseCause.TOOL_TIMEOUT)]
    return _result(rows, set=name, step=step, versions=(4, 5))


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_row_says_everything_about_its_episode(tmp_path: Path) -> None:
    write_evaluation(_evaluated(), tmp_path, _decode)
    row = _rows(tmp_path / "step_20.jsonl")[0]
    assert {key: row[key] for key in ("task_id", "source", "question", "answers", "k", "reward", "stop", "versions")} == {
        "task_id": "task-0",
        "source": "nq",
        "question": "question 0?",
        "answers": ["Paris"],
        "k": 0,
        "reward": 1.0,
        "stop": "answered",
        "versions": [4, 5],
    }
    assert row["prompt"] == "0 1 2"
    assert [(turn["completion"], turn["observation"], turn["action"], turn["results"]) for turn in row["turns"]] == [
        ("3 4", "5 6", "search", ["d1", "d2"]),
        ("7", "", "answer", []),
    ]
    assert row["tokens"] == {"prompt": 3, "generated": 3, "total": 8}
    assert row["transcript"] == "0 1 2 3 4 5 6 7"


def test_rows_are_in_order_and_failures_are_listed_never_scored(tmp_path: Path) -> None:
    numbers = write_evaluation(_evaluated(), tmp_path, _decode)
    assert [(row["task_id"], row["k"]) for row in _rows(tmp_path / "step_20.jsonl")] == [("task-0", 0), ("task-0", 1), ("task-1", 0)]
    assert numbers["failures"] == {"tool_timeout": ["task-2"]}
    assert numbers["em"] == pytest.approx(2 / 3)
    assert (numbers["trajectories"], numbers["tasks"]) == (3, 2)


def test_numbers_by_hand_whole_and_by_source(tmp_path: Path) -> None:
    numbers = write_evaluation(_evaluated(), tmp_path, _decode)
    assert (numbers["tokens"], numbers["turns"], numbers["searches"]) == pytest.approx(((3 + 1 + 3) / 3, 4 / 3, 1 / 3))
    assert numbers["versions"] == [4, 5]
    assert numbers["interval"] == [0.5, 1.0]  # of the prompts' means .5 and 1, two drawn: the 2.5 % and 97.5 % points
    assert (numbers["by_source"]["nq"]["em"], numbers["by_source"]["hotpot"]["em"]) == (0.5, 1.0)
    assert numbers["by_source"]["hotpot"]["stop"] == {"turn_limit": 1.0}
    assert json.loads((tmp_path / "step_20.json").read_text()) == {"heldout": numbers}


def test_em_is_the_exact_match_part_where_there_is_one(tmp_path: Path) -> None:
    rows = [
        (_task(0), episode(("answer", [1]), reward=1.2, parts={"exact_match": 1.0, "format": 0.2})),
        (_task(1), episode(("invalid", [1]), reward=0.2, parts={"format": 0.2}, sample=(1, 0))),
    ]
    numbers = write_evaluation(_result(rows, set="s", step=0, versions=(1, 1)), tmp_path, _decode)
    assert numbers["em"] == 0.5
    assert numbers["reward"] == pytest.approx(0.7)


def test_sets_of_one_step_share_the_files_and_a_repeated_set_replaces_its_own_rows(tmp_path: Path) -> None:
    write_evaluation(_evaluated("a"), tmp_path, _decode)
    write_evaluation(_evaluated("b"), tmp_path, _decode)
    write_evaluation(_evaluated("a"), tmp_path, _decode)
    assert [row["set"] for row in _rows(tmp_path / "step_20.jsonl")] == ["b"] * 3 + ["a"] * 3
    assert sorted(json.loads((tmp_path / "step_20.json").read_text())) == ["a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_20.json", "step_20.jsonl"]


def test_an_error_in_the_middle_leaves_the_earlier_file_whole(tmp_path: Path) -> None:
    write_evaluation(_evaluated(), tmp_path, _decode)
    before = (tmp_path / "step_20.jsonl").read_bytes()

    def failing(ids: Sequence[int]) -> str:
        raise UnicodeError("no such token")

    with pytest.raises(UnicodeError):
        write_evaluation(_evaluated(), tmp_path, failing)
    assert (tmp_path / "step_20.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_20.json", "step_20.jsonl"]


def test_text_that_utf8_cannot_hold_is_kept(tmp_path: Path) -> None:
    write_evaluation(_evaluated(), tmp_path, lambda ids: "caf\u00e9 \u2028 \ud800\r\n")
    assert _rows_by_line(tmp_path / "step_20.jsonl")[0]["transcript"] == "caf\u00e9 \u2028 \ud800\r\n"


def _rows_by_line(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_an_evaluation_of_failures_alone_has_no_numbers_and_no_metrics_of_means(tmp_path: Path) -> None:
    result = _result([(_task(0), CloseCause.ENGINE_ERROR)], set="s", step=3, versions=(2, 2))
    numbers = write_evaluation(result, tmp_path, _decode)
    assert (numbers["em"], numbers["interval"], numbers["by_source"]) == (None, [None, None], {})
    assert evaluation_metrics(numbers) == {"eval/s/trajectories": 0.0, "eval/s/failures": 1.0, "eval/s/version_low": 2.0, "eval/s/version_high": 2.0}


def test_the_metrics_of_an_evaluation_are_in_the_catalogue(tmp_path: Path) -> None:
    metrics = evaluation_metrics(write_evaluation(_evaluated(), tmp_path, _decode))
    assert metrics["eval/heldout/em/hotpot"] == 1.0
    assert metrics["eval/heldout/failures"] == 1.0
    assert unknown(metrics) == []


def test_an_evaluation_agrees_with_itself_and_disagreement_names_its_tasks(tmp_path: Path) -> None:
    write_evaluation(_evaluated(), tmp_path, _decode)
    rows = _rows(tmp_path / "step_20.jsonl")
    assert compare(rows, list(reversed(rows)))["agreement"] == 1.0
    changed = [rows[0], rows[1] | {"tokens_hash": "0"}]
    assert compare(rows, changed) == {"agreement": pytest.approx(1 / 3), "episodes": 3, "only_a": 1, "only_b": 0, "different": ["task-0"]}


def test_rows_without_token_hashes_are_compared_by_transcript() -> None:
    a = {"set": "s", "task_id": "t", "k": 0, "transcript": "x"}
    assert compare([a], [a | {"tokens_hash": "1"}])["agreement"] == 1.0
    assert compare([a], [a | {"transcript": "y"}])["agreement"] == 0.0
    assert compare([], [])["agreement"] == 0.0
