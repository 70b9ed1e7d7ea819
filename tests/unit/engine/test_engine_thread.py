"""The thread that owns the scheduler."""

import threading

import pytest

from agentrl.engine.thread import EngineThread
from agentrl.errors import EngineUnavailable


class Steps:
    """A scheduler of countable steps; every second one finishes something, step `fatal` breaks."""

    def __init__(self, fatal=None):
        self.left, self.done, self.fatal = 0, 0, fatal

    @property
    def busy(self):
        return self.left > 0

    def step(self):
        self.left, self.done = self.left - 1, self.done + 1
        if self.done == self.fatal:
            raise MemoryError("no room")

    def take_finished(self):
        return [self.done] if self.done and self.done % 2 == 0 else []

    def add(self, steps):
        self.left += steps
        return self.left


def started(scheduler, delivered, failures):
    thread = EngineThread(scheduler, threads=1, deliver=delivered.append, on_failure=failures.append)
    thread.start()
    return thread


def test_it_steps_while_there_is_work_and_ends_when_told():
    scheduler, delivered, failures = Steps(), [], []
    thread = started(scheduler, delivered, failures)
    assert thread.call(lambda: scheduler.add(3)).result(5) == 3
    while scheduler.left:
        thread.call(lambda: None).result(5)
    assert thread.alive
    thread.stop()
    assert (scheduler.done, not thread.alive, failures) == (3, True, [])
    assert [2] in delivered


def test_a_command_that_fails_fails_for_its_caller_only():
    thread = started(Steps(), [], [])
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(5)
    assert thread.call(lambda: "fine").result(5) == "fine"
    thread.stop()


def test_a_broken_step_answers_whoever_waits_and_refuses_the_rest():
    scheduler, failures, failed, gate = Steps(fatal=1), [], threading.Event(), threading.Event()
    thread = EngineThread(scheduler, threads=1, deliver=print, on_failure=lambda error: (failures.append(error), failed.set()))
    thread.start()
    thread.post(gate.wait)
    thread.post(lambda: scheduler.add(1))
    late = []
    thread.post(lambda: late.append(thread.call(lambda: None)))  # comes in before the step that breaks
    gate.set()
    assert failed.wait(5)
    thread.stop()
    assert [type(failure) for failure in failures] == [MemoryError]
    with pytest.raises(EngineUnavailable):
        late[0].result(5)
    with pytest.raises(EngineUnavailable, match="no room"):
        thread.post(lambda: None)
