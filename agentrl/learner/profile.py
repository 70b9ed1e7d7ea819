"""Profiles of some of the learner's steps, as the recipe's `profile` section asks for them: a file a step, or marks for Nsight Systems.

profiles/learner-rank0-step-00000005.json       torch: a Chrome trace with the step's phases by name
profiles/learner-rank0-step-00000005.pickle     memory: what torch's allocator did in the step, and for whom
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from agentrl.config.recipe import ProfileRecipe
from agentrl.learner.ranks import Ranks

__all__ = ["StepProfiler"]

log = logging.getLogger(__name__)

# Allocations and frees that are kept: as many as a step of a large model makes, in some hundred megabytes.
MEMORY_EVENTS = 1_000_000


class StepProfiler:
    """Of one rank. Between steps it holds nothing: a run that ends has no profile that is not written."""

    def __init__(self, recipe: ProfileRecipe | None, ranks: Ranks, run_dir: Path) -> None:
        self._recipe = recipe if recipe is not None and "learner" in recipe.roles and ranks.rank in recipe.ranks else None
        self._ranks = ranks
        self._directory = run_dir / "profiles"

    def wants(self, step: int) -> bool:
        """Whether this step is one of those that are looked at."""
        return self._recipe is not None and self._recipe.steps[0] <= step < self._recipe.steps[1]

    def marks(self, step: int) -> Callable[[str], AbstractContextManager[object]] | None:
        """What marks a phase of this step by name; None where nobody looks."""
        if self._recipe is None or not self.wants(step):
            return None
        return torch.cuda.nvtx.range if self._recipe.tool == "nsys" else record_function

    def step(self, step: int) -> AbstractContextManager[None]:
        """Around a step."""
        if self._recipe is None or not self.wants(step):
            return nullcontext()
        path = self._directory / f"learner-rank{self._ranks.rank}-step-{step:08d}"
        tools = {"torch": self._traced, "memory": self._allocations, "nsys": self._marked}
        return tools[self._recipe.tool](path)

    @contextmanager
    def _traced(self, path: Path) -> Iterator[None]:
        cuda = self._ranks.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities, acc_events=True) as seen:
            yield
            if cuda:
                torch.cuda.synchronize(self._ranks.device)  # or what is still on its way is missing
        path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(path.with_suffix(".json")))
        log.info("profile: %s.json", path)

    @contextmanager
    def _allocations(self, path: Path) -> Iterator[None]:
        """Not run by the tests: needs a GPU."""
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        try:
            yield
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        log.info("profile: %s.pickle", path)

    @contextmanager
    def _marked(self, path: Path) -> Iterator[None]:
        """Not run by the tests: needs a GPU. `nsys` writes the file, where its command line says."""
        torch.cuda.synchronize(self._ranks.device)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.nvtx.range(path.name):
                yield
                torch.cuda.synchronize(self._ranks.device)
        finally:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
