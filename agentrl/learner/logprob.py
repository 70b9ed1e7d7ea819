"""Log-probs and entropies from hidden states without keeping [N, V] logits. N tokens, H hidden, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["token_logprobs"]

# Elements of a chunk's logits; the backward pass computes them again, chunk by chunk. On the CPU 32 MiB: larger ones leave the cache and were
# slower. On a GPU 512 MiB: a chunk reads the whole output layer, so with a vocabulary of 150,000 it should have hundreds of rows.
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    sum_pi_squared: bool = False,
    chunk_elements: int | None = None,
) -> tuple[Tensor, ...]:
    """log p and entropy (nats) of softmax(hidden weight^T / temperature), in float32; both carry gradients.

    Args:
        targets_N: the token each row's log-prob is wanted of.
        temperature_N: of each row, > 0.
        sum_pi_squared: answer a third [N]: the sum over the vocabulary of squared probabilities, without gradient.
        chunk_elements: logits that exist at a time (a few times over); by default what suits the device.
    """
    rows = max(1, (chunk_elements or CHUNK_ELEMENTS[hidden_NH.device.type]) // len(weight_VH))
    told: tuple[Tensor, ...] = _TokenLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature_N, rows, sum_pi_squared)  # type: ignore[no-untyped-call]
    return told


class _TokenLogprobs(torch.autograd.Function):
    """With z the logits, p = softmax(z), H the entropy and t the target:

    d log p_t / dz_j = [j = t] - p_j          dH / dz_j = -p_j (log p_j + H)

    Kept for the backward pass are hidden states, weight, targets and two numbers a token. Where nobody asks for the gradient of the entropy its
    term is not computed. The weight's gradient is summed up in float32 whatever the inputs are.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature_N: Tensor, rows: int, squares: bool
    ) -> tuple[Tensor, ...]:
        logp_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        entropy_N, normaliser_N, squared_N = torch.empty_like(logp_N), torch.empty_like(logp_N), torch.empty_like(logp_N)
        logits_buffer, probability_buffer = _buffers(hidden_NH, weight_VH, rows)
        for part in _chunks(len(hidden_NH), rows):
            logits_CV = _logits(hidden_NH[part], weight_VH, temperature_N[part], logits_buffer)
            normaliser_N[part] = logits_CV.logsumexp(-1)
            logp_CV = logits_CV.sub_(normaliser_N[part, None])
            logp_N[part] = logp_CV.gather(-1, targets_N[part, None])[:, 0]
            probability_CV = torch.exp(logp_CV, out=probability_buffer[: len(logp_CV)])
            entropy_N[part] = -torch.linalg.vecdot(probability_CV, logp_CV)
            if squares:
                squared_N[part] = torch.linalg.vecdot(probability_CV, probability_CV)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperature_N, normaliser_N, entropy_N)
        if not squares:
            return logp_N, entropy_N
        ctx.mark_non_differentiable(squared_N)
        return logp_N, entropy_N, squared_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        logp_grad_N, entropy_grad_N = gradients[:2]
        hidden_NH, weight_VH, targets_N, temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        if logp_grad_N is None:
            logp_grad_N = torch.zeros_like(normaliser_N)
        hidden_grad_NH = torch.empty_like(hidden_NH)
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # None: frozen
        logits_buffer, probability_buffer = _buffers(hidden_NH, weight_VH, ctx.rows)
        for part in _chunks(len(hidden_NH), ctx.rows):
            logp_CV = _logits(hidden_NH[part], weight_VH, temperature_N[part], logits_buffer).sub_(normaliser_N[part, None])
            if entropy_grad_N is None:
                grad_CV = logp_CV.exp_().mul_(-logp_grad_N[part, None])
            else:
                probability_CV = torch.exp(logp_CV, out=probability_buffer[: len(logp_CV)])
                scale_CV = logp_CV.add_(entropy_N[part, None]).mul_(entropy_grad_N[part, None]).add_(logp_grad_N[part, None])
                grad_CV = probability_CV.mul_(scale_CV).neg_()
            grad_CV.scatter_add_(-1, targets_N[part, None], logp_grad_N[part, None])
            grad_CV = grad_CV.div_(temperature_N[part, None]).to(hidden_NH.dtype)
            hidden_grad_NH[part] = grad_CV @ weight_VH
            if weight_grad_VH is not None and grad_CV.dtype == torch.float32:
                weight_grad_VH.addmm_(grad_CV.T, hidden_NH[part])
            elif weight_grad_VH is not None:
                weight_grad_VH += grad_CV.T @ hidden_NH[part]
        return hidden_grad_NH, None if weight_grad_VH is None else weight_grad_VH.to(weight_VH.dtype), None, None, None, None


def _buffers(hidden_NH: Tensor, weight_VH: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Room for a chunk's logits and probabilities, used by one chunk after the other: fresh memory for each would be scattered, and slower."""
    logits_CV = hidden_NH.new_empty(min(rows, len(hidden_NH)), len(weight_VH), dtype=torch.float32)
    return logits_CV, torch.empty_like(logits_CV)


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature_C: Tensor, buffer_CV: Tensor) -> Tensor:
    logits_CV = buffer_CV[: len(hidden_CH)]
    if hidden_CH.dtype == torch.float32:
        torch.mm(hidden_CH, weight_VH.T, out=logits_CV)
    else:
        logits_CV.copy_(hidden_CH @ weight_VH.T)
    return logits_CV.div_(temperature_C[:, None])


def _chunks(tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, tokens, rows)]
