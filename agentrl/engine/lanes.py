"""What the next decode step needs of every slot, kept as arrays so that a step builds nothing anew."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from agentrl.engine.sampling import uniforms
from agentrl.engine.sequence import Sequence

__all__ = ["Draws", "Lanes"]


class Draws:
    """The seeds, counters and temperatures a set of rows samples with."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.seeds = np.zeros(rows, dtype=np.uint64)
        self.positions = np.zeros(rows, dtype=np.uint64)
        self.temperatures = torch.ones(rows, device=device)

    @classmethod
    def of(cls, sequences: Many[Sequence], device: torch.device) -> Draws:
        """One row per sequence, for its next token."""
        draws = cls(len(sequences), device)
        for row, sequence in enumerate(sequences):
            draws.place(row, sequence)
        return draws

    def place(self, row: int, sequence: Sequence) -> None:
        """The row samples the sequence's next token."""
        params = sequence.request.params
        self.seeds[row] = params.seed
        self.positions[row] = params.position + len(sequence.output)
        self.temperatures[row] = params.temperature

    def uniforms(self, rows: int) -> Tensor:
        """The uniform numbers of the first `rows` rows. fp64 [rows]"""
        return torch.from_numpy(uniforms(self.seeds[:rows], self.positions[:rows])).to(self.temperatures.device)


class Lanes:
    """Row s is slot s. Rows without a sequence write to the idle column."""

    def __init__(self, slots: int, idle_position: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)  # the next input
        self.positions = torch.full((slots,), idle_position, dtype=torch.long, device=device)  # ... and where it goes
        self.draws = Draws(slots, device)
        self._steps = torch.zeros(slots, dtype=torch.long, device=device)  # 1 where a sequence runs
        self._idle_position = idle_position

    def place(self, slot: int, sequence: Sequence) -> None:
        """The sequence's newest output token is the slot's next input."""
        self.tokens[slot] = sequence.output[-1]
        self.positions[slot] = len(sequence.request.input_ids) + len(sequence.output) - 1
        self._steps[slot] = 1
        self.draws.place(slot, sequence)

    def idle(self, slot: int) -> None:
        """No sequence runs in the slot."""
        self.positions[slot] = self._idle_position
        self._steps[slot] = 0

    def idle_all(self) -> None:
        """No sequence runs."""
        self.positions.fill_(self._idle_position)
        self._steps.zero_()

    def advance(self, tokens: Tensor) -> None:
        """Tokens were drawn in the slots 0..n-1: they are the next inputs. [n]"""
        rows = len(tokens)
        self.tokens[:rows] = tokens
        self.positions[:rows] += self._steps[:rows]
        self.draws.positions[:rows] += np.uint64(1)
