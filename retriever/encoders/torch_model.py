"""Models as PyTorch modules, which every runtime computes, and the runtime that computes them in PyTorch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import ModelFiles
from retriever.encoders.settings import Pooling, Runtime
from retriever.encoders.tokens import Chunk

if TYPE_CHECKING:
    import torch

__all__ = ["Program", "pooled", "scoring_module", "torch_program", "vector_module"]

Program = Callable[[Chunk], npt.NDArray[np.float32]]  # a chunk of N texts -> [N, D]


def torch_program(module: torch.nn.Module, runtime: Runtime) -> Program:
    """Computes chunks by a module of this file. Sets PyTorch's threads for the whole process."""
    import torch

    if runtime.device == "cpu":
        torch.set_num_threads(runtime.threads)
    on_device = module.to(device=runtime.device, dtype=_dtype(runtime))

    def program(chunk: Chunk) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            inputs = (torch.from_numpy(array).to(runtime.device) for array in (chunk.ids, chunk.mask, chunk.types))
            computed: npt.NDArray[np.float32] = on_device(*inputs).float().cpu().numpy()
            return computed

    return program


def vector_module(files: ModelFiles, pooling: Pooling) -> torch.nn.Module:
    """ids, mask, types [N, S] -> pooled states [N, D] in fp32 weights.

    Raises:
        EncoderFault: transformers cannot load the model.
    """
    import torch
    from transformers import AutoModel

    class Vectors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _pretrained(AutoModel, files)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            return pooled(self.model(input_ids=ids, attention_mask=mask).last_hidden_state, mask, pooling)

    return Vectors().eval()


def scoring_module(files: ModelFiles) -> torch.nn.Module:
    """ids, mask, types [N, S] of pairs -> their logit [N, 1] in fp32 weights.

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
            return logits

    return Scores().eval()


def pooled(states_NSD: torch.Tensor, mask_NS: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One state [N, D] of each text's states: their mean, the first, or the last that is no padding (which is on the right)."""
    if pooling == "cls":
        return states_NSD[:, 0]
    if pooling == "last":
        last_N11 = (mask_NS.sum(dim=1) - 1).clamp(min=0)[:, None, None]
        return states_NSD.gather(1, last_N11.expand(-1, -1, states_NSD.shape[2]))[:, 0]
    weights_NS1 = mask_NS[:, :, None].to(states_NSD.dtype)
    return (states_NSD * weights_NS1).sum(dim=1) / weights_NS1.sum(dim=1).clamp(min=1)


def _pretrained(loader: Any, files: ModelFiles) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # a server's log is no place for it
    try:
        return loader.from_pretrained(files.directory, dtype=torch.float32, use_safetensors=True, local_files_only=True)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise EncoderFault(f"transformers cannot load {files.model}: {error}") from error


def _dtype(runtime: Runtime) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[runtime.precision]
