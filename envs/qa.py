"""A question and one answer to it, scored: GSM8K and everything else that needs no tool.

    prompt        the question in a template that says what an answer looks like
    ... 9 * 2 = 18.  #### 18                                             action "answer": the episode ends

There is one completion. Where the scorer finds an answer in it, right or wrong, the episode ends as answered. Where it finds none, the action
is "invalid" and the episode ends at its turn limit, or at the token limit that cut the completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from agentrl.env import Environment, Observation, Segment, StepResult
from agentrl.errors import ConfigError, DataError, EnvironmentFailure, RecipeCodeError
from agentrl.resolve import called, resolve
from agentrl.types import CloseCause, StopReason, Task
from envs.exact_match import exact_match, last_answer
from envs.numeric_answer import numeric_answer
from envs.search_prompts import fill

__all__ = ["PROMPT", "SCORERS", "QAEnv", "Scorer", "exact_answer"]

PROMPT = "{question}\nReason step by step. Then end with a line of the form #### <number>, where <number> is your final answer alone."

Scorer = Callable[[str, Sequence[str]], float | None]
"""Of a completion and the golden answers: what it earns, or None where it holds no answer. It runs between other episodes: it must be fast."""

_MARKED = re.compile(r"#{4,}[ \t]*+([^\n]*?)[ \t]*(?=\n|</?[a-z|\uff5c]|$)")  # to the line's end, or to a tag or control token


class QAEnv(Environment):
    """One question, one answer.

    Args:
        prompt: a text with `{question}`. A task that comes as a chat of its own is used as it is.
        chat: the prompt is a user's message, wrapped by the tokenizer's chat template; otherwise plain text.
        stop_strings: a completion ends behind the first of them; by default where the model ends it.
        scorer: a name in `SCORERS`, or `module:function(completion, answers)`, a `Scorer`. The reward part is called like it: a function's by its
            own name.

    Raises:
        ConfigError: the prompt has no place for the question, or there is no such scorer.
    """

    def __init__(self, *, prompt: str = PROMPT, chat: bool = True, stop_strings: Sequence[str] = (), scorer: str = "numeric") -> None:
        if "{question}" not in prompt or "{context}" in prompt:
            raise ConfigError(f"QAEnv's prompt must be a text with {{question}}, and it has no {{context}} to fill in; got {prompt!r}")
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise ConfigError(f"QAEnv's stop_strings must be a list of strings with something in them, got {stop_strings!r}")
        self.stop_strings = tuple(stop_strings)
        self._prompt = prompt
        self._role = "user" if chat else None
        self._scorer, self._score = scorer, _find_scorer(scorer)

    async def start(self, task: Task) -> Observation:
        """The prompt.

        Raises:
            DataError: the task cannot be asked or scored.
        """
        if not task.answers:
            raise DataError(f"task {task.id} has no golden answers: it cannot be scored")
        self._golden_answers = task.answers
        if not task.messages:
            return Observation(segments=fill(self._prompt, {"question": task.prompt.strip()}), role=self._role)
        if [message.get("role") for message in task.messages] != ["user"]:
            raise DataError(f"task {task.id}: expected a chat of one user message, got {len(task.messages)} messages, or another role")
        return Observation(segments=(Segment(text=task.messages[0]["content"], untrusted=True),), role=self._role)

    async def step(self, completion: str) -> StepResult:
        """Score it, and end.

        Raises:
            EnvironmentFailure: of cause `reward_error`: the scorer raised, or answered no number.
        """
        try:
            score = called(f"scorer {self._scorer}", self._score, completion, self._golden_answers)
        except RecipeCodeError as error:
            raise EnvironmentFailure(str(error), cause=CloseCause.REWARD_ERROR) from error
        if score is not None and not isinstance(score, int | float):
            raise EnvironmentFailure(f"scorer {self._scorer} must return a number or None, got {score!r}", cause=CloseCause.REWARD_ERROR)
        parts = {self._scorer.rpartition(":")[2]: float(score or 0.0)}
        if score is None:
            return StepResult(stop=StopReason.TURN_LIMIT, parts=parts, action="invalid")
        return StepResult(stop=StopReason.ANSWERED, parts=parts, action="answer")


def exact_answer(completion: str, answers: Sequence[str]) -> float | None:
    """1 where what stands behind the last `####` (else in the last `<answer>`) is a golden answer, both normalised as SQuAD does, else 0.

    None where neither is there.
    """
    marked = _MARKED.findall(completion)
    given = marked[-1] if marked else last_answer(completion)
    return None if given is None else float(exact_match(given, answers))


SCORERS: Mapping[str, Scorer] = {
    "numeric": numeric_answer,
    "numeric_flexible": partial(numeric_answer, mode="flexible"),
    "exact": exact_answer,
}


def _find_scorer(name: str) -> Scorer:
    if name in SCORERS:
        return SCORERS[name]
    if ":" not in name:
        raise ConfigError(f"QAEnv's scorer must be one of {', '.join(SCORERS)}, or module:function, got {name!r}")
    found: Scorer = resolve(name)
    if not callable(found):
        raise ConfigError(f"QAEnv's scorer {name} is a {type(found).__name__}, not a function")
    return found
