"""What a deterministic run asks of its recipe, because its bits would depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.config.tasks import HASHED

__all__ = ["unmet_conditions"]

FIXED = {
    "engine.kind": "embedded",  # SGLang's batches have the shapes they happen to have
    "engine.urls": [],
    "engine.replicas": 1,
    "rollout.workers": 1,
    "rollout.max_staleness": 0,
    "weights.publish_every": 1,
    "buffer.over_sample": 0.0,  # which of the groups are complete first depends on the clock
    "engine.threads": 1,
    "learner.threads": 1,
    "engine.device": "cpu",
    "learner.device": "cpu",
    "learner.compile": False,  # its kernels are made anew on every machine
    "model.dtype": "float32",
    "resources.colocate": False,  # when engines fall asleep depends on the clock
}
MIN_SLOTS = 4  # linear layers give other bits at one to three rows


def unmet_conditions(recipe: Mapping[str, Any]) -> list[str]:
    """What of a recipe (a map of sections) does not fit, each as what is wanted instead."""
    unmet = []
    for key, wanted in FIXED.items():
        section, name = key.split(".")
        if (found := recipe[section][name]) != wanted:
            unmet.append(f"{key} {wanted} (is {found})")
    if recipe["engine"]["slots"] < MIN_SLOTS:
        unmet.append(f"engine.slots >= {MIN_SLOTS}")
    if recipe["eval"]["sets"]:
        unmet.append("no eval.sets")  # they would play beside training
    if recipe["buffer"]["replay"]["fresh"] != 1.0:
        unmet.append("buffer.replay.fresh 1")  # which new groups are complete first depends on the clock
    if (retriever := recipe["retriever"]) is not None:
        wanted = {"device": "cpu", "threads": 1, "encoder": HASHED, "reranker": None}  # a model's numbers depend on what else is in the batch
        unmet += [f"retriever.{name} {value} (is {retriever[name]})" for name, value in wanted.items() if retriever[name] != value]
    if recipe["tasks"]["curriculum"] is not None:
        unmet.append("no tasks.curriculum")  # it is told of groups in the order in which they end
    if recipe["run"]["hours"] is not None:
        unmet.append("no run.hours")  # a share of time is never the same twice
    return unmet
