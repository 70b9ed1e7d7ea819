"""Telling somebody of an alarm: a command of the recipe's, or a URL. Neither can hold up or end a run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from agentrl.config.health import HealthRecipe
from agentrl.errors import ConfigError
from agentrl.metrics.files import to_json
from retriever.transport import trio_client

__all__ = ["notify", "require_program"]

LONGEST_ANSWER_BYTES = 2**20  # nothing of it is used


def require_program(recipe: HealthRecipe) -> None:
    """Look for the program of `health.command` before anything is started, in PATH or from the current directory.

    Raises:
        ConfigError: it is not there, or is not executable.
    """
    if recipe.command is not None and shutil.which(recipe.command[0]) is None:
        raise ConfigError(f"health.command: {recipe.command[0]} is neither a program in PATH nor an executable file seen from {Path.cwd()}")


async def notify(
    recipe: HealthRecipe, told: Mapping[str, Any], *, cwd: Path, log_file: Path, transport: httpx.AsyncBaseTransport | None = None
) -> list[str]:
    """Tell of an alarm in the ways its actions name. Returns what went wrong, a line each.

    It is not cut short by the run's end, for which it has until its deadline.

    Args:
        told: becomes the JSON; its `actions` say which ways.
        cwd: the directory the command runs in.
        log_file: gets what the command prints.
        transport: the POST goes over it, e.g. a fake.
    """
    content, troubles = to_json(told), []
    ways = {"command": partial(_run, recipe, content, cwd, log_file), "url": partial(_post, recipe, content, transport)}
    for way, tell in ways.items():
        if way not in told["actions"]:
            continue
        trouble = ""
        with trio.CancelScope(shield=True), trio.move_on_after(recipe.deadline_s) as deadline:
            trouble = await tell()
        trouble = f"no end within {recipe.deadline_s:g} s" if deadline.cancelled_caught else trouble
        if trouble:
            troubles.append(f"health.{way} was not told of alarm {told['alarm']}: {trouble}")
    return troubles


async def _run(recipe: HealthRecipe, content: bytes, cwd: Path, log_file: Path) -> str:
    assert recipe.command is not None, "the recipe was refused otherwise"
    try:
        with log_file.open("ab") as out:
            ended = await trio.run_process(
                recipe.command,
                stdin=content,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                check=False,
                start_new_session=True,
                deliver_cancel=_kill_group,
            )
    except OSError as error:
        return str(error)
    return "" if ended.returncode == 0 else f"{recipe.command[0]} ended with code {ended.returncode}; its output is in {log_file}"


async def _kill_group(process: trio.Process) -> None:
    """The command and what it started."""
    os.killpg(process.pid, signal.SIGKILL)


async def _post(recipe: HealthRecipe, content: bytes, transport: httpx.AsyncBaseTransport | None) -> str:
    assert recipe.url is not None, "the recipe was refused otherwise"
    async with trio_client(max_connections=1, max_response_bytes=LONGEST_ANSWER_BYTES, replay_posts=False, transport=transport) as http:
        try:
            response = await http.post(recipe.url, content=content, headers={"content-type": "application/json"})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}"
    return "" if response.is_success else f"{recipe.url} answered {response.status_code}"
