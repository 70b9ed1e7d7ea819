"""The policy as the learner sees it: a Hugging Face causal model that answers with log-probs instead of logits.

Dimensions: B trajectories, T tokens, N wanted tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentrl.config.recipe import ModelRecipe
from agentrl.errors import ConfigError
from agentrl.learner.logprob import token_logprobs
from agentrl.learner.ranks import Ranks

__all__ = ["PolicyModel"]

# Two roads to one log-prob in float32 agree to about 1e-6; a family that scales or caps its logits is far off.
SAME_LOGPROB = 1e-3

# Families whose layers end in an MLP of each token by itself.
DENSE_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class PolicyModel(nn.Module):
    """Log-probs and entropies of the tokens that are asked for.

    It is the root of FSDP, and the output layer is used inside its forward: FSDP gathers the root's parameters there and only there.
    Call this, never `causal`: what that answers depends on which tokens were wanted last (`_spare_last_mlp`).
    """

    causal: Any  # a transformers PreTrainedModel with a causal head

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.causal = causal
        self._shape: torch.Size  # [B, T] of the forward pass going on
        self._predicting_N: Tensor  # ... and its flat positions that predict a wanted token

    @classmethod
    def load(cls, model_dir: Path, *, attention: str = "sdpa", gradient_checkpointing: bool = False) -> PolicyModel:
        """Read a Hugging Face directory, in float32 on the CPU.

        Buffers outside the state dict (rotary frequencies) are computed here, with the weights; a model made on the meta device would
        have to compute them again.

        Raises:
            ConfigError: there is no model that loads, or its family does something to its logits that `forward` does not know.
        """
        disable_progress_bar()
        try:
            causal = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=torch.float32, attn_implementation=attention, local_files_only=True, attention_dropout=0.0
            )
        except (OSError, ValueError, ImportError) as error:  # what transformers raises for files, architectures, flash attention
            raise ConfigError(f"the model in {model_dir} cannot be loaded with model.attention {attention}: {error}") from error
        if gradient_checkpointing:
            newer_name = getattr(causal, "activation_checkpointing_enable", None)
            (newer_name or causal.gradient_checkpointing_enable)({"use_reentrant": False})
        policy = cls(causal).train()
        if causal.config.model_type in DENSE_FAMILIES:
            policy._spare_last_mlp()
        if attention == "sdpa":  # flash attention runs on a GPU only
            policy._check(model_dir)
        return policy

    def forward(self, token_ids_BT: Tensor, wanted_BT: Tensor, temperature_B: Tensor) -> tuple[Tensor, Tensor]:
        """log p(token | tokens before it) at temperature, and the entropy of that distribution; both [B, T], 0 where not wanted.

        Args:
            token_ids_BT: right-padded. Attention is causal and positions count from the left, so padding needs no mask.
            wanted_BT: bool. The first column cannot be wanted: nothing precedes it.
        """
        targets_N = wanted_BT.flatten().nonzero()[:, 0]
        self._shape, self._predicting_N = wanted_BT.shape, targets_N - 1  # the token at t is predicted at t - 1
        hidden_BTH = self.causal.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, self._predicting_N)
        logp_N, entropy_N = token_logprobs(
            hidden_NH, self._output_weight, token_ids_BT.flatten()[targets_N], temperature_B[targets_N // wanted_BT.shape[1]]
        )
        blank_BT = logp_N.new_zeros(wanted_BT.shape)
        return blank_BT.masked_scatter(wanted_BT, logp_N), blank_BT.masked_scatter(wanted_BT, entropy_N)

    def shard(self, ranks: Ranks, recipe: ModelRecipe) -> None:
        """Split the parameters over the ranks, layer by layer and the rest at the root. The same at every number of ranks."""
        self.to(ranks.device)
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = half if recipe.dtype == "bfloat16" else MixedPrecisionPolicy()
        for layer in self.causal.base_model.layers:
            fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
        fully_shard(self, mesh=ranks.mesh, mp_policy=policy)

    def sync_gradients(self, now: bool) -> None:
        """Whether the next backward pass adds the gradients of all ranks: only at the last micro-batch of an update."""
        root: Any = self  # fully_shard has made it an FSDPModule
        root.set_requires_gradient_sync(now)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, in the model's order, tied ones once."""
        yield from self.causal.named_parameters()

    @property
    def _output_weight(self) -> Tensor:
        head = self.causal.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ConfigError("the output layer of this model has a bias: not supported by the learner")
        weight: Tensor = head.weight
        return weight

    def _spare_last_mlp(self) -> None:
        """Run the last layer's MLP only where something is predicted: what it adds elsewhere is never read.

        Generated tokens are a fifth to a third of a search trajectory, and the MLP two thirds of a layer.
        """

        def pick(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            return inputs[0].flatten(0, 1).index_select(0, self._predicting_N)

        def put_back(_: nn.Module, __: tuple[Tensor], output_NH: Tensor) -> Tensor:
            blank = output_NH.new_zeros(self._shape[0] * self._shape[1], output_NH.shape[1])
            return blank.index_copy(0, self._predicting_N, output_NH).view(*self._shape, -1)

        mlp = self.causal.base_model.layers[-1].mlp
        mlp.register_forward_pre_hook(pick)
        mlp.register_forward_hook(put_back)

    @torch.no_grad()
    def _check(self, model_dir: Path) -> None:
        token_ids_BT = torch.arange(8)[None] % self._output_weight.shape[0]
        wanted_BT = torch.arange(8)[None] > 0
        ours_BT, _ = self(token_ids_BT, wanted_BT, torch.ones(1))
        self._predicting_N = torch.arange(8)  # here all are read
        logits_BTV = self.causal(input_ids=token_ids_BT, use_cache=False).logits.float()
        theirs_BS = logits_BTV[:, :-1].log_softmax(-1).gather(-1, token_ids_BT[:, 1:, None])[..., 0]
        apart = (ours_BT[:, 1:] - theirs_BS).abs().max().item()
        if not apart < SAME_LOGPROB:
            raise ConfigError(
                f"{model_dir}: log-probs differ from the model's own by {apart:.3g}: this family changes its logits in a way unknown here"
            )
