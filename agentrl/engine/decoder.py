"""One decode step: a forward over the slots 0..n-1, one token drawn in each, and what the next step needs of them.

On a CPU a step is computed call by call, with the rows and columns at work. On a GPU starting a kernel costs about as much as running it, so a
step, drawing included, is captured as a CUDA graph per bucket of rows and attended columns, when it first comes up, and replayed after that.
A graph names the memory it works on: lanes, cache and weights are written in place for as long as the engine lives, which is why new weights
need no new graphs. Either way the host waits for the device once per step, for the tokens.

Graphs have not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.engine.lanes import Lanes
from agentrl.engine.runner import ModelRunner
from agentrl.engine.sampling import pack, sample, unpack

__all__ = ["Decoder", "bucket"]

_ATTEND_STEP = 16  # on a CPU attended columns grow in steps: fewer shapes, fewer allocations
# On a GPU: at most half of the rows and a quarter of the columns are for nothing, and 128 rows x 4,096 columns make some 300 graphs at worst.
_ROWS_PER_OCTAVE, _COLUMNS_PER_OCTAVE = 2, 4
_LEAST_COLUMNS = 128


class Decoder:
    """Steps the lanes of a runner.

    Args:
        fixed: one shape for every step: all slots, all columns.
    """

    def __init__(self, runner: ModelRunner, lanes: Lanes, *, fixed: bool) -> None:
        self._runner = runner
        self._lanes = lanes
        self._fixed = fixed
        self._graphs: _Graphs | None = None
        if runner.device.type == "cuda":
            self._graphs = _Graphs(runner.slots, runner.device)

    def step(self, rows: int, columns: int) -> tuple[list[int], list[float]]:
        """The next token and its log-prob in each of the first `rows` slots, of which the longest sequence has `columns` tokens."""
        rows, attend = self._shape(rows, columns)
        draws = self._lanes.draws
        uniforms = draws.uniforms(rows)
        if self._graphs is None:
            tokens_n, logprobs_n = self._compute(rows, attend, uniforms)
            drawn = tokens_n.tolist(), logprobs_n.tolist()
        else:
            drawn = unpack(self._replayed(self._graphs, rows, attend, uniforms))
        draws.advance(rows)
        return drawn

    def forget(self) -> None:
        """Drop captured steps, and with them the memory they work in."""
        if self._graphs is not None:
            self._graphs = _Graphs(self._runner.slots, self._runner.device)

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and attended columns to compute, at least those at work."""
        slots, context = self._runner.slots, self._runner.context_tokens
        if self._fixed:
            return slots, context
        if self._graphs is None:
            return rows, min(-(-columns // _ATTEND_STEP) * _ATTEND_STEP, context)
        return min(bucket(rows, _ROWS_PER_OCTAVE), slots), min(bucket(max(columns, _LEAST_COLUMNS), _COLUMNS_PER_OCTAVE), context)

    def _compute(self, rows: int, attend: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs; waits for nothing. [rows] each"""
        lanes = self._lanes
        logits_nV = self._runner.decode(lanes.tokens[:rows], lanes.positions[:rows], attend=attend)
        # a captured step must serve all temperatures
        temperatures_n = None if lanes.draws.plain and self._graphs is None else lanes.draws.temperatures[:rows]
        tokens_n, logprobs_n = sample(logits_nV, temperatures_n, uniforms)
        lanes.advance(tokens_n)
        return tokens_n, logprobs_n

    def _replayed(self, graphs: _Graphs, rows: int, attend: int, uniforms: Tensor) -> Tensor:
        if (rows, attend) not in graphs.captured:
            with self._lanes.untouched():
                graphs.rehearse(lambda: self._compute(rows, attend, graphs.uniforms[:rows]))
            graphs.capture((rows, attend), lambda: pack(*self._compute(rows, attend, graphs.uniforms[:rows])))
        return graphs.replay((rows, attend), uniforms)


def bucket(value: int, per_octave: int) -> int:
    """The least of the bucket sizes that holds `value` >= 1: `per_octave` of them from one power of two to the next, as far as they are whole."""
    step = max((1 << ((value - 1).bit_length() - 1)) // per_octave, 1) if value > 1 else 1
    return -(-value // step) * step


class _Graphs:
    """Captured steps by shape, and the memory their uniform numbers come in."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.uniforms = torch.zeros(slots, dtype=torch.float64, device=device)
        self._staging = torch.zeros(slots, dtype=torch.float64, pin_memory=True)  # free again when the step's tokens have arrived
        # One pool for all: no two graphs run at once, and what one leaves behind is fetched before the next runs.
        self._pool = torch.cuda.graph_pool_handle()

    def rehearse(self, compute: Callable[[], object]) -> None:
        """Run a step once beside the stream, so that libraries have set themselves up before the capture, which forbids that."""
        aside: torch.cuda.Stream = torch.cuda.Stream(self.uniforms.device)  # type: ignore[no-untyped-call]
        here = torch.cuda.current_stream(self.uniforms.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            compute()
        here.wait_stream(aside)

    def capture(self, shape: tuple[int, int], compute: Callable[[], Tensor]) -> None:
        """Record a step without running it. Other threads go on using the GPU meanwhile: a bucket of weights may be on its way."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            packed = compute()
        self.captured[shape] = graph, packed

    def replay(self, shape: tuple[int, int], uniforms: Tensor) -> Tensor:
        """Run a captured step on what the lanes hold now. [2, rows]"""
        graph, packed = self.captured[shape]
        self._staging[: len(uniforms)] = uniforms
        self.uniforms[: len(uniforms)].copy_(self._staging[: len(uniforms)], non_blocking=True)
        graph.replay()
        return packed
