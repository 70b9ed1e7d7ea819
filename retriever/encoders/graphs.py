"""Modules as ONNX graphs: exported once by PyTorch, checked against it, kept in a cache, and run by the ONNX Runtime without PyTorch.

A graph is named by all that makes it: the weights' hash, config.json, the pooling, the layout, and FORMAT. It appears in the cache complete or
not at all, so that several processes may export the same one at a time; the first to be ready stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import CONFIG, ModelFiles
from retriever.encoders.layouts import AXES, Layout
from retriever.encoders.program import Program
from retriever.encoders.settings import Runtime
from retriever.encoders.tokens import Chunk

if TYPE_CHECKING:
    import torch

__all__ = ["GraphSource", "Loss", "onnx_program"]

FORMAT = 1  # of what is exported: another one, another graph
FP32, INT8, GRAPH, LOSS = "fp32", "int8", "model.onnx", "loss.json"
# The largest difference of an exported graph from PyTorch, in parts of the largest number: float32 in another order makes 1e-5.
SAME_NUMBERS = 1e-3
# It adds a residual and normalises by one kernel, which is not vectorised: 5 times the time of the two (ONNX Runtime 1.31, AVX-512).
SLOW_FUSIONS = ["SkipLayerNormFusion"]

Numbers = npt.NDArray[np.float32]
Loss = Callable[[Numbers, Numbers], Mapping[str, float]]  # in float32, in int8 -> how they differ, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSource:
    """What a graph is exported from.

    Args:
        name: what it computes, beside the model's files and the layout, e.g. "mean vectors".
        module: loads the model.
        probes: real texts, for the checks; in the first chunk are several, of several lengths.
        loss: how numbers in int8 differ from those in float32.
    """

    files: ModelFiles
    weights_sha256: str
    name: str
    layout: Layout
    module: Callable[[], torch.nn.Module]
    probes: Sequence[Chunk]
    loss: Loss

    def directory(self, cache: Path | None) -> Path:
        """Where its graphs are kept."""
        config = hashlib.sha256((self.files.directory / CONFIG).read_bytes()).hexdigest()
        identity = json.dumps([FORMAT, self.weights_sha256, config, self.name, self.layout.kind])
        return (cache or _default_cache()) / hashlib.sha256(identity.encode()).hexdigest()[:32]


def onnx_program(source: GraphSource, runtime: Runtime) -> tuple[Program, Mapping[str, float] | None]:
    """Computes chunks by the ONNX Runtime, after an export where the cache has none; in int8, with its measured loss, which is printed too.

    Raises:
        EncoderFault: a package is missing, the model cannot be exported, or the exported graph computes something else.
    """
    directory = source.directory(runtime.cache)
    _appear(directory / FP32, lambda partial: _export(source, partial))
    if runtime.precision != "int8":
        return _program(directory / FP32, source.layout, runtime.threads), None
    _appear(directory / INT8, lambda partial: _quantize(source, directory / FP32, partial))
    loss: dict[str, float] = json.loads((directory / INT8 / LOSS).read_text(encoding="utf-8"))
    told = ", ".join(f"{name} {value:.4f}" for name, value in loss.items())
    print(f"{source.files.model} in int8 against fp32: {told}", file=sys.stderr, flush=True)
    return _program(directory / INT8, source.layout, runtime.threads), loss


def _program(directory: Path, layout: Layout, threads: int) -> Program:
    try:
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, InvalidProtobuf, NoSuchFile
    except ImportError as error:
        raise EncoderFault("the onnx runtime needs onnxruntime: pip install 'agentrl[retriever]', or --runtime torch") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # it plans memory for every shape that it has seen, and keeps the plans: here every batch has its own
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the cores may be shared with actors and learners
    path = str(directory / GRAPH)
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW_FUSIONS)
    except (Fail, InvalidGraph, InvalidProtobuf, NoSuchFile) as error:
        raise EncoderFault(f"{path} cannot be read ({error}): remove {directory}, and it is made again") from error
    names = {given.name for given in session.get_inputs()}

    def program(chunk: Chunk) -> Numbers:
        arrays = {name: array for name, array in layout.arrays(chunk).items() if name in names}
        computed: Numbers = session.run(None, arrays)[0]
        return computed

    return program


def _export(source: GraphSource, directory: Path) -> None:
    """Write the graph, and compare what it computes of the probes with what PyTorch does."""
    try:
        import onnxscript  # noqa: F401 (PyTorch's exporter imports it)
        import torch
    except ImportError as error:
        raise EncoderFault(
            f"exporting a model needs onnx, onnxscript and torch ({error}): pip install 'agentrl[retriever]', or --runtime torch"
        ) from error
    print(f"exporting {source.files.model} to ONNX, once", file=sys.stderr, flush=True)
    axes = AXES[source.layout.kind]
    module, sizes = source.module(), {axis: torch.export.Dim(axis, min=1) for axis in ("N", "S", "T")}
    example = tuple(torch.from_numpy(array) for array in source.layout.arrays(source.probes[0]).values())
    shapes = tuple({place: sizes[axis] for place, axis in enumerate(names)} for names in axes.values())
    with _quiet(), torch.inference_mode():
        exported = torch.onnx.export(module, example, dynamo=True, input_names=list(axes), dynamic_shapes=shapes, verbose=False)
        if exported is None:
            raise EncoderFault(f"{source.files.model} cannot be exported to ONNX: use --runtime torch")
        exported.save(directory / GRAPH)
    program = _program(directory, source.layout, threads=1)
    for chunk in source.probes:
        with torch.inference_mode():
            expected = module(*(torch.from_numpy(array) for array in source.layout.arrays(chunk).values())).numpy()
        difference = float(np.abs(program(chunk) - expected).max() / np.abs(expected).max())
        if not difference < SAME_NUMBERS:
            raise EncoderFault(f"{source.files.model}: the exported graph differs from PyTorch by {difference:.1e}: use --runtime torch")


def _quantize(source: GraphSource, exported: Path, directory: Path) -> None:
    """Write the graph with matrices in int8, a scale for each of their columns, and how much it differs on the probes."""
    try:
        import onnx
    except ImportError as error:
        raise EncoderFault("making an int8 graph needs onnx: pip install 'agentrl[retriever]', or --precision fp32") from error
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(exported / GRAPH)
    graph.graph.ClearField("value_info")  # shapes that onnxruntime does not bring up to date when it transposes a matrix, and trips over
    large = any(exported.glob("*.data"))  # beyond 2 GB, protobuf's limit, weights lie beside the graph
    with _quiet():
        quantize_dynamic(
            graph,
            directory / GRAPH,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=large,
        )
    before, after = (_program(path, source.layout, threads=1) for path in (exported, directory))
    numbers = [np.concatenate([program(chunk) for chunk in source.probes]) for program in (before, after)]
    (directory / LOSS).write_text(json.dumps(dict(source.loss(*numbers))), encoding="utf-8")


def _appear(directory: Path, make: Callable[[Path], None]) -> None:
    """Make a directory that is there when it is complete, unless it is."""
    if directory.is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        make(partial)
        try:
            partial.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise  # else another process was faster
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of exporters, which are about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "onnx"
