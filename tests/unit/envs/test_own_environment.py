import importlib.util
from pathlib import Path
from typing import Any

import trio

from agentrl.env import StepResult
from agentrl.types import StopReason, Task

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_environment.py"
TASK = Task(id="1", prompt="I think of a number from 1 to 100.", answers=("42",))


def example() -> Any:
    spec = importlib.util.spec_from_file_location("own_environment", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GuessTheNumber


def play(*completions: str, **options: Any) -> list[StepResult]:
    async def main() -> list[StepResult]:
        env = example()(**options)
        prompt = await env.start(TASK)
        assert prompt.text.startswith("I think of a number from 1 to 100. Guess it")
        return [await env.step(completion) for completion in completions]

    return trio.run(main)


def test_hints_lead_to_the_number():
    results = play("I try <guess> 50 </guess>", "<guess>25</guess>", "<guess> 42 </guess>")
    assert [result.observation.text if result.observation else result.stop for result in results] == [
        "The number is lower.",
        "The number is higher.",
        StopReason.ANSWERED,
    ]
    assert results[-1].parts == {"found": 1.0}


def test_the_last_guess_ends_it():
    results = play("<guess> 1 </guess>", "no idea", guesses=2)
    assert results[0].observation is not None
    assert (results[1].stop, results[1].parts) == (StopReason.TURN_LIMIT, {"found": 0.0})


def test_a_completion_without_a_guess_is_told_so():
    [result] = play("42", guesses=3)
    assert result.action == "invalid"
    assert result.observation is not None
    assert "between <guess> and </guess>" in result.observation.text


def test_it_is_a_complete_environment_in_25_lines():
    text = EXAMPLE.read_text()
    lines = [line for line in text[text.index("class ") :].splitlines() if line.strip()]
    assert len(lines) <= 25
