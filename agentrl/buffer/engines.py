"""The roster: which engines live, as the driver says, and which of them hold the newest weights, as the learner says.

    live ──learner──> current ──learner──> fenced ──learner──> current          a dead engine leaves; it comes back under a new incarnation
      └─ it begins fenced                    └─ given up: the driver restarts it

It is told anew by every start of a run, so it is in no record. What is said of an incarnation that is no longer there is ignored.
"""

from __future__ import annotations

from dataclasses import replace

from agentrl.buffer_api import EngineEntry, EngineRoster

__all__ = ["Engines"]


class Engines:
    """The roster of a run's engines. Its revision grows with every change."""

    def __init__(self) -> None:
        self._revision = 0
        self._live: dict[int, EngineEntry] = {}

    @property
    def roster(self) -> EngineRoster:
        """The engines that live, by index."""
        return EngineRoster(revision=self._revision, engines=tuple(self._live[index] for index in sorted(self._live)))

    def live(self, index: int, incarnation: int, url: str) -> None:
        """An engine answers at `url`. It is fenced until the learner has brought it the newest weights."""
        known = self._live.get(index)
        if known is None or known.incarnation < incarnation:
            self._put(EngineEntry(index=index, incarnation=incarnation, url=url))

    def dead(self, index: int, incarnation: int) -> bool:
        """An engine is gone, and all its older incarnations. False: a newer one lives, or none did."""
        known = self._live.get(index)
        if known is None or known.incarnation > incarnation:
            return False
        del self._live[index]
        self._revision += 1
        return True

    def current(self, index: int, incarnation: int, version: int) -> bool:
        """An engine holds `version`, the newest: episodes may sit at it. False: it is not there any more."""
        return self._change(index, incarnation, version=version, current=True, reason="", given_up=False)

    def fenced(self, index: int, incarnation: int, reason: str, *, give_up: bool) -> bool:
        """No episode may sit at an engine.

        Args:
            give_up: the learner cannot bring it to the newest weights: it is to be restarted.
        """
        return self._change(index, incarnation, version=None, current=False, reason=reason, given_up=give_up)

    def _change(self, index: int, incarnation: int, *, version: int | None, current: bool, reason: str, given_up: bool) -> bool:
        known = self._live.get(index)
        if known is None or known.incarnation != incarnation:
            return False
        changed = replace(known, version=version, current=current, reason=reason, given_up=given_up)
        if changed != known:
            self._put(changed)
        return True

    def _put(self, entry: EngineEntry) -> None:
        self._live[entry.index] = entry
        self._revision += 1
