"""Bounds of a connection to a server: how long and how large the head of a request may be.

uvicorn bounds neither (0.54, with httptools): a client that sends a byte now and then, or one header without end, keeps a connection and its
memory for good. Bodies are bounded where they are read, in retriever.app.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEAD_S", "MAX_HEAD_BYTES", "bounded_protocol"]

SILENT_S = 75.0  # a connection on which no request has begun
HEAD_S = 20.0  # from the first byte of a request to the end of its head
MAX_HEAD_BYTES = 64 * 1024
MAX_UNREAD_BYTES = 4 * 1024 * 1024  # of a body that nobody reads, because its request has been refused


def bounded_protocol(*, httptools: bool | None = None) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these bounds.

    Args:
        httptools: read requests by it: three times as fast as by h11. None: where it is installed.
    """
    parent: type[Any] = H11Protocol
    if importlib.util.find_spec("httptools") is not None if httptools is None else httptools:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        parent = HttpToolsProtocol
    return type("BoundedProtocol", (_Bounded, parent), {})


class _Bounded:
    """Before uvicorn's protocol. A request has begun when there is a new `cycle`: it is made at the end of a head."""

    cycle: Any
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._unread = 0
        self._limit: asyncio.TimerHandle | None = self.loop.call_later(SILENT_S, self._close)

    def connection_lost(self, error: Exception | None) -> None:
        self._unlimit()
        super().connection_lost(error)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        in_body = before is not None and before.more_body
        super().data_received(data)  # type: ignore[misc]
        if self.cycle is not before or (in_body and not before.response_complete):
            self._unread = 0
            if self._limit is not None:
                self._unlimit()
            return
        if not self._unread:
            self._unlimit()
            self._limit = self.loop.call_later(HEAD_S, self._close)
        self._unread += len(data)
        if self._unread > (MAX_UNREAD_BYTES if in_body else MAX_HEAD_BYTES):
            self._close()

    def _unlimit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close(self) -> None:
        self._unlimit()
        if not self.transport.is_closing():
            self.transport.close()
