"""Corpora: JSON lines of `{"id", "contents"}` as Search-R1's, or of `{"id", "title", "text"}`, which becomes the former.

    {"id": "7", "title": "Oslo", "text": "Oslo is ..."}   ->   {"id": "7", "contents": "\\"Oslo\\"\\nOslo is ..."}

Other fields of a row are kept and served with it. Small corpora are read (`read_corpus`); of any size, imported into a directory, or adopted
where they lie.
"""

from __future__ import annotations

from pathlib import Path

from retriever.corpora.importing import CorpusRecord, adopt_corpus, import_corpus, read_documents, same_id
from retriever.corpora.row import CorpusError, Document
from retriever.corpora.source import Source, SourceFile

__all__ = ["CorpusError", "CorpusRecord", "Document", "SourceFile", "adopt_corpus", "import_corpus", "read_corpus"]


def read_corpus(path: Path) -> list[Document]:
    """The documents of a file, in its order, in memory. Empty lines are skipped.

    Raises:
        CorpusError: a row is not what it should be, an id comes twice, or there is no row at all.
        OSError: the file cannot be read.
    """
    seen: dict[str, int] = {}
    documents = []
    with Source(path) as source:
        for number, _, document in read_documents(source, lambda what, done, of: None, "read"):
            if document.id in seen:
                raise CorpusError(f"{source.place(number)}: {same_id(document.id, source, seen[document.id])}")
            seen[document.id] = number
            documents.append(document)
    return documents
