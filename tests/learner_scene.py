"""What the learner's tests play with: a tiny model, trajectories made of symbols, a recipe."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from agentrl.config.recipe import Architecture, Recipe
from agentrl.learner.build_model import make_model
from agentrl.types import Purpose, Reward, StopReason, Ticket, Trajectory

VOCABULARY = 48
TINY = Architecture(hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, max_positions=64)


def tiny_tokenizer(directory: Path) -> Path:
    """A word-level tokenizer in Hugging Face form: <pad> <bos> <eos> and w3, w4, ..."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ["<pad>", "<bos>", "<eos>", *(f"w{number}" for number in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(told))
    return directory


def tiny_model(directory: Path, architecture: Architecture = TINY, seed: int = 0) -> Path:
    """A model directory with the tiny tokenizer."""
    return make_model(architecture, tiny_tokenizer(directory / "tokenizer"), directory / "model", seed)


def tiny_recipe(**overrides: Any) -> Recipe:
    """A recipe of which the learner reads its own sections; `learner__ranks=2` sets `learner.ranks`."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "run": {"steps": 10},
        "model": {"architecture": {}, "tokenizer": "none"},
        "tasks": {"train": [{"path": "none"}]},
        "env": {"factory": "none:None"},
        "learner": {"learning_rate": 1e-2},
        "algorithm": {},
    }
    for name, value in overrides.items():
        place = settings
        *path, last = name.split("__")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return Recipe.model_validate(settings)


def trajectory(
    tokens: Sequence[int],
    mask: Sequence[int],
    *,
    reward: float,
    task: int = 0,
    k: int = 0,
    logprob: float = -1.0,
    version: int = 0,
    temperature: float = 1.0,
) -> Trajectory:
    """A trajectory of given tokens whose generated ones all had the same log-prob and version."""
    loss_mask = np.array(mask, np.uint8)
    last = [int(token) for token in np.flatnonzero(loss_mask)[-1:]]
    return Trajectory(
        ticket=Ticket(purpose=Purpose.TRAIN, ordinal=task, k=k, attempt=0),
        task_id=f"task-{task}",
        source="test",
        token_ids=np.array(tokens, np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=np.where(loss_mask == 1, logprob, 0.0).astype(np.float32),
        versions=np.where(loss_mask == 1, version, -1).astype(np.int32),
        turns=(),
        reward=Reward(total=reward, tokens=tuple(last), amounts=(reward,) * len(last)),
        stop=StopReason.ANSWERED,
        dispatched_s=0.0,
        finished_s=1.0,
        worker=0,
        incarnation=0,
        temperature=temperature,
    )


def random_groups(seed: int = 0, *, groups: int = 3, size: int = 4, logprob: float = -3.0) -> list[list[Trajectory]]:
    """Groups of prompt, completion, observation, completion; every group has rewards of both kinds."""
    rng = random.Random(seed)

    def one(task: int, k: int) -> Trajectory:
        lengths = [rng.randint(2, 9) for _ in range(4)]
        mask = [part % 2 for part, length in enumerate(lengths) for _ in range(length)]
        tokens = [rng.randrange(3, VOCABULARY) for _ in mask]
        return trajectory(tokens, mask, reward=float((k + task) % 2), task=task, k=k, logprob=logprob + rng.random())

    return [[one(task, k) for k in range(size)] for task in range(groups)]
