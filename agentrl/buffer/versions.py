"""Versions: names of published snapshots of weights. They only ever grow, also over rollbacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.buffer_api import VersionInfo

__all__ = ["Versions"]


@dataclass(slots=True)
class _Version:
    step: int  # its weights were made at
    abandoned: bool = False  # in a history that was rolled back
    bad: bool = False  # ... because of these weights, or of some before them: what they wrote is not trained on


class Versions:
    """Every version that was ever reserved, and which one the engines have."""

    def __init__(self) -> None:
        self._made: list[_Version] = []  # by version: 0, 1, ...
        self.published: int | None = None  # the newest that every live engine reported
        self.serving = False  # ... since the run was last resumed, which starts new engines

    @property
    def next(self) -> int:
        """The version that is reserved next."""
        return len(self._made)

    def known(self, version: int) -> bool:
        """Whether it was reserved."""
        return 0 <= version < len(self._made)

    def reserve(self, version: int, step: int) -> None:
        """A version is reserved for the weights of `step`. Gaps (there are none) would count as abandoned."""
        while len(self._made) < version:
            self._made.append(_Version(step=step, abandoned=True))
        self._made.append(_Version(step=step))

    def publish(self, version: int) -> None:
        """Every live engine reports it."""
        self.published = version if self.published is None else max(self.published, version)
        self.serving = True

    def roll_back(self, step: int, *, bad_after: int | None = None) -> None:
        """Versions made after `step` are abandoned; those of them that were made after `bad_after` are bad."""
        for made in self._made:
            if made.step > step and not made.abandoned:
                made.abandoned, made.bad = True, bad_after is not None and made.step > bad_after

    def bad(self, versions: Iterable[int]) -> bool:
        """Whether one of them is bad."""
        return any(self._made[version].bad for version in versions)

    def info(self, version: int, *, newest: int | None = None) -> VersionInfo:
        """What is known of it, now or when `newest` was the newest version."""
        made = self._made[version]
        return VersionInfo(step=made.step, abandoned=made.abandoned, age_versions=(self.next - 1 if newest is None else newest) - version)

    def staleness(self, versions: Iterable[int], step: int) -> int:
        """The largest staleness of tokens of these versions in a batch that starts at `step`; 0 where there are none."""
        return max((self.info(version).staleness(step) for version in versions), default=0)
