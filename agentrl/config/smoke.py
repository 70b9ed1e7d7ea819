"""`--smoke`: the same recipe, small enough to run anywhere in a minute. A pure transformation.

Two learner steps, no network: the recipe's architecture at tiny size with random weights, a tokenizer trained on the recipe's corpus, an
embedded engine on the CPU, the first few tasks, short limits, nothing placed, no sinks. What a recipe adds on top (other files, mostly) stands
in its `smoke` section, and the command line wins over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.config.recipe import LimitsRecipe, RetrieverRecipe, RolloutRecipe
from agentrl.config.tasks import OF_A_CORPUS

__all__ = ["smoke_overrides"]

_GROUPS, _GROUP_SIZE = 2, 4
_TASKS, _EVAL_TASKS = 16, 8
_WARM_START_STEPS = 8
# Tokens. Search-R1's prompt takes about 300 of a tokenizer trained on a few kilobytes; two searches then fit the context.
_LIMITS = {"prompt_tokens": 640, "completion_tokens": 48, "observation_tokens": 128, "context_tokens": 1024}
_ARCHITECTURE = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2}
_VOCABULARY = 1024

# The parts that need no look at the recipe.
_ALWAYS: dict[str, Any] = {
    "run.steps": 2,
    "run.epochs": None,
    "run.hours": None,
    "run.ray_address": None,
    "run.bind": "loopback",
    "model.path": None,
    "model.dtype": "float32",
    "model.attention": "sdpa",
    "model.gradient_checkpointing": False,
    "tasks.over_long": "filter",
    "engine.kind": "embedded",
    "engine.replicas": 1,
    "engine.urls": [],
    "engine.slots": 16,
    "engine.device": "cpu",
    "engine.threads": 1,
    "engine.python": None,
    "engine.tensor_parallel": 1,
    "engine.api_key_variable": None,
    "engine.admin_key_variable": None,
    "rollout.workers": 1,
    "rollout.concurrency": 32,
    "learner.ranks": 1,
    "learner.groups_per_batch": _GROUPS,
    "learner.replicate": 1,
    "learner.packing": "auto",
    "learner.device": "cpu",
    "learner.cpu_offload": False,
    "learner.compile": False,
    "profile": None,
    "learner.threads": 1,
    "learner.tokens_per_micro_batch": 8192,
    "weights.backend": "auto",
    "weights.bucket_mb": 8,
    "checkpoint.every": 1,
    "metrics.sinks": [],
    "resources.engine_gpus": 0,
    "resources.learner_gpus": 0,
    "resources.engine_cpus": 0,
    "resources.learner_cpus": 0,
    "resources.worker_cpus": 0,
    "resources.retriever_gpus": 0,
    "resources.retriever_cpus": 0,
    "resources.placement": "pack",
}


def smoke_overrides(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides (`a.b: value`) that make a recipe small.

    Args:
        recipe: the plain recipe as it would be without them: its files with its `smoke` section and the command line's overrides. It need not
            be valid: what is wrong with it is reported when the result is validated.
    """
    small = dict(_ALWAYS)
    if isinstance(name := recipe.get("name"), str):
        small["name"] = f"{name}-smoke"
    small |= _limits(recipe)
    small |= _model(recipe)
    small |= _tasks(recipe)
    small["rollout.group_size"] = _at_most(_GROUP_SIZE, _get(recipe, "rollout", "group_size"), RolloutRecipe().group_size)
    small["learner.mini_batches"] = _at_most(_GROUPS, _get(recipe, "learner", "mini_batches"), 1)
    small |= _algorithms(recipe)
    if _get(recipe, "warm_start") is not None:
        small["warm_start.steps"] = _at_most(_WARM_START_STEPS, _get(recipe, "warm_start", "steps"), _WARM_START_STEPS)
        small |= {"warm_start.warmup_steps": _WARM_START_STEPS // 4, "warm_start.threads": 1}
    if _get(recipe, "eval", "every") is not None:
        small["eval.every"] = 1
    return small | _retriever(recipe)


def _limits(recipe: Mapping[str, Any]) -> dict[str, Any]:
    defaults = LimitsRecipe()
    limits = {name: _at_most(most, _get(recipe, "rollout", "limits", name), getattr(defaults, name)) for name, most in _LIMITS.items()}
    small = {f"rollout.limits.{name}": value for name, value in limits.items()}
    return small | {"engine.context_tokens": limits["context_tokens"], "model.architecture.max_positions": limits["context_tokens"]}


def _model(recipe: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {f"model.architecture.{name}": value for name, value in _ARCHITECTURE.items()}
    if _get(recipe, "model", "architecture", "initialisation") == "mimetic":  # knows no grouped keys
        small["model.architecture.kv_heads"] = _ARCHITECTURE["heads"]
    if str(_get(recipe, "model", "tokenizer")).startswith("prepared:"):
        return small  # made on the spot already
    small |= {"model.tokenizer": None, "model.train_tokenizer.vocab_size": _VOCABULARY}
    corpus = _get(recipe, "retriever", "corpus")
    for source in _list(_get(recipe, "tasks", "train")):
        corpus = corpus or (source.get("path") if isinstance(source, Mapping) else None)
    return small | {"model.train_tokenizer.corpus": corpus}


def _retriever(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """On one thread of the CPU, and a corpus without a model to download."""
    if not isinstance(retriever := _get(recipe, "retriever"), Mapping):
        return {}
    ours = isinstance(retriever.get("corpus"), str)
    names = [*OF_A_CORPUS, "runtime", "precision", "parameters", "mode"] if ours else []
    small = {f"retriever.{name}": RetrieverRecipe.model_fields[name].default for name in (*names, "device", "threads", "reranker")}
    return small | ({"retriever.url": None, "retriever.index": None} if ours else {})


def _algorithms(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """No weights from elsewhere, and no filter: the groups of a random model are all alike."""
    small: dict[str, Any] = {}
    if _get(recipe, "critic") is not None:
        small["critic.path"] = None
    if _get(recipe, "algorithm", "kl", "reference") is not None:
        small["algorithm.kl.reference"] = None
    if _get(recipe, "model", "lora") is not None:
        small["model.lora.publish"] = "merged"
    if _get(recipe, "buffer", "filter") not in (None, "none"):
        small |= {"buffer.filter": "none", "buffer.filter_part": None, "buffer.over_sample": 0.0, "buffer.max_filtered_in_row": None}
    return small


def _tasks(recipe: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for index, source in enumerate(_list(_get(recipe, "tasks", "train"))):
        small |= _limit(f"tasks.train[{index}]", source, _TASKS)
    sets = _get(recipe, "eval", "sets")
    for name, chosen in (sets if isinstance(sets, Mapping) else {}).items():
        for index, source in enumerate(_list(_get(chosen, "tasks"))):
            small |= _limit(f"eval.sets.{name}.tasks[{index}]", source, _EVAL_TASKS)
        small[f"eval.sets.{name}.n"] = 1
    return small


def _limit(place: str, source: Any, most: int) -> dict[str, Any]:
    if not isinstance(source, Mapping):
        return {}
    return {f"{place}.limit": _at_most(most, source.get("limit"), most)}


def _get(value: Any, *path: str) -> Any:
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at_most(most: int, asked: Any, default: int) -> int:
    """What is asked for (the default where that is no count), but at most `most`."""
    return min(asked if isinstance(asked, int) and asked > 0 else default, most)
