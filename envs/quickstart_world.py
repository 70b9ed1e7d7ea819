"""The quick-start's world: invented people, places and works, and questions about them.

A knowledge base draws which name denotes what, and every fact, at random. One passage states one fact:

    facts      (Gindo, author) = Kunko      (Kunko, born) = Tarmi
    passages   "Gindo was written by Kunko ."   "Kunko was born in Tarmi ."
    one hop    "who wrote Gindo ?"                           Kunko
    two hops   "where was the author of Gindo born ?"        Tarmi

So an answer can only come from the passages: nothing about it can be known beforehand.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["HELDOUT_SIZE", "NAMES", "RELATIONS", "TRAIN_SIZE", "TWO_HOP", "KnowledgeBase", "Question", "Relation", "Size", "vocabulary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Relation:
    """How a fact (subject, relation) = object is stated, searched for and asked about."""

    passage: str
    keyword: str
    questions: tuple[str, ...]


RELATIONS: Mapping[str, Relation] = {
    "born": Relation(
        passage="{subject} was born in {object} .", keyword="born", questions=("where was {subject} born ?", "what is the birthplace of {subject} ?")
    ),
    "lives": Relation(
        passage="{subject} lives in {object} .", keyword="lives", questions=("where does {subject} live ?", "what is the home of {subject} ?")
    ),
    "works": Relation(
        passage="{subject} works for {object} .",
        keyword="works",
        questions=("which company does {subject} work for ?", "who is the employer of {subject} ?"),
    ),
    "author": Relation(
        passage="{subject} was written by {object} .", keyword="written", questions=("who wrote {subject} ?", "who is the author of {subject} ?")
    ),
    "founder": Relation(
        passage="{subject} was founded by {object} .", keyword="founded", questions=("who founded {subject} ?", "who is the founder of {subject} ?")
    ),
    "country": Relation(
        passage="{subject} lies in country {object} .",
        keyword="country",
        questions=("in which country is {subject} ?", "what country is home to {subject} ?"),
    ),
    "mayor": Relation(
        passage="{subject} has mayor {object} .", keyword="mayor", questions=("who is the mayor of {subject} ?", "who governs {subject} ?")
    ),
    "based": Relation(
        passage="{subject} is based in {object} .", keyword="based", questions=("where is {subject} based ?", "where is the office of {subject} ?")
    ),
}

TWO_HOP: Mapping[tuple[str, str], str] = {
    ("author", "born"): "where was the author of {subject} born ?",
    ("author", "works"): "which company does the author of {subject} work for ?",
    ("founder", "born"): "where was the founder of {subject} born ?",
    ("founder", "lives"): "where does the founder of {subject} live ?",
    ("born", "country"): "in which country was {subject} born ?",
    ("works", "based"): "where is the employer of {subject} based ?",
    ("based", "mayor"): "who is the mayor of the city where {subject} is based ?",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How many of each kind a knowledge base holds."""

    people: int
    cities: int
    countries: int
    books: int
    companies: int


TRAIN_SIZE = Size(people=200, cities=100, countries=50, books=130, companies=135)  # 615 names, 1,200 facts
HELDOUT_SIZE = Size(people=60, cities=30, countries=15, books=40, companies=40)  # 185 names, 360 facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question and the way to its answer: `relations` to follow, starting at `subject`."""

    text: str
    answer: str
    subject: str
    relations: tuple[str, ...]

    @property
    def hops(self) -> int:
        """Facts needed to answer it."""
        return len(self.relations)


class KnowledgeBase:
    """Facts about names that `used` does not hold yet; it is extended by those taken."""

    def __init__(self, rng: random.Random, size: Size, used: set[str]) -> None:
        people, cities, countries, books, companies = (
            _fresh_names(rng, count, used) for count in (size.people, size.cities, size.countries, size.books, size.companies)
        )
        facts: dict[tuple[str, str], str] = {}
        for person in people:
            facts[person, "born"], facts[person, "lives"], facts[person, "works"] = rng.choice(cities), rng.choice(cities), rng.choice(companies)
        for city in cities:
            facts[city, "country"], facts[city, "mayor"] = rng.choice(countries), rng.choice(people)
        for book in books:
            facts[book, "author"] = rng.choice(people)
        for company in companies:
            facts[company, "founder"], facts[company, "based"] = rng.choice(people), rng.choice(cities)
        self.facts: Mapping[tuple[str, str], str] = facts
        self.passages = tuple(RELATIONS[relation].passage.format(subject=s, object=o) for (s, relation), o in facts.items())
        self._paths = {
            1: tuple((s, (relation,)) for s, relation in facts),
            2: tuple((s, (first, second)) for s, first in facts for left, second in TWO_HOP if left == first),
        }

    def questions(self, rng: random.Random, *, hops: int) -> list[Question]:
        """Every question of so many hops, once, in one of its wordings."""
        return [self._question(rng, subject, relations) for subject, relations in self._paths[hops]]

    def sample(self, rng: random.Random, *, two_hop_share: float) -> Question:
        """A random question."""
        hops = 2 if rng.random() < two_hop_share else 1
        return self._question(rng, *rng.choice(self._paths[hops]))

    def _question(self, rng: random.Random, subject: str, relations: tuple[str, ...]) -> Question:
        wordings = RELATIONS[relations[0]].questions if len(relations) == 1 else (TWO_HOP[relations[0], relations[1]],)
        answer = subject
        for relation in relations:
            answer = self.facts[answer, relation]
        return Question(text=rng.choice(wordings).format(subject=subject), answer=answer, subject=subject, relations=relations)


def vocabulary() -> list[str]:
    """Every word that passages and questions are made of, names included."""
    templates = [text for relation in RELATIONS.values() for text in (relation.passage, relation.keyword, *relation.questions)]
    templates += TWO_HOP.values()
    return sorted({word for text in templates for word in re.sub(r"\{\w+\}", " ", text).split()}) + sorted(NAMES)


def _fresh_names(rng: random.Random, count: int, used: set[str]) -> list[str]:
    fresh: list[str] = []
    while len(fresh) < count:
        name = rng.choice(NAMES)
        if name not in used:
            used.add(name)
            fresh.append(name)
    return fresh


def _all_names(count: int) -> tuple[str, ...]:
    """Pronounceable names such as Gindo and Kunko: the same ones for every seed, so that the vocabulary is too."""
    rng = random.Random(12345)
    consonants, vowels = "bdfghjklmnprstvz", "aeiou"
    drawn = {
        (rng.choice(consonants) + rng.choice(vowels) + rng.choice("nrls") + rng.choice(consonants) + rng.choice(vowels)).capitalize()
        for _ in range(count + count // 4)  # some are drawn twice
    }
    names = sorted(drawn)
    rng.shuffle(names)
    return tuple(names[:count])


NAMES = _all_names(800)
"""One token each. What a name denotes is drawn by every knowledge base anew."""
