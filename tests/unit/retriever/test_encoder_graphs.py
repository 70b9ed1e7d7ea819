import json
from pathlib import Path

import numpy as np
import pytest
import torch

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import ModelFiles
from retriever.encoders.graphs import GraphSource, onnx_program
from retriever.encoders.layouts import Layout
from retriever.encoders.settings import Runtime
from retriever.encoders.tokens import Chunk

pytestmark = pytest.mark.slow
pytest.importorskip("onnxruntime")

PROBES = [
    Chunk(places=np.array([0, 1]), lengths=np.array([3, 2]), ids=np.array([5, 6, 7, 8, 9]), types=np.zeros(5, np.int64)),
    Chunk(places=np.array([2]), lengths=np.array([1]), ids=np.array([4]), types=np.zeros(1, np.int64)),
]


class Sums(torch.nn.Module):
    """A model of one matrix: sums of tokens times (1, 2); in the exported graph, plus an error."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.error = error
        self.matrix = torch.nn.Linear(1, 2, bias=False)
        self.matrix.weight.data = torch.tensor([[1.0], [2.0]])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        sums = (ids * mask + types).sum(dim=1, keepdim=True).float()
        return self.matrix(sums + self.error if torch.compiler.is_exporting() else sums)


def source(directory: Path, module: object) -> GraphSource:
    (directory / "config.json").write_text(json.dumps({"model_type": "sums"}))
    files = ModelFiles(model="sums", directory=directory)
    layout = Layout.padded(files, "cpu")
    return GraphSource(files=files, weights_sha256="0", name="sums", layout=layout, module=module, probes=PROBES, loss=lambda a, b: {})


def test_a_graph_is_exported_once_and_computes_what_torch_does_for_any_number_of_texts_and_tokens(tmp_path: Path):
    loaded = []
    runtime = Runtime(cache=tmp_path / "cache")
    for _ in range(2):
        program, _ = onnx_program(source(tmp_path, lambda: loaded.append("model") or Sums()), runtime)
        assert [program(chunk).tolist() for chunk in PROBES] == [[[18.0, 36.0], [17.0, 34.0]], [[4.0, 8.0]]]
    assert loaded == ["model"]


def test_a_graph_that_computes_something_else_than_torch_is_refused_and_not_kept(tmp_path: Path):
    with pytest.raises(EncoderFault, match=r"the exported graph differs from PyTorch by 5\.6e-02: use --runtime torch"):
        onnx_program(source(tmp_path, lambda: Sums(error=1.0)), Runtime(cache=tmp_path / "cache"))
    assert [path.name for path in (tmp_path / "cache").glob("*/*")] == []


def test_a_graph_that_was_cut_off_is_told_with_what_to_remove(tmp_path: Path):
    given, runtime = source(tmp_path, Sums), Runtime(cache=tmp_path / "cache")
    directory = given.directory(runtime.cache) / "fp32"
    directory.mkdir(parents=True)
    (directory / "model.onnx").write_bytes(b"\x08\x0a:")
    with pytest.raises(EncoderFault, match=rf"cannot be read .*: remove {directory}, and it is made again"):
        onnx_program(given, runtime)


def test_whoever_exports_the_same_graph_later_takes_what_is_there(tmp_path: Path):
    runtime = Runtime(cache=tmp_path / "cache")

    def meanwhile() -> torch.nn.Module:
        onnx_program(source(tmp_path, Sums), runtime)
        return Sums()

    program, _ = onnx_program(source(tmp_path, meanwhile), runtime)
    assert program(PROBES[1]).tolist() == [[4.0, 8.0]]
    assert [path.name for path in (tmp_path / "cache").glob("*/*")] == ["fp32"]
