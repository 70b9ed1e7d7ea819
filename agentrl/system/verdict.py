"""Why learner and engine disagree: other weights, or other arithmetic with the same weights.

The embedded engine's checksums are those of the snapshot, tensor by tensor, unless it holds the weights in another dtype. Another engine's are its
own: it is compared with itself after it has loaded the same version from disk, a way on which nothing of the transfer takes part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from agentrl.engine_api import EngineClient, WeightsChecksum
from agentrl.errors import EngineError, PublishError
from agentrl.weights import Snapshot, save_snapshot

__all__ = ["Gap", "explain"]

_SPARES = 0.01  # of the largest gap: below it, what only the first token says is as it must be
_RELOAD_DEADLINE_S = 600.0  # a large model from a network disk

_OTHER_ARITHMETIC = (
    "compare what the engine computes with: dtype (and weights.dtype), attention and sampling backend, and in its config.json rope_theta,"
    " rope_scaling, rms_norm_eps and tie_word_embeddings. If it is their rounding and nothing else, raise canary.max_gap and canary.mean_gap"
)
_OTHER_WEIGHTS = "something wrote to the engine's weights besides the learner, or a transfer went wrong; the same command loads them anew from disk"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """How far an engine's log-probs are from the learner's, in nats; infinite where one of them is not a number."""

    engine: int
    largest: float
    mean: float  # over all tokens
    by_sequence: tuple[float, ...]  # the largest of each
    at: tuple[int, int]  # sequence and token of the largest
    spares_first: bool  # the log-prob that only the first token decides is right: that token attends to itself alone, at position 0

    @classmethod
    def of(cls, engine: int, learner: Sequence[npt.NDArray[np.float32]], told: Sequence[npt.NDArray[np.float32]]) -> Gap:
        """The gap of sequences of one length, whose log-probs begin with the second token's."""
        apart_ST = np.abs(np.stack(learner).astype(np.float64) - np.stack(told))
        apart_ST[np.isnan(apart_ST)] = math.inf
        sequence, token = (int(place) for place in np.unravel_index(apart_ST.argmax(), apart_ST.shape))
        return cls(
            engine=engine,
            largest=float(apart_ST.max()),
            mean=float(apart_ST.mean()),
            by_sequence=tuple(apart_ST.max(-1).tolist()),
            at=(sequence, token + 1),
            spares_first=bool(apart_ST[:, 0].max() <= _SPARES * apart_ST.max()),
        )

    def to_plain(self) -> dict[str, Any]:
        """For canary.jsonl; an infinite number is null there."""
        finite = [gap if math.isfinite(gap) else None for gap in (self.largest, self.mean, *self.by_sequence)]
        return {"engine": self.engine, "gap_max": finite[0], "gap_mean": finite[1], "by_sequence": finite[2:]}

    def __str__(self) -> str:
        sequences = ", ".join(f"{gap:.2g}" for gap in self.by_sequence)
        sequence, token = self.at
        return f"{self.largest:.2g} at most (sequence {sequence}, token {token}) and {self.mean:.2g} on average; by sequence {sequences}"


async def explain(
    gap: Gap, bounds: tuple[float, float], snapshot: Snapshot, engines: Sequence[EngineClient], *, run_dir: Path, model_dir: Path
) -> str:
    """What ends the run: the gap, whether the weights differ and which, and what to do. Asks the engine, and may load its weights anew."""
    engine = next(one for one in engines if one.index == gap.engine)
    told = (
        f"the canary: {engine!r} and the learner give fixed tokens other log-probs under version {snapshot.version}: {gap} (accepted: {bounds[0]:g}"
        f" and {bounds[1]:g}). "
    )
    try:
        cause = _of_sent(await trio.to_thread.run_sync(lambda: snapshot.checksums), dict((await engine.weights_checksum()).tensors))
        if cause is None or not (await engine.server_info()).staged_update:
            cause = await _of_reload(engine, snapshot, engines, run_dir=run_dir, model_dir=model_dir)
    except EngineError as error:
        cause = f"Whether its weights differ or its arithmetic could not be found out: {error}"
    return f"{told}{cause}{_where(gap) if 'KERNELS' in cause else ''}. All checks are in {run_dir / 'canary.jsonl'}"


def _where(gap: Gap) -> str:
    if gap.spares_first:
        return ". What follows the first token is right, later ones are wrong: look at attention and positions (rope) first"
    return ". Even what follows the first token is wrong, which attends to nothing else: look at embedding, norms, output layer and dtype first"


def _of_sent(sent: dict[str, str], held: dict[str, str]) -> str | None:
    """The cause, where the engine's checksums are ours. None where not one is equal: it may hold the weights in another dtype."""
    other = [name for name, checksum in sent.items() if held.get(name) != checksum]
    if len(other) == len(sent):
        return None
    if not other:
        return f"The KERNELS differ: all {len(held)} tensors of the engine are bit for bit what was sent; {_OTHER_ARITHMETIC}"
    return f"The WEIGHTS differ: {_named(other, len(sent))} not what was sent; {_OTHER_WEIGHTS}"


async def _of_reload(engine: EngineClient, snapshot: Snapshot, engines: Sequence[EngineClient], *, run_dir: Path, model_dir: Path) -> str:
    """The cause, where the engine's checksums are its own: they are taken before and after the version is loaded from disk."""
    before = await engine.weights_checksum()
    others = [await other.weights_checksum() for other in engines if other is not engine]
    agree = ""
    if others:
        agree = f" (the engines {'agree' if all(other.engine == before.engine for other in others) else 'do not agree'} with each other)"
    try:
        path = await trio.to_thread.run_sync(save_snapshot, snapshot, run_dir / "weights" / f"v{snapshot.version}", model_dir)
        after = await _reloaded(engine, path, snapshot.version)
    except (EngineError, PublishError) as error:
        return f"Whether its WEIGHTS differ is unknown{agree}: its checksums are its own, and it could not load the version from disk ({error})"
    other = [name for name, checksum in after.tensors.items() if before.tensors.get(name) != checksum]
    if other:
        return f"The WEIGHTS differ{agree}: {_named(other, len(after.tensors))} not what it loads from disk; {_OTHER_WEIGHTS}"
    if before.engine != after.engine:
        return f"The WEIGHTS differ{agree}, on another than the first tensor-parallel rank; {_OTHER_WEIGHTS}"
    return (
        f"The KERNELS differ{agree}: it holds the same {len(after.tensors)} tensors when it loads this version from disk (or its loader leaves out"
        f" the same ones on both ways); {_OTHER_ARITHMETIC}"
    )


async def _reloaded(engine: EngineClient, path: Path, version: int) -> WeightsChecksum:
    """Of what it holds after it has loaded the directory. A server that the run was attached to goes on without it, whatever comes of this."""
    try:
        await engine.pause("retract")
        await engine.update_from_disk(str(path), version=version, deadline_s=_RELOAD_DEADLINE_S)
        return await engine.weights_checksum()
    finally:
        with trio.CancelScope(shield=True), suppress(EngineError):
            await engine.continue_()


def _named(names: Sequence[str], of: int) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} is the first of {len(names)} tensors (of {of}) that are"
