"""The quick-start: a search task small enough for a laptop, made from a seed. Nothing is downloaded.

    prepare: {factory: "envs.quickstart:build"}      corpus.jsonl train.jsonl heldout.jsonl warm_start.jsonl tokenizer/
    env:     {factory: "envs.search:SearchEnv", options: ENV_OPTIONS}

An episode, in the words of the tokenizer (one token each):

    <bos> where was the author of Gindo born ?
    <think> need written </think> <search> Gindo written </search>
    <information> Gindo was written by Kunko . ... </information>
    <think> need born </think> <search> Kunko born </search>
    <information> Kunko was born in Tarmi . ... </information>
    <think> done </think> <answer> Tarmi </answer>

Training and held-out questions are about different names. Held-out names do occur in the warm start, with other facts at every mention:
what is held out are facts and questions, not words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from envs.quickstart_demos import INFORMATION, PROMPT, warm_start_rows
from envs.quickstart_world import HELDOUT_SIZE, RELATIONS, TRAIN_SIZE, KnowledgeBase, Question, vocabulary

__all__ = ["ENV_OPTIONS", "SPECIAL_TOKENS", "build"]

ENV_OPTIONS: Mapping[str, Any] = {
    "prompt": PROMPT,
    "chat": False,
    "max_turns": 3,
    "topk": 3,
    "passage_format": "{text} ",
    "information_format": INFORMATION,
    "max_invalid_actions": 1,
}
"""Options of `SearchEnv` under which an episode is, token for token, in the format of the warm start's demonstrations."""

SPECIAL_TOKENS = (
    "<pad>", "<bos>", "<eos>",
    "<think>", "</think>", "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>",
)  # fmt: skip
UNKNOWN = "<unk>"
THOUGHT_WORDS = ("need", "done", "guess")
DATA_SOURCES = {1: "one_hop", 2: "two_hop"}


def build(
    out_dir: Path,
    *,
    seed: int,
    train_tasks: int | None = None,
    heldout_tasks: int = 500,
    warm_start_steps: int = 1200,
    warm_start_tokens_per_step: int = 1024,
    warm_start_pool: int = 256,
) -> None:
    """Write corpus.jsonl, corpus_shuffled.jsonl, train.jsonl, heldout.jsonl, warm_start.jsonl and tokenizer/ into `out_dir`.

    The same arguments give the same bytes.

    Args:
        train_tasks: a random subset of the 1,200 one-hop and 1,065 two-hop questions; None for all.
        heldout_tasks: half of them two-hop; at most 640.
        warm_start_steps, warm_start_tokens_per_step, warm_start_pool: those of the recipe's warm start, by which the curriculum is cut.

    Raises:
        ValueError: more tasks are asked for than there are questions.
    """
    rng = random.Random(seed)
    used: set[str] = set()
    train = KnowledgeBase(rng, TRAIN_SIZE, used)
    heldout = KnowledgeBase(rng, HELDOUT_SIZE, used)
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_rows(out_dir / "corpus.jsonl", _corpus(train, heldout))
    _write_rows(out_dir / "corpus_shuffled.jsonl", _shuffled_corpus(rng, train, heldout))
    _write_rows(out_dir / "train.jsonl", _tasks("train", _training_questions(rng, train, train_tasks)))
    _write_rows(out_dir / "heldout.jsonl", _tasks("heldout", _heldout_questions(rng, heldout, heldout_tasks)))
    rows = warm_start_rows(
        random.Random(f"warm start {seed}"), steps=warm_start_steps, tokens_per_step=warm_start_tokens_per_step, pool=warm_start_pool
    )
    _write_rows(out_dir / "warm_start.jsonl", ({"segments": [{"text": text, "loss": loss} for text, loss in row]} for row in rows))
    _write_tokenizer(out_dir / "tokenizer")


def _corpus(*kbs: KnowledgeBase) -> Iterator[dict[str, str]]:
    """One passage per fact, under the name of its subject."""
    for kb in kbs:
        for (subject, relation), object_ in kb.facts.items():
            yield {"id": f"{subject}-{relation}", "title": subject, "text": RELATIONS[relation].passage.format(subject=subject, object=object_)}


def _shuffled_corpus(rng: random.Random, *kbs: KnowledgeBase) -> Iterator[dict[str, str]]:
    """The corpus with its objects exchanged within each relation: passages that read as well and are wrong. A control."""
    for kb in kbs:
        for wanted, relation in RELATIONS.items():
            subjects = [s for s, r in kb.facts if r == wanted]
            objects = [kb.facts[s, wanted] for s in subjects]
            rng.shuffle(objects)
            for subject, object_ in zip(subjects, objects, strict=True):
                yield {"id": f"{subject}-{wanted}", "title": subject, "text": relation.passage.format(subject=subject, object=object_)}


def _training_questions(rng: random.Random, kb: KnowledgeBase, wanted: int | None) -> list[Question]:
    questions = kb.questions(rng, hops=1) + kb.questions(rng, hops=2)
    return questions if wanted is None else _choose(rng, questions, wanted)


def _heldout_questions(rng: random.Random, kb: KnowledgeBase, wanted: int) -> list[Question]:
    return _choose(rng, kb.questions(rng, hops=1), wanted - wanted // 2) + _choose(rng, kb.questions(rng, hops=2), wanted // 2)


def _choose(rng: random.Random, questions: list[Question], wanted: int) -> list[Question]:
    if wanted > len(questions):
        raise ValueError(f"the quick-start's world has {len(questions)} such questions, fewer than the {wanted} asked for")
    return rng.sample(questions, wanted)


def _tasks(split: str, questions: Iterable[Question]) -> Iterator[dict[str, Any]]:
    for number, question in enumerate(questions):
        yield {
            "id": f"{split}-{number}",
            "question": question.text,
            "golden_answers": [question.answer],
            "data_source": DATA_SOURCES[question.hops],
            "hops": question.hops,
        }


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _write_tokenizer(directory: Path) -> None:
    """One token per word. Tags are added tokens only, no words: in untrusted text a tag is an unknown word."""
    words = [UNKNOWN, *sorted({*THOUGHT_WORDS, *vocabulary()})]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # no decoder: tokens are joined by spaces
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": UNKNOWN,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
