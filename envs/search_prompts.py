"""Search-R1's prompts, and how a question is put into one.

Source: Search-R1, `scripts/data_process/{nq_search,nq,nq_rag}.py`, word for word ("as your want" is theirs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

from agentrl.env import Segment

__all__ = ["PROMPTS", "fill", "with_question_mark"]

PROMPTS: Mapping[str, str] = {
    "search_r1": (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new information. After"
        " reasoning, if you find you lack some knowledge, you can call a search engine by <search> query </search> and it will return the top"
        " searched results between <information> and </information>. You can search as many times as your want. If you find no further"
        " external knowledge needed, you can directly provide the answer inside <answer> and </answer>, without detailed illustrations. For"
        " example, <answer> Beijing </answer>. Question: {question}\n"
    ),
    "search_r1_no_search": (
        "Answer the given question. You should first have a reasoning process in mind and then provides the answer. Show your reasoning in"
        " <think> </think> tags and return the final answer in <answer> </answer> tags, for example <answer> Beijing </answer>."
        " Question: {question}\n"
    ),
    "search_r1_rag": (
        "Answer the given question with some potentially useful context. You should analyze the question carefully, evaluate the given context"
        " (which may or may not be useful), and then generate an accurate and well-reasoned response. You should first have a reasoning process"
        " in mind and then provides the answer. Show your reasoning in <think> </think> tags and return the final answer in <answer> </answer>"
        " tags, for example <answer> Beijing </answer>. Question: {question} Context: {context} \n"
    ),
}

_VALUE = re.compile(r"\{(question|context)\}")


def with_question_mark(question: str) -> str:
    """The question, stripped, with a question mark at its end."""
    question = question.strip()
    return question if question.endswith("?") else question + "?"


def fill(template: str, values: Mapping[str, str]) -> tuple[Segment, ...]:
    """The template as frames, the values in it as untrusted text.

    Segments are tokenised one by one, and tokenizers take a word together with the space before it. So a space before a value goes with
    the value, and so does white space alone after one: the cut falls where the tokens of the whole text have a boundary, too.
    """
    pieces: list[tuple[str, bool]] = []
    for number, piece in enumerate(_VALUE.split(template)):
        if number % 2:
            pieces.append((values[piece], True))
        elif number and not piece.strip():
            pieces.append((piece, True))
        else:
            kept = piece.rstrip()
            pieces += [(kept, False), (piece[len(kept) :], True)] if _followed(template, number) else [(piece, False)]
    merged = [("".join(text for text, _ in run), untrusted) for untrusted, run in groupby(pieces, key=lambda piece: piece[1])]
    return tuple(Segment(text=text, untrusted=untrusted) for text, untrusted in merged if text)


def _followed(template: str, number: int) -> bool:
    """Whether a value comes after the piece of this number."""
    return number < 2 * len(_VALUE.findall(template))
