"""What of CPUs and GPUs is booked for which processes.

A process that books anything has a bundle of its own, but for colocation: engine i and learner rank i share the bundle `pair-i`, and its GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.recipe import Recipe
from agentrl.system.process import Role

__all__ = ["Bundle", "booked", "bundles", "pair"]

_HALF = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """CPUs and a GPU share, or GPUs, of one machine, for processes that run there."""

    name: str
    processes: tuple[str, ...]
    cpus: float
    gpus: float

    @property
    def resources(self) -> dict[str, float]:
        """As Ray names them, without those that are 0."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


def booked(recipe: Recipe, role: Role) -> tuple[float, float]:
    """CPUs and GPUs of one process of a role."""
    resources = recipe.resources
    half = _HALF if resources.colocate and recipe.engine.device == "cuda" else 0.0
    shares = {
        Role.ENGINE: (resources.engine_cpus, half or resources.engine_gpus),
        Role.LEARNER: (resources.learner_cpus, half or resources.learner_gpus),
        Role.WORKER: (resources.worker_cpus, 0.0),
        Role.RETRIEVER: (resources.retriever_cpus, resources.retriever_gpus),
    }
    return shares.get(role, (0.0, 0.0))


def bundles(recipe: Recipe) -> list[Bundle]:
    """One bundle per process that books anything, or per pair of them."""
    numbers = {Role.ENGINE: recipe.engine.replicas, Role.LEARNER: recipe.learner.ranks, Role.WORKER: recipe.rollout.workers, Role.RETRIEVER: 1}
    wanted: dict[str, Bundle] = {}
    for role, number in numbers.items():
        cpus, gpus = booked(recipe, role)
        for index in range(number):
            process = f"{role}-{index}"
            name = pair(recipe, role, index) or process
            before = wanted.get(name, Bundle(name=name, processes=(), cpus=0.0, gpus=0.0))
            wanted[name] = Bundle(name=name, processes=(*before.processes, process), cpus=before.cpus + cpus, gpus=before.gpus + gpus)
    return [bundle for bundle in wanted.values() if bundle.resources]


def pair(recipe: Recipe, role: Role, index: int) -> str:
    """The pair that a process belongs to; empty where it has what it books for itself."""
    return f"pair-{index}" if recipe.resources.colocate and role in (Role.ENGINE, Role.LEARNER) else ""
