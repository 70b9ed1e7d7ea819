"""The rollout worker's loops, against a fake engine and a fake buffer under a clock that jumps."""

import pytest
import trio
import trio.testing
from rollout_environments import Lookup, tool_down

from agentrl.config.recipe import LimitsRecipe, OverLongRecipe, RolloutRecipe
from agentrl.errors import ConfigError, EngineUnavailable, EnvironmentFailure, ToolTimeout
from agentrl.rollout.worker import RolloutWorker, cause_of
from agentrl.testing.buffer import FakeBuffer
from agentrl.testing.engine import FakeEngine, turns
from agentrl.testing.tokenizer import word_encoder
from agentrl.types import CloseCause, Purpose, Task

ENCODER = word_encoder(["where", "is", "k", "Paris", "France", "nothing"])
EPISODE = ("<search> k </search>", "<answer> Paris </answer>")


def tasks(count):
    return [Task(id=str(number), prompt="where is France", answers=("Paris",)) for number in range(count)]


class Stage:
    """A worker with its fakes. `environments` keeps every environment that was made."""

    def __init__(self, buffer, *, environment=Lookup, concurrency=4, token_s=1.0, engines=1, **recipe):
        self.buffer = buffer
        self.environments = []
        self.most_at_once = 0
        self.engines = [FakeEngine(turns(ENCODER, *EPISODE), encoder=ENCODER, token_s=token_s) for _ in range(engines)]
        self.worker = RolloutWorker(
            client=buffer,
            engines=[engine.client(index) for index, engine in enumerate(self.engines)],
            environment=lambda: self.made(environment()),
            encoder=ENCODER,
            recipe=RolloutRecipe(concurrency=concurrency, **recipe),
            index=3,
            incarnation=2,
        )

    def made(self, environment):
        self.environments.append(environment)
        self.most_at_once = max(self.most_at_once, sum(not each.closed for each in self.environments))
        return environment

    def run(self, beside=None):
        """Seconds until the worker ended by itself."""

        async def main():
            async with trio.open_nursery() as nursery:
                if beside is not None:
                    nursery.start_soon(beside)
                with trio.fail_after(3600):
                    await self.worker.run()
                nursery.cancel_scope.cancel()
            return trio.current_time()

        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_worker_plays_every_ticket_to_an_acknowledged_trajectory_and_ends_with_the_tickets():
    buffer = FakeBuffer(tasks(10), samples=3)
    stage = Stage(buffer)
    stage.run()
    assert len(buffer.trajectories) == 30
    assert {trajectory.reward.total for trajectory in buffer.trajectories} == {1.25}
    assert {(trajectory.worker, trajectory.incarnation) for trajectory in buffer.trajectories} == {(3, 2)}
    assert len({trajectory.ticket.name for trajectory in buffer.trajectories}) == 30
    assert [environment.closed for environment in stage.environments] == [1] * 30
    assert buffer.open == set()


def test_length_costs_a_part_of_the_reward_that_lands_on_the_last_generated_token():
    buffer = FakeBuffer(tasks(1))
    Stage(buffer, over_long=OverLongRecipe(limit_tokens=8, buffer_tokens=4, factor=0.5)).run()
    trajectory = buffer.trajectories[0]
    # 6 of at most 8 tokens, the last 4 of which cost: 0.5 * (4 - 6) / 4
    assert trajectory.generated == 6
    assert trajectory.reward.parts == {"searched": 0.25, "right": 1.0, "over_long": -0.25}
    assert trajectory.reward.total == 1.0
    last = trajectory.turns[-1].completion[1] - 1
    assert list(zip(trajectory.reward.tokens, trajectory.reward.amounts, strict=True))[1:] == [(last, 1.0), (last, -0.25)]


def test_length_costs_nothing_in_an_evaluation():
    buffer = FakeBuffer(tasks(1), purpose=Purpose.EVAL)
    Stage(buffer, over_long=OverLongRecipe(limit_tokens=8, buffer_tokens=4)).run()
    assert buffer.trajectories[0].reward.parts == {"searched": 0.25, "right": 1.0}


def test_a_training_ticket_at_temperature_0_is_played_greedily_and_says_so():
    buffer = FakeBuffer(tasks(1), temperature=0.0)
    stage = Stage(buffer)
    stage.run()
    assert {request["sampling_params"]["temperature"] for request in stage.engines[0].requests} == {0.0}
    assert (buffer.trajectories[0].ticket.purpose, buffer.trajectories[0].temperature) == (Purpose.TRAIN, 0.0)


def test_places_are_kept_full_and_never_exceeded():
    buffer = FakeBuffer(tasks(64))
    stage = Stage(buffer, concurrency=16)
    seconds = stage.run()
    assert stage.most_at_once == 16
    # 6 tokens of 1 s an episode, 64 episodes 16 at a time: 24 s where no place is ever left empty
    assert 24.0 <= seconds < 24.5


def test_tickets_are_asked_for_ahead_so_a_slow_buffer_leaves_no_place_empty():
    class Staggered(Lookup):  # the first 16 begin 0.5 s apart, so that one ends every half second from then on
        async def start(self, task):
            await trio.sleep(0.5 * int(task.id) if int(task.id) < 16 else 0.0)
            return await super().start(task)

    buffer = FakeBuffer(tasks(64), delay_s=0.4)
    seconds = Stage(buffer, environment=Staggered, concurrency=16).run()
    assert seconds < 0.4 + 15 * 0.5 + 4 * 6.0 + 2 * 0.4 + 0.1  # the first answer, 4 episodes at each place, the last answers


def test_outcomes_are_handed_in_together_while_the_buffer_is_busy():
    buffer = FakeBuffer(tasks(64), delay_s=0.5)
    Stage(buffer, concurrency=64).run()
    assert sum(buffer.calls) == 64
    assert len(buffer.calls) <= 4


@pytest.mark.parametrize(
    ("make", "recipe", "cause"),
    [
        (lambda: Lookup(fails=tool_down()), {}, CloseCause.TOOL_ERROR),
        (lambda: Lookup(fails=ToolTimeout("slow")), {}, CloseCause.TOOL_TIMEOUT),
        (lambda: Lookup(fails=EnvironmentFailure("?", cause="reward_error")), {}, CloseCause.REWARD_ERROR),
        (lambda: Lookup(fails=ZeroDivisionError("a bug of the environment's")), {}, CloseCause.ENVIRONMENT_ERROR),
        (lambda: Lookup(hangs=True), {"episode_deadline_s": 20.0}, CloseCause.DEADLINE),
        (Lookup, {"limits": LimitsRecipe(prompt_tokens=2)}, CloseCause.PROMPT_LIMIT),
    ],
)
def test_what_goes_wrong_closes_the_ticket_by_its_cause_and_is_never_a_reward_of_0(make, recipe, cause):
    buffer = FakeBuffer(tasks(3), max_attempts=2)
    stage = Stage(buffer, environment=make, **recipe)
    stage.run()
    assert [outcome.cause for outcome in buffer.outcomes] == [cause] * 6  # every sample tried twice
    assert buffer.trajectories == []
    assert all(outcome.detail for outcome in buffer.outcomes)
    assert all(environment.closed == 1 for environment in stage.environments)


def test_an_environment_that_cannot_even_be_made_closes_the_ticket():
    def make():
        raise OSError("no such game")

    buffer = FakeBuffer(tasks(1))
    Stage(buffer, environment=make).run()
    assert [outcome.cause for outcome in buffer.outcomes] == [CloseCause.ENVIRONMENT_ERROR]
    assert "no such game" in buffer.outcomes[0].detail


def test_an_engine_that_refuses_closes_the_ticket():
    buffer = FakeBuffer(tasks(1))
    stage = Stage(buffer)
    stage.engines[0].fail("refuse")
    stage.run()
    assert [outcome.cause for outcome in buffer.outcomes] == [CloseCause.ENGINE_ERROR]


def test_a_configuration_error_ends_the_worker():
    buffer = FakeBuffer(tasks(1))
    with pytest.raises(ExceptionGroup) as raised:
        Stage(buffer, environment=lambda: Lookup(fails=ConfigError("the chat template refuses the role"))).run()
    assert raised.group_contains(ConfigError)


def test_episodes_go_on_when_an_engine_dies():
    buffer = FakeBuffer(tasks(8))
    stage = Stage(buffer, concurrency=8, engines=2)

    async def kill():
        await trio.sleep(4)
        for rid in list(stage.engines[0]._running):
            stage.engines[0]._running[rid].stop.set()
        stage.engines[0].dead = True

    stage.run(kill)
    assert len(buffer.trajectories) == 8
    assert {turn.engine for trajectory in buffer.trajectories for turn in trajectory.turns[1:]} == {"http://engine-1"}


def test_cancelled_tickets_stop_at_once_and_leave_no_outcome():
    buffer = FakeBuffer(tasks(4))
    stage = Stage(buffer, environment=lambda: Lookup(hangs=True))

    async def close_two():
        await trio.sleep(10)
        for name in sorted(buffer.open)[:2]:
            buffer.cancel(name)
        await trio.sleep(2)
        assert sum(environment.closed for environment in stage.environments) == 2
        buffer.stop()

    stage.run(close_two)
    assert buffer.outcomes == []
    assert [environment.closed for environment in stage.environments] == [1] * 4


def test_the_end_of_the_tickets_cancels_what_still_runs_and_tells_the_engine():
    buffer = FakeBuffer(tasks(4))
    stage = Stage(buffer)

    async def stop():
        await trio.sleep(1.5)
        buffer.stop()

    seconds = stage.run(stop)
    assert seconds < 3.0
    assert len(stage.engines[0].aborted) == 4
    assert [environment.closed for environment in stage.environments] == [1] * 4


def test_an_outdated_worker_ends_itself_cleanly():
    buffer = FakeBuffer(tasks(100))
    stage = Stage(buffer)

    async def restart():
        await trio.sleep(5)
        buffer.stale = True

    assert stage.run(restart) < 10
    assert all(environment.closed == 1 for environment in stage.environments)


def test_a_heartbeat_answered_by_no_ends_the_worker():
    buffer = FakeBuffer(tasks(100))
    stage = Stage(buffer)

    async def fence():
        await trio.sleep(5)
        buffer.alive = False

    assert stage.run(fence) < 8
    assert all(environment.closed == 1 for environment in stage.environments)


def test_heartbeats_come_every_few_seconds_and_say_what_was_done():
    buffer = FakeBuffer(tasks(20))
    seconds = Stage(buffer).run()
    assert len(buffer.notes) >= seconds / 3
    last = buffer.notes[-1]
    assert last["episodes"] >= 16
    assert last["generated_tokens"] == 6 * last["episodes"]


def test_the_cause_of_a_group_of_errors_is_the_one_that_says_most():
    assert cause_of(ExceptionGroup("", [ValueError(), ExceptionGroup("", [ToolTimeout("slow")])])) is CloseCause.TOOL_TIMEOUT
    assert cause_of(ExceptionGroup("", [ValueError()])) is CloseCause.ENVIRONMENT_ERROR
    assert cause_of(EngineUnavailable("gone")) is CloseCause.ENGINE_ERROR
    assert cause_of(EnvironmentFailure("?", cause="made up")) is CloseCause.ENVIRONMENT_ERROR
    assert cause_of(trio.TooSlowError()) is CloseCause.TOOL_TIMEOUT
