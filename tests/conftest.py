"""The tests' budget of time, kept by the tests themselves.

A test without a mark takes under a quarter of a second; a slower one is marked `slow`. All of them together, the soak tests aside, stay within
`BUDGET_S` on two cores. At the end the time is told by mark, and what broke a budget fails the session.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

# One thread per process: tests of numbers are small, and two cores are all there is. Before NumPy or torch are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

BUDGET_S = 720.0
UNMARKED_S = 0.25
# Other work on the machine stretches a test's wall time: slower than UNMARKED_S is told, slower than this times it fails the session.
NOISE = 4.0

# The same examples at every run, and no deadline of hypothesis' own: time is watched here.
settings.register_profile("agentrl", derandomize=True, deadline=None, database=None)
settings.load_profile("agentrl")


MARKS = ("soak", "sglang", "slow")  # of tests that may take longer than UNMARKED_S; the budget is about those without a mark and the slow ones


class Stopwatch:
    """Seconds of every test, set-up and tear-down included, under the mark it carries."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {mark: defaultdict(float) for mark in ("", *MARKS)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        mark = next((mark for mark in MARKS if mark in report.keywords), "")
        self.seconds[mark][report.nodeid] += report.duration

    @property
    def broken(self) -> list[str]:
        """What fails the session."""
        spent = sum(sum(self.seconds[mark].values()) for mark in ("", "slow"))
        over = [f"all tests took {spent:.0f} s, more than the budget of {BUDGET_S:.0f} s"] if spent > BUDGET_S else []
        return over + [f"{name} took {took:.2f} s: mark it slow, or make it faster" for name, took in self._sluggish(UNMARKED_S * NOISE)]

    @property
    def report(self) -> list[str]:
        """One line for each mark, and the unmarked tests above their limit."""
        marks = {mark or "unmarked": tests for mark, tests in self.seconds.items() if tests}
        lines = [f"{mark:<9} {len(tests):>5} tests {sum(tests.values()):>8.1f} s" for mark, tests in marks.items()]
        return lines + [f"above {UNMARKED_S} s and not marked slow: {name} {took:.2f} s" for name, took in self._sluggish(UNMARKED_S)]

    def _sluggish(self, limit_s: float) -> list[tuple[str, float]]:
        return [(name, took) for name, took in self.seconds[""].items() if took > limit_s]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.broken and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not any(self.seconds.values()):
            return
        terminalreporter.section("time by mark")
        for line in self.report:
            terminalreporter.line(line)
        for line in self.broken:
            terminalreporter.line(f"BUDGET BROKEN: {line}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Start the watch."""
    config.pluginmanager.register(Stopwatch(), "stopwatch")
