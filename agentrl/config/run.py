"""The run as a whole: how long, evaluation, metrics, resources."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Positive, Section
from agentrl.config.tasks import TaskSource

__all__ = ["EvalRecipe", "EvalSet", "MetricsRecipe", "ResourcesRecipe", "RoleEnvironments", "RunRecipe"]

EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Variables = dict[EnvironmentName, str]

_OURS = frozenset({"PYTHONPATH", "CUDA_VISIBLE_DEVICES"})


class RunRecipe(Section):
    """Where and how long."""

    dir: str = "runs"
    """Runs are kept in `<dir>/<name>`."""
    launcher: Literal["ray", "local"] = "ray"
    """What starts the processes: Ray, or plain subprocesses of this machine."""
    ray_address: str | None = None
    """Address of a Ray that runs already (`auto`, `host:port`); by default a private one is started on this machine. `--address` sets it, too."""
    bind: Literal["loopback", "node"] = "loopback"
    """Where servers listen. `node`: at the address that their machine has in the Ray cluster, which a run over several machines needs. Whoever
    reaches those ports can read and steer the run: give it a private network."""
    steps: Positive | None = None
    """End after this many steps. Exactly one of steps, epochs and hours is set."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """End after this many passes over the training tasks: steps = epochs x tasks / groups_per_batch, rounded down."""
    hours: Annotated[float, Field(gt=0.0)] | None = None
    """End after this much time, summed over resumes; schedules follow the share of it that has passed."""
    deterministic: bool = False
    """Bit-reproducible: one engine, one worker, one thread, K=0, fixed slots, fp32 on the CPU, exact search query by query, no evaluation."""
    debug: bool = False
    """Check the ledger's balance after every record."""

    @model_validator(mode="after")
    def _one_end(self) -> RunRecipe:
        given = [name for name in ("steps", "epochs", "hours") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a run ends by exactly one of steps, epochs and hours; given: {', '.join(given) or 'none'}")
        return self


class EvalSet(Section):
    """A held-out set."""

    tasks: Annotated[list[TaskSource], Field(min_length=1)]
    """Where its tasks come from."""
    n: Positive = 1
    """Trajectories per task."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""


class EvalRecipe(Section):
    """Evaluation on named held-out sets."""

    sets: dict[str, EvalSet] = {}
    """By name."""
    every: Positive | None = None
    """Steps between evaluations beside training. `initial` and `final`: whether one runs before it and one after it."""
    initial: bool = True
    """Evaluate before training."""
    final: bool = True
    """Evaluate the last version."""
    headline: str | None = None
    """The set whose EM is the run's headline; by default the first."""


class MetricsRecipe(Section):
    """Where metrics go: metrics.jsonl always, the console, and trackers (`sinks`, under the name `project`; each needs its extra)."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """`live`: a board that is redrawn. `plain`: a line per step. `auto`: live on a terminal."""
    sinks: list[Literal["wandb", "tensorboard", "swanlab"]] = []
    """Trackers, beside metrics.jsonl."""
    project: str = "agentrl"
    """The trackers' project."""


class RoleEnvironments(Section):
    """Environment variables by role, for example `engine: {NCCL_DEBUG: INFO}`; a value is a text: `"1"`, in quotes. A process whose variables are
    others does not start."""

    buffer: Variables = {}
    """Of the buffer."""
    engine: Variables = {}
    """Of every engine."""
    learner: Variables = {}
    """Of every rank."""
    retriever: Variables = {}
    """Of the retriever."""
    worker: Variables = {}
    """Of every worker."""

    def of(self, role: str) -> dict[str, str]:
        """The variables of `role`; none where it is not among the fields."""
        variables: dict[str, str] = self.model_dump().get(role, {})
        return variables


class ResourcesRecipe(Section):
    """What the processes are placed on. CPUs are shares that Ray books, not limits. GPUs are counted out to processes by both launchers."""

    engine_gpus: Annotated[float, Field(ge=0)] = 0
    """Per engine: engine.tensor_parallel of them, or a share of one."""
    learner_gpus: Annotated[float, Field(ge=0)] = 0
    """Per rank."""
    engine_cpus: Annotated[float, Field(ge=0)] = 0
    """Per engine."""
    learner_cpus: Annotated[float, Field(ge=0)] = 0
    """Per rank."""
    worker_cpus: Annotated[float, Field(ge=0)] = 0
    """Per worker."""
    retriever_gpus: Annotated[float, Field(ge=0)] = 0
    """Of the retriever."""
    retriever_cpus: Annotated[float, Field(ge=0)] = 0
    """Of the retriever."""
    colocate: bool = False
    """Engine i and learner rank i share GPU i: engines sleep, their memory given away, while the learner trains. Needs as many engines as ranks;
    their requests wait meanwhile, so rollout.request_deadline_s must be longer than a step. engine_gpus and learner_gpus are then a half each
    (0 means that, too)."""
    placement: Literal["pack", "spread"] = "pack"
    """`pack`: on as few nodes as possible. `spread`: on as many."""
    environment: RoleEnvironments = RoleEnvironments()
    """Environment variables of the processes."""

    @model_validator(mode="after")
    def _not_ours(self) -> ResourcesRecipe:
        for role in type(self.environment).model_fields:
            if taken := sorted(_OURS & self.environment.of(role).keys()):
                raise ValueError(f"resources.environment.{role}: {taken[0]} is set by agentrl itself; leave it out")
        return self
