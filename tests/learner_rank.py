"""One rank of a learner group under test: trains, loads somebody else's checkpoint, trains on, writes its own, meets a wrong batch; then
the same with adapters, critic and reference.

Run as `python learner_rank.py RANK SIZE INIT_METHOD MODEL_DIR CHECKPOINTS OUT RECIPE_JSON`; rank 0 writes what it saw to OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from learner_models_scene import full_recipe, play
from learner_scene import random_groups, tiny_recipe

from agentrl.algorithm.aggregation import AGGREGATIONS
from agentrl.buffer_api import JournalMark
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.learner import checkpoint
from agentrl.learner.batch import TrainingBatch
from agentrl.learner.learner import Learner
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


def main() -> None:
    """Play the scenario."""
    rank, size, init_method, model_dir, checkpoints, out, recipe = sys.argv[1:]
    ranks = Ranks.join(int(rank), int(size), init_method, "cpu", 60.0)
    learner = Learner.build(Recipe.model_validate_json(recipe), Path(model_dir), ranks, Path(checkpoints).parent)
    seen: dict[str, object] = {"fresh": losses(learner, range(4)), "gathered": total(learner)}
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
