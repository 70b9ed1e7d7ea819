"""Hostile text on a terminal."""

from __future__ import annotations

import pytest

from agentrl.metrics.printable import one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b2Jx", "x"),
        ("\x1b]52;c;never ended", ""),
        ("back\x08\x08space\x00", "back\ufffd\ufffdspace\ufffd"),
        ("\u202eabc", "\ufffdabc"),
        ("one\r\ntwo\tthree", "one\ntwo\tthree"),
        ("na\u00efve \U0001f469\u200d\U0001f52c \u6771\u4eac", "na\u00efve \U0001f469\u200d\U0001f52c \u6771\u4eac"),
        ("\ud800", "\ufffd"),
    ],
)
def test_escapes_go_and_other_controls_show(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_one_line_is_one_line_of_limited_length() -> None:
    assert one_line(" a\n\nb\tc ") == "a b c"
    assert one_line("x" * 50, limit=10) == "x" * 9 + "\u2026"
