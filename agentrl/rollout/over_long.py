"""The soft over-long penalty: a reward that falls near a length limit, instead of one that breaks off at it."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.recipe import OverLongRecipe

__all__ = ["PART", "OverLong"]

PART = "over_long"  # the reward's part


@dataclass(frozen=True, kw_only=True, slots=True)
class OverLong:
    """DAPO's soft over-long punishment (Yu et al. 2025, eq. 13), times a factor.

    With L = `limit_tokens`, C = `buffer_tokens` and a trajectory of y generated tokens (observations do not count):

        0                           y <= L - C
        factor * (L - C - y) / C    L - C < y <= L
        -factor                     L < y
    """

    limit_tokens: int
    buffer_tokens: int
    factor: float = 1.0

    @classmethod
    def of(cls, recipe: OverLongRecipe | None) -> OverLong | None:
        """That of a recipe."""
        return None if recipe is None else cls(**recipe.model_dump())

    def penalty(self, generated: int) -> float:
        """What a trajectory of `generated` tokens is penalised with, in [-factor, 0]."""
        free = self.limit_tokens - self.buffer_tokens
        return 0.0 - self.factor * min(max(generated - free, 0) / self.buffer_tokens, 1.0)
