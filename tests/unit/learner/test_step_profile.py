import json

import pytest
from learner_scene import random_groups, tiny_recipe

from agentrl.learner.batch import TrainingBatch
from agentrl.learner.learner import Learner
from agentrl.learner.ranks import Ranks

BATCH = TrainingBatch.of(random_groups(groups=1), {0: 0})


@pytest.mark.slow
def test_a_trace_of_each_step_asked_for_names_its_phases(model_dir, tmp_path):
    learner = Learner.build(tiny_recipe(profile={"steps": [1, 3]}), model_dir, Ranks.single(), tmp_path)
    for step in range(4):
        learner.train(BATCH, step=step, progress=0.0)
    traces = sorted((tmp_path / "profiles").iterdir())
    assert [trace.name for trace in traces] == ["learner-rank0-step-00000001.json", "learner-rank0-step-00000002.json"]
    for trace in traces:
        events = json.loads(trace.read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {"step", "prepare", "update", "forward", "backward", "optimizer", "aten::mm"} <= names
        [step] = [event for event in events if event["name"] == "step"]
        [update] = [event for event in events if event["name"] == "update"]
        assert step["ts"] <= update["ts"] <= update["ts"] + update["dur"] <= step["ts"] + step["dur"]


@pytest.mark.slow
def test_other_ranks_and_roles_are_left_alone(model_dir, tmp_path):
    for chosen in ({"steps": [0, 1], "ranks": [1]}, {"steps": [0, 1], "roles": ["engine"]}):
        recipe = tiny_recipe(profile=chosen, learner__ranks=1 + max(chosen.get("ranks", [0])))
        Learner.build(recipe, model_dir, Ranks.single(), tmp_path).train(BATCH, step=0, progress=0.0)
    assert not (tmp_path / "profiles").exists()
