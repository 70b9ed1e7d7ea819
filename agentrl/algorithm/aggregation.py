"""From losses of tokens to one number. The denominator is always given: it is global over ranks and micro-batches."""

from __future__ import annotations

from torch import Tensor

__all__ = ["token_mean"]


def token_mean(values_BT: Tensor, mask_BT: Tensor, *, denominator: Tensor) -> Tensor:
    """Sum of the masked values over `denominator`, the number of generated tokens of the whole update.

    The values outside the mask are replaced, not multiplied: a NaN there reaches neither the sum nor the gradient of the others.
    """
    return values_BT.masked_fill(mask_BT == 0, 0.0).sum() / denominator
