"""alarms.jsonl: what was raised and what followed, durable and readable after any kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.metrics.alarms import AlarmLog, RolledBack, read_alarms
from agentrl.metrics.report import write_report
from agentrl.metrics.summary import summarise

BACK = RolledBack(
    number=1, alarm="ess", step=9, to="i0001-s00000005", to_step=5, good_until=5, abandoned=("i0001-s00000008",), learning_rate_scale=0.1
)
RAISED = {
    "alarm": "ess",
    "metric": "learner/ess",
    "step": 9,
    "since": 7,
    "value": 0.05,
    "bound": "below 0.2",
    "actions": ["rollback"],
}


def test_a_rollback_is_unfinished_until_it_is_said_to_be_done_and_a_new_reader_knows(tmp_path: Path) -> None:
    log = AlarmLog(tmp_path)
    assert (log.last, log.unfinished) == (None, False)
    log.alarm(RAISED)
    log.rollback(BACK)
    assert (AlarmLog(tmp_path).last, AlarmLog(tmp_path).unfinished) == (BACK, True)
    log.restored(version=12)
    assert (AlarmLog(tmp_path).last, AlarmLog(tmp_path).unfinished) == (BACK, False)
    log.rollback(replace(BACK, number=2))
    assert AlarmLog(tmp_path).unfinished


def test_half_a_line_is_passed_over_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    AlarmLog(tmp_path).alarm(RAISED)
    with (tmp_path / "alarms.jsonl").open("ab") as file:
        file.write(b'{"kind": "alarm", "al')
    AlarmLog(tmp_path).alarm(RAISED | {"step": 10})
    assert [line["step"] for line in read_alarms(tmp_path)] == [9, 10]


def test_the_summary_tells_of_alarms_and_rollbacks(tmp_path: Path) -> None:
    log = AlarmLog(tmp_path)
    log.alarm(RAISED)
    log.rollback(BACK)
    summary = summarise(tmp_path)
    assert [alarm["alarm"] for alarm in summary["alarms"]] == ["ess"]
    assert [(one["step"], one["to_step"], one["learning_rate_scale"]) for one in summary["rollbacks"]] == [(9, 5, 0.1)]


@pytest.mark.slow
def test_the_report_tells_of_alarms_and_rollbacks(tmp_path: Path) -> None:
    log = AlarmLog(tmp_path)
    log.alarm(RAISED)
    log.rollback(BACK)
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "learner/ess is 0.05, below 0.2, since step 7" in page
    assert "to step 5, checkpoint i0001-s00000005; 0.1 times the recipe" in page
