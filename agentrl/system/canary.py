"""The canary: the same tokens, scored by the learner and by every engine under the same weights, must have the same log-probs.

    step boundary   all ranks     listen: the learner scores the sequences, with the weights of the version that was just gathered
    published       rank 0        check:  every engine scores them; gaps are measured, written to canary.jsonl, and told with the next step

Policy gradients take the engine's log-probs for the learner's own. Where the two disagree the ratio between them is wrong and training goes
astray slowly and without an error. So a gap beyond the bounds ends the run, and `Verdict` says what to look at: weights or arithmetic.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import trio

from agentrl.config.recipe import Recipe
from agentrl.data.sources import first_tasks
from agentrl.engine_api import EngineClient, PromptScores
from agentrl.env import Observation
from agentrl.errors import EngineError, EngineUnavailable, HealthError
from agentrl.learner.learner import Learner
from agentrl.rollout.tokens import TokenEncoder
from agentrl.seeds import mix
from agentrl.system.verdict import Gap, explain
from agentrl.types import Task
from agentrl.weights import Snapshot

__all__ = ["CANARY_LOG", "Canary", "canary_sequences", "learner_logprobs"]

log = logging.getLogger(__name__)

CANARY_LOG = "canary.jsonl"
_CANARY = 0x63616E  # its tokens are other numbers than those of anything else of the seed

Logprobs = npt.NDArray[np.float32]


class Canary:
    """The canary of one learner rank. Rank 0 decides when it sings; every rank takes part when it does.

    Args:
        sequences: token ids, all of one length. The same on every rank.
        bounds: largest and mean gap that are accepted, in nats.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], *, every: int, bounds: tuple[float, float], deadline_s: float, checksums: bool) -> None:
        self.sequences = [list(ids) for ids in sequences]
        self._every, self._bounds, self._deadline_s, self._checksums = every, bounds, deadline_s, checksums
        self._until = 0  # versions until the next check
        self._learner: dict[int, list[Logprobs]] = {}  # by version: what the learner said of it
        self._metrics: dict[str, float] = {}

    @classmethod
    def of(cls, recipe: Recipe, model_dir: Path) -> Canary | None:
        """The canary of a run; None where the recipe has none."""
        settings = recipe.canary
        if settings is None:
            return None
        sequences = canary_sequences(
            TokenEncoder.load(model_dir),
            first_tasks(recipe.tasks.train, settings.sequences),
            count=settings.sequences,
            tokens=min(settings.tokens, recipe.engine.context_tokens - 1),
            vocabulary=json.loads((model_dir / "config.json").read_text(encoding="utf-8")).get("vocab_size"),
            seed=recipe.seed,
        )
        bounds = settings.bounds(recipe.model.dtype, recipe.weights.dtype)
        return cls(sequences, every=settings.every, bounds=bounds, deadline_s=settings.deadline_s, checksums=settings.checksums)

    async def listen(self, learner: Learner, version: int) -> None:
        """Have the learner score the sequences, if `version` is to be checked. Collective: every rank, with the weights of `version`."""
        due, self._until = self._until <= 0, self._until - 1
        logprobs = await trio.to_thread.run_sync(self._score, learner, due)
        if logprobs is not None and learner.ranks.first:
            self._learner[version], self._until = logprobs, self._every - 1

    async def check(self, snapshot: Snapshot, engines: Sequence[EngineClient], *, run_dir: Path, model_dir: Path) -> None:
        """Compare every engine with what the learner said of this version; nothing where it said nothing. Rank 0, after publishing.

        An engine that does not answer, or that is at another version before or after, is not compared: the next version is then checked too.

        Raises:
            HealthError: the log-probs are further apart than the bounds. Its message says why and where to look.
            EngineError: an engine refuses to score, or contradicts itself, and the others' log-probs are as they must be.
        """
        logprobs = self._learner.pop(snapshot.version, None)
        superseded = [version for version in self._learner if version < snapshot.version]
        if superseded:  # listened to, but another version was published in its place
            self._until = 0
            self._learner = {version: kept for version, kept in self._learner.items() if version not in superseded}
        if logprobs is None:
            return
        heard: dict[int, list[PromptScores]] = {}
        refusals: list[Exception] = []
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(self._hear, engine, snapshot.version, heard, refusals)
        if len(heard) < len(engines):
            self._until = 0
        gaps = [Gap.of(engine.index, logprobs, [scores.logprobs for scores in heard[engine.index]]) for engine in engines if engine.index in heard]
        if gaps:
            self._metrics = {"canary/gap_max": max(gap.largest for gap in gaps), "canary/gap_mean": max(gap.mean for gap in gaps)}
        await self._write(run_dir / CANARY_LOG, snapshot, gaps, engines)
        beyond = [gap for gap in gaps if gap.largest > self._bounds[0] or gap.mean > self._bounds[1]]
        if beyond:
            worst = max(beyond, key=lambda gap: gap.mean)
            verdict = await explain(worst, self._bounds, snapshot, engines, run_dir=run_dir, model_dir=model_dir)
            _append(run_dir / CANARY_LOG, {"version": snapshot.version, "verdict": verdict})
            raise HealthError(verdict)
        if refusals:
            raise refusals[0]

    def take_metrics(self) -> dict[str, float]:
        """The numbers of the last check, once."""
        told, self._metrics = self._metrics, {}
        return told

    def _score(self, learner: Learner, due: bool) -> list[Logprobs] | None:
        """What the learner says, where rank 0 says that it is due."""
        told = learner.ranks.max(torch.tensor([float(learner.ranks.first and due)])).item()
        return learner_logprobs(learner, self.sequences) if told else None

    async def _hear(self, engine: EngineClient, version: int, heard: dict[int, list[PromptScores]], refusals: list[Exception]) -> None:
        """Have an engine score the sequences; it is in `heard` if all of it was said by `version`."""
        told: dict[int, PromptScores] = {}
        versions: set[int | None] = set()

        async def score(number: int, ids: Sequence[int]) -> None:
            told[number] = await engine.score(ids, rid=f"canary/{version}/{engine.index}/{number}", deadline_s=self._deadline_s)

        try:
            versions.add((await engine.model_info()).version)
            async with trio.open_nursery() as nursery:
                for number, ids in enumerate(self.sequences):
                    nursery.start_soon(score, number, ids)
            versions.add((await engine.model_info()).version)
        except* EngineUnavailable as errors:
            log.warning("%r did not score the canary: %s", engine, errors.exceptions[0])
        except* EngineError as errors:
            refusals.append(errors.exceptions[0])  # the others mostly follow from it
        versions |= {scores.version for scores in told.values()}
        if len(told) == len(self.sequences) and versions == {version}:
            heard[engine.index] = [told[number] for number in range(len(self.sequences))]
        else:
            log.info("%r could not be asked about version %d: it was at %s", engine, version, sorted(map(str, versions)))

    async def _write(self, file: Path, snapshot: Snapshot, gaps: Sequence[Gap], engines: Sequence[EngineClient]) -> None:
        sums = await self._sums([engine for engine in engines if any(gap.engine == engine.index for gap in gaps)]) if self._checksums else {}
        sent = {"checksum": await trio.to_thread.run_sync(lambda: snapshot.checksum)} if self._checksums else {}
        line = {
            "version": snapshot.version,
            "step": snapshot.step,
            "time": time.time(),
            **sent,
            "engines": [gap.to_plain() | ({"checksum": sums[gap.engine]} if gap.engine in sums else {}) for gap in gaps],
            "unheard": sorted({engine.index for engine in engines} - {gap.engine for gap in gaps}),
        }
        _append(file, line)

    async def _sums(self, engines: Sequence[EngineClient]) -> dict[int, str]:
        """Checksums of those that give them: none may keep the others' gaps from being judged."""
        sums: dict[int, str] = {}
        for engine in engines:
            try:
                sums[engine.index] = (await engine.weights_checksum()).engine
            except EngineError as error:
                log.warning("%r gave no checksums: %s", engine, error)
        return sums


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")


def canary_sequences(
    encoder: TokenEncoder, tasks: Sequence[Task], *, count: int, tokens: int, vocabulary: int | None, seed: int
) -> tuple[tuple[int, ...], ...]:
    """`count` sequences of `tokens` ids each: the start of a task's prompt, then ids drawn from the seed. No control tokens among the drawn.

    Args:
        tasks: their prompts are used in turn; at most half a sequence is a prompt.
        vocabulary: of the model: ids at or above it are left out. None: not known.
    """
    size = encoder.vocab_size if vocabulary is None else min(vocabulary, encoder.vocab_size)
    made = []
    for number in range(count):
        ids = _prompt(encoder, tasks[number % len(tasks)])[: tokens // 2] if tasks else []
        ids = [token for token in ids if token < size]
        draw = 0
        while len(ids) < tokens:
            token = mix(seed, _CANARY, number, draw) % size
            draw += 1
            if not encoder.is_control(token):
                ids.append(token)
        made.append(tuple(ids))
    return tuple(made)


def _prompt(encoder: TokenEncoder, task: Task) -> list[int]:
    text = task.prompt or "".join(message["content"] for message in task.messages)
    ids: list[int] = encoder.encode_start(Observation.user(text)).ids.tolist()
    return ids


@torch.no_grad()
def learner_logprobs(learner: Learner, sequences: Sequence[Sequence[int]]) -> list[Logprobs]:
    """The log-prob of each token but the first, at temperature 1, of sequences of one length. Collective. Dimensions: S sequences, T tokens."""
    device = learner.ranks.device
    ids_ST = torch.tensor([list(ids) for ids in sequences], device=device)
    wanted_ST = torch.ones_like(ids_ST, dtype=torch.bool)
    wanted_ST[:, 0] = False
    logp_ST = learner.state.policy(ids_ST, wanted_ST, torch.ones(len(sequences), device=device))[0]
    return [row.numpy() for row in logp_ST[:, 1:].float().cpu()]
