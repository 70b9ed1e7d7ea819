"""One client per retriever and process: hundreds of episodes share its connections.

An episode leases the client and gives it back; the last one to do so closes it. Clients belong to one run of trio.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from retriever.client import RetrieverClient

__all__ = ["give_back", "lease"]


def lease(url: str) -> RetrieverClient:
    """The client of `url`. Every lease is given back exactly once."""
    clients = _clients()
    if url not in clients:
        clients[url] = _Shared(client=RetrieverClient(url))
    shared = clients[url]
    shared.leases += 1
    return shared.client


async def give_back(url: str) -> None:
    """End a lease."""
    shared = _clients()[url]
    shared.leases -= 1
    if shared.leases == 0:
        del _clients()[url]
        await shared.client.aclose()


@dataclass(kw_only=True, slots=True)
class _Shared:
    client: RetrieverClient
    leases: int = 0


_of_run: trio.lowlevel.RunVar[dict[str, _Shared]] = trio.lowlevel.RunVar("shared retrievers")


def _clients() -> dict[str, _Shared]:
    try:
        return _of_run.get()
    except LookupError:
        clients: dict[str, _Shared] = {}
        _of_run.set(clients)
        return clients
