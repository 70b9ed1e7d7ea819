"""The canary against real engines: one whose weights somebody changed, one that computes with another configuration."""

from __future__ import annotations

import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import trio
from engine_process import engine_process
from learner_scene import tiny_recipe
from safetensors.torch import load_file
from tiny_qwen2 import write_tiny_qwen2

from agentrl.config.recipe import WeightsRecipe
from agentrl.engine_api import EngineClient
from agentrl.errors import HealthError
from agentrl.learner.learner import Learner
from agentrl.learner.ranks import Ranks
from agentrl.system.canary import Canary
from agentrl.weights import Publisher, Snapshot

pytestmark = pytest.mark.slow

SEQUENCES = [[7 + (3 * number + 5 * place) % 80 for place in range(48)] for number in range(4)]
PERTURBED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learner(model_dir, tmp_path_factory) -> Learner:
    return Learner.build(tiny_recipe(), model_dir, Ranks.single(), tmp_path_factory.mktemp("run"))


def checked(learner: Learner, engine: httpx.Client, model_dir: Path, run_dir: Path, *, sent: Snapshot | None = None) -> dict:
    """Bring the learner's weights to an engine, or other bytes under the same version, and check. Returns the line of canary.jsonl."""
    canary = Canary(SEQUENCES, every=1, bounds=(1e-3, 1e-4), deadline_s=20.0, checksums=True)
    trio.run(canary.listen, learner, 5)
    snapshot = Snapshot.of(5, 5, learner.gather(1 << 20))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(EngineClient(str(engine.base_url)))
            publisher = Publisher(WeightsRecipe(deadline_s=20.0), model_dir=model_dir, directory=run_dir)
            stack.push_async_callback(publisher.aclose)
            publisher.set_engines([client])
            await publisher.publish(snapshot if sent is None else sent)
            await canary.check(snapshot, [client], run_dir=run_dir, model_dir=model_dir)

    trio.run(main)
    line, *_ = (json.loads(text) for text in (run_dir / "canary.jsonl").read_text().splitlines())
    return line


def test_with_the_same_weights_the_gap_is_rounding_and_one_changed_tensor_is_found_and_named(learner, model_dir, tmp_path):
    tensors = load_file(model_dir / "model.safetensors")
    perturbed = Snapshot.of(5, 5, [[(name, tensor + 0.02 if name == PERTURBED else tensor) for name, tensor in tensors.items()]])
    with engine_process(model_dir) as engine:
        line = checked(learner, engine, model_dir, tmp_path)
        assert line["engines"][0]["gap_max"] < 2e-5
        assert line["engines"][0]["checksum"] == line["checksum"]
        (tmp_path / "perturbed").mkdir()
        with pytest.raises(HealthError, match=f"The WEIGHTS differ: {PERTURBED} is not what was sent"):
            checked(learner, engine, model_dir, tmp_path / "perturbed", sent=perturbed)


def test_the_same_weights_under_another_rope_are_the_kernels(learner, model_dir, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(model_dir, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 50.0}))
    with engine_process(other) as engine, pytest.raises(HealthError, match="The KERNELS differ") as told:
        checked(learner, engine, model_dir, tmp_path)
    assert "later ones are wrong: look at attention and positions (rope) first" in str(told.value)
