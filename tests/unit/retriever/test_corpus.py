import json
from pathlib import Path

import pytest

from retriever.corpus import CorpusError, read_corpus


def corpus(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_title_and_text_become_search_r1s_contents(tmp_path: Path):
    path = corpus(
        tmp_path, '{"id": 7, "title": "Oslo", "text": "Oslo is ½ as big.", "url": "x"}', "", '{"id": "8", "contents": "\\"A\\"\\nb", "score": 1}'
    )
    oslo, other = read_corpus(path)
    assert (oslo.id, oslo.contents) == ("7", '"Oslo"\nOslo is ½ as big.')
    assert oslo.json.decode() == '{"id":7,"contents":"\\"Oslo\\"\\nOslo is ½ as big.","url":"x"}'
    assert other.json == b'{"id":"8","contents":"\\"A\\"\\nb","score":1}'


def test_contents_win_where_a_row_has_both(tmp_path: Path):
    [document] = read_corpus(corpus(tmp_path, '{"id": "1", "title": "T", "text": "t", "contents": "whole"}'))
    assert json.loads(document.json) == {"id": "1", "title": "T", "text": "t", "contents": "whole"}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("[1]", "expected an object, got list"),
        ("{", "not JSON"),
        ('{"contents": "x"}', "expected an id"),
        ('{"id": true, "contents": "x"}', "expected an id"),
        ('{"id": "a"}', "expected a string `contents`"),
        ('{"id": "a", "contents": 3}', "expected a string `contents`"),
        ('{"id": "a", "title": "x"}', "`title` and `text`"),
        ('{"id": "a", "contents": "x", "weight": NaN}', "NaN"),
        ('{"id": "a", "contents": "\\ud800"}', "surrogate"),
        ('{"id": "first", "contents": "x"}', "the id 'first' is that of line 1, too"),
        (b'{"id": "a", "contents": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_row_is_an_error_with_file_and_line(tmp_path: Path, row: str | bytes, complaint: str):
    path = corpus(tmp_path, '{"id": "first", "contents": "x"}', "", row)
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:3: ") as raised:
        read_corpus(path)
    assert complaint in str(raised.value)


def test_an_empty_corpus_is_refused(tmp_path: Path):
    with pytest.raises(CorpusError, match="is empty"):
        read_corpus(corpus(tmp_path, "", " "))


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    [document] = read_corpus(corpus(tmp_path, b'\xef\xbb\xbf{"id": "1", "contents": "x"}'))
    assert document.contents == "x"


def test_a_number_beyond_floating_point_is_refused(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:1: not JSON: Out of range"):
        read_corpus(corpus(tmp_path, '{"id": "1", "contents": "x", "weight": 1e999}'))  # Python reads infinity, which JSON cannot say
