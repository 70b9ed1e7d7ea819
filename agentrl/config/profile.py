"""Profiles of some steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.section import NonNegative, Positive, Section

__all__ = ["ProfileRecipe"]


class ProfileRecipe(Section):
    """Look closely at some steps. What is found is written to `runs/NAME/profiles/`; docs/profiling.md says how to read it."""

    steps: tuple[NonNegative, Positive]
    """[a, b): steps a to b - 1 of the learner, counted from 0, a file each."""
    ranks: Annotated[list[NonNegative], Field(min_length=1)] = [0]
    """The learner's ranks that are profiled."""
    tool: Literal["torch", "memory", "nsys"] = "torch"
    """`torch`: a trace for chrome://tracing or Perfetto. `memory`: who holds the GPU's memory, for pytorch.org/memory_viz. `nsys`: marks the
    steps for NVIDIA Nsight Systems, which the run is started under."""
    roles: Annotated[list[Literal["learner", "engine"]], Field(min_length=1)] = ["learner"]
    """Who is profiled. An engine's profile begins with step a."""
    engine_passes: Positive = 200
    """Forward passes of each engine that are recorded (engine)."""

    @model_validator(mode="after")
    def _ordered(self) -> ProfileRecipe:
        first, end = self.steps
        if not first < end:
            raise ValueError(f"profile.steps [{first}, {end}] holds no step: it is [first, last + 1]")
        return self
