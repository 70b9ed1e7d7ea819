"""Tasks from files and classes."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.recipe import TaskSource
from agentrl.data.sources import TaskList, load_tasks
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task

REAL_DATA = Path(os.environ.get("AGENTRL_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


class Numbers:
    """A source of tasks as a user would write it."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Task]:
        return (Task(id=f"n{i}", prompt=str(i)) for i in range(self._count))


class Strings:
    """One that is wrong."""

    def __iter__(self) -> Iterator[Any]:
        return iter(["not a task"])


def source_of(path: Path, rows: list[Any], **settings: Any) -> TaskSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskSource(path=str(path), **settings)


def questions(count: int, prefix: str = "q") -> list[dict[str, str]]:
    return [{"id": f"{prefix}{i}", "question": f"question {i}"} for i in range(count)]


def refusal(*sources: TaskSource) -> str:
    with pytest.raises(DataError) as caught:
        load_tasks(sources, seed=0)
    return str(caught.value)


def test_tasks_come_source_after_source_in_the_order_of_the_files(tmp_path: Path):
    tasks = load_tasks([source_of(tmp_path / "a.jsonl", questions(2, "a")), source_of(tmp_path / "b.jsonl", questions(1, "b"), name="mine")], seed=0)
    assert [(task.id, task.source) for task in tasks] == [("a0", "a"), ("a1", "a"), ("b0", "mine")]
    assert [len(part) for part in tasks.parts] == [2, 1]


def test_a_limit_is_a_seeded_subset_in_the_order_of_the_file(tmp_path: Path):
    source = source_of(tmp_path / "a.jsonl", questions(100), limit=10)
    first, again, other = (load_tasks([source], seed=seed) for seed in (0, 0, 1))
    numbers = [int(task.id[1:]) for task in first]
    assert len(numbers) == 10
    assert numbers == sorted(numbers) != list(range(10))
    assert list(first) == list(again) != list(other)


def test_relative_paths_start_at_the_base(tmp_path: Path):
    source_of(tmp_path / "a.jsonl", questions(1))
    assert len(load_tasks([TaskSource(path="a.jsonl")], seed=0, base=tmp_path)) == 1


def test_a_class_of_the_users_is_a_source(tmp_path: Path):
    source = TaskSource(factory=f"{__name__}:Numbers", options={"count": 3}, limit=2)
    assert len(load_tasks([source], seed=0)) == 2
    assert "item 0 is a str, not an agentrl.types.Task" in refusal(TaskSource(factory=f"{__name__}:Strings"))
    with pytest.raises(ConfigError, match="has no Missing"):
        load_tasks([TaskSource(factory=f"{__name__}:Missing")], seed=0)


def test_an_id_that_occurs_twice_is_refused_with_both_places(tmp_path: Path):
    told = refusal(source_of(tmp_path / "a.jsonl", questions(2)), source_of(tmp_path / "b.jsonl", questions(1)))
    assert told == f"{tmp_path}/b.jsonl:1: the task id 'q0' occurs twice, first at {tmp_path}/a.jsonl:1: ids must be unique over all sources"


def test_empty_lines_are_passed_over_and_lines_still_counted(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "a", "question": "q"}\n\n{"id": "b"}\n')
    assert refusal(TaskSource(path=str(path))).startswith(f"{path}:3: a row needs a question")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", ":1: not JSON: Expecting property name"),
        (b'{"question": "\xff"}', ":1: not UTF-8 text: invalid start byte"),
        (b'{"question": "\\ud800"}', ":1: not UTF-8 text: surrogates not allowed"),
        (b"[" * 100_000, ":1: not JSON:"),
        (b"", ": no tasks"),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_its_place(tmp_path: Path, line: bytes, told: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line)
    assert f"{path}{told}" in refusal(TaskSource(path=str(path)))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    assert refusal(TaskSource(path=str(tmp_path / "a.jsonl"))) == f"{tmp_path}/a.jsonl: cannot be read: No such file or directory"
    assert refusal(TaskSource(path=str(tmp_path / "a.parquet"))) == f"{tmp_path}/a.parquet: cannot be read: No such file or directory"


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_the_data_extra_names_the_extra(tmp_path: Path):
    path = tmp_path / "a.parquet"
    path.touch()
    assert refusal(TaskSource(path=str(path))) == f"{path}: reading it needs pyarrow: pip install 'agentrl[data]'"


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_a_hub_data_set_without_the_data_extra_names_the_extra():
    assert refusal(TaskSource(path="hub:org/set")) == "hub:org/set: reading it needs datasets: pip install 'agentrl[data]'"


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow (extra `data`) is not installed")
def test_parquet_rows_of_search_r1_are_read(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": "nq",
            "prompt": [{"role": "user", "content": f"question {i}"}],
            "reward_model": {"ground_truth": {"target": ["a", "b"]}},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    tasks = load_tasks([TaskSource(path=str(tmp_path / "a.parquet"))], seed=0)
    assert [(task.id, task.prompt, task.answers) for task in tasks] == [(f"nq/train/{i}", f"question {i}", ("a", "b")) for i in range(3)]


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"no data at {REAL_DATA}; set AGENTRL_TEST_DATA")
def test_real_questions_are_read_as_they_are():
    tasks = load_tasks([TaskSource(path=str(REAL_DATA / "nq_open" / "dev.jsonl"), name="nq")], seed=0)
    assert isinstance(tasks, TaskList)
    assert len(tasks) == 3610
    assert tasks[0] == Task(
        id="nq-dev-0", prompt="when was the last time anyone was on the moon", answers=("14 December 1972 UTC", "December 1972"), source="nq"
    )
