"""Scores of a completion whose answer is a number: GSM8K's, and others of its kind.

    ... so she sells 16 - 3 - 4 = 9 eggs, for 9 * 2 = 18 dollars.
    #### $18.00                                                          equals the golden answer "... <<9*2=18>>18\n#### 18"

Numbers are compared exactly, as fractions. Commas between thousands, a currency, a percent sign, units and what follows on the line do not
count; 3/4, 1 1/2 and \\frac{3}{4} are understood. What only begins like a number (1.2.3, 7:13, 12x5, 1e5, 3,50) is none. Nothing is evaluated,
and the time is linear in the text.

Source: GSM8K's format of answers (Cobbe et al. 2021, arXiv 2110.14168). As in verl's scorer for it, strict takes the last marked number and
flexible the last number; ours also knows other marks than `####`, and compares numbers where verl compares their text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

__all__ = ["Mode", "extract_number", "golden_number", "numeric_answer"]

Mode = Literal["strict", "flexible"]

# Digits of a numerator or denominator. No answer has more, and reading an integer takes time quadratic in them.
_MOST_DIGITS = 40

_NUMBER = re.compile(
    r"""
    (?<!\w) (?<![0-9][.,:/])                                    # not from the middle of a word or a number
    (?P<sign>(?<![0-9)])[-+\u2212])?                            # and 10-5 is no -5
    (?:\\?[$\u20ac\u00a3\u00a5\u20b9]\s?)? (?P<minus>[-\u2212])?
    (?:(?P<mixed>[0-9]++)[ ](?=[0-9]++\s?/))?                   # the 1 of 1 1/2
    (?: (?P<whole>[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++) (?:\.(?P<decimals>[0-9]++))? | \.(?P<bare>[0-9]++) )
    (?:\s?/\s?(?P<denominator>[0-9]++))?
    (?! [0-9A-Za-z]*[0-9] | [.,:][0-9] | \s?/\s?[0-9] )         # read to its end
    """,
    re.VERBOSE | re.ASCII,
)
_STRICT_MARK = re.compile(r"\#{4,}|\\boxed\s{0,3}\{")
_FLEXIBLE_MARK = re.compile(_STRICT_MARK.pattern + r"|\banswer(?:\s{1,3}is\b(?:\s{0,3}:)?|\s{0,3}:)", re.IGNORECASE)
_LEAD = re.compile(r"[\s*:=]{0,8}(?:\\boxed\s{0,3}\{)?\s{0,3}")  # between a mark and its number
_FRACTION = re.compile(r"\\[dt]?frac\s{0,3}\{\s{0,3}([0-9]++)\s{0,3}\}\s{0,3}\{\s{0,3}([0-9]++)\s{0,3}\}")


def numeric_answer(completion: str, answers: Sequence[str], *, mode: Mode = "strict") -> float | None:
    """1 where the completion's number is that of one of the golden answers, else 0; None where it gives no number.

    Raises:
        ValueError: a golden answer holds no number.
    """
    golden = {golden_number(answer) for answer in answers}
    number = extract_number(completion, mode=mode)
    return None if number is None else float(number in golden)


def extract_number(text: str, *, mode: Mode) -> Fraction | None:
    """The number a text gives as its answer; None where there is none.

    Args:
        mode: `strict` takes the last number that stands behind `####` or within `\\boxed{}`. `flexible` also knows "the answer is" and
            "answer:", and where nothing is marked takes the last number.
    """
    text = _FRACTION.sub(r"\1/\2", text.replace("{,}", ","))
    marks = list((_STRICT_MARK if mode == "strict" else _FLEXIBLE_MARK).finditer(text))
    marked = (_number_at(text, mark.end()) for mark in reversed(marks))
    found = next((number for number in marked if number is not None), None)
    if found is not None or mode == "strict":
        return found
    numbers = [_value(match) for match in _NUMBER.finditer(text)]
    return next((number for number in reversed(numbers) if number is not None), None)


def golden_number(answer: str) -> Fraction:
    """The number of a golden answer: a number alone, or a solution that ends in a marked one.

    Raises:
        ValueError: it is neither.
    """
    number = extract_number(answer, mode="strict")
    number = _number_at(answer, 0) if number is None else number
    if number is None:
        raise ValueError(f"expected a golden answer that is a number or ends in `#### NUMBER`, got {answer[-80:]!r}")
    return number


def _number_at(text: str, start: int) -> Fraction | None:
    lead = _LEAD.match(text, start)
    assert lead is not None  # it matches nothing as well
    match = _NUMBER.match(text, lead.end())
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    """None for what is too long, or divides by zero."""
    mixed, whole, decimals, bare, below = match.group("mixed", "whole", "decimals", "bare", "denominator")
    whole, decimals = (whole or "").replace(",", ""), decimals or bare or ""
    if max(len(mixed or ""), len(whole) + len(decimals), len(below or "")) > _MOST_DIGITS:
        return None
    divisor = int(below or 1) * 10 ** len(decimals)
    if divisor == 0:
        return None
    size = int(mixed or 0) + Fraction(int(whole + decimals), divisor)
    return size if match["sign"] in (None, "+") and match["minus"] is None else -size
