"""What the next decode step needs of every slot, kept as arrays so that a step builds nothing anew."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager

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
        self._temperatures = np.ones(rows)  # the same on the host
        self.plain = True  # every temperature is 1

    @classmethod
    def of(cls, sequences: Many[Sequence], device: torch.device) -> Draws:
        """One row per sequence, for its next token."""
        draws = cls(len(sequences), device)
        draws.place(list(range(len(sequences))), sequences)
        return draws

    def place(self, rows: list[int], sequences: Many[Sequence]) -> None:
        """Each row samples its sequence's next token."""
        params = [sequence.request.params for sequence in sequences]
        self.seeds[rows] = [each.seed for each in params]
        self.positions[rows] = [each.position + len(sequence.output) for each, sequence in zip(params, sequences, strict=True)]
        self._temperatures[rows] = [each.temperature for each in params]
        self.temperatures[rows] = torch.tensor([each.temperature for each in params], device=self.temperatures.device)
        self.plain = bool((self._temperatures == 1.0).all())

    def uniforms(self, rows: int) -> Tensor:
        """The uniform numbers of the first `rows` rows, on the host. fp64 [rows]"""
        return torch.from_numpy(uniforms(self.seeds[:rows], self.positions[:rows]))

    def advance(self, rows: int) -> None:
        """The first `rows` rows have drawn."""
        self.positions[:rows] += np.uint64(1)


class Lanes:
    """Row s is slot s. Rows without a sequence write to the idle column."""

    def __init__(self, slots: int, idle_position: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)  # the next input
        self.positions = torch.full((slots,), idle_position, dtype=torch.long, device=device)  # ... and where it goes
        self.draws = Draws(slots, device)
        self._steps = torch.zeros(slots, dtype=torch.long, device=device)  # 1 where a sequence runs
        self._idle_position = idle_position

    def place(self, sequences: Many[Sequence]) -> None:
        """Each sequence's newest output token is its slot's next input."""
        slots = [sequence.slot for sequence in sequences]
        if slots:
            self.tokens[slots] = torch.tensor([sequence.output[-1] for sequence in sequences], device=self.tokens.device)
            self.positions[slots] = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences], device=self.tokens.device)
            self._steps[slots] = 1
            self.draws.place(slots, sequences)

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
        self.positions[:rows].add_(self._steps[:rows])

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """No sequence runs inside, and afterwards all is as it was: a step taken inside writes to the idle column and changes nothing."""
        kept = [lane.clone() for lane in (self.tokens, self.positions)]
        self.positions.fill_(self._idle_position)
        yield
        for lane, before in zip((self.tokens, self.positions), kept, strict=True):
            lane.copy_(before)
