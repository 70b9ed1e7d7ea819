"""From losses of tokens to one number. B trajectories, T tokens.

Every denominator is given and counts the whole update: all ranks, all micro-batches, by the loss mask, before tokens are masked by age or
rejection. So the parts' numbers add up to the whole's however the update was cut, and masking a token does not make the others heavier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

__all__ = ["AGGREGATIONS", "Denominators", "aggregate"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Denominators:
    """What the sums over a part of an update are divided by."""

    tokens: Tensor  # 0-d: generated tokens of the whole update
    sequences: Tensor  # 0-d: trajectories of the whole update with a generated token
    row_tokens_B: Tensor  # generated tokens of each row of this part
    horizon: float | None = None  # tokens, of seq_mean_token_sum_norm: a constant of the run, such as the most tokens a trajectory may generate

    @classmethod
    def of(cls, loss_mask_BT: Tensor, *, horizon: float | None = None) -> Denominators:
        """Of an update that is one part on one rank; elsewhere `tokens` and `sequences` are added up first."""
        row_tokens_B = loss_mask_BT.sum(dim=1)
        return cls(tokens=row_tokens_B.sum(), sequences=(row_tokens_B > 0).sum(), row_tokens_B=row_tokens_B, horizon=horizon)

    def rows(self, chosen: Tensor | slice) -> Denominators:
        """For a part of these rows, by index: the update's counts stay."""
        return Denominators(tokens=self.tokens, sequences=self.sequences, row_tokens_B=self.row_tokens_B[chosen], horizon=self.horizon)


def aggregate(values_BT: Tensor, mask_BT: Tensor, *, how: str, denominators: Denominators) -> Tensor:
    """One number (0-d) of the values inside the mask; adding it up over the parts of an update gives the update's.

    token_mean                sum of all / tokens (DAPO, Yu et al. 2025)
    token_sum                 sum of all
    seq_mean_token_sum        sum of all / sequences
    seq_mean_token_sum_norm   sum of all / (sequences * horizon) (Dr. GRPO, Liu et al. 2025)
    seq_mean_token_mean       sum over rows of (sum / tokens of the row) / sequences (GRPO, Shao et al. 2024, eq. 3)

    Values outside the mask are replaced, not multiplied: a NaN there reaches neither the number nor another token's gradient. The names
    and meanings are verl's `agg_loss`.

    Raises:
        ValueError: no such aggregation; seq_mean_token_sum_norm without a horizon.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {how!r}: expected one of {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[how](values_BT.masked_fill(mask_BT == 0, 0.0), denominators)


def _token_mean(values_BT: Tensor, by: Denominators) -> Tensor:
    return values_BT.sum() / by.tokens.clamp(min=1)


def _token_sum(values_BT: Tensor, by: Denominators) -> Tensor:
    return values_BT.sum()


def _seq_mean_token_sum(values_BT: Tensor, by: Denominators) -> Tensor:
    return values_BT.sum() / by.sequences.clamp(min=1)


def _seq_mean_token_sum_norm(values_BT: Tensor, by: Denominators) -> Tensor:
    if by.horizon is None:
        raise ValueError("seq_mean_token_sum_norm needs a horizon: the width of a padded batch would make the loss depend on how it was cut")
    return _seq_mean_token_sum(values_BT, by) / by.horizon


def _seq_mean_token_mean(values_BT: Tensor, by: Denominators) -> Tensor:
    return (values_BT.sum(dim=1) / by.row_tokens_B.clamp(min=1)).sum() / by.sequences.clamp(min=1)


AGGREGATIONS: Mapping[str, Callable[[Tensor, Denominators], Tensor]] = MappingProxyType(
    {
        "token_mean": _token_mean,
        "token_sum": _token_sum,
        "seq_mean_token_sum": _seq_mean_token_sum,
        "seq_mean_token_sum_norm": _seq_mean_token_sum_norm,
        "seq_mean_token_mean": _seq_mean_token_mean,
    }
)
