"""What an episode of searching earns: the variants of `SearchEnv`'s option `reward`.

    em              1 where the last answer the policy itself wrote equals a golden answer, else 0. The default
    subem           1 where a golden answer is part of it, else 0
    em_strict_v01   Search-R1's score of its first release: for comparison with its runs
    em_format_v03   Search-R1's score with a reward for the form: likewise

The two of Search-R1 read prompt and response as one text, P for the prompt's and R for the response's `<answer>` pairs:

    pairs in P + R   answer
    0 or 1           none, even where the policy wrote it: a prompt without an example scores every single answer 0
    2 or more        the last. The prompts of `search_prompts` hold two pairs (the instruction itself, and the example "Beijing"), so an
                     answer always counts, and an episode without one has answered "Beijing"

`em_strict_v01` is 1 where that answer equals a golden one. `em_format_v03` also asks whether the response is in form, which is

    <think> .. </think> (<search> .. </search> <information> .. </information> <think> .. </think>)* <answer> .. </answer>

with only white space between and no such tag inside, and pays

                             in form                                                     not in form
    equal                    1                                                           1 - structure_format_score
    another, or no answer    structure_format_score, + retrieval_score where a golden    final_format_score; 0 without an answer
                             answer is part of an information block

Passages are untrusted, and their text is not in the text that is scored: a mark stands for each observation's passages. So a passage can
neither answer, nor open or close a tag, nor mend a form, nor be part of an answer that the policy left open around it. Search-R1 reads
passages too; the scores are the same unless a passage holds one of the tags. Only `retrieval_score` looks at passages: it pays for what they say.

Different from Search-R1 otherwise: it finds the response behind `<|im_start|>assistant`, so under another chat template nothing is ever in
form there; here the response is known. And an episode that the rollout's own limits cut short is not scored (it earns 0).

Source: Search-R1 (Jin et al. 2025), `utils/reward_score/qa_em.py` and `qa_em_format.py`; the defaults are those of its scripts.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from agentrl.env import Segment
from envs.exact_match import exact_match, substring_match

__all__ = ["PASSAGES", "VARIANTS", "Score", "SearchReward", "Transcript", "Variant", "in_form", "paired_answer"]

_log = logging.getLogger(__name__)

# Stands for untrusted text: the "object replacement character". No tag holds it, and normalising an answer keeps it, so an answer around a
# passage equals no golden one.
PASSAGES = "\ufffc"

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INFORMATION = re.compile(r"<information>(.*?)</information>", re.DOTALL)
_TEXT = r"[^<]*(?:<(?!/?(?:think|search|information|answer)>)[^<]*)*"
_THINK, _SEARCH, _INFORM, _CONCLUDE = (rf"<{tag}>{_TEXT}</{tag}>\s*" for tag in ("think", "search", "information", "answer"))
_FORM = re.compile(rf"\s*{_THINK}(?:{_SEARCH}{_INFORM}{_THINK})*{_CONCLUDE}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """One episode as text."""

    prompt: str  # PASSAGES in place of retrieved text
    response: tuple[Segment, ...]  # completions up to their action's end, and observations
    answer: str | None  # the last one the policy itself wrote

    @property
    def scored(self) -> str:
        """The response without untrusted text."""
        return "".join(PASSAGES if segment.untrusted else segment.text for segment in self.response)

    @property
    def read(self) -> str:
        """The response as the policy saw it."""
        return "".join(segment.text for segment in self.response)


class SearchReward:
    """One variant with its options.

    Args:
        reward: a variant's name, or `{"variant": name, option: number, ...}`.

    Raises:
        ValueError: an unknown variant, an option that it does not have, or one that is not a finite number.
    """

    def __init__(self, reward: str | Mapping[str, object]) -> None:
        options = {"variant": reward} if isinstance(reward, str) else dict(reward)
        name = options.pop("variant", None)
        if not isinstance(name, str) or name not in VARIANTS:
            raise ValueError(f"reward must be one of {', '.join(VARIANTS)}, or {{variant: one of them, options}}, got {reward!r}")
        self.name, self._variant = name, VARIANTS[name]
        self._options = {**self._variant.options, **_numbers(name, options, known=self._variant.options)}
        if self._variant.caution:
            _warn_once(name)

    @property
    def part(self) -> str:
        """The name of the reward's part."""
        return self._variant.part

    def __call__(self, transcript: Transcript, golden_answers: Sequence[str]) -> float:
        """What the episode earned."""
        return self._variant.score(transcript, golden_answers, self._options)

    def check_observations(self, before: str, after: str, *, searches: bool) -> None:
        """Whether this variant fits the frames around passages.

        Raises:
            ValueError: no episode that searched could be in form, or a score for retrieval where nothing is retrieved.
        """
        if self.name != "em_format_v03":
            return
        if not searches and self._options["retrieval_score"]:
            raise ValueError("reward: retrieval_score pays for what a search found, and this environment does not search: leave it out")
        if searches and not in_form(f"<think>a</think><search>b</search>{before}{PASSAGES}{after}<think>c</think><answer>d</answer>"):
            raise ValueError(
                "reward em_format_v03 wants passages between <information> and </information>: with this information_format"
                f" ({before!r} .. {after!r}) no episode that searched could be in form"
            )


def in_form(response: str) -> bool:
    """Whether a response is in the form that `em_format_v03` pays for."""
    return _FORM.fullmatch(response) is not None


def paired_answer(text: str) -> str | None:
    """The last `<answer>` of prompt and response, stripped; None where there are fewer than two."""
    answers = _ANSWER.findall(text)
    return answers[-1].strip() if len(answers) > 1 else None


Score = Callable[[Transcript, Sequence[str], Mapping[str, float]], float]


def _em(transcript: Transcript, golden_answers: Sequence[str], _: Mapping[str, float]) -> float:
    return float(transcript.answer is not None and exact_match(transcript.answer, golden_answers))


def _subem(transcript: Transcript, golden_answers: Sequence[str], _: Mapping[str, float]) -> float:
    return float(transcript.answer is not None and substring_match(transcript.answer, golden_answers))


def _em_strict_v01(transcript: Transcript, golden_answers: Sequence[str], _: Mapping[str, float]) -> float:
    answer = paired_answer(transcript.prompt + transcript.scored)
    return float(answer is not None and exact_match(answer, golden_answers))


def _em_format_v03(transcript: Transcript, golden_answers: Sequence[str], options: Mapping[str, float]) -> float:
    answer = paired_answer(transcript.prompt + transcript.scored)
    formed = in_form(transcript.scored)
    if answer is not None and exact_match(answer, golden_answers):
        return 1.0 if formed else 1.0 - options["structure_format_score"]
    if formed:
        blocks = _INFORMATION.findall(transcript.prompt + transcript.read)
        found = any(substring_match(block, golden_answers) for block in blocks)
        return options["structure_format_score"] + (options["retrieval_score"] if found else 0.0)
    return 0.0 if answer is None else options["final_format_score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to score an episode."""

    part: str  # of the reward
    score: Score
    options: Mapping[str, float] = field(default_factory=dict)  # with their defaults
    caution: str = ""  # said once per process, where the score is for comparison only


VARIANTS: Mapping[str, Variant] = {
    "em": Variant(part="exact_match", score=_em),
    "subem": Variant(part="substring_match", score=_subem),
    "em_strict_v01": Variant(
        part="em_strict_v01",
        score=_em_strict_v01,
        caution="it counts the <answer> pairs of prompt and response together, and fewer than two are no answer: under a prompt without an example"
        " answer every single answer earns 0, and under Search-R1's prompt an episode without an answer has answered its example",
    ),
    "em_format_v03": Variant(
        part="em_format_v03",
        score=_em_format_v03,
        options={"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.0},
        caution="it pays for the form of a wrong answer, and as it counts the <answer> pairs of prompt and response together, it takes an episode"
        " without an answer for a wrong answer under Search-R1's prompt, and a single answer for none under a prompt without an example answer",
    ),
}


def _numbers(variant: str, options: Mapping[str, object], *, known: Mapping[str, float]) -> dict[str, float]:
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        raise ValueError(f"reward {variant} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    numbers: dict[str, float] = {}
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"reward {variant}: {name} must be a finite number, got {value!r}")
        numbers[name] = float(value)
    return numbers


@cache
def _warn_once(variant: str) -> None:
    _log.warning("the reward %s is meant for comparison with Search-R1: %s; `em` is free of this", variant, VARIANTS[variant].caution)
