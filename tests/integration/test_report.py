"""The report of a run, from nothing but its files."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agentrl.metrics.overlap import measure_overlap
from agentrl.metrics.report import write_report
from agentrl.metrics.summary import summarise

pytestmark = pytest.mark.slow

HOSTILE = "</pre></span><script>document.title = 'owned'</script><iframe src='http://127.0.0.1:9'></iframe>"
VOID = {"meta", "line", "rect", "circle", "polyline", "polygon"}


class Document(HTMLParser):
    """Tags, attributes that could fetch or run something, headings, and the text of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.active: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.active += [name for name, _ in attributes if name in ("src", "href", "srcset", "action", "data") or name.startswith("on")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def _numbers(step: int, em: float) -> dict[str, Any]:
    part = {"em": em, "interval": [max(0.0, em - 0.05), min(1.0, em + 0.05)], "stop": {"answered": 0.9, "turn_limit": 0.1}}
    stage = {0: "initial", 20: "final"}.get(step, "periodic")
    return {"set": "heldout", "step": step, "stage": stage, "failures": {"tool_timeout": ["t9"]}, "by_source": {"1-hop": part, "2-hop": part}, **part}


def _run_directory(path: Path) -> Path:
    """Twenty steps with three evaluations."""
    (path / "eval").mkdir(parents=True)
    lines = []
    for step in range(1, 21):
        metrics = {"batch/groups": 4, "batch/trajectories": 16, "batch/reward_mean": step / 20, "batch/response_tokens": 10.0}
        metrics |= {"batch/staleness_mean": 1.25, "batch/staleness_max": 2, "batch/staleness/1": 0.75, "batch/staleness/2": 0.25}
        metrics |= {"learner/entropy": 1 / step, "learner/grad_norm": 0.5, "learner/kl_k1": 0.01, "learner/ratio_mean": 1.0, "learner/tokens": 160}
        metrics |= {"engine/tokens_per_s": 900.0, "learner/tokens_per_s": 800.0, "idle/engine": 0.1, "idle/learner": 0.3, "seconds/step": 1.0}
        lines.append(json.dumps({"step": step, "time": step * 2.0, "metrics": metrics}))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    row = {"set": "heldout", "task_id": "t", "k": 0, "source": "1-hop", "question": HOSTILE, "answers": [HOSTILE], "reward": 1.0, "stop": "answered"}
    row |= {"prompt": "P", "turns": [{"completion": "<answer> x </answer>", "observation": HOSTILE}], "tokens": {"generated": 3, "total": 9}}
    for step, em in ((0, 0.25), (10, 0.625), (20, 0.875)):
        (path / "eval" / f"step_{step}.json").write_text(json.dumps({"heldout": _numbers(step, em)}))
        (path / "eval" / f"step_{step}.jsonl").write_text(
            "".join(json.dumps(row | {"task_id": f"t{n}", "reward": float(n % 2)}) + "\n" for n in range(12))
        )
    (path / "run.json").write_text(json.dumps({"name": HOSTILE, "seed": 7, "commit": "abc1234", "packages": {"torch": "2.10.0"}, "recipe": {}}))
    (path / "recipe.yaml").write_text(f"name: mine # {HOSTILE}\n")
    return path


def test_the_report_holds_the_run_and_needs_nothing_else(tmp_path: Path) -> None:
    run_dir = _run_directory(tmp_path / "run")
    ledger = {"wanted": 320, "trained": 312, "dropped": {"group_incomplete": 8}}
    summarise(run_dir, ledger=ledger, overlap=measure_overlap([(0.0, 10.0, 40)], [(4.0, 7.0)]))
    write_report(run_dir)
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    document = Document(page)
    headings = ["Result", "Learning", "Asynchrony and throughput", "Optimisation", "Episodes", "Where every sample went", "Transcripts"]
    headings.append("Recipe and environment")
    assert re.findall(r"<h2>([^<]*)</h2>", page) == headings
    for shown in (
        "87.5%",
        "25.0%",
        "95 %: 82.5% to 92.5%",
        "1.25 steps",
        "30.0%",
        "group incomplete",
        "312",
        "tool timeout",
        "torch",
        "2.10.0",
        "seed 7",
    ):
        assert shown in document.words
    for chart in (
        "Reward in training and held-out EM",
        "EM on heldout by source",
        "Staleness of trained tokens",
        "Entropy",
        "Gradient norm",
        "Policy ratio",
        "Idle",
    ):
        assert chart in document.words
    assert document.tags.count("article") == 8
    assert document.tags.count("svg") >= 10
    assert document.active == [], "nothing is fetched, linked or run"


def test_hostile_text_is_inert_everywhere_in_the_report(tmp_path: Path) -> None:
    run_dir = _run_directory(tmp_path / "run")
    write_report(run_dir)
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    document = Document(page)
    assert not {"script", "iframe"} & set(document.tags)
    assert HOSTILE in document.words, "it is shown as text"
    assert "default-src 'none'" in page


def test_the_curves_are_a_picture(tmp_path: Path) -> None:
    run_dir = _run_directory(tmp_path / "run")
    write_report(run_dir)
    picture = (run_dir / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    width, height = int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")
    assert (width, height) == (1560, 840)
    assert sorted(path.name for path in run_dir.iterdir()) == ["curves.png", "eval", "metrics.jsonl", "recipe.yaml", "report.html", "run.json"]


def test_the_summary_of_an_earlier_step_is_not_believed(tmp_path: Path) -> None:
    run_dir = _run_directory(tmp_path / "run")
    summarise(run_dir, ledger={"trained": 77777})
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 21, "time": 50.0, "metrics": {"batch/groups": 4}}) + "\n")
    write_report(run_dir)
    words = Document((run_dir / "report.html").read_text(encoding="utf-8")).words
    assert "21 steps" in words
    assert "77,777" not in words


def test_a_run_that_did_nothing_yet_has_a_report(tmp_path: Path) -> None:
    write_report(tmp_path)
    assert "0 steps" in Document((tmp_path / "report.html").read_text(encoding="utf-8")).words


def test_evaluations_without_a_score_leave_gaps_and_no_error(tmp_path: Path) -> None:
    run_dir = _run_directory(tmp_path / "run")
    nothing = {"em": None, "interval": [None, None], "stop": {}, "by_source": {}}
    (run_dir / "eval" / "step_20.json").write_text(json.dumps({"heldout": _numbers(20, 0.5) | nothing}))
    (run_dir / "eval" / "step_20.jsonl").write_text("")
    write_report(run_dir)
    assert "nothing scored" in (run_dir / "report.html").read_text(encoding="utf-8")
