"""The token limits of an episode, and which of them a turn ran into."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.recipe import LimitsRecipe
from agentrl.env import StepResult
from agentrl.errors import EnvironmentFailure
from agentrl.rollout.completion import LENGTH, Completion
from agentrl.rollout.tokens import Encoded
from agentrl.types import CloseCause, StopReason

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Lengths in tokens. Defaults are Search-R1's."""

    prompt_tokens: int = 2048
    completion_tokens: int = 500  # per turn
    observation_tokens: int = 500  # per turn
    context_tokens: int = 4096  # prompt and all turns

    @classmethod
    def of(cls, recipe: LimitsRecipe) -> Limits:
        """Those of a recipe."""
        return cls(**recipe.model_dump())

    def check_prompt(self, length: int) -> None:
        """Refuse a prompt over its limit, or one that leaves no room for a token: the question is never cut.

        Raises:
            EnvironmentFailure: of cause `prompt_limit`.
        """
        limit = min(self.prompt_tokens, self.context_tokens - 1)
        if length > limit:
            raise EnvironmentFailure(f"a prompt of {length} tokens exceeds the limit of {limit}", cause=CloseCause.PROMPT_LIMIT)

    def completion(self, length: int) -> int:
        """Tokens the next completion may have after `length` tokens: at least 1 as long as `stop` said to go on."""
        return min(self.completion_tokens, self.context_tokens - length)

    def stop(self, length: int, completion: Completion, result: StepResult, observation: Encoded | None) -> StopReason | None:
        """Why the episode ends after this turn; None where it goes on. `length` is the episode's before the turn.

        As in Search-R1 a completion cut by its own limit is an action like any other (mostly an invalid one) and the episode goes on. Where
        the environment ends the episode on such a cut action, the limit is the reason.
        """
        cut_by_context = self.context_tokens - length < self.completion_tokens
        limit = StopReason.CONTEXT_LIMIT if cut_by_context else StopReason.COMPLETION_LIMIT
        if result.stop is not None or observation is None:
            return limit if completion.stop == LENGTH and result.stop is not StopReason.ANSWERED else result.stop
        if completion.stop == LENGTH and cut_by_context:
            return limit
        if not observation.fits:
            return StopReason.OBSERVATION_LIMIT
        full = length + len(completion.token_ids) + len(observation.ids) >= self.context_tokens
        return StopReason.CONTEXT_LIMIT if full else None
