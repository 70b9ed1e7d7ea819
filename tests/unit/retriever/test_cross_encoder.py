from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_bert import write_tiny_model

from retriever.encoders.cross_encoder import CrossEncoder
from retriever.encoders.encoder import EncoderFault
from retriever.encoders.settings import Runtime

pytestmark = pytest.mark.slow

TORCH = Runtime(kind="torch")
OPTIONS: dict[str, dict] = {"bert": {}, "roberta": {"pad_token_id": 1, "type_vocab_size": 1}}
PAIRS = [("w1 w2", "w3 w4 w5 w6"), ("w1 w2", "w7"), ("w8", "w3 w4 w5 w6 w9 w10"), ("w2 w1", ""), ("w1 w2", "w3 w4 w5 w6")]


def by_transformers(model: Path, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Pair by pair, without padding or code of ours."""
    import transformers
    from tokenizers import Tokenizer

    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    logits = []
    for pair in pairs:
        encoding = tokenizer.encode(*pair)
        told = {"token_type_ids": torch.tensor([encoding.type_ids])} if loaded.config.model_type == "bert" else {}
        with torch.inference_mode():
            logits.append(loaded(torch.tensor([encoding.ids]), **told).logits[0].numpy())
    return np.concatenate(logits)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_scores_are_the_logits_of_transformers(tmp_path: Path, kind: str):
    model = write_tiny_model(tmp_path / "m", kind, labels=1, **OPTIONS[kind])
    reranker = CrossEncoder.open(str(model), TORCH)
    expected = by_transformers(model, PAIRS)
    assert len({f"{score:.3f}" for score in expected}) == 4  # the pairs differ, but for the last one
    np.testing.assert_allclose(reranker.score_pairs(PAIRS), expected, atol=2e-6)
    np.testing.assert_allclose(reranker.score_pairs([("w1 w2", "w7"), ("w1 w2", "w3 w4 w5 w6")]), expected[[1, 0]], atol=2e-6)
    assert reranker.score_pairs([]).shape == (0,)


def test_the_onnx_runtime_gives_the_same_scores_and_int8_states_its_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("onnxruntime")
    model = write_tiny_model(tmp_path / "m", labels=1, num_hidden_layers=1)
    expected = by_transformers(model, PAIRS)
    reranker = CrossEncoder.open(str(model), Runtime(cache=tmp_path / "cache"))
    np.testing.assert_allclose(reranker.score_pairs(PAIRS), expected, atol=1e-5)
    coarse = CrossEncoder.open(str(model), Runtime(cache=tmp_path / "cache", precision="int8"))
    loss = coarse.info()["loss"]
    assert f"in int8 against fp32: correlation {loss['correlation']:.4f}, largest difference of a logit" in capfd.readouterr().err
    assert loss["correlation"] > 0.95


def test_only_the_document_is_cut_and_a_question_only_where_it_takes_more_than_half(tmp_path: Path):
    model = write_tiny_model(tmp_path / "m", labels=1)
    reranker = CrossEncoder.open(str(model), TORCH, max_tokens=16)
    words = [f"w{i}" for i in range(40)]
    cut = [("w1 w2", " ".join(words[:11])), (" ".join(words[:8]), " ".join(words[:5]))]  # with three special tokens, 16 each
    whole = [("w1 w2", " ".join(words)), (" ".join(words), " ".join(words))]
    np.testing.assert_allclose(reranker.score_pairs(whole), by_transformers(model, cut), atol=2e-6)


def test_what_is_no_character_does_not_stop_it(tmp_path: Path):
    reranker = CrossEncoder.open(str(write_tiny_model(tmp_path / "m", labels=1)), TORCH)
    np.testing.assert_array_equal(reranker.score_pairs([("w1 \ud800", "w2 \udfff")]), reranker.score_pairs([("w1 ?", "w2 ?")]))


def test_many_pairs_keep_their_places(tmp_path: Path):
    model = write_tiny_model(tmp_path / "m", labels=1)
    reranker = CrossEncoder.open(str(model), TORCH)
    pairs = [(f"w{i % 60}", " ".join(f"w{(i * 7 + j) % 60}" for j in range(i % 11))) for i in range(1100)]
    scores = reranker.score_pairs(pairs)
    places = [0, 77, 1023, 1024, 1099]
    np.testing.assert_allclose(scores[places], by_transformers(model, [pairs[place] for place in places]), atol=2e-6)


def test_a_model_with_two_logits_or_a_limit_that_it_cannot_keep_is_refused(tmp_path: Path):
    with pytest.raises(EncoderFault, match="has 2 logits, a reranker has one"):
        CrossEncoder.open(str(write_tiny_model(tmp_path / "two", labels=2)), TORCH)
    with pytest.raises(EncoderFault, match=r"states is an encoder and no cross-encoder: its config.json says BertModel"):
        CrossEncoder.open(str(write_tiny_model(tmp_path / "states")), TORCH)
    model = str(write_tiny_model(tmp_path / "one", labels=1))
    with pytest.raises(EncoderFault, match=r"max_tokens 65 is not between 16 and what .* can read: 64 \(max_position_embeddings"):
        CrossEncoder.open(model, TORCH, max_tokens=65)
