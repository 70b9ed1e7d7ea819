"""What is on display while a run goes on, and what can show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Board", "Evaluated", "Phase", "Screen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """One evaluation of a set, as shown."""

    step: int
    name: str
    em: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What the run is doing, and how far it is where that is known."""

    name: str
    done: int = 0
    total: int = 0  # 0: not known
    detail: str = ""


@dataclass(kw_only=True, slots=True)
class Board:
    """All that is on display."""

    title: str
    total_steps: int | None
    capacity: int  # groups that may be alive at once
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    phase: Phase = Phase(name="starting")


class Screen(Protocol):
    """Shows a board."""

    def step(self, board: Board) -> None:
        """A step was trained."""

    def evaluation(self, board: Board) -> None:
        """An evaluation ended."""

    def phase(self, board: Board) -> None:
        """The phase or its progress changed."""

    def message(self, text: str, board: Board) -> None:
        """Something to say once."""

    def close(self) -> None:
        """Leave the terminal as it was."""
