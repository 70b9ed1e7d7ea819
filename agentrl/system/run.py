"""`agentrl run`: one run of a recipe, from the command line to the summary."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import trio

from agentrl.config.cautions import cautions
from agentrl.config.load import dump_recipe
from agentrl.config.paths import require_files
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.metrics.report import write_report
from agentrl.metrics.sinks import open_sinks
from agentrl.metrics.summary import summarise
from agentrl.system.build import environment_file, find_recipe_code, refuse_unsupported
from agentrl.system.driver import Beside, Driver, console_of
from agentrl.system.notify import require_program
from agentrl.system.ray_address import require_listener
from agentrl.system.rundir import RunDirectory
from agentrl.system.status import ledger_of, overlap_of

__all__ = ["PAUSED", "first_error", "import_path", "run"]

PAUSED = 3  # exit code of a run that an alarm paused


def run(recipe: Recipe, *, command: list[str], smoke: bool, fresh: bool, beside: Beside | None = None) -> int:
    """Run a recipe, or go on with it where it stopped. Returns the exit code.

    Args:
        beside: work to do while it runs, once its processes are up.

    Raises:
        ConfigError: the recipe asks for what this version cannot do, or the run directory holds another run.
        AgentRLError: the run failed; the message names one cause and where to look.
    """
    refuse_unsupported(recipe)
    require_files(recipe)
    require_program(recipe.health)
    if recipe.run.launcher == "ray" and recipe.run.ray_address:
        require_listener(recipe.run.ray_address)  # before a model is prepared for nothing
    found_in = environment_file(recipe)
    find_recipe_code(recipe)
    for caution in cautions(recipe):
        print(f"caution: {caution}", file=sys.stderr)
    with RunDirectory.open(recipe, resolved=dump_recipe(recipe), command=command, fresh=fresh) as directory:
        if directory.finished:
            print(f"{directory.path} has finished: see {directory.path / 'report.html'}. Begin anew with --fresh, or give more run.steps")
            return 0
        started, called_from = time.monotonic(), Path.cwd()
        os.chdir(directory.path)  # a directory of the user's must not shadow a module of ours in one process and not in another
        with open_sinks(recipe, directory.path) as sinks, console_of(recipe) as console:
            driver = Driver(
                recipe=recipe,
                directory=directory,
                console=console,
                sinks=sinks,
                python_path=os.pathsep.join(import_path()),
                environment_file=found_in,
                called_from=called_from,
                beside=beside,
            )
            phase = _drive(driver)
        extra = {"phase": phase, "wall_s": time.monotonic() - started}
        summary = summarise(directory.path, ledger=ledger_of(directory.path), overlap=overlap_of(directory.path), extra=extra)
        write_report(directory.path)
        _conclude(directory.path, phase, summary, command, paused_by=driver.paused_by)
        if driver.signalled is not None:
            return 128 + driver.signalled
        return PAUSED if phase == "stopped" and driver.paused_by is not None else 0


def _drive(driver: Driver) -> str:
    """Drive to the end. Of several errors at once the first is told."""
    try:
        return trio.run(driver.main)
    except BaseExceptionGroup as group:
        cause = first_error(group)
        if isinstance(cause, AgentRLError):
            raise cause from group
        raise


def first_error(error: BaseException) -> BaseException:
    """The error that came first of a group: the others mostly follow from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def import_path() -> list[str]:
    """Where this process finds modules: its children look in the same places, in the same order."""
    return [str(Path(entry).resolve()) for entry in sys.path if entry and Path(entry).is_dir() and "site-packages" not in entry]


def _conclude(path: Path, phase: str, summary: dict[str, Any], command: list[str], *, paused_by: str | None) -> None:
    """The last lines of a run: what came out and what to do next."""
    again = shlex.join(word for word in command if word != "--fresh")
    if phase == "stopped":
        print(f"stopped at step {summary['steps']}{f' by alarm {paused_by}' if paused_by else ''}. Go on: {again}")
        return
    final, initial = summary["eval"].get("final"), summary["eval"].get("initial")
    if final and initial:
        print(f"held-out EM {initial['em']:.3f} -> {final['em']:.3f}  (95 % interval {final['interval'][0]:.3f} to {final['interval'][1]:.3f})")
    print(f"report   {path / 'report.html'}")
    print(f"summary  {path / 'summary.json'}")
