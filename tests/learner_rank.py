"""One rank of a learner group under test: trains, loads somebody else's checkpoint, trains on, writes its own, meets a wrong batch; then
the same with adapters, critic and reference.

Run as `python learner_rank.py RANK SIZE INIT_METHOD MODEL_DIR CHECKPOINTS OUT RECIPE_JSON`; rank 0 writes what it saw to OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from learner_models_scene import full_recipe, play
from learner_scene import random_groups, tiny_recipe
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from agentrl.algorithm.aggregation import AGGREGATIONS
from agentrl.buffer_api import JournalMark
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.learner import checkpoint
from agentrl.learner.batch import TrainingBatch
from agentrl.learner.learner import Learner
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks


def losses(learner: Learner, steps: range) -> list[float]:
    """The loss of every step; each has a batch of its own."""
    return [learner.train(TrainingBatch.of(random_groups(step), {0: 0}), step=step, progress=0.1 * step).metrics["learner/loss"] for step in steps]


def total(learner: Learner) -> float:
    """Sum of the magnitudes of all gathered weights."""
    return sum(float(tensor.double().abs().sum()) for bucket in learner.gather(4096) for _, tensor in bucket)


def save(learner: Learner, root: Path, step: int, incarnation: int) -> None:
    """Write and commit."""
    pending = checkpoint.write(learner, root, step, incarnation)
    if learner.ranks.first:
        checkpoint.commit(pending, JournalMark(offset=0, consumed=(), frontier=0, step=step))


def play_models(model_dir: Path, ranks: Ranks, checkpoints: Path) -> dict[str, object]:
    """Policy by adapters, critic and reference: from the beginning, then from a checkpoint of somebody else."""
    learner = Learner.build(full_recipe(), model_dir, ranks, checkpoints.parent)
    seen: dict[str, object] = {"models_fresh": play(learner, range(4)), "models_gathered": total(learner)}
    checkpoint.load(learner, next(checkpoint.manifests(checkpoints)))
    seen["models_loaded"] = play(learner, range(2, 4))
    save(learner, checkpoints, 4, 1)
    return seen


def play_aggregations(model_dir: Path, ranks: Ranks, directory: Path, micro_batch: int | None) -> dict[str, list[float]]:
    """Loss and gradient norm of one step by every aggregation, with a critic and a leash in the loss.

    Args:
        micro_batch: trajectories; None: all at once.
    """
    seen = {}
    for how in AGGREGATIONS:
        horizon = 8.0 if how == "seq_mean_token_sum_norm" else None
        ways = {"algorithm__aggregation": how, "algorithm__aggregation_horizon": horizon, "learner__trajectories_per_micro_batch": micro_batch}
        rest = {"critic": {}, "algorithm__advantage": {"estimator": "gae"}, "algorithm__entropy": {"coefficient": 0.01}}
        learner = Learner.build(tiny_recipe(**ways, **rest), model_dir, ranks, directory)
        metrics = learner.train(TrainingBatch.of(random_groups(groups=5, size=2), {0: 0}), step=0, progress=0.0).metrics
        seen[how] = [metrics[name] for name in ("learner/loss", "learner/grad_norm", "critic/loss", "critic/grad_norm", "learner/entropy")]
    return seen


def differences(policy: PolicyModel, plain: Any) -> list[float]:
    """The largest between a policy and a plain causal model, which materialises its logits: of log-probs, of entropies, of gradients."""
    ids = torch.tensor([[1, 7, 9, 11, 30, 4], [1, 8, 8, 2, 5, 0]])
    wanted, temperature = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0]]) == 1, torch.tensor([1.0, 0.7])
    logp, entropy = policy(ids, wanted, temperature)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    everything = (plain(input_ids=ids, use_cache=False).logits[:, :-1] / temperature[:, None, None]).log_softmax(-1)
    plain_logp = everything.gather(-1, ids[:, 1:, None])[..., 0] * wanted[:, 1:]
    plain_entropy = -(everything.exp() * everything).sum(-1) * wanted[:, 1:]
    (plain_logp.sum() + 0.1 * plain_entropy.sum()).backward()
    gradients = zip(policy.parameters(), plain.parameters(), strict=True)
    far = [(whole(ours.grad) - theirs.grad).abs().max() for ours, theirs in gradients]
    return [(logp[:, 1:] - plain_logp).abs().max().item(), (entropy[:, 1:] - plain_entropy).abs().max().item(), max(far).item()]


def whole(value: Any) -> torch.Tensor:
    """A copy that is not sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def play_copies(model_dir: Path, ranks: Ranks, checkpoints: Path, recipe: Recipe) -> dict[str, object]:
    """Every rank a copy of its own: from the beginning, then from somebody else's checkpoint. And what the log-probs are without logits."""
    policy = PolicyModel.load(model_dir)
    policy.shard(ranks, "float32")
    seen: dict[str, object] = {"from_plain": differences(policy, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))}
    learner = Learner.build(recipe, model_dir, ranks.with_copies(ranks.size), checkpoints.parent)
    seen |= {"copies_fresh": losses(learner, range(4)), "copies_gathered": total(learner)}
    checkpoint.load(learner, next(checkpoint.manifests(checkpoints)))
    return seen | {"copies_loaded": losses(learner, range(2, 4))}


def main() -> None:
    """Play the scenario."""
    rank, size, init_method, model_dir, checkpoints, out, recipe = sys.argv[1:]
    ranks = Ranks.join(int(rank), int(size), init_method, "cpu", 60.0)
    chosen = Recipe.model_validate_json(recipe)
    seen = play_copies(Path(model_dir), ranks, Path(checkpoints), chosen)
    learner = Learner.build(chosen, Path(model_dir), ranks, Path(checkpoints).parent)
    seen |= {"fresh": losses(learner, range(4)), "gathered": total(learner)}
    checkpoint.load(learner, next(checkpoint.manifests(Path(checkpoints))))
    seen["loaded"] = losses(learner, range(2, 4))
    save(learner, Path(checkpoints), 4, 1)
    seen["after"] = losses(learner, range(4, 6))
    try:
        learner.train(TrainingBatch.of(random_groups(rank == "0"), {0: 0}), step=6, progress=0.0)
    except AgentRLError as error:
        seen["refused"] = str(error)
    seen |= play_models(Path(model_dir), ranks, Path(f"{checkpoints}_models"))
    seen["aggregations"] = play_aggregations(Path(model_dir), ranks, Path(checkpoints).parent, None)
    if ranks.first:
        Path(out).write_text(json.dumps(seen))
    ranks.leave()
    os._exit(0)  # as agentrl.system.child ends: gloo's threads may abort while the interpreter is torn down


if __name__ == "__main__":
    main()
