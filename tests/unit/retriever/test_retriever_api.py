import itertools
import json
import re
import struct
from typing import Any

import httpx
import msgpack
import pytest
from retriever_served import INDEX, ROWS, TEXTS, ask, index_of, served

from retriever.api import MAX_BODY_BYTES, MAX_QUERIES, MAX_TOPK, MSGPACK
from retriever.query import Query

PACKED = {"content-type": MSGPACK, "accept": MSGPACK}


def search_r1(result: Any) -> bytes:
    """The bytes that FastAPI makes of an answer."""
    return json.dumps({"result": result}, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("with_scores", [True, False])
def test_answers_have_search_r1s_bytes_in_both_modes_for_any_number_of_queries(count: int, with_scores: bool):
    """Search-R1's own server (search_r1/search/retrieval_server.py at a14dc3a) breaks without scores, its default: it unpacks the list of
    results into results and scores, so that 1 or 3 queries are answered by 500, and 2 by 200 with the documents of the first as results
    and those of the second as scores."""
    queries = ["Oslo Norway", "Rome Italy", "Zürich"][:count]
    [answer] = ask({"queries": queries, "topk": 2, "return_scores": with_scores})
    hits = INDEX.search([Query(text=query, topk=2) for query in queries])
    expected = [[{"document": ROWS[hit.row], "score": hit.score} if with_scores else ROWS[hit.row] for hit in some] for some in hits]
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == search_r1(expected)
    assert [some[0].row for some in hits] == [0, 1, 3][:count]


def test_one_post_of_64_queries_reads_as_search_r1s_trainer_reads_it():
    """llm_agent/generation.py at a14dc3a: all active queries in one request with scores; `result[i][j]["document"]["contents"]` by line."""
    queries = [f"{city} {land}" for city, land in TEXTS.items()] * 16
    [answer] = ask({"queries": queries, "topk": 3, "return_scores": True})
    result = answer.json()["result"]
    assert [len(hits) for hits in result] == [3] * 64
    titles = [hits[0]["document"]["contents"].split("\n")[0] for hits in result]
    assert titles == [f'"{city}"' for city in TEXTS] * 16
    assert all(hit["score"] >= after["score"] for hits in result for hit, after in itertools.pairwise(hits))


def test_what_a_request_leaves_out_has_search_r1s_defaults_and_what_it_adds_is_ignored():
    plain, null, extra = ask(
        {"queries": ["Oslo"]}, {"queries": ["Oslo"], "topk": None, "return_scores": None}, {"queries": ["Oslo"], "more": 1}, topk=2
    )
    assert plain.content == null.content == extra.content
    assert len(plain.json()["result"][0]) == 2
    assert "document" not in plain.json()["result"][0][0]


def test_a_single_query_is_skyrls_form_of_a_list_of_one():
    one, list_of_one, both = ask({"query": "Oslo", "topk": 1}, {"queries": ["Oslo"], "topk": 1}, {"query": "Oslo", "queries": ["Oslo"]})
    assert one.content == list_of_one.content
    assert both.status_code == 422
    assert "not both" in both.json()["detail"]


def test_no_queries_and_queries_without_a_word_have_no_hits():
    none, empty = ask({"queries": []}, {"queries": ["", "  \n", "??", "Oslo"], "topk": 1})
    assert none.content == b'{"result":[]}'
    assert [len(hits) for hits in empty.json()["result"]] == [0, 0, 0, 1]


def test_an_index_with_fewer_documents_than_asked_for_answers_all_it_has():
    [few] = ask({"queries": ["lies"], "topk": MAX_TOPK})
    assert sorted(document["id"] for document in few.json()["result"][0]) == ["0", "1", "2", "3"]
    [one] = ask({"queries": ["lies"], "topk": 2}, index=index_of(ROWS[:1]))
    assert one.json() == {"result": [[ROWS[0]]]}


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b'{"queries": ["\xff"]}', 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"queries": ["a"], "topk": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        ([], 422, "expected"),
        ({}, 422, "queries must be a list of strings"),
        ({"queries": "Oslo"}, 422, "queries must be a list of strings"),
        ({"queries": ["Oslo", 1]}, 422, "queries must be a list of strings"),
        ({"query": ["Oslo"]}, 422, "query a string"),
        ({"queries": ["Oslo"], "topk": 0}, 422, "topk must be an integer from 1 to 100"),
        ({"queries": ["Oslo"], "topk": MAX_TOPK + 1}, 422, "topk"),
        ({"queries": ["Oslo"], "topk": True}, 422, "topk"),
        ({"queries": ["Oslo"], "topk": 1.5}, 422, "topk"),
        (b'{"queries": ["Oslo"], "topk": NaN}', 422, "topk"),
        (b'{"queries": ["Oslo"], "topk": 1e999}', 422, "topk"),
        ({"queries": ["Oslo"], "return_scores": "yes"}, 422, "return_scores must be true or false"),
        ({"queries": ["Oslo"], "rerank": 1}, 422, "rerank must be true or false"),
        ({"queries": ["Oslo"], "rerank": True}, 422, "no reranker"),
        ({"queries": ["Oslo"], "mode": "fast"}, 422, "mode must be one of dense, bm25, hybrid"),
        ({"queries": ["Oslo"], "mode": "bm25"}, 422, "searched by dense"),
        ({"queries": ["Oslo"], "fields": "id"}, 422, "fields must be a list"),
        ({"queries": ["Oslo"], "fields": []}, 422, "fields must be a list"),
        ({"queries": ["Oslo"], "max_chars": 0}, 422, "max_chars must be an integer"),
        ({"queries": ["Oslo"] * (MAX_QUERIES + 1)}, 413, f"at most {MAX_QUERIES}"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "at most"),
    ],
)
def test_a_wrong_request_is_told_what_was_expected(body: Any, status: int, complaint: str):
    wrong, right = ask(body, {"queries": ["Oslo"]})
    assert wrong.status_code == status
    assert complaint in wrong.json()["detail"]
    assert right.status_code == 200


def test_a_megabyte_of_query_and_a_lone_surrogate_are_searched_for():
    long, surrogate = ask({"queries": ["Oslo " * 200_000], "topk": 1}, b'{"queries": ["Oslo \\ud800"], "topk": 1}')
    assert [answer.json()["result"][0][0]["id"] for answer in (long, surrogate)] == ["0", "0"]


def test_documents_are_cut_and_their_fields_chosen_as_asked():
    fields, cut, both = ask(
        {"queries": ["Oslo"], "topk": 1, "fields": ["n", "id", "nothing"]},
        {"queries": ["Oslo"], "topk": 1, "max_chars": 9},
        {"queries": ["Oslo"], "topk": 1, "max_chars": 9, "fields": ["contents"], "return_scores": True},
    )
    assert fields.json() == {"result": [[{"id": "0", "n": 0}]]}
    assert cut.json() == {"result": [[{"id": "0", "contents": '"Oslo"\nOs', "n": 0}]]}
    [[hit]] = both.json()["result"]
    assert hit["document"] == {"contents": '"Oslo"\nOs'}


@pytest.mark.parametrize("with_scores", [True, False])
def test_msgpack_says_what_json_says(with_scores: bool):
    request = {"queries": ["Oslo", "Zürich"], "topk": 2, "return_scores": with_scores}
    [plain] = ask(request)
    [packed] = ask(msgpack.packb(request), headers=PACKED)
    assert packed.headers["content-type"] == MSGPACK
    assert msgpack.unpackb(packed.content) == plain.json()
    [answer_only] = ask(request, headers={"accept": MSGPACK})
    [request_only] = ask(msgpack.packb(request), headers={"content-type": MSGPACK, "accept": "*/*"})
    assert (answer_only.content, request_only.content) == (packed.content, plain.content)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x81", b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\x81\x80\x01", struct.pack(">BI", 0xDB, 2**31) + b"x", b"\x01\x02"],
)
def test_what_is_no_msgpack_is_400(body: bytes):
    [answer] = ask(body, headers=PACKED)
    assert answer.status_code == 400
    assert re.fullmatch("the body is not msgpack: .+", answer.json()["detail"])


def test_a_document_with_integers_that_msgpack_does_not_have_is_answered_with_the_nearest_numbers():
    row = {"id": "0", "contents": "Oslo", "n": [2**64 - 1, 2**64, {"m": -(2**70)}], "huge": 10**309}

    async def play(client: httpx.AsyncClient) -> list[Any]:
        headers = {"accept": MSGPACK}
        found = await client.post("/retrieve", json={"query": "Oslo"}, headers=headers)
        pages = await client.post("/access", json={"urls": ["0"]}, headers=headers)
        answers = [found, pages, await client.get("/documents/0", headers=headers)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        return [msgpack.unpackb(answer.content) for answer in answers]

    expected = row | {"n": [2**64 - 1, 2.0**64, {"m": -(2.0**70)}], "huge": str(10**309)}
    assert served(play, index=index_of([row])) == [{"result": [[expected]]}, {"result": [expected]}, expected]


def test_bytes_in_msgpack_are_no_query():
    [answer] = ask(msgpack.packb({"queries": [b"Oslo"]}), headers=PACKED)
    assert answer.status_code == 422


def test_a_document_is_found_by_its_id_whatever_is_in_it():
    rows = [{"id": id, "contents": "x"} for id in ("plain", "http://wiki/index.php?title=Oslo", "a/b c?", "ü")]

    async def play(client: httpx.AsyncClient) -> None:
        for row, path in zip(rows, ["plain", "http:%2F%2Fwiki%2Findex.php%3Ftitle=Oslo", "a/b%20c%3F", "%C3%BC"], strict=True):
            answer = await client.get(f"/documents/{path}")
            assert (answer.status_code, answer.json()) == (200, row)
        missing = await client.get("/documents/nobody")
        assert (missing.status_code, missing.json()) == (404, {"detail": "there is no document with the id 'nobody'"})
        packed = await client.get("/documents/plain", headers={"accept": MSGPACK})
        assert msgpack.unpackb(packed.content) == rows[0]

    served(play, index=index_of(rows))


def test_pages_are_accessed_by_url_as_asearchers_server_answers():
    """tools/local_retrieval_server.py of ASearcher (813e804): {"urls": [...]} -> {"result": [page or null, ...]}, index.php/ in its other form."""
    rows = [{"id": f"https://wiki.org/{page}", "contents": page} for page in ("Oslo", "index.php?title=Rome")]

    async def play(client: httpx.AsyncClient) -> None:
        urls = ["https://wiki.org/Oslo", "https://nowhere", "https://wiki.org/index.php/Rome"]
        answer = await client.post("/access", json={"urls": urls})
        assert answer.json() == {"result": [rows[0], None, rows[1]]}
        packed = await client.post("/access", content=msgpack.packb({"urls": urls}), headers=PACKED)
        assert msgpack.unpackb(packed.content) == answer.json()
        for body, status in [
            (b"{", 400),
            (b"[]", 422),
            (b"{}", 422),
            (b'{"urls": [1]}', 422),
            (b'{"urls": %s}' % json.dumps(["x"] * 1025).encode(), 413),
        ]:
            assert (await client.post("/access", content=body)).status_code == status

    served(play, index=index_of(rows))
