import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from minilm import MINILM, needs_minilm
from tiny_bert import write_sentence_transformer, write_tiny_model

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import ModelFiles
from retriever.encoders.hashed import HashedEncoder, HashedSettings
from retriever.encoders.layouts import FEW_SHAPES, Layout
from retriever.encoders.models import describe
from retriever.encoders.modules import pooled, vector_module, with_packed_weights
from retriever.encoders.opening import open_encoder
from retriever.encoders.program import torch_program
from retriever.encoders.settings import Runtime
from retriever.encoders.tokens import TextTokenizer

ROOT = Path(__file__).resolve().parents[3]
TORCH = Runtime(kind="torch")
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13", "w1 w1 w1 w2"]
QUESTIONS = [
    "what is love?",
    "who sang the song that goes la la la",
    "hello",
    "When did the Normans, who came from the north, conquer the English coast for the second time?",
]
FIRST_NUMBERS = [-0.0703, 0.0800, 0.0083, 0.0443]  # of the first question's vector, by transformers


def tiny(directory: Path, kind: str = "bert", pooling: str = "mean_tokens", **options: object) -> Path:
    return write_sentence_transformer(write_tiny_model(directory, kind, **options), pooling=pooling)


def by_transformers(model: Path, texts: list[str], pooling: str = "mean") -> np.ndarray:
    """Text by text, without padding, chunks or code of ours."""
    import transformers
    from tokenizers import Tokenizer

    loaded = transformers.AutoModel.from_pretrained(model).eval()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    vectors = []
    for text in texts:
        with torch.inference_mode():
            [states] = loaded(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state
        vector = {"mean": states.mean(dim=0), "cls": states[0], "last": states[-1]}[pooling]
        vectors.append((vector / vector.norm()).numpy())
    return np.stack(vectors)


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


def test_pooling_by_hand():
    states = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], [[5.0, 6.0], [7.0, 7.0], [0.0, 2.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pooled(states, mask, "mean").tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert pooled(states, mask, "cls").tolist() == [[1.0, 2.0], [5.0, 6.0]]
    assert pooled(states, mask, "last").tolist() == [[3.0, 4.0], [0.0, 2.0]]


@needs_minilm
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_minilms_vectors_are_those_of_transformers(minilm_cache: Path, kind: str):
    encoder = open_encoder(describe(str(MINILM)).record, Runtime(kind=kind, cache=minilm_cache), table=None)
    vectors = encoder.encode_queries(QUESTIONS)
    assert cosines(vectors, by_transformers(MINILM, QUESTIONS)).min() > 0.99999
    np.testing.assert_allclose(vectors[0, :4], FIRST_NUMBERS, atol=5e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@needs_minilm
@pytest.mark.slow
def test_int8_states_its_loss_and_keeps_to_it(minilm_cache: Path, capfd: pytest.CaptureFixture[str]):
    record = describe(str(MINILM)).record
    coarse = open_encoder(record, Runtime(precision="int8", cache=minilm_cache), table=None)
    loss = coarse.info()["loss"]
    assert f"in int8 against fp32: mean cosine {loss['mean cosine']:.4f}, lowest cosine {loss['lowest cosine']:.4f}" in capfd.readouterr().err
    assert 0.97 < loss["lowest cosine"] < loss["mean cosine"] < 0.999
    exact = open_encoder(record, Runtime(cache=minilm_cache), table=None)
    assert cosines(coarse.encode_queries(QUESTIONS), exact.encode_queries(QUESTIONS)).min() > 0.97


@needs_minilm
@pytest.mark.slow
def test_serving_by_the_onnx_runtime_imports_neither_torch_nor_transformers(minilm_cache: Path):
    code = f"""
import sys
from pathlib import Path
from retriever.encoders.models import describe
from retriever.encoders.opening import open_encoder
from retriever.encoders.program import torch_program
from retriever.encoders.settings import Runtime
from retriever.encoders.tokens import TextTokenizer
encoder = open_encoder(describe({str(MINILM)!r}).record, Runtime(cache=Path({str(minilm_cache)!r})), table=None)
print(encoder.encode_queries(["what is love?"]).shape, [name for name in ("torch", "transformers", "onnx", "huggingface_hub") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "(1, 384) []\n"


@needs_minilm
@pytest.mark.slow
def test_bf16_is_close_to_fp32():
    record = describe(str(MINILM)).record
    exact = open_encoder(record, TORCH, table=None).encode_queries(QUESTIONS)
    assert cosines(open_encoder(record, Runtime(precision="bf16"), table=None).encode_queries(QUESTIONS), exact).min() > 0.9998


@needs_minilm
@pytest.mark.slow
def test_packed_weights_in_bf16_give_the_same_numbers():
    files = ModelFiles.locate(str(MINILM))
    layout = Layout.fastest(files, "cpu")
    [chunk] = TextTokenizer(files, threads=1).chunks(QUESTIONS, max_tokens=64, limits=layout.limits)
    arrays = [torch.from_numpy(array) for array in layout.arrays(chunk).values()]
    module = vector_module(files, "mean", layout).to(torch.bfloat16)
    with torch.inference_mode():
        before = module(*arrays)
        torch.testing.assert_close(with_packed_weights(module)(*arrays), before, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_sizes_that_are_rounded_up_leave_the_vectors_as_they_are(tmp_path: Path, kind: str, pooling: str):
    files = ModelFiles.locate(str(tiny(tmp_path / "m")))
    layout = Layout.fastest(files, "cpu") if kind == "packed" else Layout.padded(files, "cpu")
    module = vector_module(files, pooling, layout)
    [chunk] = TextTokenizer(files, threads=1).chunks(TEXTS, max_tokens=32, limits=layout.limits)
    exact = torch_program(module, layout, TORCH)(chunk)
    rounded = torch_program(module, replace(layout, steps=FEW_SHAPES), TORCH)(chunk)
    assert rounded.shape == (5, exact.shape[1])  # of eight rows
    np.testing.assert_allclose(rounded, exact, atol=1e-5)  # states of up to 3, in float32


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_packed_tokens_give_what_transformers_makes_of_each_text_alone(tmp_path: Path, kind: str, pooling: str):
    mode = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}[pooling]
    model = tiny(tmp_path / "m", kind, mode, pad_token_id=1 if kind == "roberta" else 0)
    assert Layout.fastest(ModelFiles.locate(str(model)), "cpu").kind == "packed"
    vectors = open_encoder(describe(str(model)).record, TORCH, table=None).encode_documents(TEXTS)
    np.testing.assert_allclose(vectors, by_transformers(model, TEXTS, pooling), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distilbert", "qwen2"])
def test_other_models_are_padded_and_give_the_same(tmp_path: Path, kind: str):
    own = {"distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}, "qwen2": {"num_key_value_heads": 2}}[kind]
    model = tiny(tmp_path / "m", kind, "lasttoken", **own)
    assert Layout.fastest(ModelFiles.locate(str(model)), "cpu").kind == "padded"
    vectors = open_encoder(describe(str(model)).record, TORCH, table=None).encode_documents(TEXTS)
    np.testing.assert_allclose(vectors, by_transformers(model, TEXTS, "last"), atol=2e-6)


@pytest.mark.slow
def test_prefixes_precede_questions_and_documents_and_what_is_too_long_is_cut(tmp_path: Path):
    model = str(tiny(tmp_path / "m"))
    plain = open_encoder(describe(model).record, TORCH, table=None)
    record = describe(model, query_prefix="w50 ", document_prefix="w51 w52 ", max_query_tokens=5, max_document_tokens=7).record
    encoder = open_encoder(record, TORCH, table=None)
    np.testing.assert_allclose(encoder.encode_queries(["w1", "w1 w2 w3 w4"]), plain.encode_queries(["w50 w1", "w50 w1 w2"]), atol=1e-6)
    np.testing.assert_allclose(encoder.encode_documents(["w1", "w1 w2 w3 w4"]), plain.encode_queries(["w51 w52 w1", "w51 w52 w1 w2 w3"]), atol=1e-6)
    info = encoder.info()
    assert (info["query_prefix"], info["pooling"], info["runtime"], info["precision"], info["threads"]) == ("w50 ", "mean", "torch", "fp32", 1)


@pytest.mark.slow
def test_texts_keep_their_places_blank_ones_are_zero_and_progress_is_told(tmp_path: Path):
    encoder = open_encoder(describe(str(tiny(tmp_path / "m")), query_prefix="w50 ").record, TORCH, table=None)
    texts = [" ".join(f"w{(i * 7 + j) % 60}" for j in range(i % 9)) for i in range(1500)]
    told: list[int] = []
    vectors = encoder.encode_documents(texts, told.append)
    assert told == sorted(told)
    assert told[-1] == 1500
    for place in (1, 700, 1499):
        np.testing.assert_allclose(vectors[place], encoder.encode_documents([texts[place]])[0], atol=2e-6)
    assert not vectors[::9].any()
    assert not encoder.encode_queries(["", " \n\t", "\u3000"]).any()
    assert encoder.encode_queries([]).shape == (0, 32)


@pytest.mark.slow
def test_what_is_no_character_is_read_as_a_question_mark(tmp_path: Path):
    encoder = open_encoder(describe(str(tiny(tmp_path / "m"))).record, TORCH, table=None)
    np.testing.assert_array_equal(encoder.encode_queries(["w1 \ud800 w2", "\x00"]), encoder.encode_queries(["w1 ? w2", "\x00"]))


@pytest.mark.slow
def test_a_megabyte_of_text_costs_no_more_than_its_first_tokens(tmp_path: Path):
    encoder = open_encoder(describe(str(tiny(tmp_path / "m"))).record, TORCH, table=None)
    long = "w1 " * 400_000
    np.testing.assert_allclose(encoder.encode_queries([long]), encoder.encode_queries([long[:1000]]), atol=1e-6)


@pytest.mark.slow
def test_a_prefix_that_leaves_no_room_is_refused(tmp_path: Path):
    model = str(tiny(tmp_path / "m"))
    with pytest.raises(EncoderFault, match="the prefix 'w1 w2 ' takes all of the 4 tokens"):
        open_encoder(describe(model, query_prefix="w1 w2 ", max_query_tokens=4).record, TORCH, table=None)


@pytest.mark.slow
def test_other_weights_are_refused(tmp_path: Path):
    record = describe(str(tiny(tmp_path / "m"))).record
    write_tiny_model(tmp_path / "m", seed=1)
    with pytest.raises(EncoderFault, match=r"others than those of the record \(sha256 .*Bring back the model, or build the index again"):
        open_encoder(record, TORCH, table=None)


@pytest.mark.slow
def test_a_device_that_is_not_there_is_told(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("the device is there")
    with pytest.raises(EncoderFault, match="cannot be brought to --device cuda:0: "):
        open_encoder(describe(str(tiny(tmp_path / "m"))).record, Runtime(device="cuda:0"), table=None)


def test_a_hashed_encoder_opens_from_its_record_and_table(tmp_path: Path):
    made = HashedEncoder.fit(HashedSettings(dim=64), TEXTS)
    np.save(tmp_path / "idf.npy", made.table, allow_pickle=False)
    again = open_encoder(made.record, Runtime(), table=tmp_path / "idf.npy")
    assert np.array_equal(again.encode_queries(TEXTS), made.encode(TEXTS))
    assert again.record == {"kind": "hashed", "dim": 64, "word_weight": 1.0, "trigram_weight": 0.4, "passages": 5}


@pytest.mark.parametrize("record", [{"kind": "hashed", "dim": 64}, {"kind": "transformer", "dim": 64}, {"kind": "magic"}, {}])
def test_a_record_of_something_else_is_refused(record: dict):
    with pytest.raises(EncoderFault, match=r"an encoder's record has the keys|a hashed encoder's record has|an encoder is of kind"):
        open_encoder(record, Runtime(), table=None)
