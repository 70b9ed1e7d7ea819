"""Engines that a run is attached to: asked, left, taken back, never killed."""

import json
from pathlib import Path

import pytest
import trio
import trio.testing
from roster_scene import Roster

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError
from agentrl.system.attached import AttachedEngines
from agentrl.testing.engine import FakeEngine, turns
from agentrl.testing.tokenizer import word_encoder

ENCODER = word_encoder(["one"])
RECIPE = Recipe.model_validate(
    {
        "name": "attached",
        "run": {"steps": 1},
        "model": {"path": "model"},
        "tasks": {"train": [{"path": "tasks.jsonl"}]},
        "env": {"factory": "my.module:Environment"},
        "engine": {"urls": ["http://engine-0", "http://engine-1"]},
        "weights": {"transport": "disk"},
    }
)


class Scene:
    def __init__(self, model_dir=Path("nowhere")):
        self.roster = Roster()
        self.fakes = [FakeEngine(turns(ENCODER, "one"), encoder=ENCODER) for _ in range(2)]
        numbers = iter(range(1, 100))
        self.attached = AttachedEngines(
            RECIPE,
            model_dir=model_dir,
            buffer=self.roster,
            next_incarnation=lambda: next(numbers),
            connect=lambda url, index: self.fakes[index].client(index),
        )

    async def look(self, times=1):
        return [await self.attached.look(self.roster.engine_list.roster.engines) for _ in range(times)]

    @property
    def live(self):
        return {entry.index: (entry.incarnation, entry.current) for entry in self.roster.engine_list.roster.engines}


def play(act):
    async def main():
        await act(Scene())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_all_that_answer_are_admitted_fenced_and_one_that_does_not_is_named_by_its_url():
    async def act(scene):
        await scene.attached.admit()
        assert scene.live == {0: (1, False), 1: (2, False)}
        other = Scene()
        other.fakes[1].dead = True
        with pytest.raises(ConfigError, match=r"engine\.urls: http://engine-1: .* cannot be reached"):
            await other.attached.admit()

    play(act)


def test_one_that_misses_three_looks_leaves_and_comes_back_under_a_new_incarnation_when_it_answers():
    async def act(scene):
        await scene.attached.admit()
        await scene.roster.engine_current(1, 2, 4)
        scene.fakes[1].weight_version = "4"
        scene.fakes[1].frozen = True
        assert await scene.look(2) == [0, 0]
        assert scene.live == {0: (1, False), 1: (2, True)}
        assert await scene.look(2) == [1, 0]
        assert scene.live == {0: (1, False)}
        scene.fakes[1].frozen = False
        await scene.look()
        assert scene.live == {0: (1, False), 1: (3, False)}

    play(act)


def test_a_late_answer_now_and_then_is_no_reason_to_leave():
    async def act(scene):
        await scene.attached.admit()
        for dead in (True, True, False, True, True, False):
            scene.fakes[0].dead = dead
            await scene.look()
        assert scene.live == {0: (1, False), 1: (2, False)}

    play(act)


def test_one_that_was_restarted_between_two_looks_is_told_by_its_weights():
    async def act(scene):
        await scene.attached.admit()
        await scene.roster.engine_current(0, 1, 7)
        scene.fakes[0].weight_version = "8"  # the next version is on its way
        await scene.look()
        assert scene.live[0] == (1, True)
        scene.fakes[0].weight_version = "default"  # SGLang's name of the weights it starts with
        assert await scene.look() == [1]
        assert 0 not in scene.live
        await scene.look()
        assert scene.live[0] == (3, False)

    play(act)


def test_a_server_of_another_model_is_refused_before_it_is_given_weights(tmp_path):
    for name, hidden in (("ours", 192), ("theirs", 64)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": hidden}))

    async def main():
        scene = Scene(tmp_path / "ours")
        scene.fakes[1].model_path = str(tmp_path / "theirs")
        with pytest.raises(ConfigError, match=r"http://engine-1: it serves .*theirs, whose hidden_size is 64, and the run's model has 192: start it"):
            await scene.attached.admit()

    trio.run(main)
