import json
import os
from pathlib import Path

import numpy as np
import pytest

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import ModelFiles
from retriever.encoders.layouts import FEW_SHAPES, Layout, Steps
from retriever.encoders.settings import Runtime, TransformerSettings
from retriever.encoders.tokens import Chunk, ChunkLimits, cut

CHUNK = Chunk(
    places=np.array([4, 0, 9]),
    lengths=np.array([3, 2, 1]),
    ids=np.array([11, 12, 13, 21, 22, 31]),
    types=np.array([0, 0, 1, 0, 1, 0]),
)
SETTINGS = TransformerSettings(
    model="a/b",
    weights_sha256="0" * 64,
    dim=8,
    pooling="mean",
    query_prefix="query: ",
    document_prefix="passage: ",
    max_query_tokens=16,
    max_document_tokens=32,
    normalize=True,
)


def lists(arrays: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: array.tolist() for name, array in arrays.items()}


def test_a_padded_chunk_by_hand():
    assert lists(Layout(kind="padded", pad_id=7).arrays(CHUNK)) == {
        "ids": [[11, 12, 13], [21, 22, 7], [31, 7, 7]],
        "mask": [[1, 1, 1], [1, 1, 0], [1, 0, 0]],
        "types": [[0, 0, 1], [0, 1, 0], [0, 0, 0]],
    }


def test_a_packed_chunk_by_hand():
    assert lists(Layout(kind="packed", first_position=2).arrays(CHUNK)) == {
        "ids": [11, 12, 13, 21, 22, 31],
        "positions": [2, 3, 4, 2, 3, 2],
        "slots": [[0, 1, 2], [3, 4, 0], [5, 0, 0]],
        "mask": [[1, 1, 1], [1, 1, 0], [1, 0, 0]],
        "back": [0, 1, 2, 3, 4, 6],
    }


def test_a_packed_chunk_rounded_up_by_hand():
    layout = Layout(kind="packed", pad_id=0, first_position=2, steps=Steps(texts=4, length=2, tokens=8))
    assert lists(layout.arrays(CHUNK)) == {
        "ids": [11, 12, 13, 21, 22, 31, 0, 0],
        "positions": [2, 3, 4, 2, 3, 2, 2, 2],
        "slots": [[0, 1, 2, 0], [3, 4, 0, 0], [5, 0, 0, 0], [0, 0, 0, 0]],
        "mask": [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]],
        "back": [0, 1, 2, 4, 5, 8, 0, 0],
    }


def test_a_padded_chunk_rounded_up_by_hand():
    assert lists(Layout(kind="padded", pad_id=7, steps=Steps(texts=8, length=1, tokens=1)).arrays(CHUNK)) == {
        "ids": [[11, 12, 13], [21, 22, 7], [31, 7, 7], [7, 7, 7]],
        "mask": [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]],
        "types": [[0, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]],
    }


def test_padded_rows_stay_within_the_models_positions():
    for positions, width in ((None, 4), (5, 4), (3, 3), (2, 3)):
        layout = Layout(kind="padded", steps=Steps(texts=1, length=4, tokens=1), positions=positions)
        assert layout.arrays(CHUNK)["ids"].shape == (3, width)


def test_chunks_of_1_to_32_questions_come_in_few_sizes():
    layout = Layout(kind="packed", steps=FEW_SHAPES)
    sizes, shapes = set(), set()
    for texts in range(1, 33):
        for length in range(8, 24):
            lengths = np.full(texts, length)
            ids = np.zeros(texts * length, np.int64)
            arrays = layout.arrays(Chunk(places=np.arange(texts), lengths=lengths, ids=ids, types=ids))
            sizes.add(arrays["ids"].size)
            shapes.add(arrays["slots"].shape)
    assert sizes <= {8, *range(16, 737, 16)}
    assert shapes == {(texts, length) for texts in (1, 2, 4, 8, 16, 24, 32) for length in (8, 16, 24)}


@pytest.mark.parametrize(
    ("model_type", "kind", "first"), [("bert", "packed", 0), ("xlm-roberta", "packed", 2), ("mpnet", "padded", 0), ("qwen3", "padded", 0)]
)
def test_only_models_that_are_known_to_allow_it_are_packed(tmp_path: Path, model_type: str, kind: str, first: int):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "pad_token_id": 1}))
    files = ModelFiles(model="m", directory=tmp_path)
    layout = Layout.fastest(files, "cpu")
    assert (layout.kind, layout.first_position) == (kind, first)
    assert Layout.fastest(files, "cuda:0").kind == "padded"


def test_chunks_are_cut_by_rows_and_padded_tokens_the_longest_first():
    lengths = [5, 9, 1, 5, 30, 2]
    cuts = [places.tolist() for places in cut(lengths, ChunkLimits(rows=3, tokens=18))]
    assert cuts == [[4], [1, 0], [3, 5, 2]]  # 30 is alone; 2 x 9; 3 x 5
    assert list(cut([], ChunkLimits(rows=3, tokens=18))) == []


def test_settings_come_back_from_their_record():
    assert TransformerSettings.of(json.loads(json.dumps(SETTINGS.record))) == SETTINGS


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pooling": "max"}, "pooling is one of mean, cls, last, got 'max'"),
        ({"dim": "8"}, "wrong dim: '8'"),
        ({"max_query_tokens": True}, "wrong max_query_tokens: True"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"max_query_tokens": 3}, "max_query_tokens must be at least 4, got 3"),
        ({"color": 1}, "these differ: .'color'"),
    ],
)
def test_a_record_that_was_altered_is_refused(change: dict, told: str):
    with pytest.raises(EncoderFault, match=told):
        TransformerSettings.of(SETTINGS.record | change)


@pytest.mark.parametrize(
    ("options", "resolved"),
    [
        ({}, "onnx"),
        ({"precision": "int8"}, "onnx"),
        ({"precision": "bf16"}, "torch"),
        ({"device": "cuda:0"}, "torch"),
        ({"device": "cuda:0", "precision": "fp16"}, "torch"),
        ({"kind": "torch"}, "torch"),
    ],
)
def test_the_runtime_follows_device_and_precision(options: dict, resolved: str):
    assert Runtime(**options).resolved == resolved


def test_a_gpu_does_not_wait_for_the_tokens_of_one_thread():
    assert Runtime(threads=3).tokenizing_threads == 3
    assert Runtime(device="cuda:0").tokenizing_threads == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kind": "onnx", "precision": "bf16"}, "use --runtime torch"),
        ({"kind": "onnx", "device": "cuda:0"}, "use --runtime torch"),
        ({"kind": "torch", "precision": "int8"}, "use --runtime onnx"),
        ({"device": "cuda:0", "precision": "int8"}, "not int8"),
        ({"precision": "fp16"}, "--precision bf16"),
        ({"device": "cuda:0", "threads": 4}, "has none to set"),
        ({"threads": 0}, "threads >= 1"),
        ({"kind": "tensorrt"}, "a runtime is one of"),
    ],
)
def test_combinations_that_would_have_no_effect_are_refused(options: dict, told: str):
    with pytest.raises(EncoderFault, match=told):
        Runtime(**options)
