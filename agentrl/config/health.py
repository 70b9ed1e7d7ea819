"""The run's health: alarms over the metrics of its steps, and what follows when one is raised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Float, NonNegative, Positive, PositiveFloat, Seconds, Section

__all__ = ["DEFAULT_ALARMS", "AlarmRecipe", "HealthRecipe"]

Action = Literal["warn", "pause", "rollback", "command", "url"]

# Metrics that are known when a step ends, and are the learner's to judge.
OBSERVED = ("batch/", "learner/", "critic/")


class AlarmRecipe(Section):
    """One alarm: a metric and its bounds. The metric is bad in a step where it is beyond any of them, or is not a finite number."""

    metric: str
    """A `batch/`, `learner/` or `critic/` metric of docs/metrics.md. A step without it is neither good nor bad."""
    above: Float | None = None
    """Bad above this."""
    below: Float | None = None
    """Bad below this."""
    above_factor: PositiveFloat | None = None
    """Bad above this many times the run's own first healthy steps (`baseline_steps`), where their median is positive."""
    below_factor: PositiveFloat | None = None
    """Bad below this many times the same."""
    patience: Positive = 3
    """Bad steps in a row before the alarm is raised. It is raised again only after a good step."""
    warmup_steps: NonNegative = 0
    """Steps at the start of the run that are not looked at."""
    actions: list[Action] = ["warn"]
    """`warn`: log, console, `alarm/<name>` among the step's metrics, a line in alarms.jsonl (with any other action, too). `pause`: the run ends as by
    Ctrl-C, with a checkpoint and exit code 3; the same command goes on. `rollback`: back to the last good checkpoint with a smaller learning
    rate. `command`, `url`: the alarm is told as JSON. None: the alarm is off."""

    @model_validator(mode="after")
    def _fits(self) -> AlarmRecipe:
        if not self.metric.startswith(OBSERVED):
            raise ValueError(f"an alarm watches a metric that starts with {', '.join(OBSERVED)}, not {self.metric}")
        if self.actions and self.above is self.below is self.above_factor is self.below_factor is None:
            raise ValueError("an alarm needs above, below, above_factor or below_factor; actions: [] turns it off")
        return self


# Bounds that runs in good health keep well away from; the relative ones are generous, because entropy and length move while a policy learns.
DEFAULT_ALARMS: dict[str, dict[str, Any]] = {
    "entropy_low": {"metric": "learner/entropy", "below_factor": 0.02, "patience": 5},
    "entropy_high": {"metric": "learner/entropy", "above_factor": 4.0, "patience": 3},
    "ess": {"metric": "learner/ess", "below": 0.2, "patience": 3},
    "kl_behaviour": {"metric": "learner/kl_k3", "above": 0.5, "patience": 3},
    "kl_reference": {"metric": "learner/kl_reference_k3", "above": 5.0, "patience": 3},
    "grad_norm": {"metric": "learner/grad_norm", "above_factor": 20.0, "patience": 3},
    "skipped_updates": {"metric": "learner/updates_skipped", "above": 0.0, "patience": 2},
    "invalid_actions": {"metric": "batch/valid_action_share", "below_factor": 0.5, "patience": 3},
    "length_low": {"metric": "batch/response_tokens", "below_factor": 0.2, "patience": 5},
    "length_high": {"metric": "batch/response_tokens", "above_factor": 5.0, "patience": 5},
    "all_wrong": {"metric": "batch/groups_all_wrong", "above": 0.98, "patience": 20},
}


class HealthRecipe(Section):
    """Alarms, and what follows when one is raised. The defaults only warn.

    `alarms` is laid over the defaults by name: `entropy_low: {actions: [rollback]}` changes one key of one of them.
    """

    alarms: dict[str, AlarmRecipe] = {name: AlarmRecipe(**told) for name, told in DEFAULT_ALARMS.items()}
    """By name. docs/health.md lists the defaults."""
    baseline_steps: Positive = 10
    """Healthy steps (no absolute bound broken) whose median is what `above_factor` and `below_factor` multiply."""
    rate_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """What a rollback multiplies every learning rate with, for the rest of the run."""
    max_rollbacks: Positive = 3
    """In the whole run, resumes included. The alarm after the last one ends the run with an error."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and arguments, started without a shell, with the alarm as JSON on its standard input."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Gets the alarm as the JSON body of a POST."""
    deadline_s: Seconds = 10.0
    """Of the command and of the POST. Training does not wait for either."""

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, given: Any) -> Any:
        alarms = given.get("alarms") if isinstance(given, Mapping) else None
        if not isinstance(alarms, Mapping):
            return given
        if unfit := [name for name in alarms if not re.fullmatch(r"[a-z0-9_]+", str(name))]:
            raise ValueError(f"an alarm's name is made of a-z, 0-9 and _: {unfit[0]} is not")
        merged = {name: DEFAULT_ALARMS.get(name, {}) | dict(told) if isinstance(told, Mapping) else told for name, told in alarms.items()}
        return dict(given) | {"alarms": DEFAULT_ALARMS | merged}

    @model_validator(mode="after")
    def _told_where(self) -> HealthRecipe:
        for way in ("command", "url"):
            asking = [name for name, alarm in self.alarms.items() if way in alarm.actions]
            if asking and getattr(self, way) is None:
                raise ValueError(f"alarm {asking[0]} has the action {way}, but health.{way} is not set")
            if not asking and getattr(self, way) is not None:
                raise ValueError(f"health.{way} is set, but no alarm has the action {way}")
        return self

    @property
    def rolls_back(self) -> bool:
        """Whether any alarm may take the run back."""
        return any("rollback" in alarm.actions for alarm in self.alarms.values())
