"""What a valid recipe asks for and its author should know: told by `agentrl validate`, and once when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.config.recipe import Recipe

__all__ = ["cautions"]


def cautions(recipe: Recipe) -> list[str]:
    """Sentences that name a key, what it does and what to do instead."""
    algorithm, learner, lora, replay = recipe.algorithm, recipe.learner, recipe.model.lora, recipe.buffer.replay
    engine = recipe.engine
    told = {
        "algorithm.train_on_observations: the policy is trained to write what the retriever says. An ablation (Search-R1 without its mask)": (
            algorithm.train_on_observations
        ),
        "algorithm.gae_over_observations: advantages decay and are whitened over tokens the policy did not write. An ablation (Search-R1's way)": (
            algorithm.gae_over_observations
        ),
        "algorithm.proximal recompute with one update per batch: the clipped ratio is 1 and nothing bounds the step. Use more mini_batches, or"
        " proximal behaviour": algorithm.proximal == "recompute" and learner.mini_batches * learner.ppo_epochs == 1,
        "algorithm.kl.estimate k1 in the loss has a gradient of 0 on average: use k3 or k3_straight_through": (
            algorithm.kl.where == "loss" and algorithm.kl.estimate == "k1"
        ),
        "buffer.replay: with reuse x fresh > 1 groups that wait for their next use grow old without end: set algorithm.max_token_age, or lower"
        " fresh": replay.reuse * replay.fresh > 1 and algorithm.max_token_age is None,
        "engine.options and engine.environment are for SGLang servers that the run starts: they do nothing here": (
            bool(engine.options or engine.environment) and (engine.kind == "embedded" or bool(engine.urls))
        ),
        "learner.packing packed with model.attention sdpa: a packed row's tokens are computed against all others of the row and masked. Slower than"
        " padded": learner.packing == "packed" and recipe.model.attention == "sdpa",
        "weights.pause in_place: tokens after an update attend to keys and values of older weights, so their log-probs are not exactly their"
        " version's": recipe.weights.pause == "in_place",
        "retriever.reranker orders what a search asks to be ordered: for envs.search, env.options.retriever_options.rerank=true": (
            recipe.retriever is not None and recipe.retriever.reranker is not None and not _asks_to_rerank(recipe.env.options)
        ),
        "run.bind node: whoever reaches the ports of the run's servers can read and steer it. For private networks": recipe.run.bind == "node",
        "model.lora.dropout: the learner's log-probs then differ from the engine's by noise, which looks like staleness": (
            lora is not None and lora.dropout > 0
        ),
    }
    return [sentence for sentence, holds in told.items() if holds]


def _asks_to_rerank(options: Mapping[str, Any]) -> bool:
    chosen = options.get("retriever_options")
    return isinstance(chosen, Mapping) and chosen.get("rerank") is True
