"""Do all engines hold the same weights? Engines of one kind have one algorithm for checksums, so theirs are compared with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import trio

from agentrl.errors import EngineError, PublishError
from agentrl.weights.member import Member

__all__ = ["confirmed"]


async def confirmed(members: Sequence[Member], version: int, *, checked: bool) -> dict[Member, str]:
    """Hear of every member that it is at `version`. Returns those that are not, or hold other weights than most of their kind.

    Args:
        checked: engines that can have compared what came with what was sent, so there is nothing to ask them.
    """
    wrong: dict[Member, str] = {}
    sums: dict[Member, str] = {}
    kinds = Counter(member.kind for member in members)

    async def ask(member: Member) -> None:
        try:
            await member.confirm(version)
            if kinds[member.kind] > 1 and not (checked and member.staged):
                sums[member] = (await member.engine.weights_checksum()).engine
        except (EngineError, PublishError) as error:
            wrong[member] = str(error)

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(ask, member)
    return wrong | _others(sums)


def _others(sums: dict[Member, str]) -> dict[Member, str]:
    """Members whose checksum is not that of more than half of their kind."""
    wrong: dict[Member, str] = {}
    for member, told in sums.items():
        alike = [other for of, other in sums.items() if of.kind == member.kind]
        most, count = Counter(alike).most_common(1)[0]
        if 2 * count <= len(alike) or told != most:
            wrong[member] = f"{member.engine} holds other weights than others: checksum {told}, of its kind {count} of {len(alike)} have {most}"
    return wrong
