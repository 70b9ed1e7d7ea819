"""Log-probs and entropies from hidden states without keeping [N, V] logits. N tokens, H hidden, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["token_logprobs"]

# Elements of a chunk's logits (float32: 64 MiB). The backward pass computes them again, chunk by chunk.
CHUNK_ELEMENTS = 1 << 24


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    sum_pi_squared: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, ...]:
    """log p and entropy (nats) of softmax(hidden weight^T / temperature), in float32; both carry gradients.

    Args:
        targets_N: the token each row's log-prob is wanted of.
        temperature_N: of each row, > 0.
        sum_pi_squared: answer a third [N]: the sum over the vocabulary of squared probabilities, without gradient.
        chunk_elements: logits that exist at a time.
    """
    rows = max(1, chunk_elements // len(weight_VH))
    told: tuple[Tensor, ...] = _TokenLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature_N, rows, sum_pi_squared)  # type: ignore[no-untyped-call]
    return told


class _TokenLogprobs(torch.autograd.Function):
    """With z the logits, p = softmax(z), H the entropy and t the target:

    d log p_t / dz_j = [j = t] - p_j          dH / dz_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature_N: Tensor, rows: int, squares: bool
    ) -> tuple[Tensor, ...]:
        logp_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        entropy_N, normaliser_N, squared_N = torch.empty_like(logp_N), torch.empty_like(logp_N), torch.empty_like(logp_N)
        for part in _chunks(len(hidden_NH), rows):
            logits_CV = _logits(hidden_NH[part], weight_VH, temperature_N[part])
            normaliser_N[part] = logits_CV.logsumexp(-1)
            logp_N[part] = logits_CV.gather(-1, targets_N[part, None])[:, 0] - normaliser_N[part]
            probability_CV = (logits_CV - normaliser_N[part, None]).exp_()
            entropy_N[part] = normaliser_N[part] - torch.linalg.vecdot(probability_CV, logits_CV)
            if squares:
                squared_N[part] = torch.linalg.vecdot(probability_CV, probability_CV)
        ctx.rows = rows
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperature_N, normaliser_N, entropy_N)
        if not squares:
            return logp_N, entropy_N
        ctx.mark_non_differentiable(squared_N)
        return logp_N, entropy_N, squared_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logp_grad_N, entropy_grad_N = gradients[:2]
        hidden_NH, weight_VH, targets_N, temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        hidden_grad_NH = torch.empty_like(hidden_NH)
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # None: frozen
        for part in _chunks(len(hidden_NH), ctx.rows):
            logp_CV = _logits(hidden_NH[part], weight_VH, temperature_N[part]).sub_(normaliser_N[part, None])
            probability_CV = logp_CV.exp()
            scale_CV = logp_CV.add_(entropy_N[part, None]).mul_(entropy_grad_N[part, None]).add_(logp_grad_N[part, None])
            grad_CV = probability_CV.mul_(scale_CV).neg_()
            grad_CV.scatter_add_(-1, targets_N[part, None], logp_grad_N[part, None])
            grad_CV = grad_CV.div_(temperature_N[part, None]).to(hidden_NH.dtype)
            hidden_grad_NH[part] = grad_CV @ weight_VH
            if weight_grad_VH is not None:
                weight_grad_VH += grad_CV.T @ hidden_NH[part]
        return hidden_grad_NH, None if weight_grad_VH is None else weight_grad_VH.to(weight_VH.dtype), None, None, None, None


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature_C: Tensor) -> Tensor:
    return (hidden_CH @ weight_VH.T).float().div_(temperature_C[:, None])


def _chunks(tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, tokens, rows)]
