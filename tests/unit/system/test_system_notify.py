"""Somebody is told of an alarm: by a command or a URL, within a deadline, and never at the run's cost."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from agentrl.config.health import HealthRecipe
from agentrl.errors import ConfigError
from agentrl.system.notify import notify, require_program

ALARM = {"alarm": "ess", "step": 9, "value": 0.05}


def told_by(tmp_path: Path, *, transport: httpx.AsyncBaseTransport | None = None, cancelled: bool = False, **health: Any) -> list[str]:
    """What goes wrong when ALARM is told in every way of `health`; `cancelled`: at the end of a run."""
    actions = [way for way in ("command", "url") if way in health]
    recipe = HealthRecipe.model_validate(health | {"alarms": {"ess": {"actions": actions}}})

    async def main() -> list[str]:
        with trio.CancelScope() as scope:
            if cancelled:
                scope.cancel()
            return await notify(recipe, ALARM | {"actions": actions}, cwd=tmp_path, log_file=tmp_path / "log", transport=transport)
        raise AssertionError("it was cut short")

    return trio.run(main)


def test_a_command_gets_the_alarm_on_its_standard_input_in_the_callers_directory_also_when_the_run_ends(tmp_path):
    assert told_by(tmp_path, command=["sh", "-c", "cat > told.json; echo heard"], cancelled=True) == []
    assert json.loads((tmp_path / "told.json").read_text()) == ALARM | {"actions": ["command"]}
    assert (tmp_path / "log").read_text() == "heard\n"


def test_no_shell_reads_the_command(tmp_path):
    assert told_by(tmp_path, command=["echo", "$HOME; false"]) == []
    assert (tmp_path / "log").read_text() == "$HOME; false\n"


def test_a_command_that_fails_or_is_gone_is_told_and_no_more(tmp_path):
    (failed,) = told_by(tmp_path, command=["sh", "-c", "exit 3"])
    assert failed.startswith("health.command was not told of alarm ess: sh ended with code 3")
    (gone,) = told_by(tmp_path, command=["/nonexistent/notify"])
    assert "No such file" in gone


@pytest.mark.slow
def test_a_command_beyond_its_deadline_is_killed_with_what_it_started(tmp_path):
    began = time.monotonic()
    (late,) = told_by(tmp_path, command=["sh", "-c", "sleep 60 & sleep 60"], deadline_s=0.3)
    assert time.monotonic() - began < 10
    assert late.endswith("no end within 0.3 s")


def test_a_url_gets_the_alarm_as_json_and_a_refusal_is_told(tmp_path):
    received = []

    def answer(request: httpx.Request) -> httpx.Response:
        received.append((request.method, request.headers["content-type"], json.loads(request.content)))
        return httpx.Response(200 if len(received) == 1 else 500)

    transport = httpx.MockTransport(answer)
    assert told_by(tmp_path, url="http://alarms.test/", transport=transport) == []
    assert received == [("POST", "application/json", ALARM | {"actions": ["url"]})]
    assert told_by(tmp_path, url="http://alarms.test/", transport=transport) == [
        "health.url was not told of alarm ess: http://alarms.test/ answered 500"
    ]


def test_a_url_nobody_answers_at_is_told(tmp_path):
    (trouble,) = told_by(tmp_path, url="http://127.0.0.1:1/")
    assert "ConnectError" in trouble


def test_a_program_that_is_not_there_is_refused_before_anything_starts():
    def of(program: str) -> HealthRecipe:
        return HealthRecipe.model_validate({"alarms": {"ess": {"actions": ["command"]}}, "command": [program]})

    require_program(HealthRecipe())
    require_program(of(sys.executable))
    with pytest.raises(ConfigError, match="no-such-program is neither a program in PATH"):
        require_program(of("no-such-program"))
