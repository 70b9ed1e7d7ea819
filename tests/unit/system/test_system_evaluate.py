"""Engines of an evaluation that do not load the model at once."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from roster_scene import Roster

from agentrl.errors import EngineUnavailable
from agentrl.evaluate import _keep_loaded


class Late:
    """Clients of engines that are late the first `late` times."""

    def __init__(self, late):
        self.late, self.tried = late, []

    def __call__(self, url, index):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return

    async def update_from_disk(self, path, *, version, deadline_s):
        self.tried.append(trio.current_time())
        if len(self.tried) <= self.late:
            raise EngineUnavailable(f"late {len(self.tried)}")


class Buffer(Roster):
    async def reserve_version(self, *, reason):
        return 1


@pytest.mark.parametrize(("restarts", "tries"), [(False, 4), (True, 1)])
def test_an_engine_that_is_late_is_given_up_only_where_the_run_can_restart_it(restarts, tries):
    async def main():
        buffer, engines = Buffer(), Late(3)
        buffer.live(0)
        with trio.move_on_after(60.0):
            await _keep_loaded(SimpleNamespace(buffer=buffer), Path("model"), engines, restarts=restarts)
        assert len(engines.tried) == tries
        assert all(later - earlier >= 5.0 for earlier, later in zip(engines.tried, engines.tried[1:], strict=False))
        (entry,) = buffer.engine_list.roster.engines
        assert (entry.current, entry.given_up) == (not restarts, restarts)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
