"""Sample episodes of a report: hostile text is inert, and it shows who wrote what."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from agentrl.metrics.transcript import choose_rows, render_episode

HOSTILE = "</span></pre></article><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[2J"


class Elements(HTMLParser):
    """What a browser would see: tags, and the text within each class."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(html)
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(str(dict(attributes).get("class") or tag))

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text[self._open[-1]] = self.text.get(self._open[-1], "") + data


def _row(task: str = "t", reward: float = 1.0, source: str = "nq", **more: Any) -> dict[str, Any]:
    turns = [{"completion": "<search> x </search>", "observation": "passage"}, {"completion": "<answer> y </answer>", "observation": ""}]
    row = {"task_id": task, "k": 0, "source": source, "question": "who?", "answers": ["y"], "reward": reward, "stop": "answered"}
    return row | {"prompt": "Answer.", "turns": turns, "tokens": {"generated": 9, "total": 20}} | more


def test_generated_and_given_text_are_told_apart() -> None:
    seen = Elements(render_episode(_row()))
    assert seen.text["generated"] == "<search> x </search><answer> y </answer>"
    assert seen.text["info"] == "passage"
    assert seen.text["prompt"] == "Answer."
    assert seen.text["badge good"] == "reward 1"


def test_a_hostile_transcript_is_inert_wherever_it_stands() -> None:
    turns = [{"completion": HOSTILE, "observation": HOSTILE}]
    row = _row(question=HOSTILE, answers=[HOSTILE], stop=HOSTILE, source=HOSTILE, prompt=HOSTILE, turns=turns)
    page = render_episode(row, earlier=row)
    seen = Elements(page)
    assert not {"script", "img"} & set(seen.tags)
    assert seen.tags.count("article") == 1
    assert seen.text["info"].count("<script>alert(1)</script>") == 2, "shown as text, now and before training"
    assert "\u202e" not in page
    assert "\x1b" not in page


def test_an_endless_transcript_is_cut_and_says_so() -> None:
    page = render_episode(_row(turns=[{"completion": "a" * 50_000, "observation": "b" * 50_000}]))
    assert len(page) < 14_000
    assert "more characters" in page


def test_right_and_wrong_episodes_are_shown_in_turn_over_the_sources() -> None:
    rows = [_row(f"{source}-{reward:g}-{n}", reward, source) for n in range(4) for source in ("1-hop", "2-hop") for reward in (1.0, 0.0)]
    assert [row["task_id"] for row in choose_rows(rows, 5)] == ["1-hop-1-0", "1-hop-0-0", "2-hop-1-0", "2-hop-0-0", "1-hop-1-1"]
    assert len(choose_rows(rows[:3], 8)) == 3
    assert [row["task_id"] for row in choose_rows([_row("a"), _row("b")], 8)] == ["a", "b"], "all right: no wrong one is missed"
