"""`agentrl engine serve`: the embedded engine alone, for any client that speaks SGLang's native API."""

from __future__ import annotations

import ipaddress
import os
import signal
from pathlib import Path
from typing import Any

from agentrl.engine_api import EngineKeys
from agentrl.errors import ConfigError
from agentrl.system.http import serve_app
from agentrl.system.process import StopSignal

__all__ = ["serve", "server_keys"]


def serve(model_dir: Path, *, host: str, port: int, slots: int, context_tokens: int, threads: int, device: str, keys: EngineKeys) -> None:
    """Serve a Hugging Face directory until Ctrl-C or SIGTERM; prints `ready URL` when it answers."""
    from agentrl.engine.app import EngineServer  # torch: the arguments have been looked at before it is imported

    stop = StopSignal()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = EngineServer(
        model_dir,
        slots=slots,
        context_tokens=context_tokens,
        threads=threads,
        device=device,
        weight_version="0",
        api_key=keys.api,
        admin_key=keys.admin,
    )

    def ready(info: dict[str, Any]) -> None:
        print(f"ready {info['url']}", flush=True)

    serve_app(server.app, on_ready=ready, stop=stop, host=host, port=port)


def server_keys(host: str, *, api_key_variable: str | None, admin_key_variable: str | None) -> EngineKeys:
    """The keys a server at `host` wants of its callers, from the environment variables of these names.

    Raises:
        ConfigError: a variable is not set, or other machines can reach `host` and nothing would keep them out.
    """
    keys = EngineKeys(api=_key("--api-key-variable", api_key_variable), admin=_key("--admin-key-variable", admin_key_variable))
    if keys.api is None and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and whoever reaches an engine without a key can use it and change its weights: name"
            " the environment variable that holds a key with --api-key-variable NAME, or leave --host at 127.0.0.1"
        )
    return keys


def _key(option: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"{option} {variable}: the environment variable {variable} is not set")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
