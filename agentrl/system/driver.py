"""The driver of a run: prepares, starts the processes, follows the buffer's events to the end, shuts everything down."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from agentrl.buffer.settings import BufferSettings
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.metrics.alarms import read_alarms
from agentrl.metrics.console import Console
from agentrl.metrics.evaluation import evaluation_metrics
from agentrl.metrics.sinks import Sinks
from agentrl.system.build import Cluster, start_processes
from agentrl.system.engines import engine_clients
from agentrl.system.local import LocalLauncher
from agentrl.system.meters import EngineMeter, FlowMeter
from agentrl.system.notify import notify
from agentrl.system.prepare import Progress, prepare
from agentrl.system.process import Launcher, Role
from agentrl.system.rundir import RunDirectory
from agentrl.system.supervisor import Supervisor

__all__ = ["EVENTS_POLL_S", "Beside", "Driver", "console_of", "make_launcher", "told", "with_beside"]

log = logging.getLogger(__name__)

EVENTS_POLL_S = 10.0
LAST_CHECKPOINT_S = 120.0  # how long a stopped run may take to finish its batch and write its checkpoint
SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Work of a command beside its run, with the resolved recipe, the model directory and the servers; a run that has finished waits for it.
Beside = Callable[[Recipe, Path, Cluster], Awaitable[None]]

BESIDE_S = 300.0  # ... for so long: a large model scores a few short texts

_ENDS = {"finished": "finished", "stopping": "stopped"}  # phases of the buffer that end the driver's following


def make_launcher(recipe: Recipe, python_path: str) -> Launcher:
    """The launcher of `run.launcher`. Ray is imported only where it is used."""
    # For all children: idle BLAS threads of NumPy and FAISS spin on the cores that engine and learner compute on. Torch is told by the recipe.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if recipe.run.launcher == "local":
        return LocalLauncher(python_path=python_path)
    from agentrl.system.ray_launcher import RayLauncher

    return RayLauncher(recipe, python_path=python_path)


def console_of(recipe: Recipe) -> Console:
    """The display of a run of `recipe`."""
    capacity = BufferSettings.of(recipe, total_steps=recipe.run.steps).group_limit
    return Console(recipe.name, total_steps=recipe.run.steps, capacity=capacity, mode=recipe.metrics.console)


def told(console: Console) -> Progress:
    """The preparing stage's progress, shown."""
    return lambda what, done, of: console.phase("preparing", done=done, total=of, detail=what)


async def with_beside(follow: Callable[[], Awaitable[str]], beside: Callable[[], Awaitable[None]] | None, *, patience_s: float = BESIDE_S) -> str:
    """Follow a run to its end, with work beside it that has `patience_s` more once the run has finished, and no time at all where it was stopped.

    Returns what `follow` does: the phase reached.
    """
    async with trio.open_nursery() as work:
        if beside is not None:
            work.start_soon(beside)
        phase = await follow()
        work.cancel_scope.deadline = trio.current_time() + (patience_s if phase == "finished" else 0.0)
    return phase


@dataclass
class Driver:
    """One start of a run, from the preparing stage to the last process's end."""

    recipe: Recipe
    directory: RunDirectory
    console: Console
    sinks: Sinks
    python_path: str
    environment_file: str
    called_from: Path  # the directory the command was given in
    beside: Beside | None = None
    signalled: int | None = None  # the signal that stopped the run
    paused_by: str | None = None  # the alarm that did
    model_dir: Path | None = None
    _flow: FlowMeter = field(default_factory=FlowMeter)
    _alarms_told: int = 0  # lines of alarms.jsonl

    async def main(self) -> str:
        """Run to the end. Returns the phase reached: "finished" or "stopped".

        Raises:
            ProcessDied: a process died that the run cannot go on without (in an ExceptionGroup).
        """
        recipe, self.model_dir = await prepare(self.recipe, self.directory.path, python_path=self.python_path, progress=told(self.console))
        self.console.phase("starting")
        self._alarms_told = len(read_alarms(self.directory.path))
        phase = "stopped"  # where a second signal cancels everything below
        async with make_launcher(recipe, self.python_path) as launcher, trio.open_nursery() as nursery:
            supervisor = Supervisor(launcher, nursery, first_incarnation=self.directory.first_incarnation())
            cluster = await start_processes(
                supervisor,
                recipe,
                run_dir=self.directory.path,
                model_dir=self.model_dir,
                environment_file=self.environment_file,
                run_incarnation=self.directory.incarnation,
            )
            async with cluster.buffer:
                nursery.start_soon(supervisor.probe)
                nursery.start_soon(self._signal_loop, cluster, nursery)
                beside = None if self.beside is None else partial(self.beside, recipe, self.model_dir, cluster)
                phase = await with_beside(partial(self._follow, cluster, supervisor, nursery), beside)
                await supervisor.stop()
            nursery.cancel_scope.cancel()
        return phase

    async def _follow(self, cluster: Cluster, supervisor: Supervisor, nursery: trio.Nursery) -> str:
        """Take the buffer's events until one ends the run.

        consumes      events of the buffer, in order; alarms.jsonl, whose lines are there before the events that follow from them
        produces      metrics.jsonl and other sinks, the console's display; in `nursery`, notifications of alarms
        waits for     the next event; then the learner's end, at most LAST_CHECKPOINT_S: a stopped run still reports the batch it was at
        unblocked by  the phase "finished" or "stopping"; a failure, which it raises
        """
        after = cluster.first_event

        async def take(wait_s: float) -> str | None:
            nonlocal after
            reached: str | None = None
            events, after = await cluster.buffer.events(after=after, wait_s=wait_s)
            self._tell_alarms(nursery)
            for event in events:
                if event["kind"] == "step":
                    self._step(event, await meter.read(), supervisor)
                else:
                    reached = self._take(event) or reached
            return reached

        async with EngineMeter(cluster.buffer, engine_clients(self.recipe)) as meter:
            while (phase := await take(EVENTS_POLL_S)) is None:
                continue
            with trio.move_on_after(LAST_CHECKPOINT_S):
                await supervisor.join(Role.LEARNER)
            await take(0.0)
        return phase

    def _take(self, event: dict[str, Any]) -> str | None:
        """Act on one event. Returns the phase reached where it ends the run."""
        match event["kind"]:
            case "published":
                self._flow.published(event)
            case "evaluation":
                self.sinks.step(event["step"], evaluation_metrics(event["payload"]))
                self.console.evaluation(event["payload"])
            case "failure":
                raise AgentRLError(event["reason"])
            case "phase":
                self.console.phase(event["phase"])
                return _ENDS.get(event["phase"])
        return None

    def _step(self, event: dict[str, Any], engines: dict[str, float], supervisor: Supervisor) -> None:
        memory = {f"memory_mb/{name}": value for name, value in supervisor.memory_mb().items()}
        metrics = event["metrics"] | self._flow.of_step(event) | engines | memory | {"engine/deaths": supervisor.deaths[Role.ENGINE]}
        self.sinks.step(event["step"], metrics)
        self.console.step(event["step"], metrics)

    def _tell_alarms(self, nursery: trio.Nursery) -> None:
        """Show the new lines of alarms.jsonl, and have those told that an alarm's actions name."""
        lines = read_alarms(self.directory.path)
        for line in lines[self._alarms_told :]:
            if line["kind"] == "alarm":
                self.console.message(f"ALARM {line['alarm']} at step {line['step']}: {line['metric']} is {line['value']}, {line['bound']}")
                self.paused_by = line["alarm"] if "pause" in line["actions"] else self.paused_by
                nursery.start_soon(self._notify, line)
            elif line["kind"] == "rollback":
                scale = f"learning rate x {line['learning_rate_scale']:g} from here on"
                self.console.message(f"ROLLBACK {line['number']} to step {line['to_step']} because of {line['alarm']}: {scale}")
        self._alarms_told = len(lines)

    async def _notify(self, line: dict[str, Any]) -> None:
        told = line | {"run": self.recipe.name, "run_dir": str(self.directory.path)}
        log_file = self.directory.path / "logs" / "health-command.log"
        for trouble in await notify(self.recipe.health, told, cwd=self.called_from, log_file=log_file):
            log.warning("%s", trouble)
            self.console.message(trouble)

    async def _signal_loop(self, cluster: Cluster, nursery: trio.Nursery) -> None:
        """Ctrl-C and SIGTERM: the first ends the run at the next step boundary, the second at once.

        consumes      signals
        produces      `stop` to the buffer; then cancellation of everything
        waits for     a signal
        unblocked by  cancellation at the end of the run
        """
        with trio.open_signal_receiver(*SIGNALS) as signals:
            async for number in signals:
                if self.signalled is not None:
                    nursery.cancel_scope.cancel()
                    return
                self.signalled = number
                self.console.message("stopping after this step; once more to stop at once")
                nursery.start_soon(cluster.buffer.stop, f"signal {number}")  # beside this loop: the second signal is heard meanwhile
