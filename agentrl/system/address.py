"""The address at which a process of a run listens."""

from __future__ import annotations

from agentrl.config.recipe import Recipe

__all__ = ["LOOPBACK", "bind_address"]

LOOPBACK = "127.0.0.1"


def bind_address(recipe: Recipe) -> str:
    """Loopback, or with `run.bind: node` this machine's address in the Ray cluster."""
    if recipe.run.bind == "loopback":
        return LOOPBACK
    import ray  # only where there is a cluster

    address: str = ray.util.get_node_ip_address()
    return address
