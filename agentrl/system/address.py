"""The address at which a process of a run listens."""

from __future__ import annotations

import socket
from contextlib import closing

from agentrl.config.recipe import Recipe

__all__ = ["LOOPBACK", "bind_address", "free_port"]

LOOPBACK = "127.0.0.1"


def bind_address(recipe: Recipe) -> str:
    """Loopback, or with `run.bind: node` this machine's address in the Ray cluster."""
    if recipe.run.bind == "loopback":
        return LOOPBACK
    import ray  # only where there is a cluster

    address: str = ray.util.get_node_ip_address()
    return address


def free_port(host: str = LOOPBACK) -> int:
    """A port that nobody listens on at this moment."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
