"""Answers that were given lately, to give them again."""

from __future__ import annotations

from collections import OrderedDict

from retriever.query import Found, Query

__all__ = ["AnswerCache"]

ENTRY_BYTES = 700  # of the query, the list and its hits, besides the documents: measured at 3 hits
HIT_BYTES = 150


class AnswerCache:
    """The answers to the queries asked last, of one index. A query is the same if its text, topk, mode and reranking are.

    Args:
        entries: how many it keeps; 0 keeps none.
        max_bytes: of their documents and themselves, estimated. An answer that does not fit leaves the cache as it is.
    """

    def __init__(self, entries: int, max_bytes: int) -> None:
        self._entries, self._max_bytes = entries, max_bytes
        self._found: OrderedDict[Query, list[Found]] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._found)

    def get(self, query: Query) -> list[Found] | None:
        """The answer, if it is here; it is then the newest."""
        found = self._found.get(query)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self._found.move_to_end(query)
        return found

    def put(self, query: Query, found: list[Found]) -> None:
        """Keep an answer, at the expense of the oldest."""
        if not self._entries or query in self._found or (size := _bytes(query, found)) > self._max_bytes:
            return
        self._found[query] = found
        self.bytes += size
        while len(self._found) > self._entries or self.bytes > self._max_bytes:
            self.bytes -= _bytes(*self._found.popitem(last=False))


def _bytes(query: Query, found: list[Found]) -> int:
    return ENTRY_BYTES + len(query.text) + sum(HIT_BYTES + len(hit.document) for hit in found)
