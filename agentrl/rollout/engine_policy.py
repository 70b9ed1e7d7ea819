"""The policy that an engine runs: one turn is one generation request, or several where the first ones broke off."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import trio

from agentrl.engine_api import EngineClient, GenerateReply, GenerateRequest
from agentrl.errors import EngineError, EngineUnavailable
from agentrl.rollout.completion import EOS, LENGTH, Completion, first_stop
from agentrl.rollout.fleet import Seat
from agentrl.rollout.tokens import Tokens
from agentrl.seeds import turn_seed

__all__ = ["EnginePolicy"]

ABORT_DEADLINE_S = 2.0
AFTER_ABORT_S = 0.1  # before an aborted turn goes on: whoever aborted it wants the engine for a moment
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


class EnginePolicy:
    """One episode's policy, at its seat in the fleet.

    A turn that an engine aborts goes on where it broke off, keeping its tokens. One whose engine fails is sent to another engine, from the
    last token that came. Its random numbers are those of its positions, so it is the same turn. Stop strings are looked for again in
    the whole of a turn made of several replies: one that lies across a seam was seen by no engine.

    Args:
        name: unique among all requests in flight, e.g. the ticket's.
        seed: of the sample.
        decode: ids to text, special tokens shown.
        deadline_s: of one request; also how long engines may keep failing before the turn is given up.
        apart: have engines keep its cached prefixes apart from those of episodes that began under other weights. For updates that leave
            keys and values as they are (`in_place`): without, an episode would begin on what older weights computed.
    """

    def __init__(
        self,
        seat: Seat,
        *,
        name: str,
        seed: int,
        temperature: float,
        decode: Callable[[Tokens], str],
        deadline_s: float,
        apart: bool = False,
    ) -> None:
        self._seat = seat
        self._name = name
        self._seed = seed
        self._temperature = temperature
        self._decode = decode
        self._deadline_s = deadline_s
        self._apart = apart
        self._extra_key: str | None = None
        self._turns = 0
        self._requests = itertools.count()

    async def complete(self, token_ids: Tokens, *, stop_strings: Sequence[str], budget: int) -> Completion:
        """Write one turn.

        Raises:
            EngineRefused: an engine refused the request.
            EngineUnavailable: no engine answered.
        """
        draft = _Draft(stop_strings, budget, self._decode)
        seed = turn_seed(self._seed, self._turns)
        self._turns += 1
        started_s = time.time()
        while True:
            draft.add(await self._submit(token_ids, draft, seed))
            if draft.stop:
                return draft.completion(engine=self._seat.engine.url, started_s=started_s)
            await trio.sleep(AFTER_ABORT_S)

    async def _submit(self, token_ids: Tokens, draft: _Draft, seed: int) -> GenerateReply:
        """Ask for the rest of a turn until an engine answers. Where there is none, it waits for one, as long as engines may keep failing."""
        failing_since: float | None = None
        for failures in itertools.count():
            failed_s = 0.0 if failing_since is None else trio.current_time() - failing_since
            await self._seat.settle(self._deadline_s - failed_s)
            if self._apart and self._extra_key is None:
                self._extra_key = f"began-{self._seat.version}"
            request = GenerateRequest(
                rid=f"{self._name}/{self._turns - 1}/{next(self._requests)}",
                input_ids=np.concatenate([token_ids, draft.token_ids]) if len(draft) else token_ids,
                max_new_tokens=draft.left,
                temperature=self._temperature,
                stop=draft.stop_strings,
                sampling_seed=seed,
                position=len(draft),
                extra_key=self._extra_key,
            )
            try:
                return await self._generate(request)
            except EngineUnavailable:
                failing_since = trio.current_time() if failing_since is None else failing_since
                if trio.current_time() - failing_since >= self._deadline_s:
                    raise
            if not self._seat.stands:  # it has left: there is nothing to be patient with
                continue
            self._seat.move()
            await trio.sleep(min(FIRST_BACKOFF_S * 2**failures, MAX_BACKOFF_S) * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable: itertools.count has no end")

    async def _generate(self, request: GenerateRequest) -> GenerateReply:
        """One request. The engine is told when nobody waits for it any more."""
        engine = self._seat.engine
        try:
            with self._seat.asking():
                reply = await engine.generate(request, deadline_s=self._deadline_s)
            return reply
        except (trio.Cancelled, EngineUnavailable):
            if self._seat.stands:
                with trio.CancelScope(shield=True):  # bounded by its own deadline
                    await _abort(engine, request.rid)
            raise


async def _abort(engine: EngineClient, rid: str) -> None:
    try:
        await engine.abort(rid, deadline_s=ABORT_DEADLINE_S)
    except EngineError:
        return  # it is gone, and the request with it


class _Draft:
    """A turn while it is written: the replies so far, joined."""

    def __init__(self, stop_strings: Sequence[str], budget: int, decode: Callable[[Tokens], str]) -> None:
        self.stop_strings = tuple(stop_strings)
        self.stop = ""  # why it ended; empty while it goes on
        self.text = ""
        self.token_ids = np.empty(0, dtype=np.int32)
        self._logprobs = np.empty(0, dtype=np.float32)
        self._versions = np.empty(0, dtype=np.int32)
        self._budget = budget
        self._decode = decode

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self._budget - len(self.token_ids)

    def add(self, reply: GenerateReply) -> None:
        """Join a reply, and see whether the turn ended.

        Raises:
            EngineError: more tokens than were asked for, or an end without a single token.
        """
        if len(reply.output_ids) > self.left:
            raise EngineError(f"an engine wrote {len(reply.output_ids)} tokens where {self.left} were asked for")
        seam = len(self)
        versions = np.empty(len(reply.output_ids), dtype=np.int32)
        for span in reply.spans:
            versions[span.start : span.end] = span.version
        if seam:
            self.token_ids = np.concatenate([self.token_ids, reply.output_ids])
            self._logprobs = np.concatenate([self._logprobs, reply.logprobs])
            self._versions = np.concatenate([self._versions, versions])
        else:
            self.token_ids, self._logprobs, self._versions = reply.output_ids, reply.logprobs, versions
        self.text = self._decode(self.token_ids)
        self._see_end(reply, seam)
        if self.stop and not len(self):
            raise EngineError("an engine ended a turn without a token")

    def completion(self, *, engine: str, started_s: float) -> Completion:
        """The finished turn."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=self._logprobs,
            versions=self._versions,
            text=self.text,
            stop=self.stop,
            engine=engine,
            started_s=started_s,
            generated_s=time.time(),
        )

    def _see_end(self, reply: GenerateReply, seam: int) -> None:
        found = first_stop(self.text, self.stop_strings)
        if found is not None:
            self.stop, self.text = found
            if seam:
                self._cut(self._tokens_to_stop(seam))
        elif reply.finish.kind == "stop":
            self.stop = reply.finish.matched if isinstance(reply.finish.matched, str) else EOS
        elif not self.left:
            self.stop = LENGTH
        elif reply.finish.kind == "length":
            raise EngineError(f"an engine ended a turn for its length, {self.left} tokens before its limit")

    def _tokens_to_stop(self, seam: int) -> int:
        """How many tokens there are up to the one that completes the first stop string: what one unbroken request would have written."""
        low, high = seam, len(self)  # the engine looked for stops in what came before the seam
        while low < high:
            middle = (low + high) // 2
            if first_stop(self._decode(self.token_ids[:middle]), self.stop_strings) is None:
                low = middle + 1
            else:
                high = middle
        return high

    def _cut(self, length: int) -> None:
        self.token_ids = self.token_ids[:length]
        self._logprobs = self._logprobs[:length]
        self._versions = self._versions[:length]
