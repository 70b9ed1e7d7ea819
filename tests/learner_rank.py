"""One rank of a learner group under test: trains, loads somebody else's checkpoint, trains on, writes its own, meets a wrong batch.

Run as `python learner_rank.py RANK SIZE INIT_METHOD MODEL_DIR CHECKPOINTS OUT RECIPE_JSON`; rank 0 writes what it saw to OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from learner_scene import random_groups

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


def main() -> None:
    """Play the scenario."""
    rank, size, init_method, model_dir, checkpoints, out, recipe = sys.argv[1:]
    ranks = Ranks.join(int(rank), int(size), init_method, "cpu", 60.0)
    learner = Learner.build(Recipe.model_validate_json(recipe), Path(model_dir), ranks, Path(checkpoints).parent)
    seen = {"fresh": losses(learner, range(4)), "gathered": total(learner)}
    checkpoint.load(learner, next(checkpoint.manifests(Path(checkpoints))))
    seen["loaded"] = losses(learner, range(2, 4))
    pending = checkpoint.write(learner, Path(checkpoints), 4, 1)
    if ranks.first:
        checkpoint.commit(pending, JournalMark(offset=0, consumed=(), frontier=0, step=4))
    seen["after"] = losses(learner, range(4, 6))
    try:
        learner.train(TrainingBatch.of(random_groups(rank == "0"), {0: 0}), step=6, progress=0.0)
    except AgentRLError as error:
        seen["refused"] = str(error)
    if ranks.first:
        Path(out).write_text(json.dumps(seen))
    ranks.leave()
    os._exit(0)  # as agentrl.system.child ends: gloo's threads may abort while the interpreter is torn down


if __name__ == "__main__":
    main()
