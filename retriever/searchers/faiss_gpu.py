"""A FAISS index on GPUs. Written against FAISS 1.15.1's documented interface; it has not been run on a GPU."""

from __future__ import annotations

import re
from typing import Any

import faiss

from retriever.searchers.searcher import Memory, SearcherError
from retriever.searchers.sizes import GPU_SCRATCH, index_memory

__all__ = ["to_gpus"]


def to_gpus(index: Any, device: str) -> tuple[Any, Memory]:
    """The index on the GPUs that `device` names, rows divided over them, and what it takes there.

    Raises:
        SearcherError: FAISS or the machine has no such GPU, or FAISS has no such index for GPUs.
    """
    if not hasattr(faiss, "StandardGpuResources"):
        raise SearcherError(f"device {device}: this FAISS has no GPUs: pip uninstall faiss-cpu, then pip install 'agentrl[faiss-gpu]'")
    gpus = _gpus(device, faiss.get_num_gpus())
    options = faiss.GpuMultipleClonerOptions()
    options.shard = len(gpus) > 1
    options.common_ivf_quantizer = True  # lists are divided, and looked up once
    on_disk = index_memory(index, index.ntotal, mmap=False).disk_bytes
    try:
        moved = faiss.index_cpu_to_gpus_list(index, co=options, gpus=gpus)
    except RuntimeError as error:
        raise SearcherError(f"device {device}: FAISS does not bring {type(index).__name__} there: {str(error).rpartition('Error: ')[2]}") from error
    return moved, Memory(device_bytes=on_disk + GPU_SCRATCH * len(gpus), disk_bytes=on_disk)


def _gpus(device: str, there: int) -> list[int]:
    """The numbers in "cuda" (all), "cuda:0" or "cuda:0,cuda:1"."""
    if device == "cuda" and there:
        return list(range(there))
    found = [re.fullmatch(r"cuda:(\d+)", part.strip()) for part in device.split(",")]
    gpus = [int(match.group(1)) for match in found if match]
    if len(gpus) < len(found) or not gpus or len(set(gpus)) < len(gpus) or max(gpus) >= there:
        raise SearcherError(f"device is cpu, cuda, or GPUs such as cuda:0,cuda:1, each once; got {device!r}, and FAISS sees {there} GPUs")
    return gpus
