"""One row of a data file, as a task.

Three shapes are read as they are. A plain question:

    {"id": "nq-7", "question": "who wrote ...", "golden_answers": ["..."], ...}

GSM8K's question with a worked solution, whose golden answer is what stands behind its last `####` (the whole, where there is none):

    {"question": "Natalia sold ...", "answer": "... 48+24 = <<48+24=72>>72 clips ...\n#### 72"}

and the rows of Search-R1 and verl, which hold a whole chat:

    {"data_source": "nq", "prompt": [{"role": "user", "content": "..."}], "reward_model": {"ground_truth": {"target": ["..."]}},
     "extra_info": {"split": "train", "index": 7}, ...}

Columns that are none of these are kept in the task's `extra`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import DataError
from agentrl.types import Task

__all__ = ["task_of_row"]

_ANSWER_MARK = "####"  # Cobbe et al. 2021


def task_of_row(row: Any, *, place: str, number: int, source: str | None, default_source: str) -> Task:
    """The task of a row.

    Args:
        place: file and line, for error messages.
        number: of the row in its file, from 0: names a row that has neither an id nor an index.
        source: the task's source; None takes the row's `data_source`, else `default_source`.

    Raises:
        DataError: naming `place`, what was expected and what came.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: a row must be a JSON object, got {_shown(row)}")
    named = source or row.get("data_source") or default_source
    if not isinstance(named, str):
        raise DataError(f"{place}: data_source must be a string, got {_shown(named)}")
    if isinstance(row.get("prompt"), list):
        return _chat_task(row, place, number, named)
    return _question_task(row, place, number, named)


def _question_task(row: Mapping[str, Any], place: str, number: int, source: str) -> Task:
    if "question" not in row:
        keys = ", ".join(map(str, row)) or "none"
        raise DataError(f"{place}: a row needs a question (or a chat in prompt, with reward_model); its keys: {keys}")
    return Task(
        id=str(_identifier(row["id"], place)) if "id" in row else f"{source}/{number}",
        prompt=_text(row["question"], f"{place}: question"),
        answers=_question_answers(row, place),
        source=source,
        extra={key: value for key, value in row.items() if key not in ("id", "question", "golden_answers", "data_source")},
    )


def _question_answers(row: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """Of `golden_answers`, else of a text in `answer`; none where there is neither."""
    if "golden_answers" in row:
        return _answers(row["golden_answers"], f"{place}: golden_answers")
    solution = row.get("answer")
    if not isinstance(solution, str):
        return ()
    return (_text(solution.rpartition(_ANSWER_MARK)[2], f"{place}: answer, behind its last {_ANSWER_MARK},").strip(),)


def _chat_task(row: Mapping[str, Any], place: str, number: int, source: str) -> Task:
    messages = tuple(_message(message, f"{place}: prompt[{index}]") for index, message in enumerate(row["prompt"]))
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not asked:
        raise DataError(f"{place}: prompt holds no message of the user's")
    return Task(
        id=_chat_id(row, place, number, source),
        prompt=asked[-1],
        answers=_ground_truth(row, place),
        source=source,
        messages=messages,
        extra={key: value for key, value in row.items() if key not in ("prompt", "reward_model", "golden_answers", "data_source")},
    )


def _chat_id(row: Mapping[str, Any], place: str, number: int, source: str) -> str:
    """Search-R1's indices count within a source (and a split), and its ids within a split: alone they are not unique."""
    info = row.get("extra_info")
    info = info if isinstance(info, Mapping) else {}
    index = info["index"] if info.get("index") is not None else row.get("id", number)
    split = info.get("split")
    return "/".join([source, *([split] if isinstance(split, str) else []), str(_identifier(index, place))])


def _ground_truth(row: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """Of `reward_model.ground_truth` ({"target": ...}, a string or a list), else of `golden_answers`."""
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if truth is not None:
        return _answers(truth, f"{place}: reward_model.ground_truth")
    return _answers(row["golden_answers"], f"{place}: golden_answers") if "golden_answers" in row else ()


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise DataError(f"{where} must be a message with the strings role and content, got {_shown(message)}")
    return {"role": message["role"], "content": message["content"]}


def _answers(value: Any, where: str) -> tuple[str, ...]:
    answers: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where} must be a list of at least one string, got {_shown(value)}")
    return tuple(answers)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} must be a string with something in it, got {_shown(value)}")
    return value


def _identifier(value: Any, place: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{place}: an id must be a string or an integer, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
