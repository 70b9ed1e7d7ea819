from pathlib import Path

import trio
from learner_scene import tiny_recipe

from agentrl.buffer_api import EngineEntry, EngineRoster
from agentrl.system.engine_profiles import start_engine_profiles


class Roster:
    """A buffer that knows one engine, which nobody serves."""

    def __init__(self):
        self.asked = 0

    async def engines(self, *, after, wait_s):
        self.asked += 1
        return EngineRoster(revision=1, engines=(EngineEntry(index=0, incarnation=1, url="http://127.0.0.1:9"),))


def test_engines_are_asked_at_the_first_step_alone_and_one_that_is_gone_is_a_warning(caplog):
    recipe, buffer = tiny_recipe(profile={"steps": [2, 4], "roles": ["engine"]}), Roster()

    async def main():
        for step in range(5):
            await start_engine_profiles(recipe, buffer, Path("."), step)

    trio.run(main)
    assert buffer.asked == 1
    assert "no profile of" in caplog.text


def test_without_a_profile_of_engines_nobody_is_asked():
    async def main():
        for recipe in (tiny_recipe(), tiny_recipe(profile={"steps": [0, 1]})):
            await start_engine_profiles(recipe, None, Path("."), 0)

    trio.run(main)
