"""What a self-test asks while its run is up: whether engines, tokenizer, model and chat template agree about tokens and text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.config.recipe import Recipe
from agentrl.data.sources import first_tasks
from agentrl.engine_api import EngineClient, EngineKeys, GenerateRequest
from agentrl.env import Environment
from agentrl.errors import EngineError, EngineUnavailable, EnvironmentFailure
from agentrl.resolve import called, resolve
from agentrl.rollout.chat import ChatTemplate, read_settings, special_tokens
from agentrl.rollout.tokens import TokenEncoder
from agentrl.system.build import Cluster
from agentrl.system.check import Check
from agentrl.system.retriever_token import keep_token

__all__ = ["Probe", "probe_texts", "template", "tokenizer", "vocabulary"]

ROSTER_WAIT_S = 10.0
_WORDS = ("Who wrote Hamlet?", "  two  blanks,\n\n\ta tab", "1234567890 + 0.5", "Ångström, 北京, 🙂")
_MOST_SPECIAL = 64  # of a tokenizer's added tokens: some have a thousand reserved ones
_SAID = 8  # tokens
_REPLIES = ("an answer", "<think>\na thought\n</think>\n\nan answer")


class Probe:
    """The checks of a running run, by name, as far as they have come."""

    def __init__(self) -> None:
        self.checks: dict[str, Check] = {}

    async def __call__(self, recipe: Recipe, model_dir: Path, cluster: Cluster) -> None:
        """Ask everything once."""
        self._keep(vocabulary(model_dir))
        try:
            first, later = await _roles(recipe, cluster)
            self._keep(template(ChatTemplate.load(model_dir), first, later))
        except EnvironmentFailure as error:
            self._keep(Check(name="template", passed=False, told=f"the environment could not be asked for a prompt: {error}", remedy="See env"))
        roster = await cluster.buffer.engines(after=0, wait_s=ROSTER_WAIT_S)
        keys = EngineKeys.of_environment(recipe.engine.api_key_variable, recipe.engine.admin_key_variable)
        texts = probe_texts(model_dir)
        for entry in roster.engines:
            async with EngineClient(entry.url, entry.index, keys=keys) as engine:
                self._keep(await tokenizer(engine, model_dir, texts))

    def _keep(self, check: Check) -> None:
        if check.name not in self.checks or self.checks[check.name].passed:  # of several engines the first that fails is told
            self.checks[check.name] = check


def probe_texts(model_dir: Path) -> list[str]:
    """Texts that tokenizers of other settings read otherwise: blanks, numbers, scripts, and every special token between words."""
    added = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens") or []
    return [*_WORDS, *(f"a{token['content']}b" for token in added[:_MOST_SPECIAL])]


async def tokenizer(engine: EngineClient, model_dir: Path, texts: Sequence[str]) -> Check:
    """Whether an engine reads texts as the run's tokenizer does, and writes ids as it does: stop strings are found in what it writes."""
    try:
        return await _tokenizer(engine, model_dir, texts)
    except EngineUnavailable as error:
        told = f"engine {engine.index} could not be asked: {error}"
        return Check(name="tokenizer", passed=False, told=told, remedy="It died or does not answer, which says nothing about tokens: see its log")
    except EngineError as error:
        return Check(name="tokenizer", passed=False, told=str(error), remedy=f"Does {engine!r} have a tokenizer? Stop strings need one")


async def _tokenizer(engine: EngineClient, model_dir: Path, texts: Sequence[str]) -> Check:
    ours, encoder = Tokenizer.from_file(str(model_dir / "tokenizer.json")), TokenEncoder.load(model_dir)
    remedy = f"Start {engine!r} with the tokenizer of {model_dir} (SGLang: --tokenizer-path), in the same version"
    for number, text in enumerate(texts):
        theirs = await engine.score_text(text, rid=f"selftest/{engine.index}/{number}")
        readings = [list(ours.encode(text, add_special_tokens=added).ids) for added in (True, False)]
        if not any(theirs.reads(ids) for ids in readings):
            told = f"engine {engine.index} reads {text!r} as {list(theirs.ids)}, the run's tokenizer as {readings[1]}"
            return Check(name="tokenizer", passed=False, told=told, remedy=remedy)
    prompt = ours.encode(texts[0], add_special_tokens=False).ids
    request = GenerateRequest(rid=f"selftest/{engine.index}/said", input_ids=prompt, max_new_tokens=_SAID, temperature=0.0)
    reply = await engine.generate(request)
    written = encoder.decode(reply.output_ids)
    # Engines may write a text for itself, or as it goes on from the prompt: some tokenizers drop a space at the beginning of a text.
    going_on = encoder.decode([*prompt, *reply.output_ids.tolist()]).removeprefix(encoder.decode(prompt))
    # The last character may have come in half: some engines hold it back, others write the replacement character.
    if reply.text.rstrip("\ufffd") not in (written.rstrip("\ufffd"), going_on.rstrip("\ufffd")):
        told = f"engine {engine.index} writes {reply.output_ids.tolist()} as {reply.text!r}, the run's tokenizer as {written!r}"
        return Check(name="tokenizer", passed=False, told=told, remedy=remedy)
    return Check(name="tokenizer", passed=True, told=f"{len(texts)} texts read alike, {len(reply.output_ids)} tokens written alike")


def vocabulary(model_dir: Path) -> Check:
    """Whether every id of the tokenizer has a row in the model's embedding, and the model ends where the tokenizer says that texts end."""
    config = _json(model_dir / "config.json")
    size, rows = TokenEncoder.load(model_dir).vocab_size, config.get("vocab_size", 0)
    ends = _ids(config.get("eos_token_id")) | _ids(_json(model_dir / "generation_config.json").get("eos_token_id"))
    eos = special_tokens(read_settings(model_dir)).get("eos_token")
    number = None if eos is None else Tokenizer.from_file(str(model_dir / "tokenizer.json")).token_to_id(eos)
    told = f"{size} ids of the tokenizer for {rows} rows of the model; ends at {sorted(ends) or 'no token'}, the tokenizer's {eos} is {number}"
    remedy = ""
    if size > rows:
        remedy = "Ids beyond the embedding end an engine: take the model's own tokenizer, or a model whose embedding was resized"
    elif any(end >= rows for end in ends):
        remedy = "eos_token_id of config.json or generation_config.json is no id of the model"
    elif number is not None and number not in ends:
        remedy = f"Add {number} to eos_token_id in generation_config.json: the engine does not stop at {eos}"
    return Check(name="vocabulary", passed=not remedy, told=told, remedy=remedy)


def template(chat: ChatTemplate | None, first: str | None, later: str | None) -> Check:
    """Whether the chat template writes a conversation as a whole as episodes do, turn by turn.

    Args:
        first: the role of the environment's prompt, `later`: of what it answers; None where they are appended as they are.
    """
    if chat is None or first is None:
        why = "the tokenizer has none" if chat is None else "the environment's prompts have no role"
        return Check(name="template", passed=True, told=f"no chat template is used: {why}")
    for reply in _REPLIES if later is not None else _REPLIES[:1]:
        apart = chat.divergence(first, later, reply=reply)
        if apart is not None:
            whole, ours = (text[_first_difference(*apart) :][:40] for text in apart)
            at = f"after {_first_difference(*apart)} characters a whole conversation has {whole!r} where turn by turn there is {ours!r}"
            return Check(
                name="template",
                passed=False,
                told=at,
                remedy="Episodes keep every token as it was written; a server that renders messages would show the trained model another text from"
                " there on. Use a template without this (chat_template.jinja in the model's directory), or observations without a role",
            )
    roles = first if later is None else f"{first}, then {later}"
    return Check(name="template", passed=True, told=f"conversations of 1 to 3 turns ({roles}) are each the start of the next")


async def _roles(recipe: Recipe, cluster: Cluster) -> tuple[str | None, str | None]:
    """The role of an environment's prompt, and of what it answers to a completion without sense."""
    options = dict(recipe.env.options) if cluster.retriever is None else {"retriever_url": cluster.retriever} | recipe.env.options
    keep_token(cluster.retriever_token)
    factory: Any = resolve(recipe.env.factory)
    environment: Environment = called(recipe.env.factory, lambda: factory(**options))
    try:
        first = await environment.start(first_tasks(recipe.tasks.train, 1)[0])
        answered = (await environment.step("selftest")).observation
    finally:
        await environment.close()
    return first.role, None if answered is None else answered.role


def _first_difference(one: str, other: str) -> int:
    same = (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(same, min(len(one), len(other)))


def _ids(value: Any) -> set[int]:
    return set() if value is None else set(value) if isinstance(value, list) else {value}


def _json(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return value
