"""One metric's row, and what means and shares are taken over."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["COMPUTED", "GENERATED", "TRAINED", "TRAJECTORIES", "UPDATES", "Metric", "metric"]

GENERATED = "generated tokens"
TRAJECTORIES = "trajectories"
COMPUTED = "trained tokens with a gradient, of the first update"
TRAINED = "trained tokens with a gradient"
UPDATES = "updates of the step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What a number means."""

    name: str
    definition: str
    unit: str
    denominator: str = ""  # what a mean or a share is taken over; empty for counts, extremes and readings
    verl: str = ""  # verl's name, "~" before one that is defined otherwise

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric."""
        head, *rest = re.split(r"<[^>]+>", self.name)
        if not rest:
            return name == head
        pattern = re.escape(head) + "".join(r"[^/]+" + re.escape(part) for part in rest[:-1]) + ".+" + re.escape(rest[-1])
        return re.fullmatch(pattern, name) is not None


def metric(name: str, definition: str, unit: str, denominator: str = "", verl: str = "") -> Metric:
    """A row, in the order in which it is written."""
    return Metric(name=name, definition=definition, unit=unit, denominator=denominator, verl=verl)
