"""Combinations of sections that would do nothing, or the wrong thing, without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.config.computing import refused_computing
from agentrl.config.health import DEFAULT_ALARMS
from agentrl.config.methods import CRITIC_ESTIMATORS

__all__ = ["refused_combination"]

Plain = Mapping[str, Any]  # a recipe as a map of sections

# Estimators that compare a trajectory with the others of its group, and how large the group must be.
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "opo", "gpg", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline")
BASELINE_ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")


def refused_combination(recipe: Plain) -> str | None:
    """What does not fit and what to do about it; None where everything does."""
    return next((refused for check in CHECKS if (refused := check(recipe))), None)


def _group_size(recipe: Plain) -> str | None:
    name, size = recipe["algorithm"]["advantage"]["estimator"], recipe["rollout"]["group_size"]
    if name in GROUP_ESTIMATORS + BASELINE_ESTIMATORS and size < 2:
        return f"algorithm.advantage.estimator {name} needs rollout.group_size >= 2: a group of one has no baseline"
    return None


def _critic(recipe: Plain) -> str | None:
    algorithm, critic = recipe["algorithm"], recipe["critic"]
    name = algorithm["advantage"]["estimator"]
    if name in CRITIC_ESTIMATORS and critic is None:
        return f"algorithm.advantage.estimator {name} needs a critic: add a `critic` section (`critic: {{}}` for its defaults)"
    if name not in CRITIC_ESTIMATORS and ":" not in name and critic is not None:
        return f"there is a critic, and algorithm.advantage.estimator {name} does not use it: remove it, or set the estimator to gae"
    if algorithm["gae_over_observations"] and critic is None:
        return "algorithm.gae_over_observations is about the critic's advantages, and there is no critic"
    return None


def _parts(recipe: Plain) -> str | None:
    algorithm = recipe["algorithm"]
    if algorithm["advantage"]["estimator"] == "gdpo" and algorithm["kl"]["where"] == "reward":
        return "algorithm.kl.where reward changes the total reward, and estimator gdpo looks at its parts only: set it to loss"
    return None


def _lora(recipe: Plain) -> str | None:
    lora = recipe["model"]["lora"]
    if lora is not None and lora["publish"] == "adapters":
        return "model.lora.publish adapters: this version sends engines full weights only; set it to merged"
    if lora is not None and recipe["algorithm"]["kl"]["reference"] is not None:
        return "algorithm.kl.reference: with model.lora the reference is the model without its adapters; leave it out"
    return None


def _reuse(recipe: Plain) -> str | None:
    replay = recipe["buffer"]["replay"]
    if replay["reuse"] > 1 and replay["fresh"] == 1.0:
        return "buffer.replay.reuse > 1 does nothing while buffer.replay.fresh is 1: all of a batch is new; lower fresh"
    if replay["reuse"] == 1 and replay["fresh"] < 1.0:
        return "buffer.replay.fresh < 1 does nothing while buffer.replay.reuse is 1: no group is used again; raise reuse"
    return None


def _observations(recipe: Plain) -> str | None:
    algorithm = recipe["algorithm"]
    if algorithm["train_on_observations"] and algorithm["proximal"] == "interpolate":
        return "algorithm.train_on_observations needs the learner's own log-probs of observations: set algorithm.proximal to behaviour or recompute"
    return None


def _filter(recipe: Plain) -> str | None:
    if recipe["buffer"]["filter"] == "mixed" and recipe["rollout"]["group_size"] < 2:
        return "buffer.filter mixed keeps groups whose rewards differ, and rollout.group_size is 1: every group would be dropped"
    return None


def _curriculum(recipe: Plain) -> str | None:
    tasks = recipe["tasks"]
    if tasks["curriculum"] is not None and any(source["weight"] is not None for source in tasks["train"]):
        return "tasks.train: weights do nothing beside tasks.curriculum, which decides what comes next: leave one of them out"
    return None


def _alarms(recipe: Plain) -> str | None:
    """Alarms that could never be raised. Those of the defaults may be there for nothing, as long as nobody asked for them."""
    without = {"critic/": recipe["critic"] is None, "learner/kl_reference": recipe["algorithm"]["kl"]["where"] == "none"}
    for name, alarm in recipe["health"]["alarms"].items():
        default = DEFAULT_ALARMS.get(name)
        untouched = default is not None and all(alarm[key] == value for key, value in ({"actions": ["warn"]} | default).items())
        missing = next((prefix for prefix, absent in without.items() if absent and alarm["metric"].startswith(prefix)), None)
        if missing is not None and alarm["actions"] and not untouched:
            what = "there is no critic" if missing == "critic/" else "algorithm.kl.where is none"
            return f"health.alarms.{name} watches {alarm['metric']}, which is never measured: {what}"
    return None


def _mini_batches(recipe: Plain) -> str | None:
    learner, trajectories = recipe["learner"], recipe["learner"]["groups_per_batch"] * recipe["rollout"]["group_size"]
    if learner["mini_batches"] > trajectories:
        return f"learner.mini_batches ({learner['mini_batches']}) exceeds the {trajectories} trajectories of a batch: lower it"
    return None


def _transfer(recipe: Plain) -> str | None:
    weights = recipe["weights"]
    if weights["transport"] == "disk" and weights["fan_out"] != "auto":
        return f"weights.fan_out {weights['fan_out']} does nothing with weights.transport disk, which has no process groups: leave it out"
    if weights["transport"] == "disk" and weights["backend"] != "auto":
        return f"weights.backend {weights['backend']} does nothing with weights.transport disk, which has no process groups: leave it out"
    return None


def _attached(recipe: Plain) -> str | None:
    urls, engine = [url.rstrip("/") for url in recipe["engine"]["urls"]], recipe["engine"]
    if len(set(urls)) < len(urls):
        return "engine.urls: every server once; the same one twice would be sent every version twice"
    if urls and engine["replicas"] not in (1, len(urls)):
        return f"engine.replicas is {engine['replicas']}, and the run attaches to the {len(urls)} servers of engine.urls: leave replicas out"
    if urls and engine["python"] is not None:
        return "engine.python does nothing beside engine.urls: no server is started; leave one of them out"
    return None


CHECKS: tuple[Callable[[Plain], str | None], ...] = (
    _group_size,
    _critic,
    _parts,
    _lora,
    _reuse,
    _observations,
    _mini_batches,
    _filter,
    _curriculum,
    _alarms,
    _attached,
    _transfer,
    refused_computing,
)
