"""Which processes a recipe asks for, and starting them in the order in which they need each other.

buffer ─> retriever, engines ─> workers, learner ranks
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from agentrl.buffer.filters import resolve_filter
from agentrl.buffer.replay import resolve_select
from agentrl.buffer_api import BufferClient
from agentrl.config.recipe import Recipe
from agentrl.data.curriculum import find_curriculum
from agentrl.errors import ConfigError, RecipeCodeError
from agentrl.metrics.catalogue import unknown
from agentrl.resolve import called, origin, resolve
from agentrl.system.attached import AttachedEngines
from agentrl.system.booking import booked, pair
from agentrl.system.engines import engine_clients
from agentrl.system.process import ProcessSpec, Role
from agentrl.system.retriever_token import retriever_token
from agentrl.system.sglang import require_sglang
from agentrl.system.supervisor import Supervisor

__all__ = ["Cluster", "environment_file", "find_recipe_code", "missing_code", "refuse_unsupported", "start_processes"]

READY_DEADLINE_S = 600.0  # of any process; an engine has what its recipe gives it on top, and is to say itself what took so long


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Where the servers of a running run are. Its engines come and go: the buffer has the roster of them."""

    buffer: BufferClient
    retriever: str | None
    retriever_token: str | None
    first_event: int  # events of the buffer up to this number are of earlier starts


def refuse_unsupported(recipe: Recipe) -> None:
    """Say which part of the recipe this version cannot run yet.

    Raises:
        ConfigError: naming key and remedy.
    """
    engine_clients(recipe)  # for the keys alone
    if recipe.engine.kind == "sglang":
        require_sglang(recipe)
    if recipe.model.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora needs the package peft: pip install 'agentrl[lora]'")
    for name, alarm in recipe.health.alarms.items():
        if unknown([alarm.metric]):
            raise ConfigError(f"health.alarms.{name}.metric: there is no metric {alarm.metric}; docs/metrics.md lists them")


def environment_file(recipe: Recipe) -> str:
    """The file that env.factory is in, found and looked at before anything is started.

    Raises:
        ConfigError: it cannot be found, or env.options are not the arguments it takes.
    """
    try:
        factory: Any = resolve(recipe.env.factory)
    except ConfigError as error:
        raise ConfigError(f"env.factory: {error}") from error
    options = {"retriever_url": ""} | recipe.env.options if recipe.retriever is not None else recipe.env.options
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ConfigError(f"env.options do not fit {recipe.env.factory}: {error}") from error
    try:
        called(recipe.env.factory, lambda: factory(**options))  # once, for its own checks of the values
    except RecipeCodeError as error:
        raise ConfigError(f"env.options: {error}") from error
    return origin(factory)


def missing_code(recipe: Recipe) -> list[str]:
    """What a run would end with: a program, a key or a package that is not there; a class or function that is not, or does not take its options."""
    told = []
    for look in (refuse_unsupported, environment_file, find_recipe_code):
        try:
            look(recipe)
        except ConfigError as error:
            told.append(str(error))
    return told


def find_recipe_code(recipe: Recipe) -> None:
    """Look at the functions and classes that the recipe names for the buffer, before anything is started.

    Raises:
        ConfigError: one cannot be found, or does not take its options.
    """
    resolve_filter(recipe.buffer.filter, recipe.buffer.filter_part)
    resolve_select(recipe.buffer.replay.select)
    if (curriculum := recipe.tasks.curriculum) is not None:
        find_curriculum(curriculum.factory, curriculum.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Specs:
    """Makes specs: what all processes of a run have in common."""

    recipe: Recipe
    run_dir: Path
    model_dir: Path
    supervisor: Supervisor

    def of(self, role: Role, index: int = 0, **payload: Any) -> ProcessSpec:
        cpus, gpus = booked(self.recipe, role)
        return ProcessSpec(
            role=role,
            index=index,
            incarnation=self.supervisor.next_incarnation(),
            run_dir=str(self.run_dir),
            recipe=self.recipe.model_dump(mode="json"),
            payload={"model_dir": str(self.model_dir)} | payload,
            ready_deadline_s=READY_DEADLINE_S + (self.recipe.engine.start_deadline_s if role is Role.ENGINE else 0.0),
            cpus=cpus,
            gpus=gpus,
            pair=pair(self.recipe, role, index),
            environment=self.recipe.resources.environment.of(role.value),
        )


async def start_processes(
    supervisor: Supervisor,
    recipe: Recipe,
    *,
    run_dir: Path,
    model_dir: Path,
    environment_file: str,
    run_incarnation: int,
    learners: bool = True,
    evaluate_only: bool = False,
) -> Cluster:
    """Start everything and wait until all of it is ready.

    Args:
        environment_file: the file that env.factory is in the driver; workers refuse another.
        learners: without, nothing trains.
        evaluate_only: the run is its evaluation sets, once.
    """
    specs = _Specs(recipe=recipe, run_dir=run_dir, model_dir=model_dir, supervisor=supervisor)
    info = await supervisor.start(specs.of(Role.BUFFER, run_incarnation=run_incarnation, evaluate_only=evaluate_only))
    client = BufferClient(info["url"], role="driver", index=0, incarnation=supervisor.next_incarnation())
    supervisor.buffer = client
    before = await client.status()
    token = retriever_token(recipe)
    retriever = await _start_servers(supervisor, specs, token)
    shared = {"buffer": info["url"]}
    async with trio.open_nursery() as nursery:
        for index in range(recipe.rollout.workers):
            found = {"retriever_url": retriever, "retriever_token": token, "environment_file": environment_file}
            nursery.start_soon(supervisor.start, specs.of(Role.WORKER, index, **shared, **found))
        if learners:
            rendezvous = f"tcp://{await supervisor.rendezvous('learner-0')}"
            for index in range(recipe.learner.ranks):
                nursery.start_soon(supervisor.start, specs.of(Role.LEARNER, index, **shared, rendezvous=rendezvous))
    return Cluster(buffer=client, retriever=retriever, retriever_token=token, first_event=before["event"])


async def _start_servers(supervisor: Supervisor, specs: _Specs, token: str | None) -> str | None:
    """Engines, which are on the buffer's roster then, and the retriever, whose URL is returned."""
    recipe, urls = specs.recipe, {}
    if recipe.engine.urls:  # before anything that takes longer: a wrong URL is told at once
        assert supervisor.buffer is not None
        supervisor.attached = AttachedEngines(
            recipe,
            model_dir=specs.model_dir,
            buffer=supervisor.buffer,
            next_incarnation=supervisor.next_incarnation,
            connect=engine_clients(recipe),
        )
        await supervisor.attached.admit()

    async def start(spec: ProcessSpec) -> None:
        urls[spec.name] = (await supervisor.start(spec))["url"]

    async with trio.open_nursery() as nursery:
        for index in range(0 if recipe.engine.urls else recipe.engine.replicas):
            nursery.start_soon(start, specs.of(Role.ENGINE, index))
        if recipe.retriever is not None and recipe.retriever.url is None:
            nursery.start_soon(start, specs.of(Role.RETRIEVER, retriever_token=token))
    given = recipe.retriever.url if recipe.retriever is not None else None
    return urls.get("retriever-0", given)
