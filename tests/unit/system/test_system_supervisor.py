"""The supervisor: engines and workers come back, a budget ends a run that keeps dying, and what does not answer is killed."""

from dataclasses import dataclass, field

import pytest
import trio
import trio.lowlevel
import trio.testing
from roster_scene import Roster

from agentrl.errors import ProcessDied, StaleIncarnation
from agentrl.system.process import Exit, ProcessSpec, Role
from agentrl.system.supervisor import SGLANG_LEAVES_S, Supervisor


@dataclass
class FakeProcess:
    spec: ProcessSpec
    end: Exit | None = None
    pid: int = 0
    ended: trio.Event = field(default_factory=trio.Event)
    stillborn: bool = False
    killed: bool = False

    async def ready(self):
        if self.stillborn:
            self.die()
            raise ProcessDied(f"{self.spec.name} ended before it was ready: exit code 1")
        return {"url": f"http://127.0.0.1:1/{self.spec.incarnation}"} if self.spec.role is Role.ENGINE else {}

    async def wait(self):
        await self.ended.wait()
        return self.end

    async def stop(self, grace_s):
        self.die(Exit(code=0))

    def kill(self):
        self.killed = True
        self.die(Exit(code=-9))

    def die(self, end=None):
        if self.end is None:
            self.end = end or Exit(code=-9)
            self.ended.set()


class FakeLauncher:
    """Starts processes that do nothing. The next `stillborn` die before they are ready. Like Ray's actors they keep their place until killed."""

    def __init__(self):
        self.started = []
        self.stillborn = 0

    async def start(self, spec):
        assert all(one.killed for one in self.started if one.spec.name == spec.name), "its predecessor has its place"
        process = FakeProcess(spec, stillborn=self.stillborn > 0)
        self.stillborn -= 1
        self.started.append(process)
        return process


def spec(role, index=0, incarnation=1, recipe=None):
    return ProcessSpec(role=role, index=index, incarnation=incarnation, run_dir="/run", recipe=recipe or {})


def supervise(act, *, within_s=600.0):
    """Run `act(supervisor, launcher, roster)` in a nursery with a clock that jumps."""

    async def main():
        roster, launcher = Roster(), FakeLauncher()
        with trio.fail_after(within_s):
            async with trio.open_nursery() as nursery:
                supervisor = Supervisor(launcher, nursery, first_incarnation=100)
                supervisor.buffer = roster
                await act(supervisor, launcher, roster, nursery)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_dead_engine_leaves_the_roster_and_comes_back_fenced_under_a_new_incarnation():
    async def act(supervisor, launcher, roster, nursery):
        await supervisor.start(spec(Role.ENGINE))
        await roster.engine_current(0, 1, 5)
        assert roster.current == {0: 5}
        launcher.started[0].die()
        await trio.sleep(1.0)
        (entry,) = roster.engine_list.roster.engines
        assert (entry.incarnation, entry.url, entry.current) == (100, "http://127.0.0.1:1/100", False)
        assert ("died", 0, 1) in roster.said
        assert supervisor.deaths[Role.ENGINE] == 1

    supervise(act)


def test_an_incarnation_is_registered_before_its_process_works_and_its_url_when_it_answers():
    async def act(supervisor, launcher, roster, nursery):
        await supervisor.start(spec(Role.ENGINE))
        assert roster.said == [("register", "engine-0", 1, ""), ("register", "engine-0", 1, "http://127.0.0.1:1/1")]

    supervise(act)


def test_an_engine_that_ends_cleanly_by_itself_is_restarted_too_and_a_worker_is_not():
    async def act(supervisor, launcher, roster, nursery):
        await supervisor.start(spec(Role.ENGINE))
        await supervisor.start(spec(Role.WORKER))
        for process in launcher.started:
            process.die(Exit(code=0))
        await trio.sleep(5.0)
        assert [process.spec.role for process in launcher.started] == [Role.ENGINE, Role.WORKER, Role.ENGINE]

    supervise(act)


def test_engines_and_workers_have_budgets_of_their_own_and_a_sixth_death_ends_the_run_naming_its_cause():
    deaths = {}

    async def act(supervisor, launcher, roster, nursery):
        await supervisor.start(spec(Role.ENGINE))
        await supervisor.start(spec(Role.WORKER))
        for _ in range(5):
            for role in (Role.ENGINE, Role.WORKER):
                next(process for process in reversed(launcher.started) if process.spec.role is role).die()
            await trio.sleep(10.0)
        deaths.update(supervisor.deaths)
        next(process for process in reversed(launcher.started) if process.spec.role is Role.ENGINE).die()
        await trio.sleep(10.0)

    with pytest.raises(ExceptionGroup) as raised:
        supervise(act)
    assert deaths == {Role.ENGINE: 5, Role.WORKER: 5}
    assert raised.group_contains(ProcessDied, match=r"engines died 6 times within 1800 s, the last: engine-0: killed by signal 9")


def test_an_engine_that_dies_while_it_starts_counts_as_one_more_death():
    async def act(supervisor, launcher, roster, nursery):
        await supervisor.start(spec(Role.ENGINE))
        launcher.stillborn = 2
        launcher.started[0].die()
        await trio.sleep(60.0)
        assert [process.spec.incarnation for process in launcher.started] == [1, 100, 101, 102]
        assert [entry.incarnation for entry in roster.engine_list.roster.engines] == [102]
        assert supervisor.deaths[Role.ENGINE] == 3

    supervise(act)


def test_an_engine_that_fails_while_it_starts_is_killed_whether_it_is_the_first_or_a_successor():
    async def act(supervisor, launcher, roster, nursery):
        launcher.stillborn = 1
        with pytest.raises(ProcessDied):
            await supervisor.start(spec(Role.ENGINE))
        assert launcher.started[0].killed
        roster.register = refuse
        with pytest.raises(StaleIncarnation):
            await supervisor.start(spec(Role.ENGINE, 1))
        assert launcher.started[1].killed

    async def refuse(*, url="", **caller):
        if url:
            raise StaleIncarnation("another one is there")

    supervise(act)


def test_a_successor_of_sglang_starts_when_the_gpu_memory_of_its_predecessor_is_free():
    async def act(supervisor, launcher, roster, nursery):
        await supervisor.start(spec(Role.ENGINE, recipe={"engine": {"kind": "sglang"}}))
        launcher.started[0].die()
        await trio.sleep(SGLANG_LEAVES_S - 0.1)
        assert len(launcher.started) == 1
        await trio.sleep(0.2)
        assert len(launcher.started) == 2

    supervise(act)


def test_an_engine_that_the_learner_gave_up_is_killed_once_and_restarted_with_the_reason_told(caplog):
    async def act(supervisor, launcher, roster, nursery):
        nursery.start_soon(supervisor.probe)
        await supervisor.start(spec(Role.ENGINE, 1))
        await roster.engine_fenced(1, 1, "its disk is broken", give_up=True)
        await trio.sleep(20.0)
        assert [process.spec.incarnation for process in launcher.started] == [1, 100]
        assert launcher.started[1].end is None

    supervise(act)
    assert "engine-1 died (killed by signal 9, because the learner could not bring it to the newest weights: its disk is broken)" in caplog.text


def test_an_engine_that_does_not_answer_for_a_minute_is_killed_and_restarted():
    async def act(supervisor, launcher, roster, nursery):
        nursery.start_soon(supervisor.probe)  # nobody listens at the engine's URL
        await supervisor.start(spec(Role.ENGINE))
        await trio.sleep(59.0)
        assert launcher.started[0].end is None
        await trio.sleep(12.0)
        assert launcher.started[0].end == Exit(code=-9)
        assert [process.spec.incarnation for process in launcher.started] == [1, 100]

    supervise(act)


def test_any_other_death_ends_the_run():
    async def act(supervisor, launcher, roster, nursery):
        await supervisor.start(spec(Role.LEARNER))
        launcher.started[0].die()
        await trio.sleep(1.0)

    with pytest.raises(ExceptionGroup) as raised:
        supervise(act)
    assert raised.group_contains(ProcessDied, match=r"learner-0 \(pid 0\) died: killed by signal 9\. .*Go on with the same command")


def test_nothing_is_restarted_while_the_run_ends():
    async def act(supervisor, launcher, roster, nursery):
        await supervisor.start(spec(Role.ENGINE))
        await supervisor.start(spec(Role.WORKER))
        launcher.started[1].die()
        await trio.lowlevel.checkpoint()
        await supervisor.stop()
        await trio.sleep(30.0)
        assert len(launcher.started) == 2
        assert all(process.end is not None for process in launcher.started)

    supervise(act)
