from collections.abc import Sequence
from typing import Any

import pytest
import trio

from agentrl.env import Observation, StepResult
from agentrl.errors import ConfigError, DataError, EnvironmentFailure
from agentrl.types import StopReason, Task
from envs.qa import PROMPT, QAEnv, exact_answer

TASK = Task(id="t", prompt=" How many? ", answers=("18",))


def play(completion: str, task: Task = TASK, **options: Any) -> tuple[Observation, StepResult]:
    """The prompt, and what the environment says to the completion."""

    async def main() -> tuple[Observation, StepResult]:
        env = QAEnv(**options)
        return await env.start(task), await env.step(completion)

    return trio.run(main)


def length(completion: str, answers: Sequence[str]) -> float | None:
    return len(completion) / len(answers[0]) if completion else None


def failing(completion: str, answers: Sequence[str]) -> float:
    raise LookupError("no such word")


def wordy(completion: str, answers: Sequence[str]) -> str:
    return "good"


@pytest.mark.parametrize(
    ("completion", "scorer", "stop", "action", "reward"),
    [
        ("9 * 2 = 18\n#### 18", "numeric", StopReason.ANSWERED, "answer", 1.0),
        ("#### 17", "numeric", StopReason.ANSWERED, "answer", 0.0),
        ("it is 18", "numeric", StopReason.TURN_LIMIT, "invalid", 0.0),
        ("it is 18", "numeric_flexible", StopReason.ANSWERED, "answer", 1.0),
        ("#### 18", "exact", StopReason.ANSWERED, "answer", 1.0),
        ("18", "exact", StopReason.TURN_LIMIT, "invalid", 0.0),
        ("four", "test_qa:length", StopReason.ANSWERED, "answer", 2.0),  # 4 characters for each of the 2 in "18"
        ("", "test_qa:length", StopReason.TURN_LIMIT, "invalid", 0.0),
    ],
)
def test_one_completion_ends_the_episode(completion: str, scorer: str, stop: StopReason, action: str, reward: float):
    _, result = play(completion, scorer=scorer)
    assert result == StepResult(stop=stop, action=action, parts={scorer.rpartition(":")[2]: reward})


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("#### the Oslo <|im_end|>", 1.0),
        ("#### Oslo</s>", 1.0),
        ("#### Bergen\n#### Oslo\nas I said", 1.0),
        ("<answer> Oslo </answer>", 1.0),
        ("#### Oslo or Bergen", 0.0),
        ("####", 0.0),
        ("Oslo", None),
    ],
)
def test_an_exact_answer_stands_behind_the_mark_or_in_its_tags(completion: str, score: float | None):
    assert exact_answer(completion, ["Oslo"]) == score


def test_the_question_is_untrusted_and_the_template_is_not():
    prompt, _ = play("", prompt="Q: {question} A:", chat=False)
    assert [(segment.text, segment.untrusted) for segment in prompt.segments] == [("Q:", False), (" How many?", True), (" A:", False)]
    assert prompt.role is None
    prompt, _ = play("")
    assert (prompt.role, prompt.text) == ("user", PROMPT.replace("{question}", "How many?"))


def test_a_task_that_is_a_chat_is_used_as_it_is():
    chat = Task(id="t", prompt="How many?", answers=("18",), messages=({"role": "user", "content": "Say ####. How many?"},))
    assert play("", chat)[0].text == "Say ####. How many?"
    with pytest.raises(DataError, match="task t: expected a chat of one user message, got 2 messages"):
        play("", Task(id="t", prompt="q", answers=("1",), messages=({"role": "system", "content": "s"}, {"role": "user", "content": "q"})))


def test_a_task_without_answers_is_refused():
    with pytest.raises(DataError, match="task t has no golden answers"):
        play("", Task(id="t", prompt="q"))


@pytest.mark.parametrize(
    ("scorer", "told"),
    [
        ("test_qa:failing", "scorer test_qa:failing failed: LookupError: no such word"),
        ("test_qa:wordy", "scorer test_qa:wordy must return a number or None, got 'good'"),
    ],
)
def test_a_scorer_that_fails_is_no_reward_of_0(scorer: str, told: str):
    with pytest.raises(EnvironmentFailure) as caught:
        play("#### 18", scorer=scorer)
    assert (str(caught.value), caught.value.cause) == (told, "reward_error")


def test_a_golden_answer_that_is_no_number_is_no_reward_of_0():
    with pytest.raises(EnvironmentFailure, match="expected a golden answer that is a number") as caught:
        play("#### 18", Task(id="t", prompt="q", answers=("many",)))
    assert caught.value.cause == "reward_error"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scorer": "numbers"}, "scorer must be one of numeric, numeric_flexible, exact, or module:function, got 'numbers'"),
        ({"scorer": "test_qa:TASK"}, "scorer test_qa:TASK is a Task, not a function"),
        ({"scorer": "test_qa:nothing"}, "has no nothing"),
        ({"prompt": "Answer."}, "prompt must be a text with {question}"),
        ({"prompt": "{context} {question}"}, "it has no {context} to fill in"),
        ({"stop_strings": "</answer>"}, "stop_strings must be a list of strings with something in them, got '</answer>'"),
        ({"stop_strings": [""]}, "stop_strings must be a list"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as caught:
        QAEnv(**options)
    assert told in str(caught.value)


def test_stop_strings_are_the_environments():
    assert tuple(QAEnv(stop_strings=["</answer>"]).stop_strings) == ("</answer>",)
    assert tuple(QAEnv().stop_strings) == ()
