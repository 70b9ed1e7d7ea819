from math import log
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever.encoders.hashed import HashedEncoder, HashedSettings

TEXTS = ["the cat sat", "the dog sat on the cat", "a bird"]
LARGE = HashedSettings(dim=1 << 16)  # no two of these features collide


def by_hand(text: str, texts: list[str], dim: int) -> np.ndarray:
    """The formula of the module's docstring, feature by feature."""

    def features(some: str) -> list[str]:
        words = some.lower().split()
        return [*words, *("#" + f"^{word}$"[i : i + 3] for word in words for i in range(len(word)))]

    vector = np.zeros(dim)
    for feature in set(features(text)):
        name, weight = (feature[1:], 0.4) if feature.startswith("#") else (feature, 1.0)
        found_in = sum(feature in features(other) for other in texts) or 1
        code = crc32(name.encode())
        vector[code % dim] += (1 if code >> 31 else -1) * weight * log(1 + len(texts) / found_in) * (1 + log(features(text).count(feature)))
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("text", [*TEXTS, "The the THE cat", "unseen words"])
def test_vectors_follow_the_formula(text: str):
    encoder = HashedEncoder.fit(LARGE, TEXTS)
    [vector] = encoder.encode([text])
    np.testing.assert_allclose(vector, by_hand(text, TEXTS, LARGE.dim), atol=1e-6)


def test_the_idf_table_counts_passages_not_occurrences():
    encoder = HashedEncoder.fit(HashedSettings(), TEXTS)
    ids, passages = encoder.table
    counts = dict(zip(ids.tolist(), passages.tolist(), strict=True))
    assert counts[crc32(b"the")] == 2
    assert counts[crc32(b"bird")] == 1
    assert counts[crc32(b"^th") | 1 << 32] == 2


def test_counts_of_many_texts_are_summed_on_the_way():
    # those of all pieces were kept to the end: 40 GB for 21 million passages
    texts = [" ".join(f"w{word}" for word in range(start, 10_240, 256)) for start in range(256)] * 7
    encoder = HashedEncoder.fit(HashedSettings(dim=8), texts)
    counts = dict(zip(*encoder.table.tolist(), strict=True))
    assert {counts[crc32(f"w{word}".encode())] for word in range(10_240)} == {7}
    assert counts[crc32(b"^w1") | 1 << 32] == 7 * sum("^w1" in f"^{text}".replace(" ", "^") for text in texts[:256])


def test_an_encoder_made_again_from_its_table_gives_the_same_bits():
    encoder = HashedEncoder.fit(HashedSettings(), TEXTS)
    again = HashedEncoder(encoder.settings, passages=encoder.passages, table=encoder.table.copy())
    assert np.array_equal(encoder.encode(TEXTS), again.encode(TEXTS))


def test_a_text_without_a_letter_or_digit_is_zero_and_others_are_unit_vectors():
    encoder = HashedEncoder.fit(HashedSettings(dim=64), TEXTS)
    vectors = encoder.encode(["?! _", "", "cat", "½ 東京"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [0, 0, 1, 1], atol=1e-6)


def test_no_text_at_all_gives_no_vectors():
    assert HashedEncoder.fit(HashedSettings(dim=8), TEXTS).encode([]).shape == (0, 8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=6))
def test_a_vector_does_not_depend_on_what_is_encoded_beside_it(texts: list[str]):
    encoder = HashedEncoder.fit(HashedSettings(dim=32), TEXTS)
    together = encoder.encode(texts)
    assert np.isfinite(together).all()
    assert np.array_equal(together, np.concatenate([encoder.encode([text]) for text in texts]))


def test_more_texts_than_fit_in_one_go_keep_their_order_and_progress_is_told():
    texts = [f"word{i}" for i in range(600)]
    told: list[int] = []
    encoder = HashedEncoder.fit(HashedSettings(dim=128), texts)
    vectors = encoder.encode(texts, told.append)
    assert told == [256, 512, 600]
    assert np.array_equal(vectors[599], encoder.encode(["word599"])[0])


@pytest.mark.parametrize("wrong", [{"dim": 0}, {"word_weight": -1.0}, {"word_weight": 0.0, "trigram_weight": 0.0}])
def test_settings_that_encode_nothing_are_refused(wrong: dict):
    with pytest.raises(ValueError, match="an encoder needs"):
        HashedSettings(**wrong)
