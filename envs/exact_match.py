"""Scores of a short answer against gold ones: exact match and substring match, as Search-R1 and SQuAD define them.

    normalise_answer("The  Beatles!") == normalise_answer("beatles")

Source: Search-R1's `qa_em.py`, itself SQuAD 1.1's official evaluation.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

__all__ = ["exact_match", "last_answer", "normalise_answer", "substring_match"]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as in the source


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, without the articles a, an, the, with single spaces: in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golden_answers: Sequence[str]) -> bool:
    """Whether the prediction equals one of the gold answers, both normalised."""
    return normalise_answer(prediction) in {normalise_answer(answer) for answer in golden_answers}


def substring_match(prediction: str, golden_answers: Sequence[str]) -> bool:
    """Whether one of the gold answers is part of the prediction, both normalised."""
    predicted = normalise_answer(prediction)
    return any(normalise_answer(answer) in predicted for answer in golden_answers)


def last_answer(text: str) -> str | None:
    """What stands, stripped, in the last `<answer>` of a text; None where there is none."""
    answers = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None
