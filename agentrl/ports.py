"""Ports to listen on."""

from __future__ import annotations

import socket
from contextlib import closing

__all__ = ["free_port"]


def free_port(host: str = "127.0.0.1") -> int:
    """A port of the address `host` that nobody listens on at this moment."""
    with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
