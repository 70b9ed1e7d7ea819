"""The replay buffer's program: tasks in, tickets, groups and batches out; the journal's only writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.buffer.app import create_app
from agentrl.buffer.buffer import BufferSettings, ReplayBuffer
from agentrl.buffer.evaluation import EvaluationResult
from agentrl.config.recipe import Recipe
from agentrl.data.order import TaskOrder, total_steps
from agentrl.data.prompts import within_limit
from agentrl.data.sources import load_tasks
from agentrl.metrics.evaluation import write_evaluation
from agentrl.rollout.tokens import TokenEncoder
from agentrl.system.http import serve_app
from agentrl.system.process import OnReady, ProcessSpec, StopSignal
from agentrl.types import Task

__all__ = ["main"]


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Serve until stopped. Payload: model_dir, evaluate_only."""
    recipe, run_dir = Recipe.model_validate(spec.recipe), Path(spec.run_dir)
    encoder = TokenEncoder.load(Path(spec.payload["model_dir"]))
    ...
