"""The order in which a run issues its tasks: ordinal 0, 1, 2, ... over any number of epochs.

An epoch of N tasks is a new seeded shuffle of all of them. Where sources have weights, an epoch holds N x weight tasks of each source (rounded
so that the sum is N), and each source goes through its own shuffles at that pace, one after the other: no task comes a second time before every
other task of its source has come once.

The order is a pure function of (tasks, weights, seed): any ordinal may be asked for at any time, on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from agentrl.config.recipe import RunRecipe, TaskSource
from agentrl.data.sources import TaskList
from agentrl.errors import ConfigError
from agentrl.seeds import mix
from agentrl.types import Task

__all__ = ["TaskOrder", "total_steps"]

Indices = npt.NDArray[np.int64]

# What is shuffled: part of the seed of each shuffle.
_SLOTS, _TASKS = 1, 2


class TaskOrder:
    """The task of every ordinal.

    Shuffles are made when first needed and kept, some 16 bytes for every task issued, so an ordinal costs O(1) amortised in any order.

    Raises:
        ConfigError: some sources have a weight and others none, or a weight amounts to less than one task per epoch.
    """

    def __init__(self, tasks: TaskList, sources: Sequence[TaskSource], *, seed: int, shuffle: bool = True) -> None:
        self._parts = tasks.parts
        self._seed, self._shuffle = seed, shuffle
        self._quotas = _quotas([len(part) for part in self._parts], [source.weight for source in sources])
        self._epochs: dict[int, tuple[Indices, Indices]] = {}
        self._passes: dict[tuple[int, int], Indices] = {}

    @property
    def size(self) -> int:
        """Tasks per epoch."""
        return sum(self._quotas)

    def task(self, ordinal: int) -> Task:
        """The task of an ordinal >= 0."""
        if ordinal < 0:
            raise IndexError(f"a task ordinal is >= 0, got {ordinal}")
        epoch, position = divmod(ordinal, self.size)
        sources, ranks = self._epoch(epoch)
        source = int(sources[position])
        past, index = divmod(epoch * self._quotas[source] + int(ranks[position]), len(self._parts[source]))
        return self._parts[source][int(self._pass(source, past)[index])]

    def _epoch(self, epoch: int) -> tuple[Indices, Indices]:
        """For each position of an epoch the source its task is from, and how many of that source's came before it in the epoch."""
        if epoch not in self._epochs:
            sources = np.repeat(np.arange(len(self._quotas)), self._quotas)
            sources = sources[self._permutation(self.size, _SLOTS, epoch)] if self._shuffle else sources[self._even_mixture()]
            ranks = np.zeros_like(sources)
            for source, quota in enumerate(self._quotas):
                ranks[sources == source] = np.arange(quota)
            self._epochs[epoch] = sources, ranks
        return self._epochs[epoch]

    def _pass(self, source: int, past: int) -> Indices:
        """The order in which a source's tasks come when it has been gone through `past` times before."""
        key = (source, past) if self._shuffle else (source, 0)
        if key not in self._passes:
            count = len(self._parts[source])
            self._passes[key] = self._permutation(count, _TASKS, source, past) if self._shuffle else np.arange(count)
        return self._passes[key]

    def _permutation(self, count: int, *names: int) -> Indices:
        # RandomState, because NumPy promises never to change its stream: a run resumed under another version keeps its order.
        return np.random.RandomState(mix(self._seed, *names) & 0xFFFFFFFF).permutation(count)

    def _even_mixture(self) -> Indices:
        """Unshuffled: without weights one source after the other, with weights spread evenly over the epoch."""
        if [len(part) for part in self._parts] == self._quotas:
            return np.arange(self.size)
        ranks = np.concatenate([np.arange(quota) for quota in self._quotas])
        return np.argsort((ranks + 0.5) / np.repeat(self._quotas, self._quotas), kind="stable")


def total_steps(run: RunRecipe, size: int, groups_per_batch: int) -> int | None:
    """Steps of a run over `size` tasks per epoch, fixed at its start; None where it ends by hours.

    Raises:
        ConfigError: the epochs do not fill one batch.
    """
    if run.steps is not None:
        return run.steps
    if run.epochs is None:
        return None
    steps = int(Fraction(str(run.epochs)) * size / groups_per_batch)  # exact: 0.29 epochs of 100 tasks are 29
    if steps == 0:
        raise ConfigError(
            f"run.epochs {run.epochs:g} of {size} tasks do not fill one batch of {groups_per_batch} groups:"
            " raise run.epochs or lower learner.groups_per_batch"
        )
    return steps


def _quotas(counts: Sequence[int], weights: Sequence[float | None]) -> list[int]:
    """Tasks of each source in an epoch: proportional to the weights, by largest remainder, the sum kept."""
    given = [weight for weight in weights if weight is not None]
    if not given:
        return list(counts)
    if len(given) != len(counts):
        raise ConfigError(f"tasks.train[{list(weights).index(None)}] has no weight: give every source a weight, or none")
    size = sum(counts)
    exact = [Fraction(str(weight)) * size / sum(Fraction(str(w)) for w in given) for weight in given]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (quotas[i] - exact[i], i))
    for index in by_remainder[: size - sum(quotas)]:
        quotas[index] += 1
    if 0 in quotas:
        raise ConfigError(f"tasks.train[{quotas.index(0)}].weight {given[quotas.index(0)]:g} is less than one task in an epoch of {size} tasks")
    return quotas
