"""What of a trajectory decides what becomes of its group: kept in memory and in its record, so that nothing is decoded for a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.types import StopReason, Trajectory

__all__ = ["TrajectorySummary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectorySummary:
    """A trajectory without its tokens."""

    k: int  # place in its group
    reward: float  # total
    parts: Mapping[str, float] = field(default_factory=dict)  # named parts of the reward
    stop: StopReason = StopReason.ANSWERED
    length: int = 0  # tokens, prompt and observations included
    generated: int = 0  # tokens the policy wrote

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectorySummary:
        """That of a trajectory."""
        return cls(
            k=trajectory.ticket.k,
            reward=trajectory.reward.total,
            parts=dict(trajectory.reward.parts),
            stop=trajectory.stop,
            length=len(trajectory),
            generated=trajectory.generated,
        )

    def to_plain(self) -> list[Any]:
        """As a plain list."""
        return [self.k, self.reward, dict(self.parts), str(self.stop), self.length, self.generated]

    @classmethod
    def from_plain(cls, value: Any) -> TrajectorySummary:
        """Of `to_plain`."""
        k, reward, parts, stop, length, generated = value
        return cls(k=k, reward=reward, parts=parts, stop=StopReason(stop), length=length, generated=generated)
