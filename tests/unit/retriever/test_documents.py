"""Documents by row and by id, out of mapped files or memory."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retriever.corpora.ids import hash_of
from retriever.corpus import CorpusRecord, Document, import_corpus
from retriever.documents import DocumentsFault, DocumentStore, rendered

OSLO = b'{"id":"7","contents":"\\"Oslo\\"\\nOslo \xf0\x9f\x8f\x94 is \\"big\\".","url":"u"}'


def document(id: str, contents: str = "") -> Document:
    return Document(id=id, contents=contents, json=json.dumps({"id": id, "contents": contents}).encode())


def made(directory: Path, *ids: str) -> CorpusRecord:
    path = directory / "c.jsonl"
    path.write_bytes(b"".join(document(id, f"text of {id}").json + b"\n" for id in ids))
    return import_corpus(path, directory)


def opened(directory: Path) -> DocumentStore:
    ids = directory / "ids.npy"
    return DocumentStore.open(directory / "documents.jsonl", directory / "offsets.npy", ids if ids.is_file() else None)


def test_documents_are_found_by_row_and_by_id(tmp_path: Path):
    made(tmp_path, "b", "10", "a", "é")
    in_memory = DocumentStore.of([document(id, f"text of {id}") for id in ("b", "10", "a", "é")])
    with opened(tmp_path) as mapped:
        for store in (mapped, in_memory):
            assert len(store) == 4
            assert json.loads(store[1]) == {"id": "10", "contents": "text of 10"}
            assert store.contents(np.int64(3)) == "text of é"
            assert [store.row_of(id) for id in ("b", "10", "a", "é", "1", "")] == [0, 1, 2, 3, None, None]


def test_ids_that_are_rows_need_no_table_and_only_str_of_a_row_is_one(tmp_path: Path):
    assert made(tmp_path, *(str(row) for row in range(12))).ids == "rows"
    with opened(tmp_path) as store:
        assert [store.row_of(id) for id in ("0", "9", "11")] == [0, 9, 11]
        assert [store.row_of(id) for id in ("12", "-1", "07", "1.0", " 1", "1_0", "²", "٣", "", "1" * 5000, "\ud800")] == [None] * 11


def test_no_row_is_counted_from_the_end(tmp_path: Path):
    store = DocumentStore.of([document("0")])
    for row in (-1, 1):
        with pytest.raises(IndexError, match=f"document {row} of 1"):
            store[row]


def test_a_store_may_be_empty_in_memory():
    store = DocumentStore.of([])
    assert (len(store), [*store], store.row_of("0")) == (0, [], None)


def test_two_ids_with_one_hash_are_both_found():
    lines, sought = [b'{"id":"a"}', b'{"id":"b"}', b'{"id":"c"}'], hash_of("b")
    table = np.array([[sought, sought, sought], [0, 1, 2]], np.uint64)  # as if all three had the hash of "b"
    store = DocumentStore(b"".join(lines), np.array([0, 10, 20, 30]), table, name="memory")
    assert [store.row_of("b"), store.row_of("a")] == [1, None]  # "a" is looked for under its own hash


def test_documents_in_memory_have_ids_of_their_own_and_one_line_each():
    with pytest.raises(ValueError, match="documents 0 and 2 have one id, 'a'"):
        DocumentStore.of([document("a"), document("b"), document("a")])
    with pytest.raises(ValueError, match="'a' is not on one line"):
        DocumentStore.of([Document(id="a", contents="", json=b'{"id":\n"a"}')])


def test_a_closed_store_says_so(tmp_path: Path):
    made(tmp_path, "0")
    store = opened(tmp_path)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store[0]


def test_threads_read_the_same(tmp_path: Path):
    made(tmp_path, *(f"d{row}" for row in range(500)))
    wrong: list[int] = []
    with opened(tmp_path) as store:

        def read(first: int) -> None:
            wrong.extend(row for row in range(first, 500) if store.contents(row) != f"text of d{row}" or store.row_of(f"d{row}") != row)

        threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("alter", "complaint"),
    [
        (lambda at: cut(at / "documents.jsonl", 60), "documents.jsonl has 60 bytes, "),
        (lambda at: cut(at / "documents.jsonl", 0), "documents.jsonl has 0 bytes, "),
        (lambda at: cut(at / "offsets.npy", 140), "offsets.npy is not a whole .npy file"),
        (lambda at: cut(at / "offsets.npy", 0), "offsets.npy is not a whole .npy file"),
        (lambda at: cut(at / "ids.npy", 150), "ids.npy is not a whole .npy file"),
        (lambda at: np.save(at / "offsets.npy", np.zeros(4, np.int32)), "offsets.npy holds int32 [4], expected int64 [n]"),
        (lambda at: np.save(at / "offsets.npy", np.zeros(1, np.int64)), "offsets.npy: there is no document"),
        (lambda at: np.save(at / "offsets.npy", np.array(["a"], object)), "offsets.npy is not a whole .npy file"),
        (lambda at: np.save(at / "ids.npy", np.zeros((2, 4), np.uint64)), "ids.npy holds uint64 [2, 4], expected uint64 [2, 3]"),
        (lambda at: np.save(at / "ids.npy", np.zeros((2, 3), np.uint64)), "document 0 does not begin where it should, or has another id"),
        (lambda at: (at / "ids.npy").unlink(), "document 0 does not begin where it should, or has another id"),
        (lambda at: np.save(at / "offsets.npy", np.load(at / "offsets.npy") + np.array([0, 1, 0, 0])), "document 0 is no line of JSON"),
        (lambda at: (at / "documents.jsonl").write_bytes((at / "documents.jsonl").read_bytes().replace(b"\n", b" ")), "document 1 does not begin"),
        (lambda at: (at / "documents.jsonl").write_bytes((at / "documents.jsonl").read_bytes()[::-1]), "document 0 "),
    ],
)
def test_files_that_are_not_what_was_written_are_refused(tmp_path: Path, alter, complaint: str):
    made(tmp_path, "a", "b", "c")
    alter(tmp_path)
    with pytest.raises(DocumentsFault) as raised:
        opened(tmp_path)
    assert complaint in str(raised.value)
    assert str(raised.value).endswith("build again")


def test_a_missing_file_is_an_os_error(tmp_path: Path):
    made(tmp_path, "a")
    (tmp_path / "documents.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"documents\.jsonl"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("fields", "max_chars", "expected"),
    [
        (None, None, OSLO.decode()),
        (["contents", "id"], None, '{"id":"7","contents":"\\"Oslo\\"\\nOslo 🏔 is \\"big\\"."}'),
        (["url", "weight"], None, '{"url":"u"}'),
        ([], None, "{}"),
        (None, 13, '{"id":"7","contents":"\\"Oslo\\"\\nOslo 🏔","url":"u"}'),
        (None, 18, '{"id":"7","contents":"\\"Oslo\\"\\nOslo 🏔 is \\"","url":"u"}'),
        (["contents"], 3, '{"contents":"\\"Os"}'),  # a title is contents, too
        (["id"], 1, '{"id":"7"}'),
        (["url"], 1, '{"url":"u"}'),
    ],
)
def test_a_document_is_shown_in_part(fields: list[str] | None, max_chars: int | None, expected: str):
    assert rendered(OSLO, fields=fields, max_chars=max_chars).decode() == expected


def test_contents_are_cut_anywhere():
    assert rendered(b'{"id":7,"contents":"\\ud83c\\udfd4\\n\\u00e9x"}', fields=None, max_chars=3).decode() == '{"id":7,"contents":"🏔\\né"}'
    assert rendered(b'{"contents":"\\"a whole sentence in quotes"}', fields=None, max_chars=2) == b'{"contents":"\\"a"}'
    assert rendered(b'{"contents":"ab"}', fields=None, max_chars=9) == b'{"contents":"ab"}'


def test_a_length_below_one_is_refused():
    with pytest.raises(ValueError, match="max_chars must be at least 1, got 0"):
        rendered(OSLO, fields=None, max_chars=0)


@given(contents=st.text(max_size=30), ascii=st.booleans(), max_chars=st.integers(1, 40))
def test_whatever_is_cut_is_the_beginning_of_what_was_there(contents: str, ascii: bool, max_chars: int):
    line = json.dumps({"id": 1, "contents": "x" + contents}, ensure_ascii=ascii).encode()
    assert json.loads(rendered(line, fields=None, max_chars=max_chars)) == {"id": 1, "contents": ("x" + contents)[:max_chars]}


@pytest.mark.slow
def test_opening_takes_milliseconds_however_many_documents_there_are(tmp_path: Path):
    lines = [b'{"id":"%d","contents":""}\n' % row for row in range(500_000)]
    (tmp_path / "documents.jsonl").write_bytes(b"".join(lines))
    np.save(tmp_path / "offsets.npy", np.cumsum([0, *map(len, lines)]))
    took = []
    for _ in range(5):
        started = time.perf_counter()
        with opened(tmp_path) as store:
            took.append(time.perf_counter() - started)
            assert store.row_of("499999") == 499_999
    assert min(took) < 0.05
