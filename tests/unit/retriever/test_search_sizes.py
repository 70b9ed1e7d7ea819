"""What an index is said to take, against what it takes."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from retriever.searchers.bm25 import Bm25Searcher, build_bm25
from retriever.searchers.searcher import Memory, SearcherError
from retriever.searchers.sizes import bm25_memory, bm25_spill, building_bytes, memory_of

FACTORIES = ["Flat", "SQ8", "SQfp16", "SQ4", "PQ16x4np", "RaBitQ", "HNSW8,SQ8", "IVF64,SQ8", "IVF64,RaBitQ", "IVF64,RaBitQfs", "RaBitQfs", "PQ16x4fs"]


def test_the_sizes_of_wikipedia():
    count, dim = 21_015_324, 768  # e5_Flat.index, 64.6 GB
    assert memory_of("Flat", count, dim).disk_bytes == pytest.approx(64.56e9, rel=1e-3)
    assert memory_of("SQ8", count, dim).disk_bytes == pytest.approx(16.14e9, rel=1e-3)
    assert memory_of("RaBitQ", count, dim).disk_bytes == pytest.approx(2.19e9, rel=1e-2)
    assert memory_of("HNSW32,SQ8", count, dim).disk_bytes == pytest.approx(21.9e9, rel=1e-2)
    assert memory_of("blocks", count, dim, dtype="float16") == Memory(mapped_bytes=32_279_537_664, disk_bytes=32_279_537_664)
    assert memory_of("blocks", count, dim, devices=("cuda:0",)).device_bytes == 32_279_537_664


@pytest.mark.slow
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_file_is_as_large_as_predicted(tmp_path, factory):
    faiss.omp_set_num_threads(1)
    vectors = np.random.default_rng(0).standard_normal((20_000, 64)).astype(np.float32)
    index = faiss.index_factory(64, factory, faiss.METRIC_INNER_PRODUCT)
    if hasattr(index, "hnsw"):
        index.hnsw.efConstruction = 8  # the links are as many
    if hasattr(index, "cp"):
        index.cp.niter = 2
    index.train(vectors[:4000])
    index.add(vectors)
    size = len(faiss.serialize_index(index))
    predicted = memory_of(factory, 20_000, 64)
    assert predicted.disk_bytes == pytest.approx(size, rel=0.02)
    assert predicted.mapped_bytes + predicted.resident_bytes == predicted.disk_bytes
    assert (predicted.mapped_bytes == 0) == factory.endswith("fs")


def test_what_is_read_is_in_memory_and_what_is_rescored_is_mapped():
    mapped, read = memory_of("HNSW32,SQ8", 1000, 64), memory_of("HNSW32,SQ8", 1000, 64, mmap=False)
    assert mapped.resident_bytes < 0.1 * read.resident_bytes == 0.1 * read.disk_bytes
    assert memory_of("RaBitQ", 1000, 64, rescore="float16").mapped_bytes == memory_of("RaBitQ", 1000, 64).mapped_bytes + 128_000


def test_flat_indexes_are_built_in_the_memory_of_their_sample_and_graphs_in_their_own():
    assert building_bytes("Flat", 10**6, 64) == 0
    assert building_bytes("SQ8", 10**6, 64) == 65_536 * 64 * 4
    assert building_bytes("IVF16384,RaBitQ", 10**7, 64) == 64 * 16_384 * 64 * 4
    assert building_bytes("HNSW32,SQ8", 10**6, 64) == memory_of("HNSW32,SQ8", 10**6, 64).disk_bytes


def test_an_unknown_type_is_refused():
    with pytest.raises(SearcherError, match="makes no index 'Flatt'"):
        memory_of("Flatt", 10, 8)
    with pytest.raises(SearcherError, match="IndexNSG"):
        memory_of("NSG16", 10, 8)


def test_words_take_what_a_sample_of_the_texts_predicts(tmp_path):
    pick = np.random.default_rng(0).zipf(1.3, size=(1000, 60)) % 6_000
    texts = [" ".join(f"w{word}" for word in row) for row in pick]
    spilled = []
    record = build_bm25(texts, len(texts), tmp_path, progress=lambda what, done, of: spilled.append((tmp_path / "spill").stat().st_size))
    searcher = Bm25Searcher.open(tmp_path, record)
    assert bm25_memory(1000, texts[:300]).disk_bytes == pytest.approx(searcher.memory().disk_bytes, rel=0.15)
    # the plan had forgotten it: at the end of a build of Wikipedia the disk was short of 20 GB
    assert max(spilled) < bm25_spill(bm25_memory(1000, texts[:300])) < 2 * max(spilled)
    assert searcher.memory().disk_bytes == pytest.approx(sum(path.stat().st_size for path in tmp_path.iterdir()), rel=0.01)
