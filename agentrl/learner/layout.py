"""How trajectories lie in front of the transformer: side by side, padded to the longest, or packed end to end in one row.

    tokens      wanted      padded      packed
    a0 a1 a2    .  .  x     a0 a1       a0 a1 b0    position ids  0 1 0
    b0 b1       .  x        b0 0

The state before a wanted token is what is read, so tokens from the last wanted one of a row on are not passed through at all.
Dimensions: B trajectories, T tokens, N wanted tokens, P tokens packed, R x W what the transformer is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Layout"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """What the transformer is given, and where its answer is read."""

    token_ids_RW: Tensor
    read_N: Tensor  # flat positions in R x W of the states that the wanted tokens were generated from
    arguments: dict[str, Any]  # further ones of the transformer's forward

    @classmethod
    def padded(cls, token_ids_BT: Tensor, targets_N: Tensor) -> Layout:
        """One row a trajectory. Attention is causal and positions count from the left, so padding on the right needs no mask.

        Args:
            targets_N: flat positions in B x T of the wanted tokens; none of them in the first column.
        """
        rows_N, columns_N = targets_N // token_ids_BT.shape[1], targets_N % token_ids_BT.shape[1] - 1
        width = int(columns_N.max()) + 1 if len(targets_N) else 1
        return cls(token_ids_RW=token_ids_BT[:, :width], read_N=rows_N * width + columns_N, arguments={})

    @classmethod
    def packed(cls, token_ids_BT: Tensor, targets_N: Tensor, *, boundaries: bool) -> Layout:
        """All trajectories in one row.

        Transformers 5.23 keeps packed sequences apart by position ids that begin anew at 0, and only where it is given neither an attention
        mask nor a cache: all of that is decided here and in `Backbone`, and `require_kept_apart` tries it.

        Args:
            boundaries: tell the attention where each sequence begins (flash attention, varlen); others find it out by the positions.
        """
        rows_N, columns_N = targets_N // token_ids_BT.shape[1], targets_N % token_ids_BT.shape[1] - 1
        lengths_B = targets_N.new_zeros(len(token_ids_BT)).scatter_reduce(0, rows_N, columns_N + 1, "amax")
        if not len(targets_N):  # a dummy: one token goes through, and nothing of it is read
            lengths_B[0] = 1
        places_BT = torch.arange(token_ids_BT.shape[1], device=lengths_B.device).expand(token_ids_BT.shape)
        inside_BT = places_BT < lengths_B[:, None]
        starts_B = lengths_B.cumsum(0) - lengths_B
        arguments: dict[str, Any] = {"position_ids": places_BT[inside_BT][None]}
        if boundaries:
            ends = lengths_B[lengths_B > 0].cumsum(0)
            limits = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
            longest = int(lengths_B.max())
            arguments |= {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits, "max_length_q": longest, "max_length_k": longest}
        return cls(token_ids_RW=token_ids_BT[inside_BT][None], read_N=starts_B[rows_N] + columns_N, arguments=arguments)
