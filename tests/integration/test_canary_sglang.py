"""The canary against a real SGLang, whose checksums are its own: what it holds is compared with what it loads from disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from learner_scene import tiny_model, tiny_recipe

from agentrl.engine_api import EngineClient
from agentrl.errors import HealthError
from agentrl.learner.learner import Learner
from agentrl.learner.ranks import Ranks
from agentrl.system.canary import Canary
from agentrl.system.sglang import SGLangServer
from agentrl.weights import Snapshot, save_snapshot

PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(PYTHON is None, reason="AGENTRL_SGLANG_PYTHON names no Python that has sglang: make test-sglang sets one up"),
]

START_DEADLINE_S = 240.0
SEQUENCES = [[3 + (3 * number + 5 * place) % 44 for place in range(48)] for number in range(4)]
PERTURBED = "model.layers.1.mlp.down_proj.weight"
VERSION = 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def learner(model_dir, tmp_path_factory) -> Learner:
    return Learner.build(tiny_recipe(), model_dir, Ranks.single(), tmp_path_factory.mktemp("run"))


@contextmanager
def server(model_dir: Path, log: Path) -> Iterator[str]:
    recipe = tiny_recipe(
        engine={"kind": "sglang", "python": PYTHON, "slots": 4, "context_tokens": 64, "threads": 2}, rollout={"limits": {"context_tokens": 64}}
    )
    with SGLangServer.start(recipe, model_dir, log=log) as started:
        started.wait_ready(START_DEADLINE_S)
        yield started.url


def check(url: str, learner: Learner, model_dir: Path, run_dir: Path, *, loaded: Snapshot | None = None) -> float:
    """Bring the learner's weights, or others under the same version, to a server and check. Returns the largest gap."""
    canary = Canary(SEQUENCES, every=1, bounds=(1e-3, 1e-4), deadline_s=60.0, checksums=False)
    trio.run(canary.listen, learner, VERSION)
    snapshot = Snapshot.of(VERSION, VERSION, learner.gather(1 << 20))
    path = save_snapshot(snapshot if loaded is None else loaded, run_dir / "loaded", model_dir)

    async def main() -> None:
        async with EngineClient(url) as engine:
            await engine.update_from_disk(str(path), version=VERSION)
            await canary.check(snapshot, [engine], run_dir=run_dir, model_dir=model_dir)

    trio.run(main)
    return canary.take_metrics()["canary/gap_max"]


def test_the_same_weights_agree_to_rounding_and_a_changed_tensor_is_found_by_loading_them_again(learner, model_dir, tmp_path):
    tensors = Snapshot.of(VERSION, VERSION, learner.gather(1 << 20)).tensors()
    perturbed = Snapshot.of(VERSION, VERSION, [[(name, tensor + 0.05 if name == PERTURBED else tensor) for name, tensor in tensors.items()]])
    with server(model_dir, tmp_path / "server.log") as url:
        (tmp_path / "same").mkdir()
        assert check(url, learner, model_dir, tmp_path / "same") < 2e-5
        (tmp_path / "other").mkdir()
        with pytest.raises(HealthError, match=f"The WEIGHTS differ: {PERTURBED} is not what it loads from disk"):
            check(url, learner, model_dir, tmp_path / "other", loaded=perturbed)
        (tmp_path / "again").mkdir()
        assert check(url, learner, model_dir, tmp_path / "again") < 2e-5  # and it was left generating


def test_the_same_weights_with_another_epsilon_are_the_kernels(learner, model_dir, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(model_dir, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with server(other, tmp_path / "server.log") as url, pytest.raises(HealthError, match="The KERNELS differ") as told:
        check(url, learner, model_dir, tmp_path)
    assert "Even what follows the first token is wrong" in str(told.value)
