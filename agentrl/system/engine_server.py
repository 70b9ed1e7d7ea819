"""`agentrl engine serve`: the embedded engine alone, for any client that speaks SGLang's native API."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from pathlib import Path
from typing import Any

from agentrl.engine_api import EngineKeys
from agentrl.errors import ConfigError
from agentrl.system.http import serve_app
from agentrl.system.process import StopSignal

__all__ = ["fitting_context", "serve", "server_keys"]

_CONTEXT_TOKENS = 4096  # the recipe's default, too


def serve(model_dir: Path, *, host: str, port: int, slots: int, context_tokens: int | None, threads: int, device: str, keys: EngineKeys) -> None:
    """Serve a Hugging Face directory until Ctrl-C or SIGTERM; prints `ready URL` when it answers.

    Args:
        context_tokens: None: as many as usual, or as the model has positions where it has fewer.

    Raises:
        ConfigError: the host and port cannot be listened at, the device is not there, or the model has fewer positions than `context_tokens`.
    """
    _require_port(host, port)
    fitting = fitting_context(model_dir, context_tokens)
    from agentrl.engine.app import EngineServer  # torch: the arguments have been looked at before it is imported

    _require_device(device)

    stop = StopSignal()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = EngineServer(
        model_dir,
        slots=slots,
        context_tokens=fitting,
        threads=threads,
        device=device,
        weight_version="0",
        api_key=keys.api,
        admin_key=keys.admin,
    )

    def ready(info: dict[str, Any]) -> None:
        print(f"ready {info['url']}", flush=True)

    serve_app(server.app, on_ready=ready, stop=stop, host=host, port=port)


def fitting_context(model_dir: Path, asked: int | None) -> int:
    """Tokens of the longest sequence of a model: what is asked for, else the default where the model has so many positions.

    Raises:
        ConfigError: more are asked for than the model has positions.
        EngineError: it is no model that the embedded engine computes.
    """
    from agentrl.engine.architecture import ModelConfig  # torch

    positions = ModelConfig.load(model_dir).max_tokens
    if asked is not None and asked > positions:
        raise ConfigError(f"--context-tokens {asked}: {model_dir} was made for {positions} positions; leave it out, or give at most that")
    return asked or min(_CONTEXT_TOKENS, positions)


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


def _require_port(host: str, port: int) -> None:
    """Before a model is loaded for nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind((host, port))
            probe.listen()
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port} cannot be listened at: {error.strerror}") from error


def _require_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: this torch ({torch.__version__}) finds no GPU; leave it out, or install torch for your GPU")


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
