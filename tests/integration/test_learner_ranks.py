import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from learner_models_scene import full_recipe, play
from learner_rank import losses, play_aggregations, save, total
from learner_scene import tiny_model, tiny_recipe
from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.aggregation import AGGREGATIONS
from agentrl.learner import checkpoint
from agentrl.learner.learner import Learner
from agentrl.learner.ranks import Ranks

pytestmark = pytest.mark.slow

DEADLINE_S = 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(size, model_dir, checkpoints, out, recipe):
    program, place = Path(__file__).parents[1] / "learner_rank.py", f"tcp://127.0.0.1:{free_port()}"
    arguments = [place, str(model_dir), str(checkpoints), str(out), recipe.model_dump_json()]
    processes = [subprocess.Popen([sys.executable, str(program), str(rank), str(size), *arguments]) for rank in range(size)]
    try:
        assert [process.wait(timeout=DEADLINE_S) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
    return json.loads(out.read_text())


def test_two_ranks_train_like_one_and_read_each_others_checkpoints(tmp_path):
    recipe = tiny_recipe(
        algorithm__proximal="recompute", algorithm__entropy={"coefficient": 0.01}, learner__mini_batches=2, learner__tokens_per_micro_batch=90
    )
    model_dir, checkpoints = tiny_model(tmp_path), tmp_path / "checkpoints"
    alone = Learner.build(recipe, model_dir, Ranks.single(), tmp_path)
    fresh = losses(alone, range(2))
    save(alone, checkpoints, 2, 0)
    later = losses(alone, range(2, 4))
    gathered = total(alone)
    later += losses(alone, range(4, 6))
    models = Learner.build(full_recipe(), model_dir, Ranks.single(), tmp_path)
    played = play(models, range(2))
    save(models, tmp_path / "checkpoints_models", 2, 0)
    played += play(models, range(2, 4))
    weights = total(models)
    two = run_ranks(2, model_dir, checkpoints, tmp_path / "out.json", recipe)
    assert two["fresh"] == pytest.approx(fresh + later[:2], abs=1e-5)
    assert two["gathered"] == pytest.approx(gathered, abs=1e-3)
    assert two["fresh"][0] == pytest.approx(fresh[0], abs=1e-6)
    assert two["loaded"] == pytest.approx(later[:2], abs=1e-5)
    assert two["after"] == pytest.approx(later[2:], abs=1e-5)
    assert two["from_plain"] == pytest.approx([0, 0, 0], abs=1e-5)
    assert two["copies_fresh"] == pytest.approx(fresh + later[:2], abs=1e-5)
    assert two["copies_gathered"] == pytest.approx(gathered, abs=1e-3)
    assert two["copies_loaded"] == pytest.approx(later[:2], abs=1e-5)
    assert "rank 0 holds another batch" in two["refused"]
    checkpoint.load(alone, next(checkpoint.manifests(checkpoints)))
    assert losses(alone, range(4, 6)) == pytest.approx(later[2:], abs=1e-5)
    assert_close(tensor(two["models_fresh"]), tensor(played), atol=1e-5, rtol=1e-6)
    assert_close(tensor(two["models_loaded"]), tensor(played[2:]), atol=1e-5, rtol=1e-6)
    assert two["models_gathered"] == pytest.approx(weights, abs=1e-3)
    played = play(models, range(4, 6))
    checkpoint.load(models, next(checkpoint.manifests(tmp_path / "checkpoints_models")))
    assert_close(tensor(play(models, range(4, 6))), tensor(played), atol=1e-5, rtol=1e-6)
    whole = play_aggregations(model_dir, Ranks.single(), tmp_path, None)
    fifths = play_aggregations(model_dir, Ranks.single(), tmp_path, 2)
    for how in AGGREGATIONS:  # 1 rank and 1 micro-batch, 1 and 5, 2 ranks
        assert_close(tensor(fifths[how]), tensor(whole[how]), atol=1e-6, rtol=1e-6, msg=how)
        assert_close(tensor(two["aggregations"][how]), tensor(whole[how]), atol=1e-6, rtol=1e-6, msg=how)
