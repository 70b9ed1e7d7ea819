"""Experiment trackers behind one shape. Each is imported when it is opened; none may ask a question or need an account.

Steps go back after a rollback, and an evaluation beside training arrives after later steps. W&B refuses a step that goes back, so there
it is a metric of its own that the others are drawn over; TensorBoard and SwanLab keep every point.
"""

from __future__ import annotations

import netrc
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from agentrl.config.recipe import Recipe

__all__ = ["Swanlab", "Tensorboard", "Wandb"]

_WANDB_HOST = "api.wandb.ai"


class Wandb:
    """Weights & Biases: online where an API key is configured, else offline (`wandb sync` uploads it later). `WANDB_MODE` overrides."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _wandb_key() else "offline")
        self._run = wandb.init(
            project=recipe.metrics.project,
            name=recipe.name,
            id=_stable_id(run_dir / "wandb" / "run_id"),
            resume="allow",
            dir=str(run_dir),
            config=recipe.model_dump(mode="json"),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True, init_timeout=30),
        )
        self._run.define_metric("run/step")
        self._run.define_metric("*", step_metric="run/step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics over `run/step`."""
        self._run.log({**metrics, "run/step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Tensorboard:
    """TensorBoard event files in `<run_dir>/tensorboard`, written without torch or TensorFlow."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all values."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Write out what is held."""
        self._writer.close()


class Swanlab:
    """SwanLab in `<run_dir>/swanlab`: in the cloud where `SWANLAB_API_KEY` is set, else offline. `SWANLAB_MODE` overrides."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        import swanlab

        mode = os.environ.get("SWANLAB_MODE") or ("cloud" if os.environ.get("SWANLAB_API_KEY") else "offline")
        self._swanlab = swanlab
        swanlab.init(
            project=recipe.metrics.project,
            experiment_name=recipe.name,
            config=recipe.model_dump(mode="json"),
            logdir=str(run_dir / "swanlab"),
            mode=mode,
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics at `step`."""
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the experiment."""
        self._swanlab.finish()


def _wandb_key() -> bool:
    """Whether W&B has a key: in the environment, or left by `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(_WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _stable_id(path: Path) -> str:
    """The id of this run directory, made once, so that a resumed run goes on in the same place."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()
