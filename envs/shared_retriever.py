"""One client per retriever and process: hundreds of episodes share its connections.

An episode leases the client and gives it back; the last one to do so closes it. Clients belong to one run of trio, and so do the cassettes
they record to or replay, which are read once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from retriever.client import Cassette, RetrieverClient

__all__ = ["TOKEN_VARIABLE", "Leased", "give_back", "lease"]

TOKEN_VARIABLE = "AGENTRL_RETRIEVER_TOKEN"  # from the environment: options are written into a run's files
MODES = ("dense", "bm25", "hybrid")  # retriever.query.Mode
NO_URL = "http://cassette.invalid"  # never asked: of a cassette that is replayed


@dataclass(frozen=True, kw_only=True, slots=True)
class Leased:
    """Which client: those that are asked alike share one. The fields are `RetrieverClient`'s.

    `cassette` is a path, which is recorded to where `record` says so, and replayed otherwise.
    """

    url: str | None
    mode: str | None = None
    rerank: bool = False
    coalesce: int = 0
    cassette: str | None = None
    record: bool = False

    @classmethod
    def of(cls, url: str | None, options: Mapping[str, object]) -> Leased:
        """The one with these options.

        Raises:
            ValueError: an option that there is not, of another type, or without effect.
        """
        for name, value in options.items():
            if name not in _KINDS:
                raise ValueError(f"retriever_options has {', '.join(_KINDS)}, got {name!r}")
            if type(value) is not _KINDS[name]:
                raise ValueError(f"retriever_options: {name} must be of type {_KINDS[name].__name__}, got {value!r}")
        chosen: Any = dict(options)
        leased = cls(url=url, **chosen)
        if leased.mode is not None and leased.mode not in MODES:
            raise ValueError(f"retriever_options: mode must be one of {', '.join(MODES)}, got {leased.mode!r}")
        if leased.coalesce < 0:
            raise ValueError(f"retriever_options: coalesce must be 0 or more, got {leased.coalesce}")
        if leased.record and (leased.cassette is None or url is None):
            raise ValueError("retriever_options: record needs a cassette to record to, and a retriever_url to record from")
        if leased.cassette is not None and leased.coalesce and not leased.record:
            raise ValueError("retriever_options: coalesce would have no effect, for a cassette that is replayed asks nobody")
        return leased


_KINDS: Mapping[str, type] = {"mode": str, "rerank": bool, "coalesce": int, "cassette": str, "record": bool}


def lease(what: str | Leased) -> RetrieverClient:
    """The client of a URL, or of more than that. Every lease is given back exactly once.

    Raises:
        CassetteError: the cassette cannot be opened.
        ValueError: the token in the environment is none.
    """
    shared, key = _of_this_run(), _key(what)
    if key not in shared.clients:
        shared.clients[key] = _Shared(client=_client(key, shared.cassettes))
    one = shared.clients[key]
    one.leases += 1
    return one.client


async def give_back(what: str | Leased) -> None:
    """End a lease."""
    clients, key = _of_this_run().clients, _key(what)
    shared = clients[key]
    shared.leases -= 1
    if shared.leases == 0:
        del clients[key]
        await shared.client.aclose()


@dataclass(kw_only=True, slots=True)
class _Shared:
    client: RetrieverClient
    leases: int = 0


@dataclass(kw_only=True, slots=True)
class _OfRun:
    clients: dict[Leased, _Shared] = field(default_factory=dict)
    cassettes: dict[tuple[str, bool], Cassette] = field(default_factory=dict)


_of_run: trio.lowlevel.RunVar[_OfRun] = trio.lowlevel.RunVar("shared retrievers")


def _key(what: str | Leased) -> Leased:
    return Leased(url=what) if isinstance(what, str) else what


def _client(key: Leased, cassettes: dict[tuple[str, bool], Cassette]) -> RetrieverClient:
    cassette = None
    if key.cassette is not None:
        known = (key.cassette, key.record)
        if known not in cassettes:
            cassettes[known] = Cassette.record(key.cassette) if key.record else Cassette.replay(key.cassette)
        cassette = cassettes[known]
    return RetrieverClient(
        NO_URL if key.url is None else key.url,
        token=os.environ.get(TOKEN_VARIABLE) or None,
        mode=key.mode,
        rerank=key.rerank,
        coalesce=key.coalesce,
        cassette=cassette,
    )


def _of_this_run() -> _OfRun:
    try:
        return _of_run.get()
    except LookupError:
        found = _OfRun()
        _of_run.set(found)
        return found
