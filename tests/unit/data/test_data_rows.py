"""Rows of data files as tasks."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.data.rows import task_of_row
from agentrl.errors import DataError

CHAT = {
    "data_source": "nq",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Answer. Question: who?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "Anne"]}},
    "extra_info": {"split": "train", "index": 7},
    "id": "train_7",
    "golden_answers": ["Ann", "Anne"],
}


def task(row: Any, source: str | None = None):
    return task_of_row(row, place="f.jsonl:3", number=2, source=source, default_source="f")


def test_a_question_row_is_read_as_it_is():
    got = task({"id": "q1", "question": "who wrote it?", "golden_answers": ["A", "B"], "hops": 2})
    assert (got.id, got.prompt, got.answers, got.source, got.messages, got.extra) == ("q1", "who wrote it?", ("A", "B"), "f", (), {"hops": 2})


def test_a_row_of_search_r1_is_read_as_it_is():
    got = task(CHAT)
    assert (got.id, got.prompt, got.answers, got.source) == ("nq/train/7", "Answer. Question: who?", ("Ann", "Anne"), "nq")
    assert got.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Answer. Question: who?"})
    assert got.extra == {"ability": "fact-reasoning", "extra_info": {"split": "train", "index": 7}, "id": "train_7"}


def test_the_same_index_of_two_sources_makes_two_ids():
    assert task(CHAT).id != task(CHAT | {"data_source": "hotpotqa"}).id


@pytest.mark.parametrize("truth", ["Ann", ["Ann"], {"target": "Ann"}, {"target": ["Ann"]}])
def test_a_ground_truth_comes_in_several_forms(truth: Any):
    assert task(CHAT | {"reward_model": {"ground_truth": truth}}).answers == ("Ann",)


def test_the_source_is_the_recipes_name_else_the_rows_else_the_files():
    assert task({"question": "q", "data_source": "row"}, source="recipe").source == "recipe"
    assert task({"question": "q", "data_source": "row"}).source == "row"
    assert task({"question": "q"}).source == "f"


def test_a_row_without_an_id_is_named_by_its_number():
    assert task({"question": "q"}).id == "f/2"


def test_answers_may_be_left_out_where_an_environment_needs_none():
    assert task({"question": "q"}).answers == ()


@pytest.mark.parametrize(
    ("answer", "golden"),
    [
        ("48/2 = <<48/2=24>>24 in May, 72 in all.\n#### 72", ("72",)),
        ("#### 10,000 \n", ("10,000",)),
        ("first #### 1, then #### 2", ("2",)),
        ("Oslo", ("Oslo",)),
    ],
)
def test_a_row_of_gsm8k_has_its_golden_answer_behind_the_mark(answer: str, golden: tuple[str, ...]):
    got = task({"question": "How many?", "answer": answer})
    assert (got.id, got.prompt, got.answers, got.extra) == ("f/2", "How many?", golden, {"answer": answer})


def test_golden_answers_come_before_a_solution_and_an_answer_that_is_no_text_is_a_column_like_others():
    assert task({"question": "q", "answer": "x #### 1", "golden_answers": ["2"]}).answers == ("2",)
    assert task({"question": "q", "answer": 7}).answers == ()


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([1], "f.jsonl:3: a row must be a JSON object, got [1]"),
        ({"id": "x", "query": "y"}, "f.jsonl:3: a row needs a question (or a chat in prompt, with reward_model); its keys: id, query"),
        ({"question": " "}, "f.jsonl:3: question must be a string with something in it, got ' '"),
        ({"question": "q", "golden_answers": []}, "f.jsonl:3: golden_answers must be a list of at least one string, got []"),
        ({"question": "q", "golden_answers": [1972]}, "f.jsonl:3: golden_answers must be a list of at least one string, got [1972]"),
        ({"question": "q", "answer": "8 - 1 = 7 ####"}, "f.jsonl:3: answer, behind its last ####, must be a string with something in it, got ''"),
        ({"question": "q", "id": None}, "f.jsonl:3: an id must be a string or an integer, got None"),
        ({"question": "q", "data_source": 3}, "f.jsonl:3: data_source must be a string, got 3"),
        ({"prompt": [{"role": "user"}]}, "f.jsonl:3: prompt[0] must be a message with the strings role and content, got {'role': 'user'}"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "f.jsonl:3: prompt holds no message of the user's"),
    ],
)
def test_a_bad_row_is_told_with_its_place(row: Any, told: str):
    with pytest.raises(DataError) as caught:
        task(row)
    assert str(caught.value) == told
