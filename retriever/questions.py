"""Questions to evaluate a retriever with: files of JSON lines, and graded judgements of TREC's or BEIR's shape.

{"id": "7", "question": "Where is Oslo?", "golden_answers": ["Norway"], "positive_passage": "12"}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Question", "QuestionError", "read_qrels", "read_questions"]


MAX_GRADE = 1000  # 2^grade, its gain, is then a number


class QuestionError(ValueError):
    """Questions or judgements cannot be used. The message names file and line, or the ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A row of a file of questions."""

    id: str
    text: str
    gold: tuple[str, ...] = ()  # ids of relevant documents
    answers: tuple[str, ...] = ()


def read_questions(path: Path) -> list[Question]:
    """Questions of a file of JSON lines: `question` or `query`, and where there are any `id`, `positive_passage` or `positive_passages`, and
    `golden_answers`. A question without an id has its line's number.

    Raises:
        QuestionError: a row is not what it should be, an id comes twice, or there is no row.
        OSError: the file cannot be read.
    """
    questions: dict[str, Question] = {}
    with path.open(encoding="utf-8-sig", errors="strict") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    question = _question(line, f"{path}:{number}", str(number))
                    if question.id in questions:
                        raise QuestionError(f"{path}:{number}: the id {question.id!r} comes twice")
                    questions[question.id] = question
        except UnicodeDecodeError as error:
            raise QuestionError(f"{path}: not UTF-8: {error}") from error
    if not questions:
        raise QuestionError(f"{path}: there is no question")
    return list(questions.values())


def _question(line: str, where: str, number: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QuestionError(f"{where}: not JSON: {error}") from error
    text = row.get("question", row.get("query")) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise QuestionError(f"{where}: expected an object with a string `question` or `query`, got {line.strip()[:200]}")
    id = row.get("id", number)
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise QuestionError(f"{where}: expected an id that is a string or an integer, got {id!r}")
    gold = row.get("positive_passages", [row["positive_passage"]] if "positive_passage" in row else [])
    answers = row.get("golden_answers", [])
    answers = [answers] if isinstance(answers, str) else answers
    for name, value in (("positive_passages", gold), ("golden_answers", answers)):
        if not isinstance(value, list) or not all(isinstance(each, str) or (isinstance(each, int) and not isinstance(each, bool)) for each in value):
            raise QuestionError(f"{where}: expected {name} to be a list of strings, got {value!r}")
    return Question(id=str(id), text=text, gold=tuple(dict.fromkeys(map(str, gold))), answers=tuple(map(str, answers)))


def read_qrels(path: Path) -> dict[str, dict[str, float]]:
    """Grades by question and document. TREC's lines have four fields, BEIR's three and a line of names above them.

    Raises:
        QuestionError: a line is something else, a pair is judged twice, or there is none.
        OSError: the file cannot be read.
    """
    grades: dict[str, dict[str, float]] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise QuestionError(f"{path}: not UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or (number == 1 and fields == ["query-id", "corpus-id", "score"]):
            continue
        try:
            question, document, grade = (fields[0], fields[2], float(fields[3])) if len(fields) == 4 else (fields[0], fields[1], float(fields[2]))
            if len(fields) not in (3, 4):
                raise IndexError
            if not abs(grade) <= MAX_GRADE:  # no number, too
                raise ValueError
        except (IndexError, ValueError) as error:
            raise QuestionError(
                f"{path}:{number}: expected `question iteration document grade` or `question document grade`, the grade from {-MAX_GRADE} to "
                f"{MAX_GRADE}, got {line!r}"
            ) from error
        if document in grades.setdefault(question, {}):
            raise QuestionError(f"{path}:{number}: {document!r} is judged twice for question {question!r}")
        grades[question][document] = grade
    if not grades:
        raise QuestionError(f"{path}: there is no judgement")
    return grades
