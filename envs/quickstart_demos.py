"""The quick-start's warm-start rows: what stands for pre-training and fine-tuning.

A row is a list of segments, of which the policy learns those with `loss`:

    list     [<bos> Gindo Kunko Tarmi] [Gindo Kunko Tarmi]                          a list said twice
    text     [<bos> Kunko was born in Tarmi . ...] [... Kunko was born in Tarmi .]  a few facts, and again in another order
    demo     [<bos> where was Kunko born ?] [<think> need born </think> <search> Kunko born </search>]
             [<information> three passages </information>] [<think> done </think> <answer> Tarmi </answer>]

Demonstrations follow a script that errs on purpose (`Skill`), on knowledge bases that are thrown away after 64 of them, so nothing but
the procedure can be learned, and that not well: reinforcement learning has to do the rest.

Rows come in the order of the curriculum. Which phase a row belongs to depends on how many steps the rows before it make, so the
generator cuts them into steps the way the warm start does: `pool` rows at a time, sorted by length, cut at `tokens_per_step` padded tokens;
what does not fill a step waits for the next pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from envs.quickstart_world import NAMES, RELATIONS, KnowledgeBase, Question, Size

__all__ = ["INFORMATION", "PROMPT", "Pages", "Segment", "Skill", "demonstration", "warm_start_rows"]

Segment = tuple[str, bool]  # text, whether the policy learns it

PROMPT = "<bos> {question}"
INFORMATION = " <information> {passages} </information> "

THROW_AWAY = Size(people=12, cities=8, countries=4, books=6, companies=6)
DEMOS_PER_KB = 64
MARGIN = 1.05  # rows beyond the last step, should a warm start need a few more
TWO_HOP_SHARE = 0.6
PASSAGES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Skill:
    """How often the scripted policy does the right thing at each of its decisions."""

    search: float = 0.7  # searches at all
    query: float = 0.6  # asks for the name and the relation it needs
    read: float = 0.6  # takes the right name from the page
    hop: float = 0.7  # goes on to the second fact


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """A stretch of the curriculum: shares of lists and, of the rest, of raw text; demonstrations are what remains."""

    until: float  # share of the steps
    lists: float
    text: float


CURRICULUM = (
    _Phase(until=0.1, lists=1.0, text=0.0),
    _Phase(until=0.5, lists=0.05, text=0.9),
    _Phase(until=1.0, lists=0.0, text=0.2),
)


def warm_start_rows(rng: random.Random, *, steps: int, tokens_per_step: int, pool: int) -> Iterator[list[Segment]]:
    """Rows for `steps` steps of `tokens_per_step` padded tokens, and some more, in the order of the curriculum."""
    writer = _Writer(rng)
    steps_so_far, waiting = 0, list[int]()
    while steps_so_far <= MARGIN * steps:
        phase = next((phase for phase in CURRICULUM if steps_so_far < phase.until * steps), CURRICULUM[-1])
        rows = [writer.row(phase) for _ in range(pool - len(waiting))]
        cut, waiting = _cut([*waiting, *map(_length, rows)], tokens_per_step)
        steps_so_far += cut
        yield from rows


def demonstration(rng: random.Random, kb: KnowledgeBase, pages: Pages, question: Question, skill: Skill) -> list[Segment]:
    """A scripted episode, right with the probabilities of `skill`."""
    row: list[Segment] = [(PROMPT.format(question=question.text), False)]
    if rng.random() > skill.search:
        return [*row, (f"<think> guess </think> <answer> {rng.choice(NAMES)} </answer>", True)]
    subject, todo = question.subject, list(question.relations)
    while True:
        row.append((_search_turn(rng, subject, todo[0], skill), True))
        passages = pages.search(row[-1][0].split("<search>")[1].split("</search>")[0].split())
        row.append((INFORMATION.format(passages=" ".join(passages)), False))
        found = kb.facts[subject, todo[0]]
        stated = RELATIONS[todo[0]].passage.format(subject=subject, object=found) in passages
        misread = not stated or rng.random() > skill.read
        if misread:
            found = rng.choice([word for passage in passages for word in passage.split() if word[0].isupper()])
        if misread or len(todo) == 1 or rng.random() > skill.hop:
            return [*row, (f"<think> done </think> <answer> {found} </answer>", True)]
        subject, todo = found, todo[1:]


def _search_turn(rng: random.Random, subject: str, relation: str, skill: Skill) -> str:
    keyword = thought = RELATIONS[relation].keyword
    query = f"{subject} {keyword}"
    luck = rng.random()
    if luck >= skill.query:
        mistake = int(3 * (luck - skill.query) / (1 - skill.query))
        if mistake == 0:  # the wrong relation
            thought = RELATIONS[rng.choice(list(RELATIONS))].keyword
            query = f"{subject} {thought}"
        else:  # the bare name, or the relation alone
            query = subject if mistake == 1 else keyword
    return f"<think> need {thought} </think> <search> {query} </search>"


class Pages:
    """A cheap stand-in for the retriever: passages by the words they share with the query, names counting twice."""

    def __init__(self, rng: random.Random, passages: tuple[str, ...]) -> None:
        self._rng = rng
        self._passages = passages
        self.mentioning: dict[str, list[str]] = {}
        for passage in passages:
            for word in dict.fromkeys(passage.split()):
                self.mentioning.setdefault(word, []).append(passage)

    def search(self, words: list[str]) -> list[str]:
        """The best passages, filled up with random ones."""
        scores: dict[str, float] = {}
        for word in dict.fromkeys(words):
            worth = 1.0 if word[0].isupper() else 0.5
            for passage in self.mentioning.get(word, ()):
                scores[passage] = scores.get(passage, 0.0) + worth + 0.1 * self._rng.random()
        best = sorted(scores, key=scores.__getitem__, reverse=True)[:PASSAGES]
        return best + [self._rng.choice(self._passages) for _ in range(PASSAGES - len(best))]


class _Writer:
    """Writes rows of a phase, changing to a new knowledge base after every 64 demonstrations."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._skill = Skill()
        self._renew()

    def row(self, phase: _Phase) -> list[Segment]:
        if self._rng.random() < phase.lists:
            return self._list()
        if self._rng.random() < phase.text:
            return self._text()
        if self._left == 0:
            self._renew()
        self._left -= 1
        return demonstration(self._rng, self._kb, self._pages, self._kb.sample(self._rng, two_hop_share=TWO_HOP_SHARE), self._skill)

    def _renew(self) -> None:
        self._kb = KnowledgeBase(self._rng, THROW_AWAY, set())
        self._pages = Pages(self._rng, self._kb.passages)
        self._words = list(self._pages.mentioning)
        self._left = DEMOS_PER_KB

    def _list(self) -> list[Segment]:
        names = " ".join(self._rng.sample(NAMES, self._rng.randint(6, 20)))
        return [(f"<bos> {names}", False), (names, True)]

    def _text(self) -> list[Segment]:
        count = self._rng.randint(2, 5)
        about_one_thing = self._rng.random() < 0.7
        pool = self._pages.mentioning[self._rng.choice(self._words)] if about_one_thing else list(self._kb.passages)
        facts = self._rng.sample(pool, min(len(pool), count))
        while len(facts) < count:
            facts.append(self._rng.choice(self._kb.passages))
        first = " ".join(facts)
        self._rng.shuffle(facts)
        return [(f"<bos> {first}", False), (" ".join(facts[:3]), True)]


def _length(row: list[Segment]) -> int:
    return sum(len(text.split()) for text, _ in row)  # every word is one token


def _cut(lengths: list[int], tokens_per_step: int) -> tuple[int, list[int]]:
    """How many steps the warm start makes of rows of these lengths, as many as fit when padded to the longest; and what is left for later."""
    steps, step = 0, list[int]()
    for length in sorted(lengths):
        if step and (len(step) + 1) * length > tokens_per_step:
            steps, step = steps + 1, []
        step.append(length)
    return (steps, step) if steps else (1, [])
