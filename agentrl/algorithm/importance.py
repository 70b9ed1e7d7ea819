"""Importance weights between two policies, and how many samples they leave. B trajectories, T tokens."""

from __future__ import annotations

from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "effective_sample_share", "truncated_weights"]

# exp(20) = 5e8: beyond it a ratio says nothing but that something is wrong, and sums in float32 would overflow.
MAX_LOG_RATIO = 20.0


def truncated_weights(proximal_BT: Tensor, behaviour_BT: Tensor, *, truncate: float) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling of tokens (Ionides 2008): min(proximal / behaviour, truncate), without gradient.

    Returns:
        The weights [B, T] and where they were cut [B, T], bool.
    """
    weights_BT = (proximal_BT.detach() - behaviour_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weights_BT.clamp(max=truncate), weights_BT > truncate


def effective_sample_share(weight_sum: Tensor, weight_square_sum: Tensor, tokens: Tensor) -> Tensor:
    """Kish's effective sample size over the number of samples: (sum w)^2 / (n sum w^2), in 0..1.

    Takes sums, so that they can be added over micro-batches and ranks first. 1 where all weights are equal; 0 where there are no tokens.
    """
    return weight_sum.square() / (tokens * weight_square_sum).clamp(min=1e-30)
