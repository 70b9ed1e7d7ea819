"""The model's arithmetic: one forward over prompt chunks, one over single next tokens, both on a slot-wise KV cache.

A slot is one row of the cache and holds the keys and values of one sequence, token p of the sequence at column p. Nothing here knows of
requests: callers say which tokens go where.

Dimensions: S slots, n rows at work, N tokens at work, L attended columns, C longest chunk, D hidden, H heads, K key-value heads, G = H / K,
E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.engine.architecture import ModelConfig
from agentrl.engine.parking import emptied, storage_bytes
from agentrl.engine.weights import LayerWeights, Weights

__all__ = ["Chunk", "ModelRunner"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens that continue the sequence in `slot` from position `start` on."""

    slot: int
    tokens: Sequence[int]
    start: int = 0


class ModelRunner:
    """A model with a KV cache of `slots` rows and `context_tokens` columns. Synchronous; one thread at a time."""

    def __init__(self, weights: Weights, *, slots: int, context_tokens: int) -> None:
        config = weights.config
        self.weights = weights
        self.config: ModelConfig = config
        self.slots = slots
        self.context_tokens = context_tokens
        self.idle_position = context_tokens  # one column more than a sequence can fill: rows without a sequence write there
        like = weights.embedding
        shape = (slots, config.kv_heads, context_tokens + 1, config.head_size)
        self._keys = [like.new_zeros(shape) for _ in range(config.layers)]
        self._values = [like.new_zeros(shape) for _ in range(config.layers)]
        self._cos, self._sin = config.rope.tables(config.head_size, context_tokens + 1, like)
        # which of the two norms each head of queries and keys has
        self._norm_rows = torch.tensor([0] * config.heads + [1] * config.kv_heads, device=like.device)
        # On a CPU small matrix products are fastest, in fp32; otherwise a fused kernel, which keeps its sums in fp32 whatever its inputs are.
        self._fused = like.is_cuda or like.dtype != torch.float32
        self._slots = torch.arange(slots, device=like.device)
        self._columns = torch.arange(context_tokens + 1, device=like.device)

    @property
    def device(self) -> torch.device:
        """Where the arithmetic happens."""
        return self.weights.embedding.device

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk], *, attend: int | None = None, every_token: bool = False) -> Tensor:
        """Run chunks of several slots at once; the linear layers see no padding, attention is padded to the longest chunk.

        Args:
            attend: columns to attend to, by default up to the last position among the chunks; more only changes the shape of the work.
            every_token: by default only the last token of each chunk goes through all of the last layer: of the others it is enough to know
                their keys and values.

        Returns:
            Final hidden states: one per chunk [n, D], or one per token, chunk after chunk [N, D].
        """
        batch = _PrefillBatch.of(chunks, attend=attend, device=self.device)
        mask_n1CL = self._mask(batch.grid_nC, batch.attend)[:, None]
        x_ND = self.weights.embedding[batch.tokens_N]
        cos, sin = self._cos[batch.positions_N, None], self._sin[batch.positions_N, None]
        for index, layer in enumerate(self.weights.layers):
            q_NHE, k_NKE, v_NKE = self._project(x_ND, layer, cos, sin)
            keys, values = self._keys[index], self._values[index]
            keys[batch.slots_N, :, batch.positions_N] = k_NKE
            values[batch.slots_N, :, batch.positions_N] = v_NKE
            span_nKLE = keys[:, :, : batch.attend][batch.slots_n], values[:, :, : batch.attend][batch.slots_n]
            if index < len(self.weights.layers) - 1 or every_token:
                # rows of padding hold whatever memory held: nothing reads what they attend to
                q_nCHE = q_NHE.new_empty((*batch.grid_nC.shape, *q_NHE.shape[1:]))
                q_nCHE[batch.rows_N, batch.columns_N] = q_NHE
                o_nHCE = self._attend_many(q_nCHE.transpose(1, 2), *span_nKLE, mask_n1CL)
                o_NHE = o_nHCE[batch.rows_N, :, batch.columns_N]
            else:
                x_ND, mask_n11L = x_ND[batch.last_n], self._mask(batch.positions_N[batch.last_n], batch.attend)[:, None, None]
                o_NHE = self._attend_many(q_NHE[batch.last_n, :, None], *span_nKLE, mask_n11L).squeeze(2)
            x_ND = self._finish_layer(x_ND, o_NHE.flatten(1), layer)
        return self._norm(x_ND, self.weights.norm)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, *, attend: int) -> Tensor:
        """Run one token in each of the slots 0..n-1.

        Args:
            tokens: [n] long.
            positions: [n] long; `idle_position` for rows without a sequence, whose results mean nothing.
            attend: columns to attend to, more than every position at work.

        Returns:
            Logits. [n, V]
        """
        slots_n = self._slots[: len(tokens)]
        mask_n1L = self._mask(positions, attend)[:, None]
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        x_nD = self.weights.embedding[tokens]
        for index, layer in enumerate(self.weights.layers):
            q_nHE, k_nKE, v_nKE = self._project(x_nD, layer, cos, sin)
            keys, values = self._keys[index], self._values[index]
            keys[slots_n, :, positions] = k_nKE
            values[slots_n, :, positions] = v_nKE
            span_nKLE = keys[: len(tokens), :, :attend], values[: len(tokens), :, :attend]
            x_nD = self._finish_layer(x_nD, self._attend_one(q_nHE, *span_nKLE, mask_n1L), layer)
        return F.linear(self._norm(x_nD, self.weights.norm), self.weights.head).float()

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Final hidden states to logits in fp32. [N, V]"""
        return F.linear(hidden_ND, self.weights.head).float()

    @torch.inference_mode()
    def swap(self, first: int, second: int, *, tokens: int) -> None:
        """Exchange the first `tokens` columns of two slots."""
        for cache in (*self._keys, *self._values):
            kept = cache[first, :, :tokens].clone()
            cache[first, :, :tokens] = cache[second, :, :tokens]
            cache[second, :, :tokens] = kept

    @torch.inference_mode()
    def clear(self, slots: Sequence[int]) -> None:
        """Zero slots: a value that is not a number would reach through the attention mask."""
        for cache in (*self._keys, *self._values):
            cache[list(slots)] = 0.0

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values take now."""
        return storage_bytes((*self._keys, *self._values))

    def release_cache(self) -> None:
        """Give the memory of all keys and values away; nothing may run until `restore_cache`."""
        emptied((*self._keys, *self._values))

    def restore_cache(self) -> None:
        """Have it again, all 0."""
        emptied((*self._keys, *self._values), again=True)

    def _attend_many(self, q_nHCE: Tensor, keys_nKLE: Tensor, values_nKLE: Tensor, mask_n1CL: Tensor) -> Tensor:
        """Attention of several queries per head. [n, H, C, E]"""
        groups = self.config.heads // self.config.kv_heads
        if groups > 1 and q_nHCE.is_cuda:  # there the kernels that take a mask want a key for every head
            keys_nKLE, values_nKLE = keys_nKLE.repeat_interleave(groups, 1), values_nKLE.repeat_interleave(groups, 1)
            groups = 1
        return F.scaled_dot_product_attention(q_nHCE, keys_nKLE, values_nKLE, attn_mask=mask_n1CL, enable_gqa=groups > 1)

    def _attend_one(self, q_nHE: Tensor, keys_nKLE: Tensor, values_nKLE: Tensor, mask_n1L: Tensor) -> Tensor:
        """Attention of one query per head: heads that share keys are treated as queries of one head. [n, H E]"""
        n, kv_heads, attend, size = keys_nKLE.shape
        q_nKGE = q_nHE.reshape(n, kv_heads, -1, size)
        if self._fused:
            o_nKGE = F.scaled_dot_product_attention(q_nKGE, keys_nKLE, values_nKLE, attn_mask=mask_n1L[:, None])
        else:  # one small product per (row, key-value head)
            mask_m1L = mask_n1L.expand(n, kv_heads, attend).reshape(n * kv_heads, 1, attend)
            scores_mGL = torch.baddbmm(mask_m1L, q_nKGE.flatten(0, 1), keys_nKLE.flatten(0, 1).transpose(1, 2), alpha=size**-0.5)
            o_nKGE = torch.bmm(scores_mGL.softmax(-1), values_nKLE.flatten(0, 1))
        return o_nKGE.reshape(n, -1)

    def _mask(self, last: Tensor, span: int) -> Tensor:
        """Additive attention mask: 0 up to and with column `last`, -inf after. [*last.shape, span]"""
        return self._cos.new_zeros((*last.shape, span)).masked_fill_(self._columns[:span] > last[..., None], float("-inf"))

    def _project(self, x_ND: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        qkv = F.linear(self._norm(x_ND, layer.input_norm), layer.qkv, layer.qkv_bias).view(len(x_ND), -1, config.head_size)
        qk = qkv[:, : config.heads + config.kv_heads]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (config.head_size,), None, config.norm_epsilon) * layer.qk_norm[self._norm_rows]
        turned = _rotate(qk, cos, sin)
        return turned[:, : config.heads], turned[:, config.heads :], qkv[:, config.heads + config.kv_heads :]

    def _finish_layer(self, x_ND: Tensor, attended: Tensor, layer: LayerWeights) -> Tensor:
        x_ND = torch.addmm(x_ND, attended, layer.out.t())
        if layer.out_bias is not None:
            x_ND = x_ND + layer.out_bias
        gate, up = F.linear(self._norm(x_ND, layer.post_norm), layer.gate_up).chunk(2, -1)
        return torch.addmm(x_ND, F.silu(gate).mul_(up), layer.down.t())

    def _norm(self, x_ND: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x_ND, (self.config.hidden,), weight, self.config.norm_epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PrefillBatch:
    """Where every token of a prefill comes from and goes to."""

    tokens_N: Tensor
    rows_N: Tensor  # its chunk
    columns_N: Tensor  # its place in the chunk
    slots_N: Tensor
    positions_N: Tensor  # its place in the sequence
    slots_n: Tensor
    last_n: Tensor  # of each chunk's tokens the last
    grid_nC: Tensor  # positions, chunk by column, padding included
    attend: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], *, attend: int | None, device: torch.device) -> _PrefillBatch:
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        slots = torch.tensor([chunk.slot for chunk in chunks])
        rows = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
        ends = lengths.cumsum(0)
        columns = torch.arange(len(rows)) - (ends - lengths)[rows]
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        on_host = {
            "tokens_N": tokens,
            "rows_N": rows,
            "columns_N": columns,
            "slots_N": slots[rows],
            "positions_N": starts[rows] + columns,
            "slots_n": slots,
            "last_n": ends - 1,
            "grid_nC": starts[:, None] + torch.arange(int(lengths.max())),
        }
        span = int((starts + lengths).max()) if attend is None else attend
        return cls(**{name: tensor.to(device) for name, tensor in on_host.items()}, attend=span)


def _rotate(x_NHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x_NHE.shape[-1] // 2
    return torch.addcmul(x_NHE * cos, x_NHE.roll(half, -1), sin)
