"""The one thread that owns the scheduler: it runs commands between steps, and steps while there is work."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from agentrl.engine.profile import PassProfiler
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Progress, Sequence
from agentrl.errors import EngineUnavailable

__all__ = ["EngineThread"]

# Every kernel lets go of the interpreter and takes it back after it. While the event loop parses requests it would get it back after 5 ms, Python's
# default, a hundred times per step: a batch of arrivals would stop all that runs.
_SWITCH_S = 1e-4
T = TypeVar("T")


class EngineThread:
    """Started and stopped by whoever serves it.

    Args:
        deliver: called in the engine thread with the sequences that a step finished.
        on_failure: called in the engine thread once, if it breaks; nothing is served after that.
        tell: called in the engine thread with the followed sequences that have come further.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        threads: int,
        deliver: Callable[[list[Sequence]], None],
        on_failure: Callable[[BaseException], None],
        tell: Callable[[list[tuple[Sequence, Progress]]], None] | None = None,
    ) -> None:
        self.profiler = PassProfiler()
        self._scheduler = scheduler
        self._threads = threads
        self._deliver = deliver
        self._on_failure = on_failure
        self._tell = tell
        self._followed: dict[Sequence, int] = {}  # how many tokens are the next news
        self._inbox: deque[tuple[Callable[[], None], Future[Any] | None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine")

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive() and self._failure is None

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and wait for that; calls that were not begun fail."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` in the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command())
            except Exception as error:  # blast radius of one command: its caller gets it, the engine goes on
                future.set_exception(error)

        self._put(run, future)
        return future

    def post(self, command: Callable[[], None]) -> None:
        """Like `call` for commands that neither fail nor answer.

        Raises:
            EngineUnavailable: the engine has broken or is closing.
        """
        self._put(command, None)

    def follow(self, sequence: Sequence) -> None:
        """Tell how far `sequence` has come: at its first token and then at every `stream_interval`th, until it ends.

        Raises:
            EngineUnavailable: the engine has broken or is closing.
        """
        self._put(lambda: self._followed.update({sequence: 1}), None)

    def _put(self, command: Callable[[], None], future: Future[Any] | None) -> None:
        with self._wake:
            if self._closing or self._failure is not None:
                raise EngineUnavailable(f"the engine thread has ended: {self._failure or 'it was closed'}")
            self._inbox.append((command, future))
            self._wake.notify()

    def _run(self) -> None:
        """Serve.

        consumes      commands
        produces      finished sequences
        waits for     a command, while the scheduler has nothing to do
        unblocked by  stop()
        """
        torch.set_num_threads(self._threads)  # OpenMP keeps this number by thread
        sys.setswitchinterval(_SWITCH_S)  # of the whole process
        try:
            while self._take_commands():
                if self._scheduler.busy:
                    with self.profiler.around_pass():
                        self._scheduler.step()
                if self._followed:
                    self._tell_news()
                finished = self._scheduler.take_finished()
                if finished:
                    self._deliver(finished)
        except Exception as error:  # blast radius of the engine: its requests are answered, its health turns bad, the process lives
            with self._wake:
                self._failure = error
            self._on_failure(error)
        self._fail_calls()

    def _take_commands(self) -> bool:
        """Run what has come in, waiting for it if there is nothing else to do. False once closing."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._closing or self._scheduler.busy)
            if self._closing:
                return False
        for _ in range(len(self._inbox)):
            command, _ = self._inbox.popleft()
            command()
        return True

    def _tell_news(self) -> None:
        version = self._scheduler.version
        self._followed = {sequence: due for sequence, due in self._followed.items() if sequence.finish is None}
        news = [(sequence, len(sequence.output)) for sequence, due in self._followed.items() if len(sequence.output) >= due]
        self._followed |= {sequence: tokens + sequence.request.params.stream_interval for sequence, tokens in news}
        if news and self._tell is not None:
            self._tell([(sequence, Progress(tokens=tokens, version=version)) for sequence, tokens in news])

    def _fail_calls(self) -> None:
        """Answer the calls that were never begun; no more come in."""
        for _, future in self._inbox:
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(EngineUnavailable("the engine thread has ended"))
        self._inbox.clear()
