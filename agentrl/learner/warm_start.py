"""Supervised training before reinforcement learning: it stands for pre-training and fine-tuning where the model is made on the spot.

Rows are JSON lines `{"segments": [{"text": ..., "loss": true|false}, ...]}`: transcripts or texts with marked spans. They are used in
the order of the file, from its start again where the steps outlast it. Muon for hidden matrices, AdamW for the rest.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from agentrl.config.recipe import WarmStartRecipe
from agentrl.errors import DataError
from agentrl.learner.model_directory import copy_tokenizer
from agentrl.learner.policy import PolicyModel

__all__ = ["warm_start"]

ADAM_BETAS = (0.9, 0.98)
MUON_MOMENTUM, MUON_ITERATIONS = 0.95, 5
MAX_GRAD_NORM = 1.0
FINAL_SHARE = 0.05  # of the learning rate, reached shortly before the end

Progress = Callable[[int, int, float], None]  # steps done, steps, loss


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    token_ids: list[int]
    wanted: list[bool]  # token-aligned: the loss counts this token


def warm_start(model_dir: Path, rows: Path, recipe: WarmStartRecipe, out_dir: Path, seed: int, progress: Progress) -> Path:
    """Train the model in `model_dir` on `rows` and write it to `out_dir`, in float32, tokenizer included.

    Deterministic from the seed at one number of threads of one machine.

    Args:
        progress: told the steps done, of how many, and the last loss, some 100 times.

    Raises:
        DataError: a row is not what the format says, has no token with loss, or is longer than the model's positions; names its line.
    """
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(seed)
    policy = PolicyModel.load(model_dir)
    longest = policy.causal.config.max_position_embeddings
    source = _rows(rows, Tokenizer.from_file(str(model_dir / "tokenizer.json")), recipe.pool, longest)
    batches = _batches(source, recipe.tokens_per_step, recipe.pool, random.Random(seed))
    optimizers = _optimizers(policy, recipe)
    for step, batch in enumerate(islice(batches, recipe.steps)):
        loss = _loss(policy, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        _update(optimizers, share=_share(step, recipe))
        if (step + 1) % max(1, recipe.steps // 100) == 0 or step + 1 == recipe.steps:
            progress(step + 1, recipe.steps, loss.item())
    policy.causal.save_pretrained(out_dir)
    copy_tokenizer(model_dir, out_dir)
    return out_dir


def _loss(policy: PolicyModel, batch: Sequence[_Row]) -> Tensor:
    """Mean over the wanted tokens of the batch."""
    longest = max(len(row.token_ids) for row in batch)
    token_ids_BT = torch.tensor([row.token_ids + [0] * (longest - len(row.token_ids)) for row in batch])
    wanted_BT = torch.tensor([row.wanted + [False] * (longest - len(row.wanted)) for row in batch])
    logp_BT: Tensor = policy(token_ids_BT, wanted_BT, torch.ones(len(batch)))[0]
    return -logp_BT.sum() / wanted_BT.sum()


def _optimizers(policy: PolicyModel, recipe: WarmStartRecipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each with its peak learning rate."""
    hidden = [p for name, p in policy.named_weights() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    rest = [p for p in policy.parameters() if not any(p is matrix for matrix in hidden)]
    muon = torch.optim.Muon(
        hidden,
        lr=recipe.muon_learning_rate,
        weight_decay=0.0,
        momentum=MUON_MOMENTUM,
        ns_steps=MUON_ITERATIONS,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(rest, lr=recipe.adam_learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True)
    return [(adam, recipe.adam_learning_rate), (muon, recipe.muon_learning_rate)]


def _update(optimizers: Sequence[tuple[torch.optim.Optimizer, float]], *, share: float) -> None:
    for optimizer, peak in optimizers:
        optimizer.param_groups[0]["lr"] = peak * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _share(step: int, recipe: WarmStartRecipe) -> float:
    """Of the peak learning rate: linear warm-up, constant, linear decay over the last `decay_share`."""
    warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    left = recipe.steps - step
    decay = recipe.decay_share * recipe.steps
    return warm * (max(FINAL_SHARE, left / decay) if left < decay else 1.0)


def _batches(rows: Iterator[_Row], tokens: int, pool: int, order: random.Random) -> Iterator[list[_Row]]:
    """Endless batches of at most `tokens` padded tokens: pools of rows, bucketed by length, batches shuffled within the pool.

    What does not fill a batch waits for the next pool, so that no batch is small and no row is lost.
    """
    rest: list[_Row] = []
    while True:
        batches: list[list[_Row]] = []
        batch: list[_Row] = []
        for row in sorted([*rest, *islice(rows, pool - len(rest))], key=lambda row: len(row.token_ids)):
            if batch and (len(batch) + 1) * len(row.token_ids) > tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        rest = batch if batches else []
        order.shuffle(batches)
        yield from batches or [batch]


def _rows(path: Path, tokenizer: Tokenizer, pool: int, longest: int) -> Iterator[_Row]:
    """Endless rows in the order of the file. Each segment is tokenised on its own, with nothing added; a pool at a time."""
    while True:
        with path.open(encoding="utf-8") as file:
            numbered = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            found = False
            while part := [(f"{path}:{number}", _segments(f"{path}:{number}", line)) for number, line in islice(numbered, pool)]:
                found = True
                texts = [text for _, segments in part for text, _ in segments]
                encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
                for place, segments in part:
                    yield _row(place, [(next(encodings).ids, loss) for _, loss in segments], longest)
        if not found:
            raise DataError(f"{path}: no rows")


def _segments(place: str, line: str) -> list[tuple[str, bool]]:
    try:
        segments: Any = json.loads(line)["segments"]
        parsed = [(segment["text"], segment["loss"]) for segment in segments]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{place}: expected {{"segments": [{{"text": ..., "loss": true|false}}, ...]}}: {error!r}') from error
    if not all(isinstance(text, str) and isinstance(loss, bool) for text, loss in parsed):
        raise DataError(f"{place}: a segment's text is a string and its loss true or false")
    return parsed


def _row(place: str, segments: Sequence[tuple[list[int], bool]], longest: int) -> _Row:
    token_ids = [token for ids, _ in segments for token in ids]
    wanted = [loss for ids, loss in segments for _ in ids]
    wanted[:1] = [False] * len(wanted[:1])  # nothing precedes the first token
    if not any(wanted):
        raise DataError(f"{place}: no token with loss after the first")
    if len(token_ids) > longest:
        raise DataError(f"{place}: {len(token_ids)} tokens; the model has {longest} positions")
    return _Row(token_ids=token_ids, wanted=wanted)
