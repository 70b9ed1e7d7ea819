"""Sample episodes as HTML: what the policy wrote and what it was given, told apart. All text is hostile and escaped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from agentrl.metrics.batch import RIGHT_ABOVE
from agentrl.metrics.printable import html_text, one_line, printable

__all__ = ["choose_rows", "render_episode"]

_LONGEST = 12_000  # characters shown of one episode: a page of eight stays small


def choose_rows(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Up to `count` rows, right and wrong ones alternating as long as there are both, each kind taken from the sources in turn."""
    right = _in_turn([row for row in rows if (row.get("reward") or 0.0) > RIGHT_ABOVE])
    wrong = _in_turn([row for row in rows if (row.get("reward") or 0.0) <= RIGHT_ABOVE])
    mixed = [row for pair in zip_longest(right, wrong) for row in pair if row is not None]
    return mixed[:count]


def render_episode(row: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> str:
    """One episode.

    Args:
        row: a row of an evaluation.
        earlier: the same task before training, shown folded below.
    """
    before = "" if earlier is None else f"<details><summary>Before training: {_verdict(earlier)}</summary>{_transcript(earlier)}</details>"
    answers = ", ".join(map(str, row.get("answers", []))) or "-"
    tokens = row.get("tokens", {})
    counted = f"{len(row.get('turns', []))} turns · {tokens.get('generated', 0)} of {tokens.get('total', 0)} tokens generated"
    facts = f"{html_text(row.get('source', ''))} · {counted}"
    return (
        f'<article class="episode"><header><h3>{html_text(one_line(str(row.get("question", "")), limit=300))}</h3>'
        f"<p>{_verdict(row)} <span>wanted: <b>{html_text(one_line(answers))}</b></span> <span>{facts}</span></p></header>"
        f"{_transcript(row)}{before}</article>"
    )


def _in_turn(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    by_source: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_source[str(row.get("source", ""))].append(row)
    rounds = zip_longest(*(by_source[source] for source in sorted(by_source)))
    return [row for one_round in rounds for row in one_round if row is not None]


def _verdict(row: Mapping[str, Any]) -> str:
    reward = row.get("reward")
    kind = "good" if (reward or 0.0) > RIGHT_ABOVE else "bad"
    shown = "-" if reward is None else f"{reward:g}"
    return f'<span class="badge {kind}">reward {shown}</span> <span class="badge">{html_text(row.get("stop", ""))}</span>'


def _transcript(row: Mapping[str, Any]) -> str:
    pieces, left = [], _LONGEST
    for kind, text in _pieces(row):
        shown = printable(text)
        cut = "" if len(shown) <= left else f"… ({len(shown) - left} more characters)"
        if shown:
            pieces.append(f'<span class="{kind}">{html_text(shown[:left])}{cut}</span>')
        left -= len(shown)
        if left <= 0:
            break
    return f'<pre class="transcript">{"".join(pieces)}</pre>'


def _pieces(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(class of the page, text) in the order of the tokens."""
    yield "prompt", str(row.get("prompt", ""))
    for turn in row.get("turns", []):
        yield "generated", str(turn.get("completion", ""))
        yield "info", str(turn.get("observation", ""))
