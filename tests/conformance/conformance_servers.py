"""Starting the engines that the suite talks to: the embedded one by its command, a real SGLang by what starts it in runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from conformance_models import CONTEXT_TOKENS

from agentrl.config.recipe import Recipe
from agentrl.system.process import StopSignal

__all__ = ["SLOTS", "embedded_command", "embedded_thread", "http_client", "sglang_server"]

SLOTS = 4  # few, so that requests wait for one
START_DEADLINE_S = 120.0


@contextmanager
def http_client(url: str, **headers: str) -> Iterator[httpx.Client]:
    """A client whose idle connections are gone before a server closes them (SGLang: after 5 s)."""
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False, limits=httpx.Limits(keepalive_expiry=2), headers=headers) as client:
        yield client


@contextmanager
def embedded_command(model_dir: Path) -> Iterator[str]:
    """`agentrl engine serve` in a process of its own. Yields its URL."""
    options = ["--port", "0", "--slots", str(SLOTS), "--context-tokens", str(CONTEXT_TOKENS)]
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", "engine", "serve", str(model_dir), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready "), line
            yield line.removeprefix("ready ").strip()
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def embedded_thread(model_dir: Path, *, api_key: str | None, admin_key: str | None) -> Iterator[str]:
    """An embedded engine in this process, for what needs a server of its own. Yields its URL."""
    from agentrl.engine.app import EngineServer
    from agentrl.system.http import serve_app

    stop, ready, urls = StopSignal(), threading.Event(), []
    app = EngineServer(model_dir, slots=SLOTS, context_tokens=64, api_key=api_key, admin_key=admin_key).app

    def on_ready(info: dict[str, Any]) -> None:
        urls.append(info["url"])
        ready.set()

    server = threading.Thread(target=serve_app, args=(app,), kwargs={"on_ready": on_ready, "stop": stop})
    server.start()
    try:
        assert ready.wait(START_DEADLINE_S)
        yield urls[0]
    finally:
        stop.set()
        server.join(30)


@contextmanager
def sglang_server(python: str, model_dir: Path, log: Path, *, api_key: str | None = None, admin_key: str | None = None) -> Iterator[str]:
    """A real SGLang. Yields its URL."""
    from agentrl.system.sglang import SGLangServer

    variables = {"AGENTRL_TEST_API_KEY": api_key, "AGENTRL_TEST_ADMIN_KEY": admin_key}
    os.environ.update({name: key for name, key in variables.items() if key is not None})
    engine = {
        "kind": "sglang",
        "python": python,
        "slots": SLOTS,
        "context_tokens": CONTEXT_TOKENS,
        "threads": 2,
        "options": {"context_length": CONTEXT_TOKENS},  # without the margin that a run leaves
        "api_key_variable": "AGENTRL_TEST_API_KEY" if api_key else None,
        "admin_key_variable": "AGENTRL_TEST_ADMIN_KEY" if admin_key else None,
    }
    smallest = {"name": "conformance", "run": {"steps": 1}, "tasks": {"train": [{"path": "tasks.jsonl"}]}, "env": {"factory": "m:C"}}
    limits = {"limits": {"context_tokens": CONTEXT_TOKENS}}
    recipe = Recipe.model_validate(smallest | {"model": {"path": str(model_dir)}, "rollout": limits, "engine": engine})
    try:
        with SGLangServer.start(recipe, model_dir, log=log) as server:
            server.wait_ready(START_DEADLINE_S)
            yield server.url
    finally:
        for name in variables:
            os.environ.pop(name, None)
