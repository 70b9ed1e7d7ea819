"""Question answering by search, with Search-R1's semantics.

    prompt        the instructions and the question
    <think> ... </think> <search> query </search>                                action "search"
    <information>Doc 1(Title: "t") text ...</information>                        observation
    <think> ... </think> <answer> Beijing </answer>                              action "answer": the episode ends

The action is the first `<search>` or `<answer>` pair of a completion. A completion without one is answered by `invalid_message` and the
episode goes on. After `max_turns` turns comes one more, in which a search is not answered: the episode ends there.

The reward is exact match of the policy's last answer, or another variant of `search_reward`; none of them lets the text of a passage
answer, so an `<answer>` in a passage earns nothing. Exact match is told with every variant, as a measure beside the reward. Passages
are untrusted. Tags of this environment in them are broken by a space, `</information>` to `< /information>`, and counted; the tokenizer's
control tokens cannot occur in them at all. A retriever that fails is an `EnvironmentFailure`, never an observation and never a reward of 0.

Source: Search-R1 (Jin et al. 2025), `llm_agent/generation.py`, `scripts/data_process/*.py`, `utils/reward_score/qa_em.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from types import MappingProxyType

import trio

from agentrl.env import Environment, Observation, Segment, StepResult
from agentrl.errors import DataError, EnvironmentFailure, ToolTimeout
from agentrl.types import StopReason, Task, ToolCall
from envs.exact_match import exact_match, last_answer
from envs.search_prompts import PROMPTS, fill, with_question_mark
from envs.search_reward import PASSAGES, SearchReward, Transcript
from envs.shared_retriever import Leased, give_back, lease
from retriever.client import Passage, Retriever, RetrieverError, RetrieverTimeout

__all__ = ["INFORMATION_FORMAT", "INVALID_MESSAGE", "PASSAGE_FORMAT", "SearchEnv"]

PASSAGE_FORMAT = "Doc {i}(Title: {title}) {text}\n"
INFORMATION_FORMAT = "\n\n<information>{passages}</information>\n\n"
INVALID_MESSAGE = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I want to give the final"
    " answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(r"</?(\w+)>")
_OWN_TAGS = ("think", "search", "answer")
_EXACT_MATCH = "exact_match"  # the part of the reward, or the measure beside it


class SearchEnv(Environment):
    """Search-R1's environment.

    Args:
        retriever_url: of a server with Search-R1's API. Not needed where nothing is searched. A server that asks for a token gets the one in
            the environment variable AGENTRL_RETRIEVER_TOKEN.
        retriever: used instead, e.g. a fake.
        retriever_options: how it is asked:
            `mode`: `dense`, `bm25` or `hybrid`, where this package's server is to search otherwise than in its own way.
            `rerank`: true to have this package's server order the best passages by its cross-encoder.
            `coalesce`: requests of a worker in flight at once, in which the searches of its episodes go together; 0 for one per search.
            `cassette`: a file (`retriever.cassette`) that is replayed, so that no server is needed; relative to the run's directory.
            `record`: true to record to the cassette what it does not hold yet.
        topk: passages per search.
        max_turns: turns in which a search is answered; Search-R1 uses 2 for NQ and 4 for NQ + HotpotQA.
        prompt: a name in `search_prompts.PROMPTS`, or a text with `{question}` (and `{context}` with `rag`). By default the one that
            belongs to `search` and `rag`. A task that comes as a chat of its own is used as it is (with `rag`: its row's `question`).
        chat: the prompt is a user's message, wrapped by the tokenizer's chat template; otherwise plain text.
        search: off for the baseline that reasons and answers without searching.
        rag: the baseline that searches once, for the question, and has the passages in its prompt.
        passage_format: of one passage: `{i}` from 1, `{title}`, `{text}`, `{id}`.
        information_format: of an observation, around `{passages}`.
        invalid_message: the answer to a completion without an action.
        max_invalid_actions: in a row, after which the episode ends; None for no limit, as in Search-R1.
        reward: a variant of `search_reward` (`em`, `subem`, `em_strict_v01`, `em_format_v03`), or `{"variant": name}` with its options.
            The parts of the reward are called `exact_match`, `substring_match`, `em_strict_v01` and `em_format_v03`.
        tool_deadline_s: of one search, further attempts and all.

    Raises:
        ValueError: options that contradict each other, a format without its placeholder, or a reward's option that its variant lacks.
    """

    def __init__(
        self,
        *,
        retriever_url: str | None = None,
        retriever: Retriever | None = None,
        retriever_options: Mapping[str, object] = NO_OPTIONS,
        topk: int = 3,
        max_turns: int = 4,
        prompt: str | None = None,
        chat: bool = True,
        search: bool = True,
        rag: bool = False,
        passage_format: str = PASSAGE_FORMAT,
        information_format: str = INFORMATION_FORMAT,
        invalid_message: str = INVALID_MESSAGE,
        max_invalid_actions: int | None = None,
        reward: str | Mapping[str, object] = "em",
        tool_deadline_s: float = 30.0,
    ) -> None:
        search = search and not rag
        self._source = _source(retriever_url, retriever_options, searches=search or rag, given=retriever)
        self.stop_strings = ("</search>", "</answer>") if search else ("</answer>",)
        self._retriever = retriever
        self._topk = topk
        self._searching_turns = max_turns if search else 0
        self._prompt = _prompt_template(prompt, search=search, rag=rag)
        self._role = "user" if chat else None
        self._rag = rag
        self._passage_format = passage_format
        self._before, self._after = _around_passages(information_format)
        self._tags = _tag_pattern(information_format + passage_format)
        self._invalid_message = invalid_message
        self._max_invalid_actions = max_invalid_actions
        self._reward = SearchReward(reward)
        self._reward.check_observations(self._before, self._after, searches=search)
        self._tool_deadline_s = tool_deadline_s
        self._leased = False
        self._turns = self._invalid_in_a_row = 0
        self._answer: str | None = None
        self._response: list[Segment] = []

    async def start(self, task: Task) -> Observation:
        """The prompt.

        Raises:
            DataError: the task cannot be asked or scored.
            EnvironmentFailure: the retriever failed (with `rag` only).
        """
        if not task.answers:
            raise DataError(f"task {task.id} has no golden answers: it cannot be scored")
        self._golden_answers = task.answers
        if self._retriever is None and (self._source.url is not None or self._source.cassette is not None):
            self._retriever, self._leased = self._lease(), True
        if task.messages and not self._rag:
            self._asked = _only_message(task)
            return Observation(segments=(Segment(text=self._asked),), role=self._role)
        question = with_question_mark(_question(task))
        context, neutralised = "", 0
        if self._rag:
            context, neutralised = self._written(await self._retrieve(question))
        self._asked = "".join(segment.text for segment in fill(self._prompt, {"question": question, "context": PASSAGES}))
        return Observation(segments=fill(self._prompt, {"question": question, "context": context}), role=self._role, neutralised=neutralised)

    async def step(self, completion: str) -> StepResult:
        """Search, or end.

        Raises:
            ToolTimeout: the retriever did not answer in time.
            EnvironmentFailure: the retriever failed.
        """
        action, argument, completion = _action(completion)
        self._response.append(Segment(text=completion))
        answer = last_answer(completion)
        self._answer = self._answer if answer is None else answer
        final_turn = self._turns == self._searching_turns
        self._turns += 1
        self._invalid_in_a_row = self._invalid_in_a_row + 1 if action == "invalid" else 0
        if action == "answer":
            return self._end(StopReason.ANSWERED, action, argument)
        if self._invalid_in_a_row == self._max_invalid_actions:
            return self._end(StopReason.INVALID_LIMIT, action, argument)
        if final_turn:
            return self._end(StopReason.TURN_LIMIT, action, argument)
        if action == "invalid":
            return self._go_on(Observation.frame(self._invalid_message), action)
        started = trio.current_time()
        passages = await self._retrieve(argument)
        call = ToolCall(
            tool="search",
            arguments_hash=_hash({"query": argument, "topk": self._topk}),
            result_ids=tuple(passage.id for passage in passages),
            latency_s=trio.current_time() - started,
        )
        text, neutralised = self._written(passages)
        observation = Observation.framed(self._before, text.strip(), self._after, neutralised=neutralised)
        return self._go_on(observation, action, argument, call)

    async def close(self) -> None:
        """Give the shared client back."""
        if self._leased:
            self._leased = False
            await give_back(self._source)

    def _lease(self) -> Retriever:
        try:
            return lease(self._source)
        except (RetrieverError, ValueError) as error:  # the cassette, or the token
            raise EnvironmentFailure(str(error), cause="tool_error") from error

    def _go_on(self, observation: Observation, action: str, argument: str = "", *calls: ToolCall) -> StepResult:
        self._response += observation.segments
        return StepResult(observation=observation, action=action, argument=argument, tool_calls=calls)

    def _end(self, stop: StopReason, action: str, argument: str) -> StepResult:
        transcript = Transcript(prompt=self._asked, response=tuple(self._response), answer=self._answer)
        parts = {self._reward.part: self._reward(transcript, self._golden_answers)}
        exact = float(self._answer is not None and exact_match(self._answer, self._golden_answers))
        measures = {} if _EXACT_MATCH in parts else {_EXACT_MATCH: exact}
        return StepResult(stop=stop, parts=parts, measures=measures, action=action, argument=argument)

    async def _retrieve(self, query: str) -> list[Passage]:
        if self._retriever is None:
            raise EnvironmentFailure("SearchEnv.step was called before SearchEnv.start")
        try:
            [passages] = await self._retriever.retrieve([query], topk=self._topk, deadline_s=self._tool_deadline_s)
        except RetrieverTimeout as error:
            raise ToolTimeout(str(error)) from error
        except RetrieverError as error:
            raise EnvironmentFailure(str(error), cause="tool_error") from error
        return passages

    def _written(self, passages: list[Passage]) -> tuple[str, int]:
        """Passages as the policy reads them, and how many tags in them were broken."""
        broken = 0
        texts = []
        for number, passage in enumerate(passages, start=1):
            (title, a), (text, b) = self._tags.subn("< ", passage.title), self._tags.subn("< ", passage.text)
            texts.append(self._passage_format.format(i=number, title=title, text=text, id=passage.id))
            broken += a + b
        return "".join(texts), broken


def _source(url: str | None, options: Mapping[str, object], *, searches: bool, given: Retriever | None) -> Leased:
    """The retriever to lease. Refuses one that is missing, and options that nothing would come of."""
    source = Leased.of(url, options)
    if options and (given is not None or not searches):
        why = "a retriever of its own is given" if searches else "nothing is searched"
        raise ValueError(f"retriever_options ({', '.join(options)}) of SearchEnv would have no effect: {why}")
    if searches and given is None and url is None and source.cassette is None:
        raise ValueError("SearchEnv searches: give it a retriever_url, or switch search and rag off")
    return source


def _action(completion: str) -> tuple[str, str, str]:
    """The action, its argument, and the completion up to the action's end: nothing after it counts."""
    match = _ACTION.search(completion)
    return (match[1], match[2].strip(), completion[: match.end()]) if match else ("invalid", "", completion)


def _prompt_template(prompt: str | None, *, search: bool, rag: bool) -> str:
    name = "search_r1" if search else "search_r1_rag" if rag else "search_r1_no_search"
    template = PROMPTS.get(prompt or name, prompt or "")
    for placeholder in ("{question}", "{context}") if rag else ("{question}",):
        if placeholder not in template:
            raise ValueError(f"prompt must be one of {', '.join(PROMPTS)} or a text with {placeholder}, got {template!r}")
    return template


def _around_passages(information_format: str) -> tuple[str, str]:
    before, found, after = information_format.partition("{passages}")
    if not found:
        raise ValueError(f"information_format must hold {{passages}}, got {information_format!r}")
    return before, after


def _tag_pattern(formats: str) -> re.Pattern[str]:
    """Matches the `<` of every tag that means something here."""
    names = "|".join(dict.fromkeys((*_OWN_TAGS, *_TAG.findall(formats))))
    return re.compile(rf"<(?=/?(?:{names})>)", re.IGNORECASE)


def _question(task: Task) -> str:
    """The question itself, also where the task comes as a chat."""
    question = task.extra.get("question") if task.messages else task.prompt
    if not isinstance(question, str):
        raise DataError(f"task {task.id} is a chat and has no `question` beside it: rag has nothing to search for")
    return question


def _only_message(task: Task) -> str:
    if len(task.messages) != 1 or task.messages[0].get("role") != "user":
        raise DataError(f"task {task.id}: expected a chat of one user message, got roles {[message.get('role') for message in task.messages]}")
    return task.messages[0]["content"]


def _hash(arguments: dict[str, object]) -> str:
    return hashlib.blake2b(json.dumps(arguments, sort_keys=True).encode(), digest_size=16).hexdigest()
