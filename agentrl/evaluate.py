"""`agentrl evaluate`: a checkpoint, or any exported model, on the recipe's evaluation sets. Engines, workers and a buffer; no learner."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from agentrl.config.paths import require_files
from agentrl.config.recipe import Recipe
from agentrl.engine_api import EngineClient
from agentrl.errors import AgentRLError, ConfigError, EngineUnavailable
from agentrl.metrics.console import Console
from agentrl.system.build import Cluster, environment_file, refuse_unsupported, start_processes
from agentrl.system.driver import EVENTS_POLL_S, console_of, make_launcher, told
from agentrl.system.engines import engine_clients
from agentrl.system.prepare import prepare
from agentrl.system.run import first_error, import_path
from agentrl.system.rundir import write_json
from agentrl.system.supervisor import Supervisor

__all__ = ["evaluate"]

log = logging.getLogger(__name__)

_LOAD_DEADLINE_S = 600.0  # a large model's weights from a network disk
_REST_S = 5.0  # before an engine that did not load is tried again
_MANIFEST = "manifest.json"  # what tells a checkpoint from an exported model ...
_CONFIG = "config.json"  # ... which has this


def evaluate(recipe: Recipe, *, checkpoint: Path) -> int:
    """Evaluate and print the numbers; rows and numbers are left in `<run.dir>/<name>.eval/<checkpoint>/`.

    Raises:
        ConfigError: the recipe has no evaluation sets, or `checkpoint` holds no model.
        AgentRLError: the evaluation failed, or not one episode of a set could be played.
    """
    refuse_unsupported(recipe)
    require_files(recipe)
    if not recipe.eval.sets:
        raise ConfigError(f"recipe {recipe.name} has no eval.sets: nothing to evaluate on")
    if not any((checkpoint / name).exists() for name in (_MANIFEST, _CONFIG)):
        raise ConfigError(f"--checkpoint {checkpoint}: neither a checkpoint ({_MANIFEST}) nor an exported model ({_CONFIG})")
    found_in = environment_file(recipe)
    directory = _new_directory(Path(recipe.run.dir).resolve() / f"{recipe.name}.eval", checkpoint.name)
    model_dir = _exported(checkpoint, directory)
    os.chdir(directory)
    with console_of(recipe) as console:
        evaluation = _Evaluation(_of_model(recipe, model_dir), directory, model_dir, found_in, console)
        try:
            trio.run(evaluation.main)
        except BaseExceptionGroup as group:
            raise first_error(group) from group
    write_json(directory / "evaluation.json", {"checkpoint": str(checkpoint), "sets": evaluation.numbers})
    for name, numbers in evaluation.numbers.items():
        print(_said(name, numbers, directory))
    print(f"rows and numbers: {directory}")
    return 0


@dataclass
class _Evaluation:
    recipe: Recipe
    directory: Path
    model_dir: Path
    environment_file: str
    console: Console
    numbers: dict[str, Any] = field(default_factory=dict)  # by set

    async def main(self) -> None:
        python_path = os.pathsep.join(import_path())
        recipe, _ = await prepare(self.recipe, self.directory, python_path=python_path, progress=told(self.console))
        async with make_launcher(recipe, python_path) as launcher, trio.open_nursery() as nursery:
            supervisor = Supervisor(launcher, nursery, first_incarnation=1)
            cluster = await start_processes(
                supervisor,
                recipe,
                run_dir=self.directory,
                model_dir=self.model_dir,
                environment_file=self.environment_file,
                run_incarnation=1,
                learners=False,
                evaluate_only=True,
            )
            async with cluster.buffer:
                nursery.start_soon(supervisor.probe)
                nursery.start_soon(partial(_keep_loaded, cluster, self.model_dir, engine_clients(recipe), restarts=not recipe.engine.urls))
                await self._follow(cluster)
                await supervisor.stop()
            nursery.cancel_scope.cancel()

    async def _follow(self, cluster: Cluster) -> None:
        """Take the buffer's events until the evaluation has ended.

        consumes      events of the buffer
        produces      the numbers by set
        waits for     the next event
        unblocked by  the phase "finished", or a failure, which it raises
        """
        after = 0
        while True:
            events, after = await cluster.buffer.events(after=after, wait_s=EVENTS_POLL_S)
            for event in events:
                if event["kind"] == "evaluation":
                    self.numbers[event["set"]] = event["payload"]
                    self.console.evaluation(event["payload"])
                elif event["kind"] == "failure":
                    raise AgentRLError(event["reason"])
                elif event["kind"] == "phase" and event["phase"] == "finished":
                    return


async def _keep_loaded(cluster: Cluster, model_dir: Path, connect: Callable[[str, int], EngineClient], *, restarts: bool) -> None:
    """Bring every engine to the model under one version, as the learner does in a run.

    consumes      the buffer's roster of engines
    produces      current engines; the version's publication, when all of the first ones have it
    waits for     a change of the roster, or an engine's loading, or that it is time to try one again
    unblocked by  cancellation at the end of the evaluation

    Args:
        restarts: an engine that does not load is given up, and restarted by the run that started it. Otherwise it is tried again.
    """
    version, revision, published = await cluster.buffer.reserve_version(reason="initial"), 0, False
    resting: dict[int, float] = {}  # engines that did not load, by incarnation: until when they are left alone
    while True:
        roster = await cluster.buffer.engines(after=revision, wait_s=EVENTS_POLL_S)
        revision = roster.revision
        for entry in roster.engines:
            if entry.current or entry.given_up or resting.get(entry.incarnation, 0.0) > trio.current_time():
                continue
            try:
                async with connect(entry.url, entry.index) as engine:
                    await engine.update_from_disk(str(model_dir), version=version, deadline_s=_LOAD_DEADLINE_S)
            except EngineUnavailable as error:  # it has died, or is to be restarted, or is late
                log.warning("engine %d did not load the model: %s", entry.index, error)
                resting[entry.incarnation] = trio.current_time() + _REST_S
                await cluster.buffer.engine_fenced(entry.index, entry.incarnation, str(error), give_up=restarts)
            else:
                await cluster.buffer.engine_current(entry.index, entry.incarnation, version)
        current = [entry.index for entry in (await cluster.buffer.engines(after=0, wait_s=0.0)).engines if entry.current]
        if current and not published:
            await cluster.buffer.version_published(version=version, engines=current, seconds=0.0, bytes=0)
            published = True


def _said(name: str, numbers: dict[str, Any], directory: Path) -> str:
    """The line of one set."""
    if numbers["em"] is None:
        causes = ", ".join(f"{cause} {len(tasks)}" for cause, tasks in numbers["failures"].items())
        raise AgentRLError(f"{name}: not one episode could be played ({causes}): see {directory / 'logs'}")
    low, high = numbers["interval"]
    return f"{name}: EM {numbers['em']:.3f}  (95 % interval {low:.3f} to {high:.3f})"


def _of_model(recipe: Recipe, model_dir: Path) -> Recipe:
    """The recipe with the model it is to evaluate in place of its own, which then need not be made or warm-started."""
    own: dict[str, Any] = {"path": str(model_dir), "tokenizer": None, "train_tokenizer": None, "architecture": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=own), "warm_start": None})


def _exported(checkpoint: Path, directory: Path) -> Path:
    """The Hugging Face directory of a checkpoint; an exported model as it is."""
    if not (checkpoint / _MANIFEST).exists():
        return checkpoint
    from agentrl.learner.export import export_checkpoint

    export_checkpoint(checkpoint, directory / "model")
    return directory / "model"


def _new_directory(parent: Path, name: str) -> Path:
    number = 1
    while (directory := parent / f"{name}-{number}").exists():
        number += 1
    directory.mkdir(parents=True)
    return directory
