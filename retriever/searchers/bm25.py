"""Search by words: BM25 with scores computed when the index is built, as sparse columns that are mapped.

    words.npy     uint64 [V], ascending: the 64-bit hash of each word (blake2b; no list of words is kept in memory)
    columns.npy   int32 [V]: which column is the word's
    tops.npy      float32 [V]: the largest score of a column
    starts.npy    int64 [V + 1]: where each column's postings begin
    rows.npy      int32 [P]: documents that have the word, ascending
    scores.npy    float32 [P]: what the word adds to the document's score

The score is Lucene's BM25, as bm25s computes it:  idf(w) tf / (tf + k1 (1 - b + b length / mean)),  idf(w) = ln(1 + (n - df + .5) / (df + .5)).
Scoring at build time: Lu, BM25S: Orders of magnitude faster lexical search via eager sparse scoring, 2024 (arXiv 2407.03618).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retriever.query import Progress, Rows, Vectors, silent
from retriever.searchers.searcher import Memory, SearcherError, nothing_found
from retriever.searchers.words import words_of

__all__ = ["BM25_FILES", "Bm25Searcher", "build_bm25"]

BM25_FILES = ("words.npy", "columns.npy", "tops.npy", "starts.npy", "rows.npy", "scores.npy")
TOKENIZER = 1  # version of `words_of`: an index is searched with the words that it was built with
TEXTS_AT_A_TIME = 16_384
PIECE_POSTINGS = 8 << 20  # of the result that are sorted at a time: about half a gigabyte, with the copies that sorting makes

SHORT = 4096  # postings: adding them takes less time than finding out whether they can be left out
LOOKUP = 16  # binary searches take this many times as long as additions, per row
SUMMING = 1e-5  # relative error of sums in float32, generously

Ints = npt.NDArray[np.int32]


class Bm25Searcher:
    """An index of words. Used by one thread at a time.

    Args:
        arrays: by the names of `BM25_FILES`.
        record: what `build_bm25` returned.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], record: Mapping[str, Any]) -> None:
        if record.get("tokenizer") != TOKENIZER:
            raise SearcherError(f"the BM25 index was built with version {record.get('tokenizer')} of the words, this is {TOKENIZER}: build again")
        self.count = int(record["count"])
        self.record = dict(record)
        self._words, self._columns, self._tops, self._starts, self._rows, self._scores = (arrays[name] for name in BM25_FILES)
        self._sums = np.zeros(self.count, np.float32)  # of one query; all 0 between two

    @classmethod
    def open(cls, directory: Path, record: Mapping[str, Any]) -> Bm25Searcher:
        """The index of a directory, mapped.

        Raises:
            SearcherError: a file is not what was built.
        """
        arrays = {}
        for name in BM25_FILES:
            try:
                arrays[name] = np.load(directory / name, mmap_mode="r" if record["postings"] else None, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise SearcherError(f"{directory / name} cannot be read: {error}: build again") from error
        return cls(arrays, record)

    def search(self, texts: Sequence[str], topk: int) -> tuple[Vectors, Rows]:
        """Scores [N, topk] and rows [N, topk], best first, equal ones by row; -inf and -1 where no (more) document has a word of the text."""
        scores, rows = nothing_found(len(texts), topk)
        for i, text in enumerate(texts):
            found, at = self._search(self._columns_of(words_of(text)), topk)
            scores[i, : len(at)], rows[i, : len(at)] = found, at
        return scores, rows

    def memory(self) -> Memory:
        """The sums of one query are resident, the files mapped."""
        files = sum(array.nbytes for array in (self._words, self._columns, self._tops, self._starts, self._rows, self._scores))
        return Memory(resident_bytes=self._sums.nbytes, mapped_bytes=files, disk_bytes=files)

    def info(self) -> Mapping[str, Any]:
        """What it is."""
        return {"backend": "bm25", **self.record}

    def _columns_of(self, words: Sequence[str]) -> Ints:
        hashes = np.array([_hash(word) for word in words], np.uint64)
        if not len(self._words) or not len(hashes):
            return np.zeros(0, np.int32)
        places = np.minimum(np.searchsorted(self._words, hashes), len(self._words) - 1)
        return np.asarray(self._columns[places[self._words[places] == hashes]])

    def _search(self, columns: Ints, topk: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """The best rows of the sum of columns. `_sums` is 0 again afterwards."""
        found: list[Ints] = []
        try:
            candidates = self._sum(columns[np.lexsort((columns, -self._tops[columns]))], topk, found)
            sums = self._sums[candidates]
        finally:
            for rows in found:
                self._sums[rows] = 0
        if len(sums) > topk:
            good = sums >= np.partition(sums, -topk)[-topk]
            candidates, sums = candidates[good], sums[good]
        order = np.lexsort((candidates, -sums))[:topk]
        return sums[order], candidates[order].astype(np.int64)

    def _sum(self, columns: Ints, topk: int, found: list[Ints]) -> Ints:
        """Add columns, the most telling first, and return rows that have all of the best; `found` are all rows that were added to.

        Once `topk` rows have more than all further columns could give, no other row can be among the best, and long columns are looked up
        for those rows alone (MaxScore: Turtle and Flood, Query evaluation: strategies and optimizations, 1995). The answer is the same.
        """
        limits = np.cumsum(self._tops[columns][::-1].astype(np.float64))[::-1] * (1 + SUMMING)  # what the columns from here on can give
        candidates, closed = np.zeros(0, np.int32), False
        for column, limit in zip(columns, limits, strict=True):
            rows, scores = self._postings(column)
            if len(candidates) >= topk and len(rows) > SHORT:
                sums = self._sums[candidates]
                worst = np.partition(sums, -topk)[-topk]
                closed = closed or bool(limit < worst)
                if closed:
                    candidates = candidates[sums + limit >= worst]
            if closed and len(candidates) * LOOKUP < len(rows):
                at = np.minimum(np.searchsorted(rows, candidates), len(rows) - 1)
                there = rows[at] == candidates
                self._sums[candidates[there]] += scores[at[there]]
                continue
            found.append(rows)
            new = rows if not len(candidates) else rows[self._sums[rows] == 0]
            self._sums[rows] += scores
            if not closed:
                candidates = np.concatenate([candidates, new])
        return candidates

    def _postings(self, column: int) -> tuple[Ints, npt.NDArray[np.float32]]:
        start, stop = self._starts[column], self._starts[column + 1]
        return np.asarray(self._rows[start:stop]), np.asarray(self._scores[start:stop])


def build_bm25(texts: Iterable[str], count: int, directory: Path, *, k1: float = 1.5, b: float = 0.75, progress: Progress = silent) -> dict[str, Any]:
    """Write the files of an index of `count` texts into `directory`, and return the record that opens it.

    Memory: a dictionary of the distinct words, 12 bytes per text, and half a gigabyte. Postings are sorted on the disk: 12 bytes for each
    lie there meanwhile, beside the 8 that stay.

    Raises:
        SearcherError: there are not `count` texts, or k1 or b are no parameters of BM25.
    """
    if not k1 >= 0 or not 0 <= b <= 1:
        raise SearcherError(f"BM25 has k1 >= 0 and b of 0 to 1, got k1 = {k1} and b = {b}")
    directory.mkdir(parents=True, exist_ok=True)
    spill = directory / "spill"
    try:
        vocabulary, lengths, sizes = _spill(texts, count, spill, progress)
        postings = _write_postings(_spilled(spill, sizes), directory, lengths, len(vocabulary), k1=k1, b=b, progress=progress)
    finally:
        spill.unlink(missing_ok=True)
    hashes = np.fromiter(map(_hash, vocabulary), np.uint64, len(vocabulary))
    order = np.argsort(hashes, kind="stable")
    np.save(directory / "words.npy", hashes[order], allow_pickle=False)
    np.save(directory / "columns.npy", order.astype(np.int32), allow_pickle=False)
    return {"count": count, "k1": k1, "b": b, "method": "lucene", "tokenizer": TOKENIZER, "words": len(vocabulary), "postings": postings}


def _spill(texts: Iterable[str], count: int, spill: Path, progress: Progress) -> tuple[dict[str, int], Ints, list[int]]:
    """Count words text by text: [3, P] of words, rows and counts for every piece, sorted by word, one piece behind the other in one file.

    Returns the words by column, the texts' lengths, and every piece's P.
    """
    vocabulary: defaultdict[str, int] = defaultdict()
    vocabulary.default_factory = vocabulary.__len__  # a new word takes the next column
    lengths = np.zeros(count, np.int32)
    done, sizes = 0, []
    with spill.open("wb") as file:
        for some in _pieces(texts):
            if done + len(some) > count:
                raise SearcherError(f"there are more than the {count} texts that were announced")
            words = [words_of(text) for text in some]
            found = np.array([len(of_text) for of_text in words], np.int64)
            columns = np.fromiter(map(vocabulary.__getitem__, chain.from_iterable(words)), np.int64, int(found.sum()))
            keys, counts = np.unique(columns << 32 | np.repeat(np.arange(done, done + len(some)), found), return_counts=True)
            file.write(np.stack([keys >> 32, keys & 0xFFFFFFFF, counts]).astype(np.int32).tobytes())
            sizes.append(len(keys))
            lengths[done : done + len(some)] = found
            done += len(some)
            progress("words counted", done, count)
    if done != count:
        raise SearcherError(f"there are {done} texts, {count} were announced")
    return dict(vocabulary), lengths, sizes


def _spilled(spill: Path, sizes: Sequence[int]) -> list[Ints]:
    """The pieces, mapped. They are one file because a process may have no more than some 1,000 open: 16 million texts' pieces."""
    if not sum(sizes):
        return []
    whole = np.memmap(spill, np.int32, mode="r").view(np.ndarray)
    ends = np.cumsum(sizes).tolist()
    return [whole[3 * (end - size) : 3 * end].reshape(3, size) for end, size in zip(ends, sizes, strict=True)]


def _pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while some := list(islice(rest, TEXTS_AT_A_TIME)):
        yield some


def _write_postings(pieces: Sequence[Ints], directory: Path, lengths: Ints, words: int, *, k1: float, b: float, progress: Progress) -> int:
    """Merge the pieces into columns, some columns at a time."""
    frequencies = np.zeros(words, np.int64)  # texts with the word
    for piece in pieces:
        frequencies += np.bincount(piece[0], minlength=words)
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    total = int(starts[-1])
    idf = np.log1p((len(lengths) - frequencies + 0.5) / (frequencies + 0.5))
    norm = k1 * (1 - b + b * lengths / max(lengths.mean(), 1)) if total else np.zeros(0)
    tops = np.zeros(words, np.float32)
    with _Column(directory / "rows.npy", np.int32, total) as rows_out, _Column(directory / "scores.npy", np.float32, total) as scores_out:
        first = 0
        while first < words:
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + PIECE_POSTINGS, side="right")) - 1)
            columns, rows, counts = _merged(pieces, first, last)
            scores = (idf[columns] * counts / (counts + norm[rows])).astype(np.float32)
            tops[first:last] = np.maximum.reduceat(scores, starts[first:last] - starts[first])
            rows_out.write(rows)
            scores_out.write(scores)
            progress("words indexed", int(starts[last]), total)
            first = last
    np.save(directory / "tops.npy", tops, allow_pickle=False)
    np.save(directory / "starts.npy", starts, allow_pickle=False)
    return total


def _merged(pieces: Sequence[Ints], first: int, last: int) -> tuple[Ints, Ints, Ints]:
    """Columns, rows and counts of the columns `first` to `last`, by column, then row."""
    bounds = np.array([first, last], np.int32)  # of the pieces' own type: for another, NumPy would convert all of each
    spans = [np.searchsorted(piece[0], bounds) for piece in pieces]
    columns, rows, counts = (np.concatenate([piece[k, low:high] for piece, (low, high) in zip(pieces, spans, strict=True)]) for k in range(3))
    order = np.argsort(columns, kind="stable")  # pieces come in the order of their rows
    return columns[order], rows[order], counts[order]


class _Column:
    """A .npy file of one dimension that is written from its beginning to its end."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, length: int) -> None:
        self._file = path.open("wb")
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> _Column:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def write(self, values: npt.NDArray[Any]) -> None:
        self._file.write(values.tobytes())


def _hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
