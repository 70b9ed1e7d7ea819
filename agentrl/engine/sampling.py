"""Choosing tokens: one counter-based uniform number per token, the inverse of the cumulative distribution, log-probs as sampled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["sample", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """`agentrl.seeds.counter_uniform` of many (seed, position) pairs at once, equal bit for bit. [n] each"""
    value = seeds + (positions + np.uint64(1)) * _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    value ^= value >> np.uint64(31)
    drawn: npt.NDArray[np.float64] = (value >> np.uint64(11)) * 2.0**-53
    return drawn


@torch.inference_mode()
def sample(logits_NV: Tensor, temperatures_N: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob under log_softmax(logits / T); temperature 0 takes the likeliest, with T = 1 for the log-prob.

    The token is the first whose cumulative probability exceeds the row's uniform number.

    Args:
        logits_NV: fp32.
        temperatures_N: fp32, >= 0.
        uniforms_N: fp64 in [0, 1).

    Returns:
        tokens_N (long), logprobs_N (fp32; not finite where the row's logits are not).
    """
    greedy_N = temperatures_N == 0
    probabilities_NV = (logits_NV / temperatures_N.masked_fill(greedy_N, 1.0)[:, None]).softmax(-1)
    cumulative_NV = probabilities_NV.cumsum(-1, dtype=torch.float64)
    total_N = cumulative_NV[:, -1]
    # below the total even where the product rounds up to it: a token of probability 0 at the end must not be taken
    target_N = torch.minimum(uniforms_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    tokens_N = torch.searchsorted(cumulative_NV, target_N[:, None], right=True)[:, 0].clamp_(max=logits_NV.shape[1] - 1)
    if bool(greedy_N.any()):
        tokens_N = torch.where(greedy_N, logits_NV.argmax(-1), tokens_N)
    return tokens_N, probabilities_NV.gather(1, tokens_N[:, None])[:, 0].log()
