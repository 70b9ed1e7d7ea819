"""The replay buffer's program: tasks in, tickets, groups and batches out; the journal's only writer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.buffer.app import create_app, spare_the_held
from agentrl.buffer.buffer import BufferSettings, ReplayBuffer
from agentrl.buffer_api import EvaluationResult
from agentrl.config.recipe import Recipe
from agentrl.data.curriculum import CurriculumOrder, make_curriculum
from agentrl.data.order import TaskOrder, total_steps
from agentrl.data.prompts import within_limit
from agentrl.data.sources import load_tasks
from agentrl.env import Observation, Segment
from agentrl.metrics.evaluation import Decode, write_evaluation
from agentrl.rollout.tokens import TokenEncoder
from agentrl.system.address import bind_address
from agentrl.system.http import serve_app
from agentrl.system.process import OnReady, ProcessSpec, StopSignal
from agentrl.types import Task

__all__ = ["main"]

log = logging.getLogger(__name__)


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Serve until stopped. Payload: model_dir, run_incarnation, evaluate_only."""
    recipe, run_dir = Recipe.model_validate(spec.recipe), Path(spec.run_dir)
    encoder = TokenEncoder.load(Path(spec.payload["model_dir"]))
    order = None if spec.payload["evaluate_only"] else _training_order(recipe, encoder)
    steps = None if order is None else total_steps(recipe.run, order.size, recipe.learner.groups_per_batch)
    buffer = ReplayBuffer(
        run_dir / "journal",
        BufferSettings.of(recipe, total_steps=steps, evaluate_only=order is None),
        tasks=order,
        eval_tasks={name: load_tasks(held_out.tasks, seed=recipe.seed) for name, held_out in recipe.eval.sets.items()},
        incarnation=spec.incarnation,
        run=spec.payload["run_incarnation"],
        on_evaluation=partial(_report, run_dir / "eval", encoder.decode),
    )
    spare_the_held()
    serve_app(create_app(buffer), on_ready=on_ready, stop=stop, host=bind_address(recipe))


def _training_order(recipe: Recipe, encoder: TokenEncoder) -> TaskOrder | CurriculumOrder:
    tasks = load_tasks(recipe.tasks.train, seed=recipe.seed)
    limit, over_long = recipe.rollout.limits.prompt_tokens, recipe.tasks.over_long
    fitting, filtered = within_limit(tasks, count=partial(_own_tokens, encoder), limit=limit, over_long=over_long)
    if filtered:
        log.warning("%d of %d training tasks are left out: their text is longer than %d tokens", filtered, len(tasks), limit)
    if (curriculum := recipe.tasks.curriculum) is not None:
        return make_curriculum(curriculum.factory, curriculum.options, fitting)
    return TaskOrder(fitting, recipe.tasks.train, seed=recipe.seed, shuffle=recipe.tasks.shuffle)


def _own_tokens(encoder: TokenEncoder, task: Task) -> int:
    """Tokens of the task's own text. What an environment writes around it is known in the episode alone, where it is counted again."""
    text = task.prompt or "".join(message["content"] for message in task.messages)
    return len(encoder.encode_observation(Observation(segments=(Segment(text=text, untrusted=True),))).ids)


def _report(directory: Path, decode: Decode, result: EvaluationResult) -> Mapping[str, Any]:
    return write_evaluation(result, directory, decode)
