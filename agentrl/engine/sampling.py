"""Choosing tokens: one counter-based uniform number per token, the inverse of the cumulative distribution, log-probs as sampled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["pack", "sample", "uniforms", "unpack"]

_WHOLE = 1 << 16  # probabilities that are searched at once: fewer operations, on half a megabyte
_BLOCK = 64  # tokens, where there are more: the two searches together look at V / 64 + 64 numbers
# A total times this is less than the total, so that a token of probability 0 at the end is never taken.
_BELOW_ONE = 1.0 - 2.0**-52

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(bits) for bits in (30, 27, 31, 11))
_ONE = np.uint64(1)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """`agentrl.seeds.counter_uniform` of many (seed, position) pairs at once, equal bit for bit. [n] each"""
    value = (positions + _ONE) * _GOLDEN
    value += seeds
    value ^= value >> _SHIFTS[0]
    value *= _FIRST
    value ^= value >> _SHIFTS[1]
    value *= _SECOND
    value ^= value >> _SHIFTS[2]
    value >>= _SHIFTS[3]
    drawn: npt.NDArray[np.float64] = np.multiply(value, 2.0**-53, dtype=np.float64)
    return drawn


def sample(logits_NV: Tensor, temperatures_N: Tensor | None, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob under log_softmax(logits / T); temperature 0 takes the likeliest, with T = 1 for the log-prob.

    The token is the first whose cumulative probability exceeds the row's uniform number. Nothing here waits for a GPU.

    Args:
        logits_NV: fp32.
        temperatures_N: fp32, >= 0; None: all 1.
        uniforms_N: fp64 in [0, 1).

    Returns:
        tokens_N (long), logprobs_N (fp32; not finite where the row's logits are not).
    """
    if temperatures_N is None:
        probabilities_NV = logits_NV.softmax(-1)
        tokens_N = _invert(probabilities_NV, uniforms_N)
    else:
        greedy_N = temperatures_N == 0
        probabilities_NV = (logits_NV / temperatures_N.masked_fill(greedy_N, 1.0)[:, None]).softmax(-1)
        tokens_N = torch.where(greedy_N, logits_NV.argmax(-1), _invert(probabilities_NV, uniforms_N))
    return tokens_N, probabilities_NV.gather(1, tokens_N[:, None])[:, 0].log()


def pack(tokens_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Both in one tensor, so that one transfer brings them to the host; fp64 holds either exactly. [2, N]"""
    return torch.stack((tokens_N.double(), logprobs_N.double()))


def unpack(packed_2N: Tensor) -> tuple[list[int], list[float]]:
    """The tokens and the log-probs of `pack`. Waits for the device."""
    tokens, logprobs = packed_2N.tolist()
    return list(map(int, tokens)), logprobs


def _invert(probabilities_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number. [N]

    Much is searched by blocks: their sums are a 64th of the memory that the cumulative sums of all tokens would be, in fp64.
    """
    vocabulary = probabilities_NV.shape[1]
    if probabilities_NV.numel() <= _WHOLE:
        cumulative_NV = probabilities_NV.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative_NV, uniforms_N[:, None] * (cumulative_NV[:, -1:] * _BELOW_ONE))[:, 0]
    padding = -vocabulary % _BLOCK
    blocks_NBK = (F.pad(probabilities_NV, (0, padding)) if padding else probabilities_NV).view(len(probabilities_NV), -1, _BLOCK)
    sums_NB = blocks_NBK.sum(-1, dtype=torch.float64)
    ends_NB = sums_NB.cumsum(-1)
    target_N1 = uniforms_N[:, None] * (ends_NB[:, -1:] * _BELOW_ONE)
    block_N1 = _first_above(ends_NB, target_N1)
    inside_NK = blocks_NBK.gather(1, block_N1[:, :, None].expand(-1, 1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    target_N1 = target_N1 - (ends_NB - sums_NB).gather(1, block_N1)
    # rounding may have brought the rest of the target out of the block
    target_N1 = torch.minimum(target_N1.clamp_(min=0.0), inside_NK[:, -1:] * _BELOW_ONE)
    return torch.add(_first_above(inside_NK, target_N1), block_N1, alpha=_BLOCK)[:, 0].clamp_(max=vocabulary - 1)


def _first_above(cumulative_NK: Tensor, target_N1: Tensor) -> Tensor:
    """The first column whose value exceeds the target; the last where nothing does, being no number. [N, 1]"""
    return torch.searchsorted(cumulative_NK, target_N1, right=True).clamp_(max=cumulative_NK.shape[1] - 1)
