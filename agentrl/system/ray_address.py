"""What is said where the Ray at `run.ray_address` cannot be joined. Ray itself tries for a minute, a warning every second."""

from __future__ import annotations

import socket

from agentrl.errors import AgentRLError, ConfigError

__all__ = ["refusal", "require_listener"]

_PROBE_S = 3.0  # to connect: a machine of the same cluster answers within milliseconds
_REMEDY = "start one with `ray start --head`, or leave run.ray_address out: a private one is started then"
# Ray 2.60: a head started where ~/.ray/auth_token exists wants that token of everybody, but who joins sends it only if told to.
_TOKEN = "a Ray started where ~/.ray/auth_token exists wants that token: set RAY_AUTH_MODE=token, with the same file on this machine"


def require_listener(address: str) -> None:
    """Refuse a `host:port` at which nothing listens. Other forms (`auto`) are Ray's to look up.

    Raises:
        ConfigError: nothing listens there, or there is no such host.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray at {address} ({error}): {_REMEDY}") from error


def refusal(error: Exception, address: str | None) -> AgentRLError:
    """What to raise for an error of `ray.init`. One about what the user can set is a ConfigError.

    Args:
        address: that it was given; None: of a private Ray.
    """
    told = str(error).strip().partition("\n")[0]
    if type(error).__name__ == "AuthenticationError":
        return ConfigError(f"Ray refuses the token{_at(address)}: {told}. Hint: {_TOKEN}; or RAY_AUTH_MODE=disabled on both sides")
    if address is None:
        return AgentRLError(f"a private Ray could not be started: {type(error).__name__}: {told}. run.launcher=local does without Ray")
    if isinstance(error, ConnectionError):
        joining = "" if address == "auto" else f". If one runs there: {_TOKEN}"
        return ConfigError(f"no Ray{_at(address)} ({told}): {_REMEDY}{joining}")
    return ConfigError(f"the Ray{_at(address)} could not be joined: {type(error).__name__}: {told}. Does it have this Ray's version, and is it up?")


def _at(address: str | None) -> str:
    return "" if address is None else f" at {address}"
