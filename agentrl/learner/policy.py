"""The policy as the learner sees it: a Hugging Face causal model that answers with log-probs instead of logits.

Dimensions: B trajectories, T tokens, N wanted tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from agentrl.config.attentions import PACKED_ATTENTIONS
from agentrl.errors import ConfigError
from agentrl.learner.backbone import Backbone, load_pretrained
from agentrl.learner.flops import ModelShape
from agentrl.learner.logprob import token_logprobs
from agentrl.learner.lora import Adapters
from agentrl.learner.ranks import Ranks

if TYPE_CHECKING:  # so that a model needs nothing of what recipes are made of
    from agentrl.config.recipe import LoraRecipe

__all__ = ["PolicyModel"]

# Two roads to one log-prob in float32 agree to about 1e-6; a family that scales or caps its logits is far off.
SAME_LOGPROB = 1e-3


class PolicyModel(nn.Module):
    """Log-probs and entropies of the tokens that are asked for.

    It is the root of FSDP, and the output layer is used inside its forward: FSDP gathers the root's parameters there and only there.
    Call this, never `causal`: what that answers depends on which tokens were wanted last (`Backbone.will_read`).
    """

    causal: Any  # a transformers PreTrainedModel with a causal head

    def __init__(self, causal: Any, *, packed: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.adapters: Adapters | None = None  # with LoRA
        self._backbone = Backbone(causal.base_model, packed=packed)

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        packed: bool = False,
        lora: LoraRecipe | None = None,
    ) -> PolicyModel:
        """Read a Hugging Face directory, in float32 on the CPU; with `lora`, add adapters and freeze everything else.

        With `packed`, trajectories pass end to end in one row instead of side by side.

        The adapters' first values come from torch's random numbers: ranks begin with the same seed.

        Raises:
            ConfigError: there is no model that loads, its family does something to its logits that `forward` does not know, or it has
                no layers such as the adapters are asked for.
        """
        causal = load_pretrained(AutoModelForCausalLM, model_dir, attention=attention, gradient_checkpointing=gradient_checkpointing)
        policy = cls(causal, packed=packed).train()
        if attention not in PACKED_ATTENTIONS:  # those run on a GPU only
            policy._check(model_dir)
        if lora is not None:
            policy.adapters = Adapters.attach(causal, lora)
        return policy

    def forward(self, token_ids_BT: Tensor, wanted_BT: Tensor, temperature_B: Tensor, *, sum_pi_squared: bool = False) -> tuple[Tensor, ...]:
        """log p(token | tokens before it) at temperature, and the entropy of that distribution; both [B, T], 0 where not wanted.

        Args:
            token_ids_BT: right-padded.
            wanted_BT: bool. The first column cannot be wanted: nothing precedes it.
            sum_pi_squared: answer a third [B, T]: the sum over the vocabulary of squared probabilities, without gradient.
        """
        if self.adapters is not None and self.adapters.dropout:
            self.causal.train(torch.is_grad_enabled())  # the noise is for training; log-probs that are compared have none
        hidden_NH, targets_N = self._backbone.states_before(token_ids_BT, wanted_BT)
        temperature_N = temperature_B[targets_N // wanted_BT.shape[1]]
        told = token_logprobs(hidden_NH, self._output_weight, token_ids_BT.flatten()[targets_N], temperature_N, sum_pi_squared=sum_pi_squared)
        blank_BT = hidden_NH.new_zeros(wanted_BT.shape, dtype=torch.float32)
        return tuple(blank_BT.masked_scatter(wanted_BT, values_N) for values_N in told)

    @property
    def packed(self) -> bool:
        """Whether trajectories pass end to end in one row."""
        return self._backbone.packed

    @property
    def shape(self) -> ModelShape:
        """What a pass costs."""
        return self._backbone.model_shape(self.causal.get_output_embeddings().weight)

    def shard(self, ranks: Ranks, dtype: str, *, offload: bool = False, compiled: bool = False) -> None:
        """Split the parameters over the ranks, layer by layer and the rest at the root. The same at every number of ranks.

        Args:
            offload: parameters stay in the host's memory between their uses.
            compiled: compile the layers.

        Raises:
            ConfigError: packed trajectories would see one another in this model.
        """
        self._backbone.shard(self, ranks, dtype, offload=offload, compiled=compiled)
        self._backbone.require_kept_apart(lambda ids_BT, wanted_BT: self(ids_BT, wanted_BT, ids_BT.new_ones(2).float())[0], ranks, dtype)

    def sync_gradients(self, now: bool) -> None:
        """Whether the next backward pass adds the gradients of all ranks: only at the last micro-batch of an update."""
        root: Any = self  # fully_shard has made it an FSDPModule
        root.set_requires_gradient_sync(now)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters under their Hugging Face names (adapters: peft's), in the model's order, tied ones once."""
        yield from ((name, parameter) for name, parameter in self.causal.named_parameters() if parameter.requires_grad)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole copies of all weights under their Hugging Face names, in the model's order, tied ones once; adapters merged in.

        Collective: every rank iterates to the end. One weight at a time; adapters, which are small, all of them.
        """
        if self.adapters is None:
            yield from ((name, _whole(parameter)) for name, parameter in self.causal.named_parameters())
            return
        base = ((name, _whole(parameter)) for name, parameter in self.causal.named_parameters() if not parameter.requires_grad)
        yield from self.adapters.merged(base, {name: _whole(parameter) for name, parameter in self.named_weights()})

    @property
    def _output_weight(self) -> Tensor:
        head = self.causal.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ConfigError("the output layer of this model has a bias: not supported by the learner")
        weight: Tensor = head.weight
        return weight

    @torch.no_grad()
    def _check(self, model_dir: Path | str) -> None:
        token_ids_BT = torch.arange(8)[None] % self._output_weight.shape[0]
        wanted_BT = torch.arange(8)[None] > 0
        ours_BT, _ = self(token_ids_BT, wanted_BT, torch.ones(1))
        self._backbone.will_read(wanted_BT.shape, torch.arange(8))  # of the transformer's own padded input
        logits_BTV = self.causal(input_ids=token_ids_BT, use_cache=False).logits.float()
        theirs_BS = logits_BTV[:, :-1].log_softmax(-1).gather(-1, token_ids_BT[:, 1:, None])[..., 0]
        apart = (ours_BT[:, 1:] - theirs_BS).abs().max().item()
        if not apart < SAME_LOGPROB:
            raise ConfigError(
                f"{model_dir}: log-probs differ from the model's own by {apart:.3g}: this family changes its logits in a way unknown here"
            )


def _whole(parameter: nn.Parameter) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
