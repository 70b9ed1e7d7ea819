"""Corpora of any size: imported into a directory, or adopted where they lie."""

import gzip
import hashlib
import io
import json
import resource
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever.corpora import source
from retriever.corpora.ids import IdCollector, duplicate, hash_of
from retriever.corpus import CorpusError, CorpusRecord, adopt_corpus, import_corpus, read_corpus
from retriever.documents import DocumentStore

THREE = b'{"id": "0", "contents": "\\"A\\"\\nb"}\n\n{"id": "1", "title": "C", "text": "\\u00bd", "url": "u"}\n {"id":2,"contents":"e"}\r\n'
SERVED = b'{"id":"0","contents":"\\"A\\"\\nb"}\n{"id":"1","contents":"\\"C\\"\\n\xc2\xbd","url":"u"}\n{"id":2,"contents":"e"}\n'


def opened(record: CorpusRecord, directory: Path) -> DocumentStore:
    ids = directory / "ids.npy"
    assert ids.is_file() == (record.ids == "hashed")
    return DocumentStore.open(record.documents, directory / "offsets.npy", ids if ids.is_file() else None)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def tar(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        folder = tarfile.TarInfo("data")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            member = tarfile.TarInfo(f"data/{name}.jsonl")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def flipped(data: bytes, at: int) -> bytes:
    """With one byte changed."""
    altered = bytearray(data)
    altered[at] ^= 1
    return bytes(altered)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


def test_a_corpus_is_written_as_it_is_served_with_the_first_byte_of_each_document(tmp_path: Path, out: Path):
    path = written(tmp_path / "c.jsonl", THREE)
    told: list[tuple[str, int, int]] = []
    record = import_corpus(path, out, progress=lambda what, done, of: told.append((what, done, of)))
    assert (out / "documents.jsonl").read_bytes() == SERVED
    assert np.load(out / "offsets.npy").tolist() == [0, 33, 77, 101]
    assert sorted(file.name for file in out.iterdir()) == ["documents.jsonl", "offsets.npy"]
    assert (record.count, record.ids, record.documents, record.sha256) == (3, "rows", out / "documents.jsonl", hashlib.sha256(SERVED).hexdigest())
    assert (record.source.name, record.source.bytes, record.source.sha256) == ("c.jsonl", len(THREE), hashlib.sha256(THREE).hexdigest())
    assert told[-1] == ("imported", len(THREE), len(THREE))
    with opened(record, out) as store:
        assert [*store] == SERVED.splitlines() == [document.json for document in read_corpus(path)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(gzip.compress(THREE), id="gzip"),
        pytest.param(gzip.compress(THREE[:40]) + gzip.compress(THREE[40:]), id="two members"),
        pytest.param(gzip.compress(THREE) + bytes(512), id="padded"),
        pytest.param(tar(wiki=THREE), id="tar"),
        pytest.param(b"\xef\xbb\xbf" + THREE, id="byte order mark"),
        pytest.param(THREE.rstrip(), id="no last line break"),
        pytest.param(THREE.replace(b"\n", b"\r\n"), id="CRLF"),
    ],
)
def test_packed_in_whatever_way_it_is_the_same_corpus(tmp_path: Path, out: Path, data: bytes):
    record = import_corpus(written(tmp_path / "c.jsonl.gz", data), out)
    assert (out / "documents.jsonl").read_bytes() == SERVED
    assert (record.source.bytes, record.source.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_lines_are_found_across_the_pieces_that_are_read(tmp_path: Path, out: Path):
    texts = ["é" * length for length in (0, 100_000, 3, 131_071, 131_072, 300_000)]  # pieces have 262,144 bytes
    path = written(tmp_path / "c.jsonl", b"".join(json.dumps({"id": str(i), "contents": text}).encode() + b"\n" for i, text in enumerate(texts)))
    with opened(adopt_corpus(path, out), out) as store:
        assert [store.contents(row) for row in range(6)] == texts


def test_a_table_is_a_corpus(tmp_path: Path, out: Path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    days = arrow.array([0, 1], arrow.date32())
    parquet.write_table(arrow.table({"id": [7, 8], "title": ["A", "B"], "text": ["½", "c"], "day": days}), tmp_path / "c.parquet")
    record = adopt_corpus(tmp_path / "c.parquet", out)
    assert (record.count, record.ids, record.documents) == (2, "hashed", out / "documents.jsonl")
    assert record.source.sha256 == hashlib.sha256((tmp_path / "c.parquet").read_bytes()).hexdigest()
    lines = (out / "documents.jsonl").read_text().splitlines()
    assert lines == ['{"id":7,"contents":"\\"A\\"\\n½","day":"1970-01-01"}', '{"id":8,"contents":"\\"B\\"\\nc","day":"1970-01-02"}']


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"id": [1, None], "contents": ["a", "b"]}, "row 2: expected an id"),
        ({"id": [1, 1], "contents": ["a", "b"]}, "row 2: the id '1' is that of row 1, too"),
        ({"id": [1, 2], "contents": ["a", None]}, "row 2: `contents` is null"),
        ({"id": [1, 2], "contents": ["a", "b"], "weight": [0.5, float("nan")]}, "row 2: not JSON: Out of range"),
        ({"id": [1, 2], "contents": ["a", "b"], "image": [b"", b""]}, "row 1: not JSON: JSON has no form for a value of type bytes"),
        ({"id": [], "contents": []}, "is empty"),
    ],
)
def test_a_bad_row_of_a_table_is_named(tmp_path: Path, out: Path, columns: dict[str, list[object]], complaint: str):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match=r"c\.parquet: ") as raised:
        import_corpus(tmp_path / "c.parquet", out)
    assert complaint in str(raised.value)
    assert list(out.iterdir()) == []


def test_text_of_a_table_that_is_not_utf_8_is_an_error_with_its_rows(tmp_path: Path, out: Path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": [1, 2], "contents": arrow.array([b"a", b"\xff"]).view(arrow.string())})
    parquet.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match=r"c\.parquet: rows 1 to 2: a cell cannot be read: 'utf-8' codec can't decode"):
        import_corpus(tmp_path / "c.parquet", out)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        pytest.param(b"", "c: the corpus is empty", id="nothing"),
        pytest.param(b" \n\n", "c: the corpus is empty", id="empty lines"),
        pytest.param(gzip.compress(b""), "c: the corpus is empty", id="empty gzip"),
        pytest.param(gzip.compress(THREE)[:-9], "c: the archive is not whole or damaged", id="cut gzip"),
        pytest.param(gzip.compress(THREE) + b"junk", "c: the archive is not whole or damaged", id="junk behind gzip"),
        pytest.param(b"\x1f\x8bnothing", "c: the archive is not whole or damaged", id="no gzip"),
        pytest.param(flipped(tar(wiki=THREE), -5), "c: the archive is not whole or damaged (CRC check failed", id="flipped bit"),
        pytest.param(tar(), "c: an archive without a file", id="empty tar"),
        pytest.param(
            tar(one=THREE, two=THREE), "c: an archive of more than one file (data/one.jsonl, data/two.jsonl, ...): unpack it", id="tar of two"
        ),
        pytest.param(b"PAR1 and no more", "c: not a Parquet file that can be read", id="no Parquet"),
        pytest.param(b"\x28\xb5\x2f\xfd", "c: zstandard is not read here", id="zstandard"),
        pytest.param(THREE + b'{"id": "x", "contents": "\\ud800"}', "c:5: a lone surrogate is no text", id="surrogate"),
        pytest.param(THREE + b'\n{"id": "x", "contents": "\xff"}', "c:6: not UTF-8", id="latin-1"),
        pytest.param(b"\n" + THREE + b'{"id": "1", "contents": ""}', "c:6: the id '1' is that of line 4, too: ids must be unique", id="id twice"),
        pytest.param(THREE + b'{"id": "2", "contents": ""}', "c:5: the id '2' is that of line 4, too: ids must be unique", id="last id twice"),
        pytest.param(b"\x0b\n" + THREE + b"\x0b\n" + THREE, "c:7: the id '0' is that of line 2, too", id="id twice behind blanks"),
    ],
)
@pytest.mark.parametrize("into", [import_corpus, adopt_corpus])
def test_a_bad_corpus_is_an_error_with_file_and_line_and_leaves_nothing(tmp_path: Path, out: Path, into, data: bytes, complaint: str):
    with pytest.raises(CorpusError) as raised:
        into(written(tmp_path / "c", data), out)
    assert complaint in str(raised.value)
    assert list(out.iterdir()) == []


def test_what_is_called_a_table_and_is_none_is_told_so(tmp_path: Path, out: Path):
    with pytest.raises(CorpusError, match=r"c\.parquet is no Parquet file, though it is called one"):
        import_corpus(written(tmp_path / "c.parquet", b"junk"), out)


def test_a_file_without_line_breaks_is_not_read_whole(tmp_path: Path, out: Path):
    path = tmp_path / "c"
    with path.open("wb") as file:
        file.truncate(source.MAX_LINE_BYTES + (1 << 20))
    with pytest.raises(CorpusError, match=r"c:1: the line is longer than 16777216 bytes: is this a file of JSON lines\?"):
        import_corpus(path, out)


def test_lines_that_can_be_served_as_they_stand_are_not_copied(tmp_path: Path, out: Path):
    path = written(tmp_path / "c.jsonl", b'\xef\xbb\xbf{"id": "b", "contents": "\\u00bd"}\r\n \n{"id": 7, "contents": "x", "more": [1]}')
    record = adopt_corpus(path, out)
    assert (record.documents, record.count, record.ids) == (path, 2, "hashed")
    assert record.sha256 == record.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sorted(file.name for file in out.iterdir()) == ["ids.npy", "offsets.npy"]
    with opened(record, out) as store:
        assert [*store] == [b'{"id": "b", "contents": "\\u00bd"}', b'{"id": 7, "contents": "x", "more": [1]}']
        assert [store.row_of("b"), store.row_of("7"), store.row_of("0")] == [0, 1, None]


def test_what_cannot_be_served_as_it_stands_is_imported_instead(tmp_path: Path, out: Path):
    record = adopt_corpus(written(tmp_path / "c.jsonl", THREE), out)
    assert record.documents == out / "documents.jsonl"
    assert record.documents.read_bytes() == SERVED


def test_an_import_replaces_what_was_there_wholly(tmp_path: Path, out: Path):
    import_corpus(written(tmp_path / "old", b'{"id": "b", "contents": ""}'), out)
    record = import_corpus(written(tmp_path / "new", THREE), out)
    assert sorted(file.name for file in out.iterdir()) == ["documents.jsonl", "offsets.npy"]  # the old one's ids are gone
    with opened(record, out) as store:
        assert store.row_of("b") is None


@pytest.mark.parametrize("into", [import_corpus, adopt_corpus])
def test_what_a_killed_import_left_is_cleared_away(tmp_path: Path, out: Path, into):
    for name in (".documents.jsonl.partial", ".offsets.npy.partial", ".ids.npy.partial"):
        written(out / name, b"x" * 1000)
    with opened(into(written(tmp_path / "c", b'{"id": "0", "contents": "a"}'), out), out) as store:
        assert store.contents(0) == "a"
    assert {file.name for file in out.iterdir()} <= {"documents.jsonl", "offsets.npy"}


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, out: Path):
    import_corpus(written(tmp_path / "small", THREE), out)
    large = written(tmp_path / "large", b"".join(b'{"id": "x%d", "contents": "%s"}\n' % (i, b"x" * 200) for i in range(10_000)))
    with files_of_at_most(1 << 20), pytest.raises(OSError, match="File too large"):
        import_corpus(large, out)
    assert sorted(file.name for file in out.iterdir()) == ["documents.jsonl", "offsets.npy"]
    assert (out / "documents.jsonl").read_bytes() == SERVED


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a disk without room does to one that writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_first_id_that_comes_twice_is_told_and_ids_that_share_a_hash_are_none():
    ids = ["0", "a", "b", "c", "b", "a"]
    collected = IdCollector()
    for id in ids:
        collected.add(id)
    table = collected.table()
    assert table is not None
    assert sorted(table[0].tolist()) == table[0].tolist() == sorted(hash_of(id) for id in ids)
    assert duplicate(table, lambda row: ids[row]) == (2, 4)
    assert duplicate(table, lambda row: f"{ids[row]}{row}") is None  # as if these were other ids with equal hashes


WEIRD = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from('\x00\x1f\x7f\x85\u2028\u2029\ufeff\U0001f468\u200d"\\\r\n\t/')))


@given(rows=st.dictionaries(st.one_of(WEIRD, st.integers()), WEIRD, min_size=10, max_size=30), ascii=st.booleans())
@settings(max_examples=4)  # of many rows: each brings several files to the disk
def test_any_text_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, rows: dict[str | int, str], ascii: bool):
    unique = {str(id): (id, text) for id, text in rows.items()}
    directory = tmp_path_factory.mktemp("weird")
    lines = [json.dumps({"id": id, "contents": text}, ensure_ascii=ascii).encode() for id, text in unique.values()]
    path = written(directory / "c.jsonl", b"\n".join(lines))
    for into in (import_corpus, adopt_corpus):
        with opened(into(path, directory), directory) as store:
            assert [store.contents(row) for row in range(len(store))] == [text for _, text in unique.values()]
            assert [store.row_of(id) for id in unique] == list(range(len(unique)))
