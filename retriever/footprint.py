"""What an index takes to be served, from its manifest and the sizes of its files: told, and checked, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from retriever.amounts import size
from retriever.manifest import BM25, IDS, OFFSETS, IndexFault, Manifest
from retriever.searchers.searcher import Memory
from retriever.searchers.sizes import memory_of

__all__ = ["PROCESS_BYTES", "RUNTIME_BYTES", "Footprint", "footprint_of"]

# VmRSS of fresh servers of small indexes after 400 questions, less the mapped files and the weights; within 10 % from run to run (Linux, x86-64).
PROCESS_BYTES = 72_000_000  # Python with NumPy, FAISS and the HTTP server: 73 to 75 MB
RUNTIME_BYTES = {"onnx": 130_000_000, "torch": 360_000_000}  # what runs a transformer: 122 to 148 MB, 350 to 365 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory by part. Resident is what the process keeps. Mapped are files that are read when they are needed: the system counts what it has of
    them as the process's (VmRSS), and takes it back when others need the memory."""

    parts: dict[str, Memory]

    @property
    def total(self) -> Memory:
        """Of all parts, and of the process."""
        return sum(self.parts.values(), Memory(resident_bytes=PROCESS_BYTES))

    def render(self) -> str:
        """`needs 1.6 GB mapped, 0.4 GB resident; 20.0 GB of memory are available`."""
        total, available = self.total, psutil.virtual_memory().available
        devices = f", {size(total.device_bytes)} on the devices" if total.device_bytes else ""
        return f"needs {size(total.mapped_bytes)} mapped, {size(total.resident_bytes)} resident{devices}; {size(available)} of memory are available"

    def check(self, directory: Path) -> None:
        """Is there room for it?

        Raises:
            IndexFault: there is not, with what to do.
        """
        available = psutil.virtual_memory().available
        if self.total.resident_bytes > available:
            parts = ", ".join(f"{name} {size(part.resident_bytes)}" for name, part in self.parts.items() if part.resident_bytes)
            raise IndexFault(
                f"{directory} needs {size(self.total.resident_bytes)} of memory ({parts}), {size(available)} are available: "
                f"serve it mapped (without --no-mmap), or build it smaller, e.g. with --index SQ8 or blocks"
            )


def footprint_of(
    manifest: Manifest, *, devices: Sequence[str] = ("cpu",), mmap: bool = True, runtime: Literal["onnx", "torch"] = "onnx"
) -> Footprint:
    """What an index takes that is served in this way (see `index.Serving`)."""
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    documents = sum(sizes.get(name, 0) for name in (manifest.documents.file, OFFSETS, IDS))
    parts = {"documents": Memory(mapped_bytes=documents, disk_bytes=documents)}
    if manifest.encoder_bytes:
        parts["encoder"] = Memory(resident_bytes=manifest.encoder_bytes + RUNTIME_BYTES[runtime])
    if manifest.dense is not None:
        parts["vectors"] = _dense(manifest, sizes, devices=devices, mmap=mmap)
    if manifest.bm25 is not None:
        words = sum(bytes for name, bytes in sizes.items() if name.startswith(f"{BM25}/"))
        parts["words"] = Memory(mapped_bytes=words, disk_bytes=words, resident_bytes=4 * manifest.count)
    return Footprint(parts=parts)


def _dense(manifest: Manifest, sizes: dict[str, int], *, devices: Sequence[str], mmap: bool) -> Memory:
    """By the type of index; of one that was adopted, by its file."""
    assert manifest.dense is not None
    rescore = sum(sizes[name] for name in manifest.dense.rescore.files) if manifest.dense.rescore else 0
    kept, kind = Memory(mapped_bytes=rescore, disk_bytes=rescore), manifest.spec.get("index")
    if kind is not None:
        return kept + memory_of(kind, manifest.count, manifest.dense.dim, dtype=manifest.dense.block_type, mmap=mmap, devices=devices)
    files = sum(sizes[name] for name in manifest.dense.files)
    if tuple(devices) != ("cpu",):
        return kept + Memory(device_bytes=files, disk_bytes=files)
    return kept + (Memory(mapped_bytes=files, disk_bytes=files) if mmap else Memory(resident_bytes=files, disk_bytes=files))
