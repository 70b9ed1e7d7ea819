"""How well an index finds what questions ask for: every mode over one pool of documents, with intervals.

    questions = read_questions(Path("questions.jsonl"))
    judged = judged_by_ids(questions, index.documents)
    evaluation = evaluate(index.search, judged, (Mode.DENSE, Mode.BM25, Mode.HYBRID), topk=(1, 3, 5))
    print(evaluation.render())

What is relevant to a question comes from one of three places:

    gold ids    `positive_passage` or `positive_passages` of its row
    qrels       a file of graded judgements, TREC's (question, iteration, document, grade) or BEIR's (question, document, grade)
    answers     any document that contains one of its `golden_answers`, both normalised as SQuAD's metric does, as whole words

With answers it is not known how many documents are relevant, so there is success ("an answer is among the first k", DPR's top-k accuracy) and MRR,
and neither recall nor nDCG. Questions to which nothing is relevant have no score: they are left out and counted.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retriever.query import Hit, Mode, Query
from retriever.questions import Question, QuestionError
from retriever.ranking import Gain, Interval, bootstrap, ndcg_at, paired_bootstrap, recall_at, reciprocal_rank

__all__ = [
    "Arm",
    "Documents",
    "Evaluation",
    "Judged",
    "answers_in",
    "evaluate",
    "judged_by_answers",
    "judged_by_ids",
    "judged_by_qrels",
    "normalized",
]

QUESTIONS_AT_A_TIME = 64  # a batch of the encoder; how often progress is told
LEAST_DEPTH = 10  # of MRR and nDCG, which are usually told at 10
RELEVANT = 1  # the lowest grade that recall and MRR count, as trec_eval does
SHOWN = 3  # examples in a complaint

Search = Callable[[Sequence[Query]], Sequence[Sequence[Hit]]]
Told = Callable[[str, int, int], None]


class Documents(Protocol):
    """Of the index: `retriever.documents.DocumentStore`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> bytes: ...

    def contents(self, row: int) -> str:
        """What was indexed."""
        ...

    def row_of(self, id: str) -> int | None:
        """The row of an id."""
        ...


class Judged(Protocol):
    """Questions, and what is relevant to them."""

    @property
    def kind(self) -> str:
        """By what: gold ids, qrels or answers."""
        ...

    @property
    def questions(self) -> Sequence[Question]:
        """Those to which anything is relevant."""
        ...

    @property
    def left_out(self) -> int:
        """How many others there were."""
        ...

    def scores(self, number: int, rows: Sequence[int], topk: Sequence[int], depth: int, gain: Gain) -> Mapping[str, float]:
        """The measures of a ranking of question `number`, best first, by name."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to search: a mode, with or without the cross-encoder behind it."""

    mode: Mode
    rerank: bool = False

    def __str__(self) -> str:
        return f"{self.mode.value} + rerank" if self.rerank else self.mode.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What was measured: for each arm and measure one score per question."""

    scores: Mapping[Arm, Mapping[str, Sequence[float]]]
    judged: str
    documents: int
    left_out: int
    seed: int

    @property
    def questions(self) -> int:
        """Questions with a score."""
        return len(next(iter(next(iter(self.scores.values())).values())))

    @property
    def measures(self) -> list[str]:
        """Their names, in the table's order."""
        return list(next(iter(self.scores.values())))

    def interval(self, arm: Arm, measure: str) -> Interval:
        """The mean of a measure over questions."""
        return bootstrap(self.scores[arm][measure], seed=self.seed)

    def difference(self, arm: Arm, other: Arm, measure: str) -> Interval:
        """By how much `arm` is better than `other`, over the same questions."""
        return paired_bootstrap(self.scores[arm][measure], self.scores[other][measure], seed=self.seed)

    @property
    def pairs(self) -> list[tuple[Arm, Arm]]:
        """Every two arms, the later one first."""
        arms = list(self.scores)
        return [(arm, other) for place, arm in enumerate(arms) for other in arms[:place]]

    def render(self) -> str:
        """Two tables in Markdown: the arms, and their paired differences, with 95 % intervals over questions."""
        left_out = f", {self.left_out} without anything relevant left out" if self.left_out else ""
        lines = [
            f"{self.questions} questions by {self.judged} over {self.documents:,} documents{left_out}; 95 % bootstrap intervals over questions",
            "",
        ]
        head = "| " + " | ".join(["", *self.measures]) + " |"
        rule = "|" + "---|" * (len(self.measures) + 1)
        lines += [head.replace("| ", "| mode", 1), rule]
        lines += ["| " + " | ".join([str(arm), *(_cell(self.interval(arm, name)) for name in self.measures)]) + " |" for arm in self.scores]
        if self.pairs:
            lines += ["", head.replace("| ", "| difference", 1), rule]
            for arm, other in self.pairs:
                cells = [_cell(self.difference(arm, other, name), signed=True) for name in self.measures]
                lines.append("| " + " | ".join([f"{arm} - {other}", *cells]) + " |")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The same for programs."""

        def of(interval: Interval) -> dict[str, float]:
            return {"mean": interval.mean, "low": interval.low, "high": interval.high}

        return {
            "judged": self.judged,
            "questions": self.questions,
            "left_out": self.left_out,
            "documents": self.documents,
            "seed": self.seed,
            "arms": {str(arm): {name: of(self.interval(arm, name)) for name in self.measures} for arm in self.scores},
            "differences": {f"{arm} - {other}": {name: of(self.difference(arm, other, name)) for name in self.measures} for arm, other in self.pairs},
        }


def evaluate(
    search: Search, judged: Judged, arms: Sequence[Arm], *, documents: int, topk: Sequence[int] = (1, 3, 5), gain: Gain = "exponential",
    seed: int = 0, progress: Told = lambda what, done, of: None,
) -> Evaluation:  # fmt: skip
    """Ask all questions in all arms.

    Args:
        search: an index's.
        documents: of the pool, for the table.
        topk: cut-offs of recall; MRR and nDCG are cut at the largest, or at 10 if that is more.
        seed: of the bootstrap.

    Raises:
        QuestionError: there is no question to ask, or no arm.
    """
    if not judged.questions:
        raise QuestionError(f"there is no question with {judged.kind}" + (f": nothing is relevant to {judged.left_out}" if judged.left_out else ""))
    if not arms or not topk or min(topk) < 1:
        raise QuestionError(f"expected at least one mode and cut-offs of 1 or more, got {[str(arm) for arm in arms]} and {list(topk)}")
    depth = max(LEAST_DEPTH, *topk)
    scores: dict[Arm, dict[str, list[float]]] = {}
    for arm in dict.fromkeys(arms):
        rankings = _rankings(search, judged.questions, arm, depth, progress)
        told = [judged.scores(number, rows, sorted(set(topk)), depth, gain) for number, rows in enumerate(rankings)]
        scores[arm] = {name: [each[name] for each in told] for name in told[0]}
    return Evaluation(scores=scores, judged=judged.kind, documents=documents, left_out=judged.left_out, seed=seed)


def _rankings(search: Search, questions: Sequence[Question], arm: Arm, depth: int, progress: Told) -> list[list[int]]:
    rankings: list[list[int]] = []
    for start in range(0, len(questions), QUESTIONS_AT_A_TIME):
        some = questions[start : start + QUESTIONS_AT_A_TIME]
        found = search([Query(text=question.text, topk=depth, mode=arm.mode, rerank=arm.rerank) for question in some])
        rankings += [[hit.row for hit in hits] for hits in found]
        progress(f"questions asked, {arm}", len(rankings), len(questions))
    return rankings


def _cell(interval: Interval, *, signed: bool = False) -> str:
    form = "+.3f" if signed else ".3f"
    mean, low, high = (format(value, form).replace("0.", ".", 1) for value in (interval.mean, interval.low, interval.high))
    return f"{mean} ({low} to {high})"


@dataclass(frozen=True, kw_only=True, slots=True)
class _ByGrades:
    kind: str
    questions: Sequence[Question]
    grades: Sequence[Mapping[str, float]]  # of rows as text, or of ids that the pool does not have
    left_out: int

    def scores(self, number: int, rows: Sequence[int], topk: Sequence[int], depth: int, gain: Gain) -> Mapping[str, float]:
        grades, ranked = self.grades[number], [str(row) for row in rows]
        relevant = {name for name, grade in grades.items() if grade >= RELEVANT}
        told = {f"recall@{k}": recall_at(ranked, relevant, k) for k in topk}
        return told | {f"MRR@{depth}": reciprocal_rank(ranked, relevant, depth), f"nDCG@{depth}": ndcg_at(ranked, grades, depth, gain=gain)}


def judged_by_ids(questions: Sequence[Question], documents: Documents, *, allow_missing: bool = False) -> Judged:
    """By the ids in the questions' rows, each relevant to grade 1.

    Args:
        allow_missing: ids that the pool does not have count as never found, instead of being an error.

    Raises:
        QuestionError: ids are not those of documents.
    """
    return _by_grades("gold ids", questions, {question.id: dict.fromkeys(question.gold, 1.0) for question in questions}, documents, allow_missing)


def judged_by_qrels(
    questions: Sequence[Question], qrels: Mapping[str, Mapping[str, float]], documents: Documents, *, allow_missing: bool = False
) -> Judged:
    """By graded judgements (`read_qrels`). Recall and MRR count grades of 1 and more.

    Raises:
        QuestionError: ids are not those of documents, or no question of the file is judged.
    """
    if not any(question.id in qrels for question in questions):
        theirs, ours = list(qrels)[:SHOWN], [question.id for question in questions[:SHOWN]]
        raise QuestionError(f"no question is judged: the judgements are of questions such as {theirs}, the questions are {ours}")
    return _by_grades("qrels", questions, qrels, documents, allow_missing)


def _by_grades(
    kind: str, questions: Sequence[Question], judgements: Mapping[str, Mapping[str, float]], documents: Documents, allow_missing: bool
) -> Judged:
    missing: dict[str, None] = {}
    used, grades = [], []
    for question in questions:
        judged: dict[str, float] = {}
        for id, grade in judgements.get(question.id, {}).items():
            row = documents.row_of(id)
            if row is None and grade >= RELEVANT:
                missing[id] = None
            judged[str(row) if row is not None else f"missing {id}"] = grade
        if any(grade >= RELEVANT for grade in judged.values()):
            used.append(question)
            grades.append(judged)
    if missing and not allow_missing:
        examples = ", ".join(map(repr, list(missing)[:SHOWN]))
        raise QuestionError(
            f"{len(missing)} relevant ids are of no document in the index, e.g. {examples}; its ids look like {_id(documents, 0)!r}. Is it another "
            "corpus? If the index holds a part of the judged corpus only: --allow-missing counts them as never found"
        )
    return _ByGrades(kind=kind, questions=used, grades=grades, left_out=len(questions) - len(used))


def _id(documents: Documents, row: int) -> str:
    return str(json.loads(documents[row]).get("id")) if len(documents) else ""


class _ByAnswers:
    """Whether a document contains an answer is looked up when it is found."""

    kind = "answers"

    def __init__(self, questions: Sequence[Question], documents: Documents) -> None:
        answers = [answers_in(question) for question in questions]
        self.questions = [question for question, some in zip(questions, answers, strict=True) if some]
        self.left_out = len(questions) - len(self.questions)
        self._answers = [some for some in answers if some]
        self._documents = documents
        self._texts: dict[int, str] = {}

    def scores(self, number: int, rows: Sequence[int], topk: Sequence[int], depth: int, gain: Gain) -> Mapping[str, float]:
        right = [any(answer in self._text(row) for answer in self._answers[number]) for row in rows[:depth]]
        reciprocal = 1.0 / (right.index(True) + 1) if any(right) else 0.0
        return {f"answer@{k}": float(any(right[:k])) for k in topk} | {f"MRR@{depth}": reciprocal}

    def _text(self, row: int) -> str:
        if row not in self._texts:
            self._texts[row] = f" {normalized(self._documents.contents(row))} "
        return self._texts[row]


def judged_by_answers(questions: Sequence[Question], documents: Documents) -> Judged:
    """By the answers in the questions' rows: a document that contains one is relevant.

    Raises:
        QuestionError: no question has an answer.
    """
    if not any(question.answers for question in questions):
        raise QuestionError("no question has `golden_answers`")
    return _ByAnswers(questions, documents)


def answers_in(question: Question) -> tuple[str, ...]:
    """Its answers, normalised, between spaces, so that they are found as whole words only. None where nothing is left of them."""
    return tuple(f" {text} " for text in dict.fromkeys(normalized(answer) for answer in question.answers) if text)


_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, without punctuation and English articles, single spaces: the normalisation of SQuAD 1.1's metric (Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
