"""The Ray launcher: every process of a run is one actor, on one machine or on a cluster.

Ray starts, places and ends processes; it restarts nothing (max_restarts=0, max_task_retries=0): the supervisor decides. No trajectory
passes through Ray's object store. The actor is a shell round the role's program.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import ray
import trio
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError, Failure, ProcessDied
from agentrl.ports import free_port
from agentrl.system.address import LOOPBACK
from agentrl.system.booking import bundles
from agentrl.system.process import Exit, ProcessSpec, Role, StopSignal
from agentrl.system.ray_address import refusal, require_listener

__all__ = ["RayLauncher", "RayProcess", "RoleActor"]

_PLACEMENT_DEADLINE_S = 600.0  # a cluster's autoscaler may have to start machines first
_CONCURRENT_CALLS = 4  # run + ready + stop, and one to spare


class RayLauncher:
    """Starts actors in a private Ray on this machine, or in the cluster at `recipe.run.ray_address`."""

    def __init__(self, recipe: Recipe, *, python_path: str = "") -> None:
        self._recipe, self._python_path = recipe, python_path
        self._group: Any = None
        self._bundles: dict[str, int] = {}
        self._attached = False

    async def __aenter__(self) -> RayLauncher:
        # In this very thread: Ray has the kernel kill its processes when the thread that started them ends, and trio's threads end when idle.
        self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._close)

    async def start(self, spec: ProcessSpec) -> RayProcess:
        """Create the actor and start its program."""
        options: dict[str, Any] = {"num_cpus": spec.cpus, "num_gpus": spec.gpus, "name": f"{self._recipe.name}-{spec.name}-{spec.incarnation}"}
        if spec.environment:
            options["runtime_env"] = {"env_vars": spec.environment}
        if (strategy := self._strategy(spec.name)) is not None:
            options["scheduling_strategy"] = strategy
        actor = cast(Any, RoleActor).options(**options).remote()
        return RayProcess(spec=spec, actor=actor, running=actor.run.remote(spec.to_json()))

    async def rendezvous(self, name: str) -> str:
        """Where the group of processes meets whose first is `name`: `host:port`, at that process's machine."""
        if self._recipe.run.bind == "loopback":
            return f"{LOOPBACK}:{free_port()}"
        at = _here.options(num_cpus=0, scheduling_strategy=self._strategy(name) or "DEFAULT").remote()
        address: str = await _result(at)
        return address

    def _strategy(self, name: str) -> PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy | None:
        """Where a process goes: to what is booked for it; the buffer, whose journal is a file, to the driver's machine; others anywhere."""
        if name in self._bundles:
            return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[name])
        if name.startswith(Role.BUFFER):
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return None

    def _open(self) -> None:
        self._attached = ray.is_initialized()
        if not self._attached:
            _quiet()
            environment = {"env_vars": {"PYTHONPATH": self._python_path}} if self._python_path else {}
            resources = {} if self._recipe.run.ray_address else {"num_cpus": max(os.cpu_count() or 1, _booked_cpus(self._recipe))}
            address = self._recipe.run.ray_address
            if address:
                require_listener(address)
            try:
                ray.init(
                    address=address or "local",  # without, Ray would join one that somebody else has started here
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env=environment or None,
                    **resources,
                )
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise refusal(error, address) from error
        self._require_reach()
        self._place()

    def _require_reach(self) -> None:
        """Servers that listen on loopback are reached on their own machine only."""
        machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        if len(machines) > 1 and self._recipe.run.bind == "loopback":
            raise ConfigError(
                f"the Ray cluster has {len(machines)} machines, and with run.bind loopback its processes cannot reach each other: set run.bind=node"
                " (on a private network: whoever reaches the servers can steer the run), or run on one machine without run.ray_address"
            )

    def _place(self) -> None:
        """Book what the recipe asks for, all or nothing, so that half a run never holds a cluster."""
        wanted = bundles(self._recipe)
        self._bundles = {process: number for number, bundle in enumerate(wanted) for process in bundle.processes}
        if not wanted:
            return
        booked = [bundle.resources for bundle in wanted]
        self._group = placement_group(booked, strategy=self._recipe.resources.placement.upper())
        if not self._group.wait(_PLACEMENT_DEADLINE_S):
            raise ProcessDied(f"Ray could not place {booked} within {_PLACEMENT_DEADLINE_S:.0f} s; the cluster has {ray.cluster_resources()}")

    def _close(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
        if not self._attached:
            ray.shutdown()


def _booked_cpus(recipe: Recipe) -> int:
    return int(sum(bundle.cpus for bundle in bundles(recipe))) + 1


def _quiet() -> None:
    """A private Ray says nothing on the terminal and reports nothing to anybody."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)


@ray.remote  # type: ignore[untyped-decorator]
def _here() -> str:
    """The address of the machine that this is run on, with a port that is free there."""
    address = ray.util.get_node_ip_address()
    return f"{address}:{free_port(address)}"


@ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=_CONCURRENT_CALLS)
class RoleActor:
    """The shell: `run` is the program, `ready` its first word, `stop` the switch."""

    def __init__(self) -> None:
        self._stop, self._said = StopSignal(), threading.Event()
        self._info: dict[str, Any] = {}

    def run(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        from agentrl.system.child import redirect_output, run_role

        parsed = ProcessSpec.from_json(spec)
        redirect_output(parsed)
        try:
            run_role(parsed, self._tell, self._stop)
        except Exception as error:  # the blast-radius line of an actor: told to the driver as a plain record
            logging.getLogger("agentrl").exception("%s failed", parsed.name)
            failure = Failure.of(error)
            return {"kind": failure.kind, "message": failure.message, "trace": failure.trace}
        return None

    def ready(self) -> dict[str, Any]:
        self._said.wait()
        return self._info

    def stop(self) -> None:
        self._stop.set()

    def _tell(self, info: dict[str, Any]) -> None:
        self._info = info | {"pid": os.getpid()}
        self._said.set()


@dataclass
class RayProcess:
    """A process that is an actor."""

    spec: ProcessSpec
    actor: Any
    running: Any  # the reference of run()
    pid: int | None = None

    async def ready(self) -> dict[str, Any]:
        """What the program says when it can be used."""
        said = self.actor.ready.remote()
        info: dict[str, Any] | None = None
        if await _first_of(said, self.running) is said:
            with suppress(ray.exceptions.RayError):  # the actor died: both have ended, and `running` says how
                info = await _result(said)
        if info is None:
            end = await self.wait()
            raise end.refusal() or ProcessDied(f"{self.spec.name} ended before it was ready: {end}. Log: {self.spec.log}")
        self.pid = info["pid"]
        return info

    async def wait(self) -> Exit:
        """Wait for the program's end."""
        try:
            failure = await _result(self.running)
        except ray.exceptions.RayError as error:
            return Exit(failure=Failure(kind=type(error).__name__, message=_first_line(error)))
        return Exit(failure=Failure(**failure) if failure else None)

    async def stop(self, grace_s: float) -> None:
        """Set the program's switch; kill the actor after `grace_s`."""
        self.actor.stop.remote()
        with trio.move_on_after(grace_s):
            await self.wait()
        self.kill()

    def kill(self) -> None:
        """End the actor's process."""
        ray.kill(self.actor, no_restart=True)


async def _first_of(*references: Any) -> Any:
    """The first of the references that is done."""
    done: list[Any] = []
    async with trio.open_nursery() as nursery:

        async def one(reference: Any) -> None:
            await _done(reference)
            done.append(reference)
            nursery.cancel_scope.cancel()

        for reference in references:
            nursery.start_soon(one, reference)
    return done[0]


async def _result(reference: Any) -> Any:
    await _done(reference)
    return await trio.to_thread.run_sync(ray.get, reference)


async def _done(reference: Any) -> None:
    """Wait for a reference without a thread: its future wakes this task."""
    event, token = trio.Event(), trio.lowlevel.current_trio_token()

    def wake(_: Any) -> None:
        try:
            token.run_sync_soon(event.set)
        except trio.RunFinishedError:
            logging.getLogger(__name__).debug("an actor ended after the driver's loop had")

    reference.future().add_done_callback(wake)
    await event.wait()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
