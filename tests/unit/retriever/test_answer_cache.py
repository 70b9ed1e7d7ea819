from retriever.cache import AnswerCache
from retriever.query import Found, Mode, Query


def query(text: str, topk: int = 3, mode: Mode | None = None, rerank: bool = False) -> Query:
    return Query(text=text, topk=topk, mode=mode, rerank=rerank)


def found(size: int) -> list[Found]:
    return [Found(document=b"x" * size, score=1.0)]


def test_the_answer_asked_for_longest_ago_leaves_first():
    cache = AnswerCache(entries=2, max_bytes=10_000)
    cache.put(query("a"), found(1))
    cache.put(query("b"), found(2))
    assert cache.get(query("a")) == found(1)
    cache.put(query("c"), found(3))
    assert [cache.get(query(text)) for text in "abc"] == [found(1), None, found(3)]
    assert (cache.hits, cache.misses, len(cache)) == (3, 1, 2)


def test_text_topk_mode_and_reranking_all_make_another_question():
    cache = AnswerCache(entries=9, max_bytes=10_000)
    cache.put(query("a"), found(1))
    others = [query("b"), query("a", topk=4), query("a", mode=Mode.BM25), query("a", rerank=True)]
    assert [cache.get(other) for other in others] == [None] * 4


def test_its_bytes_are_bounded_and_counted():
    cache = AnswerCache(entries=100, max_bytes=5000)
    for text in "abcdefgh":
        cache.put(query(text), found(1000))
        assert cache.bytes <= 5000
    assert len(cache) == 2  # 1000 of the document, 850 of the entry and its hit, 1 of the text
    assert cache.bytes == 2 * 1851
    cache.put(query("large"), found(6000))
    assert (len(cache), cache.get(query("large"))) == (2, None)


def test_a_cache_without_entries_keeps_nothing():
    cache = AnswerCache(entries=0, max_bytes=5000)
    cache.put(query("a"), found(1))
    assert (len(cache), cache.bytes) == (0, 0)
