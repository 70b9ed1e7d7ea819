"""Continuous batching: which request runs in which slot, step by step, and under which version of the weights.

    waiting ──admit──> prefilled ──> running ──stop──> finished (its slot is kept for a request that continues it)
       ^                                │
       └───────── retract ──────────────┘   a pause, or new weights: keys and values are dropped and computed again

Owned by one thread. Nothing here waits or knows of HTTP.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.engine.decoder import Decoder
from agentrl.engine.lanes import Draws, Lanes
from agentrl.engine.runner import Chunk, ModelRunner
from agentrl.engine.sampling import pack, sample, unpack
from agentrl.engine.sequence import ABORTED, ABORTED_WAITING, FinishReason, Sequence
from agentrl.engine.slots import SlotTable
from agentrl.engine.stops import TokenText
from agentrl.engine.weights import Weights
from agentrl.errors import EngineError, EngineRefused
from agentrl.faults import point

__all__ = ["PARTS", "Counters", "Scheduler"]

PARTS = frozenset({"kv_cache", "cuda_graph", "weights"})  # what of the engine's memory can be given away, in SGLang's words

# Padded tokens in one prefill forward: bounds its memory. On a CPU larger ones fall out of its caches (4,096: a quarter slower).
_PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}
_SCORE_ROWS = 1024  # rows of logits alive at once while scoring a prompt
_MIN_DETERMINISTIC_SLOTS = 4  # linear layers give other bits at one to three rows


@dataclass(kw_only=True, slots=True)
class Counters:
    """What the engine has done since its start."""

    generated_tokens: int = 0
    prefill_tokens: int = 0  # computed, without those found in a kept slot
    cached_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    busy_s: float = 0.0
    pause_s: float = 0.0
    asleep_s: float = 0.0  # with memory given away


class Scheduler:
    """Requests in, finished sequences out.

    Args:
        deterministic: a token's bits depend on nothing but its own sequence: one shape of work each for prefill and for decoding, no reuse.
    """

    def __init__(self, runner: ModelRunner, text: TokenText | None, *, version: str, deterministic: bool = False) -> None:
        if deterministic and runner.slots < _MIN_DETERMINISTIC_SLOTS:
            raise EngineError(f"deterministic mode needs at least {_MIN_DETERMINISTIC_SLOTS} slots, got {runner.slots}")
        self.runner = runner
        self.version = version
        self.paused: Literal["abort", "retract", "in_place"] | None = None
        self.asleep: frozenset[str] = frozenset()  # of PARTS: those whose memory is given away
        self.counters = Counters()
        self._text = text
        self._deterministic = deterministic
        self._table = SlotTable(runner.slots)
        self._lanes = Lanes(runner.slots, runner.idle_position, runner.device)
        self._decoder = Decoder(runner, self._lanes, fixed=deterministic)
        self._waiting: dict[str, Sequence] = {}
        self._arrived: list[Sequence] = []  # of those, the ones no kept prefix was looked up for
        self._running: dict[int, Sequence] = {}  # by slot
        self._finished: list[Sequence] = []
        self._frozen_aborts: list[Sequence] = []  # running while paused in place: they end when the pause does
        self._paused_s = self._asleep_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self.paused is None and not self.asleep and bool(self._running or self._waiting)

    def step(self) -> None:
        """Prefill what can be admitted, then one token for everything that runs."""
        started = time.perf_counter()
        self._prefill(self._admit())
        self._compact()
        self._decode()
        self.counters.steps += 1
        self.counters.busy_s += time.perf_counter() - started

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting[sequence.request.rid] = sequence
        self._arrived.append(sequence)

    def take_finished(self) -> list[Sequence]:
        """The sequences that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def abort(self, rid: str) -> None:
        """End a request with what it has; an unknown one is ignored."""
        if rid in self._waiting:
            self._finish(self._waiting.pop(rid), ABORTED_WAITING)
            return
        for sequence in self._running.values():
            if sequence.request.rid == rid:
                if self.paused == "in_place":
                    self._frozen_aborts.append(sequence)
                else:
                    self._finish(sequence, ABORTED)
                return

    def abort_all(self) -> None:
        """End every request with what it has."""
        for rid in [*self._waiting, *(sequence.request.rid for sequence in self._running.values())]:
            self.abort(rid)

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop after the last step; `retract` sends running requests back to the front of the queue, `abort` ends them, `in_place` freezes them."""
        if self.paused is None:
            self._paused_s = time.perf_counter()
        self.paused = mode
        if mode == "in_place":
            return
        self._end_frozen()
        if mode == "abort":
            self.abort_all()
        else:
            self._retract()

    def resume(self) -> None:
        """Go on; harmless when not paused."""
        if self.paused is not None:
            self.counters.pause_s += time.perf_counter() - self._paused_s
        self.paused = None
        self._end_frozen()

    def fall_asleep(self, parts: AbstractSet[str]) -> None:
        """Give memory away: keys, values and captured steps at once; the weights are the caller's to move, from here on nothing uses them.

        Raises:
            EngineRefused: generation is not paused, or in place, with keys and values that are still wanted.
        """
        if not parts:
            return
        if self.paused not in ("retract", "abort"):
            raise EngineRefused(f"memory is released while generation is paused by 'retract' or 'abort' only; it is paused by {self.paused!r}")
        self._asleep_s = self._asleep_s if self.asleep else time.perf_counter()
        self.asleep |= parts
        self._decoder.forget()  # a captured step names memory that goes now
        if "kv_cache" in parts:
            self._table.drop_kept()
            self.runner.release_cache()

    def wake_up(self, parts: AbstractSet[str]) -> None:
        """Have the memory again, the weights' already in place; generation stays paused. Harmless where it is awake."""
        if "kv_cache" in parts & self.asleep:
            self.runner.restore_cache()
        slept, self.asleep = bool(self.asleep), self.asleep - parts
        if slept and not self.asleep:
            self.counters.asleep_s += time.perf_counter() - self._asleep_s

    @property
    def frozen(self) -> bool:
        """Whether a pause in place holds running requests, and with them their keys and values."""
        return self.paused == "in_place" and bool(self._running)

    def flush(self) -> bool:
        """Drop every cached prefix; False, and nothing done, while requests run."""
        if self._running:
            return False
        self._table.drop_kept()
        return True

    def commit(self, tensors: Weights | Mapping[str, Tensor], version: str | None) -> None:
        """New weights: all keys and values go, whatever runs is computed again under them, and further tokens carry `version`.

        Whole weights are exchanged for the live ones, single tensors are copied into them.

        Paused in place, keys and values stay: what runs goes on from those of the weights before.
        """
        point("engine.commit")
        if self.paused != "in_place":
            self._retract()
        if isinstance(tensors, Weights):
            self.runner.weights.take_over(tensors)
        else:
            self.runner.weights.replace(tensors)
        if version is not None:
            self.rename(version)

    def rename(self, version: str) -> None:
        """The weights stay; tokens from here on carry `version`."""
        self.version = version
        for sequence in self._running.values():
            sequence.mark_version(version)

    def load(self) -> dict[str, int]:
        """Requests and slots in use."""
        running = list(self._running.values())  # other threads ask while this one works
        used = sum(len(sequence.request.input_ids) + len(sequence.output) for sequence in running)
        return {"running": len(running), "waiting": len(self._waiting), "used_tokens": used}

    def counted(self) -> dict[str, float]:
        """The counters, the current pause and sleep included."""
        counted: dict[str, float] = asdict(self.counters)
        if self.paused is not None:
            counted["pause_s"] += time.perf_counter() - self._paused_s
        if self.asleep:
            counted["asleep_s"] += time.perf_counter() - self._asleep_s
        return counted

    def _end_frozen(self) -> None:
        for sequence in self._frozen_aborts:
            if sequence.finish is None:
                self._finish(sequence, ABORTED)
        self._frozen_aborts.clear()

    def _retract(self) -> None:
        """Running requests wait again, before the others; their slots are freed."""
        retracted = {sequence.request.rid: sequence for sequence in self._running.values()}
        for slot, sequence in self._running.items():
            sequence.retractions += 1
            sequence.slot = -1
            self._table.release(slot)
        self.counters.retractions += len(retracted)
        self._running.clear()
        self._table.drop_kept()
        self._lanes.idle_all()
        self._waiting = retracted | self._waiting

    def _admit(self) -> list[tuple[Sequence, int]]:
        """Waiting sequences that get a slot now, with the length of the prefix already in it."""
        if not self._waiting or self.paused is not None:
            return []
        # continuations first: a fresh request must not evict the prefix that another one waits to use
        admitted = self._continued()
        for rid, sequence in list(self._waiting.items()):
            slot = self._table.take()
            if slot is None:
                break
            sequence.slot = slot
            admitted.append((self._waiting.pop(rid), 0))
        return admitted

    def _continued(self) -> list[tuple[Sequence, int]]:
        """The new arrivals that continue a kept sequence. One look each: what they continue was finished before they were sent."""
        admitted: list[tuple[Sequence, int]] = []
        for sequence in self._arrived:
            request = sequence.request
            if self._waiting.get(request.rid) is not sequence or self._deterministic or request.scores_prompt:
                continue
            place = self._table.resume(request.input_ids, request.extra_key)
            if place is not None:
                sequence.slot, cached = place
                admitted.append((self._waiting.pop(request.rid), cached))
        self._arrived.clear()
        return admitted

    def _prefill(self, admitted: list[tuple[Sequence, int]]) -> None:
        for sequence, cached in admitted:
            sequence.cached_tokens = cached
            self.counters.cached_tokens += cached
            self._running[sequence.slot] = sequence
        for share in self._shares(admitted):
            if share[0][0].slot >= 0:  # else an earlier share broke, and all went back to the queue
                self._prefill_share(share)

    def _shares(self, admitted: list[tuple[Sequence, int]]) -> list[list[tuple[Sequence, int]]]:
        """Cut into forwards of similar lengths, each within the bound on padded tokens; one sequence each in deterministic mode."""
        shares: list[list[tuple[Sequence, int]]] = []
        bound, longest = _PREFILL_TOKENS[self.runner.device.type], 0
        for sequence, cached in sorted(admitted, key=lambda item: len(item[0].tokens) - item[1], reverse=True):
            if not shares or self._deterministic or (len(shares[-1]) + 1) * longest > bound:
                shares.append([])
                longest = len(sequence.tokens) - cached
            shares[-1].append((sequence, cached))
        return shares

    def _prefill_share(self, share: list[tuple[Sequence, int]]) -> None:
        """One forward over several sequences, and the first new token of each."""
        chunks = [Chunk(slot=sequence.slot, tokens=sequence.tokens[cached:], start=cached) for sequence, cached in share]
        self.counters.prefill_tokens += sum(len(chunk.tokens) for chunk in chunks)
        hidden_nD = self._forward([sequence for sequence, _ in share], chunks)
        for sequence, _ in share:
            sequence.mark_version(self.version)
        rows = [row for row, (sequence, _) in enumerate(share) if sequence.limit > 0]
        for sequence, _ in share:
            if sequence.limit == 0:
                self._finish(sequence, {"type": "length", "length": 0})
        if rows:
            sequences = [share[row][0] for row in rows]
            draws = Draws.of(sequences, self.runner.device)
            uniforms = draws.uniforms(len(sequences)).to(self.runner.device)
            self._accept(
                sequences, *unpack(pack(*sample(self.runner.logits(hidden_nD[rows]), None if draws.plain else draws.temperatures, uniforms)))
            )
            self._lanes.place([sequence for sequence in sequences if sequence.slot >= 0])

    def _forward(self, sequences: Many[Sequence], chunks: list[Chunk]) -> Tensor:
        """The final hidden state of each chunk's last token, after scoring the prompts that want it. [n, D]"""
        scored = any(sequence.request.scores_prompt and sequence.prompt_logprobs is None for sequence in sequences)
        ends = list(itertools.accumulate(len(chunk.tokens) for chunk in chunks))
        attend = None
        if self._deterministic:  # one chunk, as long as any can be
            [chunk], attend = chunks, self.runner.context_tokens
            chunks = [Chunk(slot=chunk.slot, tokens=[*chunk.tokens, *([0] * (attend - len(chunk.tokens)))])]
        if not (scored or self._deterministic):
            return self.runner.prefill(chunks)
        hidden_ND = self.runner.prefill(chunks, attend=attend, every_token=True)
        for sequence, end in zip(sequences, ends, strict=True):
            if sequence.request.scores_prompt and sequence.prompt_logprobs is None:
                self._score(sequence, hidden_ND[end - len(sequence.tokens) : end])
        return hidden_ND[[end - 1 for end in ends]]

    def _score(self, sequence: Sequence, hidden_TD: Tensor) -> None:
        """The prompt's log-probs, at temperature 1 as SGLang's are."""
        ids = sequence.request.input_ids
        first = max(sequence.request.logprob_start, 1)
        scores: list[float] = []
        for start in range(first, len(ids), _SCORE_ROWS):
            targets = torch.tensor(ids[start : start + _SCORE_ROWS], device=self.runner.device)
            logits = self.runner.logits(hidden_TD[start - 1 : start - 1 + len(targets)])
            scores += logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
        sequence.prompt_logprobs = scores

    def _compact(self) -> None:
        """Bring running requests into low slots where decoding would compute many rows for nothing."""
        while self._running and (highest := max(self._running)) > 1.25 * len(self._running) + 4 and not self._deterministic:
            lower = self._table.lowest_below(highest)
            if lower is None:
                return
            held = self._table.move(highest, lower)
            sequence = self._running.pop(highest)
            self.runner.swap(highest, lower, tokens=max(held, len(sequence.computed_tokens)))
            self._lanes.idle(highest)
            sequence.slot = lower
            self._lanes.place([sequence])
            self._running[lower] = sequence

    def _decode(self) -> None:
        if not self._running:
            return
        longest = max(len(sequence.request.input_ids) + len(sequence.output) for sequence in self._running.values())
        tokens, logprobs = self._decoder.step(max(self._running) + 1, longest)
        running = list(self._running.values())
        self._accept(running, [tokens[sequence.slot] for sequence in running], [logprobs[sequence.slot] for sequence in running])

    def _accept(self, sequences: Many[Sequence], tokens: Many[int], logprobs: Many[float]) -> None:
        """One new token per sequence."""
        self.counters.generated_tokens += len(sequences)
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            output = sequence.output
            output.append(token)
            sequence.logprobs.append(logprob)
            if token in sequence.watched or len(output) >= sequence.limit:
                reason = self._reason(sequence, token)
                if reason is not None:
                    self._finish(sequence, reason)
        if not math.isfinite(math.fsum(logprobs)):
            self._fail_broken(sequences)

    def _reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why the sequence ends with its newest token, in SGLang's order: stop strings, then stop tokens, then length."""
        params = sequence.request.params
        if self._text is not None and params.stop and token in sequence.watched:
            matched = self._text.matched(sequence.output, params.stop)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        if token in params.stop_ids:
            return {"type": "stop", "matched": token}
        return {"type": "length", "length": len(sequence.output)} if len(sequence.output) >= sequence.limit else None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.slot >= 0:
            del self._running[sequence.slot]
            self._lanes.idle(sequence.slot)
            if self._deterministic:
                self._table.release(sequence.slot)
            else:
                self._table.keep(sequence.slot, sequence.computed_tokens, sequence.request.extra_key)
        sequence.slot = -1
        sequence.finish = reason
        sequence.version = self.version
        sequence.finished_s = time.time()
        self._finished.append(sequence)

    def _fail_broken(self, sequences: Many[Sequence]) -> None:
        """Weights that overflow must not look like samples: what was drawn from them is an error, and nothing of it stays in the cache."""
        reason = {"type": "abort", "message": "the model's logits are not finite", "status_code": 500, "err_type": "InternalServerError"}
        for sequence in sequences:
            if not math.isfinite(sequence.logprobs[-1]):
                if sequence.finish is None:
                    self._finish(sequence, reason)
                sequence.finish = reason
        self._retract()
        self.runner.clear(range(self.runner.slots))
