"""What every runtime computes, as PyTorch modules of the arrays of a layout: pooled states of texts, and scores of pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import ModelFiles
from retriever.encoders.layouts import Layout
from retriever.encoders.settings import Pooling

if TYPE_CHECKING:
    import torch

__all__ = ["pooled", "scoring_module", "vector_module", "with_packed_weights"]

PACKED_ATTENTION = "agentrl_packed"  # its name in transformers' registry


def vector_module(files: ModelFiles, pooling: Pooling, layout: Layout) -> torch.nn.Module:
    """A layout's arrays -> one pooled state per text [N, D], in float32 whatever the weights are.

    Raises:
        EncoderFault: transformers cannot load the model.
    """
    import torch
    from transformers import AttentionInterface, AutoModel

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _pretrained(AutoModel, files)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            return pooled(self.model(input_ids=ids, attention_mask=mask).last_hidden_state, mask, pooling)

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
            self.model = _pretrained(AutoModel, files, attn_implementation=PACKED_ATTENTION)

        def forward(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
            told = {"slots": slots, "back": back, "outside": (mask == 0)[:, None, None, :]}  # which transformers hands on to the attention
            states_TD = self.model(input_ids=ids[None], position_ids=positions[None], **told).last_hidden_state[0]
            return pooled(_gathered(states_TD, slots), mask, pooling)

    return (Packed() if layout.kind == "packed" else Padded()).eval()


def scoring_module(files: ModelFiles) -> torch.nn.Module:
    """The padded layout's arrays of pairs -> their logit [N, 1], in float32 whatever the weights are.

    Raises:
        EncoderFault: transformers cannot load the model.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    has_types = int(files.config().get("type_vocab_size") or 0) > 1

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _pretrained(AutoModelForSequenceClassification, files)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            told = {"token_type_ids": types} if has_types else {}
            logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, **told).logits
            return logits.float()

    return Scores().eval()


def with_packed_weights(module: torch.nn.Module) -> torch.nn.Module:
    """The same module, whose linear layers in bf16 keep their weights as oneDNN multiplies with them: else it would reorder them in every product.

    Measured with MiniLM: the same numbers, a lone question in a fifth less time, more of them in some 7 % less. A PyTorch or a CPU that cannot leaves
    the module as it was.
    """
    import torch

    onednn = torch.ops.mkldnn  # what PyTorch's own compiler packs weights by
    known = all(hasattr(onednn, name) for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"))
    if not known or not onednn._is_mkldnn_bf16_supported():
        return module

    class PackedLinear(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.bias = linear.bias
            self.weight = onednn._reorder_linear_weight(linear.weight.detach(), None)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            computed: torch.Tensor = onednn._linear_pointwise(states, self.weight, self.bias, "none", [], "")
            return computed

    with torch.inference_mode():
        for parent in list(module.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is torch.nn.Linear and layer.weight.dtype == torch.bfloat16:
                    setattr(parent, name, PackedLinear(layer))
    return module


def pooled(states_NSD: torch.Tensor, mask_NS: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One state [N, D] of each text's states, in float32: their mean, the first, or the last that is no padding (which is on the right)."""
    states_NSD = states_NSD.float()
    if pooling == "cls":
        return states_NSD[:, 0]
    if pooling == "last":
        last_N11 = (mask_NS.sum(dim=1) - 1).clamp(min=0)[:, None, None]
        return states_NSD.gather(1, last_N11.expand(-1, -1, states_NSD.shape[2]))[:, 0]
    weights_NS1 = mask_NS[:, :, None].float()
    return (states_NSD * weights_NS1).sum(dim=1) / weights_NS1.sum(dim=1).clamp(min=1)


def _packed_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **told: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over a packed row: [1, H, T, K] of each -> [1, T, H, K]. Each text attends to itself."""
    import torch

    rows = [_gathered(states[0].transpose(0, 1), told["slots"]).transpose(1, 2) for states in (query, key, value)]
    scores_NHSS = (rows[0] @ rows[1].transpose(2, 3) * told["scaling"]).masked_fill(told["outside"], -torch.inf)
    mixed_NSHK = (torch.softmax(scores_NHSS, dim=-1) @ rows[2]).transpose(1, 2)
    mixed_TE = mixed_NSHK.flatten(2).flatten(0, 1).index_select(0, told["back"])
    return mixed_TE.reshape(1, -1, *mixed_NSHK.shape[2:]), None


def _gathered(states: torch.Tensor, slots_NS: torch.Tensor) -> torch.Tensor:
    """[T, ...] -> [N, S, ...]: what each slot has, and anything where it has nothing. Rows are copied whole."""
    import torch

    flat = states.flatten(1) if states.dim() > 2 else states
    return flat.index_select(0, slots_NS.flatten()).reshape(torch.Size([*slots_NS.shape, *states.shape[1:]]))


def _pretrained(loader: Any, files: ModelFiles, **options: Any) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # a server's log is no place for it
    try:
        return loader.from_pretrained(files.directory, dtype=torch.float32, use_safetensors=True, local_files_only=True, **options)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise EncoderFault(f"transformers cannot load {files.model}: {error}") from error
