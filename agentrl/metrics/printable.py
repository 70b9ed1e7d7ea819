"""Text from outside made safe to show: a passage or an error message cannot move the cursor, recolour the terminal or hide itself."""

from __future__ import annotations

import re
import unicodedata
from html import escape

__all__ = ["html_text", "one_line", "printable"]

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\Z)"  # OSC, DCS, SOS, PM, APC: titles, links, clipboard
    r"|\x1b[ -/]*[0-~]"  # two-character escapes
    r"|\x9b[0-?]*[ -/]*[@-~]",  # CSI as one character
    re.DOTALL,
)
_KEPT = "\n\t"
_UNSEEN = ("Cc", "Cf", "Cs")  # controls, formatting (text direction among it), lone surrogates


def printable(text: str) -> str:
    """`text` without terminal escapes; other control characters, and those that reorder text, become U+FFFD. Line ends and tabs stay."""
    plain = _ESCAPES.sub("", text).replace("\r\n", "\n")
    return "".join(c if c in _KEPT or unicodedata.category(c) not in _UNSEEN or _joins(c) else "\ufffd" for c in plain)


def one_line(text: str, *, limit: int = 200) -> str:
    """The same on one line, cut to `limit` characters."""
    joined = " ".join(printable(text).split())
    return joined if len(joined) <= limit else joined[: limit - 1] + "\u2026"


def html_text(value: object) -> str:
    """Printable text for an element or a quoted attribute of HTML and SVG."""
    return escape(printable(str(value)), quote=True)


def _joins(character: str) -> bool:
    """Joiners and marks that scripts and emoji need."""
    return character in "\u200c\u200d\u00ad\u2060"
