"""Something that members and we do at the same time: their HTTP calls, and our end of a collective. Who is to blame when it fails?

an engine cannot be reached, or answers 5xx         it is
ours failed, and engines have not answered soon     they are: frozen, or behind one that is
an engine refuses before anybody failed             it is: the others, waiting for it, only notice
ours failed first, and all engines refuse           nobody is known to be: a connection broke
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from agentrl.errors import EngineError, EngineUnavailable, PublishError
from agentrl.weights.member import Member

__all__ = ["JointFailure", "together"]

# After the first failure the others are heard for so long: what ends a collective ends it for all of them at about the same time.
GRACE_S = 1.0


class JointFailure(PublishError):
    """It failed.

    Args:
        guilty: members to blame, with what is known.
    """

    def __init__(self, guilty: Mapping[Member, str], reason: str) -> None:
        super().__init__(reason)
        self.guilty = dict(guilty)


async def together(members: Sequence[Member], call: Callable[[Member], Awaitable[None]], ours: Callable[[], None]) -> None:
    """Do it.

    Args:
        ours: blocks in a thread, which is left behind where a member fails before it: gloo cannot give up but by its own deadline.

    Raises:
        JointFailure: an engine or the collective failed.
    """
    joint = _Joint(members)
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(joint.theirs, member, call)
        nursery.start_soon(joint.ours, ours)
        nursery.start_soon(joint.watch, nursery.cancel_scope)
    joint.judge()


class _Joint:
    """What has been heard."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._waiting = set(members)
        self._errors: dict[Member, EngineError] = {}  # in the order they came
        self._own: str | None = None
        self._own_first = False
        self._own_waits = True
        self._changed = trio.Event()

    async def theirs(self, member: Member, call: Callable[[Member], Awaitable[None]]) -> None:
        try:
            await call(member)
        except EngineError as error:
            self._errors[member] = error
        self._waiting.discard(member)
        self._wake()

    async def ours(self, act: Callable[[], None]) -> None:
        try:
            await trio.to_thread.run_sync(act, abandon_on_cancel=True)
        except PublishError as error:
            self._own, self._own_first = str(error), not self._errors
        self._own_waits = False
        self._wake()

    async def watch(self, scope: trio.CancelScope) -> None:
        """End when all have come, or a while after the first failure."""
        while not (self._failed or self._done):
            await self._changed.wait()
        if self._failed:
            with trio.move_on_after(GRACE_S):
                while self._waiting:
                    await self._changed.wait()
            scope.cancel()

    def judge(self) -> None:
        if self._failed:
            guilty = self._guilty()
            told = [*guilty.values(), *(str(error) for error in self._errors.values()), *([self._own] if self._own else [])]
            raise JointFailure(guilty, "; ".join(dict.fromkeys(told)))

    def _guilty(self) -> dict[Member, str]:
        unreachable = {member: str(error) for member, error in self._errors.items() if isinstance(error, EngineUnavailable)}
        if unreachable:
            return unreachable
        if self._own is not None and self._waiting:
            return {member: f"{member.engine} did not answer within the deadline" for member in self._waiting}
        if self._errors and not self._own_first:
            member, error = next(iter(self._errors.items()))
            return {member: str(error)}
        return {}

    @property
    def _failed(self) -> bool:
        return bool(self._errors) or self._own is not None

    @property
    def _done(self) -> bool:
        return not self._waiting and not self._own_waits

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
