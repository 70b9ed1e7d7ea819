"""Which groups are trained on again, where a recipe has `buffer.replay`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError, RecipeCodeError
from agentrl.resolve import called, resolve
from agentrl.seeds import mix

__all__ = ["Candidate", "Select", "choose", "resolve_select"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A trained group with uses left and no token older than `max_token_age`."""

    ordinal: int
    uses: int  # batches it was in
    staleness: int  # of its oldest token, in the batch that is being made
    task: str = ""  # its task's id
    rewards: tuple[float, ...] = ()  # of its trajectories, by k


Select = Callable[[Sequence[Candidate], int, int], Sequence[int]]
"""`select(candidates by ordinal, count, seed) -> ordinals`: `count` distinct ones of the candidates."""


def resolve_select(select: str) -> Select:
    """`oldest`, `uniform`, or the function `module:function`.

    Raises:
        ConfigError: there is no such function.
    """
    if select in _BUILT_IN:
        return _BUILT_IN[select]
    if ":" not in select:
        raise ConfigError(f"buffer.replay.select must be oldest, uniform or module:function, got {select!r}")
    try:
        function = resolve(select)
    except ConfigError as error:
        raise ConfigError(f"buffer.replay.select: {error}") from error
    if not callable(function):
        raise ConfigError(f"buffer.replay.select: {select} is not a function")
    return function  # type: ignore[no-any-return]


def choose(select: Select, candidates: Sequence[Candidate], count: int, *, seed: int, batch: int) -> list[int]:
    """The ordinals of `count` candidates (all of them where there are fewer), checked.

    Raises:
        RecipeCodeError: the function raised, or did not do what it should.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.ordinal)
    count = min(count, len(ordered))
    if count == 0:
        return []
    chosen = called("buffer.replay.select", lambda: list(select(ordered, count, mix(seed, batch))))
    if len(set(chosen)) != count or not set(chosen) <= {candidate.ordinal for candidate in ordered}:
        raise RecipeCodeError(f"buffer.replay.select returned {chosen}, expected {count} distinct ordinals of the candidates")
    return chosen


def _oldest(candidates: Sequence[Candidate], count: int, seed: int) -> list[int]:
    return [candidate.ordinal for candidate in candidates[:count]]


def _uniform(candidates: Sequence[Candidate], count: int, seed: int) -> list[int]:
    return random.Random(seed).sample([candidate.ordinal for candidate in candidates], count)


_BUILT_IN: dict[str, Select] = {"oldest": _oldest, "uniform": _uniform}
