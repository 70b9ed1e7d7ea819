"""Adopt a FAISS index and a corpus that others made, without embedding anything: `adopt(faiss_file, corpus, out, adoption)`.

Search-R1's e5_Flat.index and wiki-18.jsonl are such a pair. It is checked that there are as many vectors as lines and that they are those of
the documents (see `diagnosis`). Then the file is kept as it is, or its vectors are read from the mapped file, some thousands at a time, into row
shards: blocks of 16 bit, or any other FAISS index, without the float32 vectors ever being in memory. The corpus, and a file that is kept, are
copied: what others do to theirs is nothing to the index. With `link` they are used as they lie, by a hard link or by their path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retriever.building.assembly import assemble, settle
from retriever.building.build import Job, resumed, same_index
from retriever.building.contents import open_documents
from retriever.building.copying import copied, linked, shares_blocks
from retriever.building.diagnosis import diagnose
from retriever.building.plan import Plan, Taken, plan_of
from retriever.building.shards import Shard, ShardRecord, finished, narrowed, shards_of, write_marked
from retriever.building.spec import BuildSpec, check_index, encoder_record
from retriever.building.workers import runtime_on
from retriever.building.workshop import Workshop, workshop
from retriever.corpora.importing import read_documents
from retriever.corpora.row import ContentsMissing
from retriever.corpora.source import Source
from retriever.corpus import CorpusRecord, adopt_corpus
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import TransformerSettings
from retriever.manifest import DOCUMENTS, MANIFEST, VECTORS, DenseRecord, IndexFault, sample_of
from retriever.query import Progress, Vectors, silent
from retriever.searchers.faiss_index import FaissSearcher

__all__ = ["Adoption", "adopt"]

EXACT = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexHNSWFlat", "IndexScalarQuantizer")  # types that keep the vectors, or nearly
SHARD_ROWS = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """What is made of a FAISS index that others made.

    Args:
        spec: the encoder that made it, and what the index is to be; its `index` is not read where it is kept.
        keep: the file as it is.
        link: corpus and kept vectors are used as they lie, by whoever promises to leave them alone; otherwise the index has copies.
    """

    spec: BuildSpec
    keep: bool = True
    link: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.spec.encoder, TransformerSettings):
            raise ValueError("adopting needs the --encoder that made the vectors: a model")
        if self.keep and (self.spec.rescore or self.spec.dtype):
            raise ValueError("--dtype and --rescore are of vectors that are converted: name an --index, too, or leave them out")

    def content(self, vectors: Path) -> dict[str, Any]:
        """What decides the bytes of the result."""
        kept = {"index": None, "dtype": None, "rescore": None} if self.keep else {}
        adopted = {"bytes": vectors.stat().st_size, "sample": sample_of(vectors), "linked": self.link}
        return {**self.spec.content(), **kept, "adopted": adopted}


def adopt(
    vectors: Path,
    corpus: Path,
    out: Path,
    adoption: Adoption,
    progress: Progress = silent,
    *,
    told: Callable[[Plan], None] = lambda plan: None,
) -> Path:
    """Make the directory `out` of a FAISS file and a corpus, as `build` would have. Returns `out`.

    Args:
        told: of what it takes, before anything long starts.

    Raises:
        CorpusError: a row of the corpus is wrong.
        IndexFault: they do not belong together, in the encoder's opinion or by their numbers; or as in `build`.
        SearcherError: the file is no FAISS index.
    """
    vectors, corpus = vectors.resolve(strict=True), corpus.resolve(strict=True)
    content = adoption.content(vectors)
    if out.exists():
        return same_index(out, corpus, content)
    out.parent.mkdir(parents=True, exist_ok=True)
    with workshop(out) as held:
        if held is None:
            return same_index(out, corpus, content)
        try:
            if (held.directory / MANIFEST).exists():
                same_index(held.directory, corpus, content)
            else:
                plan = _planned(held, vectors, corpus, adoption)
                told(plan)
                plan.check()
                _adopt(held, vectors, corpus, adoption, content, progress)
            settle(held.directory)
            held.finish()
        except BaseException as error:
            held.drop_unless_worth_keeping(error)
            raise
    return out


def _adopt(held: Workshop, vectors: Path, corpus: Path, adoption: Adoption, content: Mapping[str, Any], progress: Progress) -> None:
    spec = adoption.spec
    assert isinstance(spec.encoder, TransformerSettings)
    dense = FaissSearcher.open(vectors)
    if dense.dim != spec.encoder.dim:
        raise IndexFault(
            f"{vectors} holds vectors of {dense.dim} numbers, {spec.encoder.model} makes {spec.encoder.dim}: name the model that made them"
        )
    if not adoption.keep:
        check_index(spec, dense.count)
    job = resumed(held, corpus, content, spec.shard_rows, progress)
    if job is None:
        record = _taken(adopt_corpus(corpus, held.directory, progress=progress), held.directory, adoption.link, progress)
        job = Job(spec=dict(content), corpus=record, shard_rows=spec.shard_rows or SHARD_ROWS)
        held.keep(job.plain(held.directory))
    if dense.count != job.corpus.count:
        raise IndexFault(
            f"{vectors} holds {dense.count} vectors, {corpus} {job.corpus.count} documents: they do not belong together "
            f"({abs(dense.count - job.corpus.count)} too {'few' if dense.count < job.corpus.count else 'many'} vectors)"
        )
    _check(held, vectors, corpus, dense, job.corpus, spec)
    encoder = encoder_record(spec.encoder)
    if adoption.keep:
        assemble(
            held.directory, job.corpus, spec, encoder, (), progress, content=content, adopted=_kept(held, vectors, dense, adoption.link, progress)
        )
    else:
        shards = _converted(held, dense, job, spec, progress)
        assemble(held.directory, job.corpus, spec, encoder, shards, progress, content=content)


def _check(held: Workshop, vectors: Path, corpus: Path, dense: FaissSearcher, record: CorpusRecord, spec: BuildSpec) -> None:
    """Are these the vectors of these documents?

    Raises:
        IndexFault: they are not, with what is probably wrong.
    """
    assert isinstance(spec.encoder, TransformerSettings)
    runtime = runtime_on(spec.runtime, spec.devices[0])
    encoder = open_encoder(spec.encoder.record, runtime, table=None)
    lossy = dense.info()["type"] not in EXACT
    with open_documents(held.directory, record.documents) as documents:
        found = diagnose(documents, dense, encoder, spec.encoder, runtime, lossy=lossy)
    if found.fault is not None:
        raise IndexFault(f"{vectors} and {corpus}: {found.fault}")


def _planned(held: Workshop, vectors: Path, corpus: Path, adoption: Adoption) -> Plan:
    """What it takes."""
    plan = plan_of(corpus, held.directory, adoption.spec, probing=False)
    files = {"documents": corpus} if _stays(corpus) else {}
    files |= {"vectors": vectors} if adoption.keep else {}
    return replace(plan, taken={name: _taking(file, held.directory, adoption.link) for name, file in files.items()})


def _taking(file: Path, directory: Path, link: bool) -> Taken:
    size = file.stat().st_size
    if link:
        return Taken(bytes=size, disk_bytes=0, what=f"{file} itself: leave it alone")
    if shares_blocks(file, directory):
        return Taken(bytes=size, disk_bytes=0, what=f"a copy of {file} that shares its blocks on the disk")
    return Taken(bytes=size, disk_bytes=size, what=f"a copy of {file}")


def _stays(corpus: Path) -> bool:
    """Whether its lines can be served as they stand, by the first of them; otherwise they are written anew."""
    with Source(corpus) as source, suppress(ContentsMissing):
        return source.is_plain and bool(next(read_documents(source, silent, "read", as_it_is=True)))
    return False


def _taken(record: CorpusRecord, directory: Path, link: bool, progress: Progress) -> CorpusRecord:
    """The corpus under the directory's own name: a copy, or a link. Where it cannot be linked it stays where it lies."""
    own = directory / DOCUMENTS
    if record.documents == own:
        return record
    if not link:
        copied(record.documents, own, progress)
    elif not linked(record.documents, own):
        return record
    return replace(record, documents=own)


def _kept(held: Workshop, vectors: Path, dense: FaissSearcher, link: bool, progress: Progress) -> DenseRecord:
    """The FAISS file: a copy, or a link, or by its absolute path where it cannot be linked."""
    own, file = held.directory / VECTORS, VECTORS
    if not link:
        copied(vectors, own, progress)
    elif not linked(vectors, own):
        file = str(vectors)
    return DenseRecord(backend="faiss", dim=dense.dim, factory=str(dense.info()["type"]), files=[file], metric=dense.metric)


def _decoded(dense: FaissSearcher, shard: Shard) -> Vectors:
    """Rows of the file: at once where its type can, otherwise one by one."""
    if dense.info()["type"] in EXACT:
        rows: Vectors = dense.index.reconstruct_n(shard.start, shard.rows)
        return rows
    return dense.stored(range(shard.start, shard.stop))


def _converted(held: Workshop, dense: FaissSearcher, job: Job, spec: BuildSpec, progress: Progress) -> list[tuple[Path, ShardRecord]]:
    """The vectors of the file as row shards, marked as those that are embedded."""
    assert isinstance(spec.encoder, TransformerSettings)
    if dense.metric != "ip" and not spec.encoder.normalize:  # of vectors of length 1 the nearest have the largest inner products
        raise IndexFault("distances of an L2 index rank other documents first than inner products, but for vectors of length 1: leave --index out")
    shards = shards_of(held.build, job.corpus.count, job.shard_rows)
    records = narrowed(shards, finished(shards, progress), spec.shard_dtype, progress)
    for shard in shards:
        if shard.number not in records:
            records[shard.number] = write_marked(shard, _decoded(dense, shard), spec.shard_dtype)
        progress("vectors converted", shard.stop, job.corpus.count)
    return [(shard.path, records[shard.number]) for shard in shards]
