"""The recipe: one pydantic model per component, one module per subject. Unknown keys are errors. Imports neither torch nor ray.

`docs/recipes.md` is made from these models. Loading (strict YAML, overrides, files and lines in error messages) is in `config.load`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from agentrl.config.algorithm import AdvantageRecipe, AlgorithmRecipe, EntropyRecipe, ImportanceRecipe, KLRecipe, LossRecipe, RejectionRecipe
from agentrl.config.buffer import BufferRecipe, ReplayRecipe, StopsRecipe
from agentrl.config.canary import CanaryRecipe
from agentrl.config.combinations import refused_combination
from agentrl.config.deterministic import unmet_conditions
from agentrl.config.engine import EngineRecipe
from agentrl.config.health import AlarmRecipe, HealthRecipe
from agentrl.config.learner import CheckpointRecipe, CriticRecipe, LearnerRecipe, ScheduleRecipe
from agentrl.config.model import Architecture, LoraRecipe, ModelRecipe, PrepareRecipe, TokenizerTraining, WarmStartRecipe
from agentrl.config.placement import refused_placement
from agentrl.config.profile import ProfileRecipe
from agentrl.config.rollout import LimitsRecipe, OverLongRecipe, RolloutRecipe
from agentrl.config.run import EvalRecipe, EvalSet, MetricsRecipe, ResourcesRecipe, RoleEnvironments, RunRecipe
from agentrl.config.section import Section
from agentrl.config.tasks import CurriculumRecipe, EnvRecipe, RetrieverRecipe, TaskSource, TasksRecipe
from agentrl.config.weights import WeightsRecipe

__all__ = [
    "AdvantageRecipe",
    "AlarmRecipe",
    "AlgorithmRecipe",
    "Architecture",
    "BufferRecipe",
    "CanaryRecipe",
    "CheckpointRecipe",
    "CriticRecipe",
    "CurriculumRecipe",
    "EngineRecipe",
    "EntropyRecipe",
    "EnvRecipe",
    "EvalRecipe",
    "EvalSet",
    "HealthRecipe",
    "ImportanceRecipe",
    "KLRecipe",
    "LearnerRecipe",
    "LimitsRecipe",
    "LoraRecipe",
    "LossRecipe",
    "MetricsRecipe",
    "ModelRecipe",
    "OverLongRecipe",
    "PrepareRecipe",
    "ProfileRecipe",
    "Recipe",
    "RejectionRecipe",
    "ReplayRecipe",
    "ResourcesRecipe",
    "RetrieverRecipe",
    "RoleEnvironments",
    "RolloutRecipe",
    "RunRecipe",
    "ScheduleRecipe",
    "Section",
    "StopsRecipe",
    "TaskSource",
    "TasksRecipe",
    "TokenizerTraining",
    "WarmStartRecipe",
    "WeightsRecipe",
]


class Recipe(Section):
    """One run. `name` names its directory, `seed` decides everything random."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's; names its directory."""
    seed: int = 0
    """Decides everything random."""
    run: RunRecipe
    prepare: PrepareRecipe | None = None
    model: ModelRecipe
    warm_start: WarmStartRecipe | None = None
    tasks: TasksRecipe
    env: EnvRecipe
    retriever: RetrieverRecipe | None = None
    engine: EngineRecipe = EngineRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    buffer: BufferRecipe = BufferRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    critic: CriticRecipe | None = None
    """None: an estimator without a critic."""
    algorithm: AlgorithmRecipe = AlgorithmRecipe()
    weights: WeightsRecipe = WeightsRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    eval: EvalRecipe = EvalRecipe()
    metrics: MetricsRecipe = MetricsRecipe()
    profile: ProfileRecipe | None = None
    """None: nothing is profiled."""
    health: HealthRecipe = HealthRecipe()
    canary: CanaryRecipe | None = CanaryRecipe()
    resources: ResourcesRecipe = ResourcesRecipe()
    smoke: dict[str, Any] = {}
    """Overrides (`a.b: value`) that `--smoke` applies on top of its own."""

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        engine, context = self.engine.context_tokens, self.rollout.limits.context_tokens
        if engine < context:
            raise ValueError(
                f"engine.context_tokens ({engine}) is below rollout.limits.context_tokens ({context}): raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _coherent(self) -> Recipe:
        plain = self.model_dump()
        if refused := refused_combination(plain) or refused_placement(plain):
            raise ValueError(refused)
        return self

    @model_validator(mode="after")
    def _deterministic(self) -> Recipe:
        if self.run.deterministic and (unmet := unmet_conditions(self.model_dump())):
            raise ValueError(f"run.deterministic needs {', '.join(unmet)}")
        return self
