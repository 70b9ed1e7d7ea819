"""Text to words, in any language, for search by words.

    "Don't panic: Zürich, 東京都!"   ->   don  t  panic  zürich  東  東京  京都  都   (see below)

Letters and digits with their combining marks are a word, compared without regard to case and to Unicode's compatibility forms (NFKC, casefold).
Scripts that are written without spaces (Han, kana, Thai, Lao, Khmer, Myanmar) become overlapping pairs of characters, as search engines do.
No stemming and no stop words: both belong to one language, and BM25's idf makes common words weigh next to nothing.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import chain

__all__ = ["words_of"]

MAX_WORD = 64  # characters; the rest of a longer one is cut off
_ASCII = re.compile(r"[a-z0-9]+")
# Han and its extensions, kana, Thai, Lao, Myanmar, Khmer: no spaces between words.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_UNSPACED_RUN = re.compile(f"[{_UNSPACED}]+")


def words_of(text: str) -> list[str]:
    """The words of a text, in its order."""
    if text.isascii():
        words = _ASCII.findall(text.lower())
    else:
        normal = unicodedata.normalize("NFKC", text).casefold()
        words = [word for run in _word_pattern().findall(normal) for word in _parts(run)]
    return [word[:MAX_WORD] for word in words] if words and max(map(len, words)) > MAX_WORD else words


def _parts(run: str) -> list[str]:
    """A run of letters itself, or, where it is of an unspaced script, its pairs of characters."""
    if run.isascii() or not _UNSPACED_RUN.search(run):
        return [run]
    parts: list[str] = []
    at = 0
    for match in _UNSPACED_RUN.finditer(run):
        if match.start() > at:
            parts.append(run[at : match.start()])
        some = match.group()
        parts += [some[i : i + 2] for i in range(len(some) - 1)] or [some]
        at = match.end()
    if at < len(run):
        parts.append(run[at:])
    return parts


@cache
def _word_pattern() -> re.Pattern[str]:
    r"""Letters and digits, and the marks that follow them: `\w` alone breaks Hindi and Arabic words apart at their vowels."""
    codes = chain(range(0x300, 0x20000), range(0xE0100, 0xE01F0))  # all others of Unicode 15 are ideographs, unassigned or private
    marks = "".join(chr(code) for code in codes if unicodedata.category(chr(code)) in ("Mn", "Mc"))
    return re.compile(rf"[^\W_](?:[^\W_]|[{marks}])*")
