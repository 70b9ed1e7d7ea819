"""A module that runs: chunks in, numbers out. In PyTorch here; `graphs` has the ONNX Runtime's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.layouts import FEW_SHAPES, Layout
from retriever.encoders.modules import with_packed_weights
from retriever.encoders.settings import Runtime
from retriever.encoders.tokens import Chunk

if TYPE_CHECKING:
    import torch

__all__ = ["Program", "torch_program"]

Program = Callable[[Chunk], npt.NDArray[np.float32]]  # a chunk of N texts -> [N, D]


def torch_program(module: torch.nn.Module, layout: Layout, runtime: Runtime) -> Program:
    """Computes chunks by a module of `modules`. Sets PyTorch's threads for the whole process.

    Raises:
        EncoderFault: the device is not there, or has not the memory.
    """
    import torch

    if runtime.device == "cpu":
        torch.set_num_threads(runtime.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[runtime.precision]
    try:
        on_device = module.to(device=runtime.device, dtype=dtype)
    except (RuntimeError, AssertionError) as error:  # the latter where PyTorch was built without CUDA
        raise EncoderFault(f"the model cannot be brought to --device {runtime.device}: {str(error).splitlines()[0]}") from error

    if runtime.device == "cpu" and runtime.precision == "bf16":
        on_device, layout = with_packed_weights(on_device), replace(layout, steps=FEW_SHAPES)

    def program(chunk: Chunk) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            inputs = (torch.from_numpy(array).to(runtime.device) for array in layout.arrays(chunk).values())
            computed: npt.NDArray[np.float32] = on_device(*inputs).cpu().numpy()
            return computed[: len(chunk.places)]

    return program
