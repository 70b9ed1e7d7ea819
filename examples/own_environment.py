"""An environment of one's own: a number is found by guessing, each guess answered by a hint.

In a recipe: `env: {factory: "own_environment:GuessTheNumber", options: {guesses: 7}}`, run from this directory. Its tasks are JSON lines
such as `{"id": "1", "question": "I think of a number from 1 to 100.", "golden_answers": ["42"]}`.
"""

import re

from agentrl.env import Environment, Observation, StepResult
from agentrl.types import StopReason, Task


class GuessTheNumber(Environment):
    """Find the number. A right guess earns 1, and all of them used up earn 0."""

    stop_strings = ("</guess>",)

    def __init__(self, *, guesses: int = 7) -> None:
        self.guesses_left = guesses

    async def start(self, task: Task) -> Observation:
        self.number = int(task.answers[0])
        return Observation.user(f"{task.prompt} Guess it, for example <guess> 50 </guess>, and I say higher or lower.")

    async def step(self, completion: str) -> StepResult:
        match = re.search(r"<guess>\s*(\d{1,9})\s*</guess>", completion)
        guess = int(match[1]) if match else None
        self.guesses_left -= 1
        if guess == self.number:
            return StepResult(action="guess", argument=str(guess), stop=StopReason.ANSWERED, parts={"found": 1.0})
        if self.guesses_left == 0:
            return StepResult(action="guess", stop=StopReason.TURN_LIMIT, parts={"found": 0.0})
        if guess is None:
            return StepResult(action="invalid", observation=Observation.user("Put a number between <guess> and </guess>."))
        hint = "higher" if guess < self.number else "lower"
        return StepResult(action="guess", argument=str(guess), observation=Observation.user(f"The number is {hint}."))
