"""Whitening: mean 0 and variance 1 over the generated tokens of a batch. B trajectories, T tokens."""

from __future__ import annotations

from torch import Tensor

__all__ = ["whiten"]

# Added to the variance, as verl does: where all values are equal they become 0.
VARIANCE_EPS = 1e-8


def whiten(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(x - mean) * rsqrt(variance + 1e-8) with the mean and the unbiased variance over the mask; 0 elsewhere.

    As verl's `masked_whiten`, but that a mask of one token or none gives 0 and no error. Values outside the mask are never looked at.
    """
    outside_BT = ~mask_BT.bool()
    count = (~outside_BT).sum()
    values_BT = values_BT.masked_fill(outside_BT, 0.0)
    centred_BT = (values_BT - values_BT.sum() / count.clamp(min=1)).masked_fill(outside_BT, 0.0)
    variance = centred_BT.square().sum() / (count - 1).clamp(min=1)
    return centred_BT * (variance + VARIANCE_EPS).rsqrt()
