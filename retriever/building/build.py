"""Build an index of a corpus into a directory that appears when it is complete: `build(corpus, out, spec)`.

What was done of a build that was killed, or stopped by Ctrl-C, is kept beside `out`: the same build, begun again, goes on from there, and so
does one of another index: row shards are kept by what they are made of (corpus, encoder, precision, rows). The parts, in order: the documents,
the hashed encoder's table, the row shards (one mark each), the FAISS index or the blocks, the words, the manifest.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from retriever.amounts import size
from retriever.building.assembly import assemble, settle
from retriever.building.contents import Contents, open_documents
from retriever.building.plan import Plan, plan_of, shard_rows_at
from retriever.building.shards import ShardRecord, finished, narrowed, shards_of
from retriever.building.spec import BuildSpec, check_index, differences, encoder_record
from retriever.building.workers import Embedding, embed
from retriever.building.workshop import Workshop, workshop, write_array
from retriever.corpus import CorpusRecord, SourceFile, import_corpus
from retriever.encoders.hashed import HashedEncoder, HashedSettings
from retriever.manifest import BM25, IDF, MANIFEST, VECTORS, IndexFault, Manifest
from retriever.query import Progress, silent

__all__ = ["Job", "build", "check_job", "planned", "resumed", "same_index", "sha256_of"]

OF_SHARDS = ("corpus", "encoder", "precision", "adopted", "shard_rows")  # what decides the vectors of a row shard, but for their type

SHARD_ROWS = 65_536  # where nobody asked how fast it goes


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is being built, of what: written down for the run that goes on after this one."""

    spec: dict[str, Any]
    corpus: CorpusRecord
    shard_rows: int

    @classmethod
    def of(cls, plain: dict[str, Any], directory: Path) -> Job:
        """Of its JSON, in the directory where it is being built: which may have been moved."""
        corpus = plain["corpus"]
        record = CorpusRecord(**{**corpus, "documents": directory / corpus["documents"], "source": SourceFile(**corpus["source"])})
        return cls(spec=plain["spec"], corpus=record, shard_rows=plain["shard_rows"])

    def plain(self, directory: Path) -> dict[str, Any]:
        """As JSON: the documents by their name where they lie in the directory, and otherwise by their absolute path."""
        documents = self.corpus.documents
        told = documents.name if documents.parent == directory else str(documents.absolute())
        return {**asdict(self), "corpus": {**asdict(self.corpus), "documents": told}}


def build(
    corpus: Path,
    out: Path,
    spec: BuildSpec | None = None,
    progress: Progress = silent,
    *,
    told: Callable[[Plan], None] | None = None,
    wait: bool = False,
) -> Path:
    """Index `corpus` into the directory `out`. If it is there already, it must be of the same corpus and spec. Returns `out`.

    Args:
        told: of the plan, before anything long starts; may raise to stop. Without it, nothing is probed.
        wait: for another build of `out` to end, instead of refusing.

    Raises:
        CorpusError: a row of the corpus is wrong.
        IndexFault: `out`, or an unfinished build of it, is something else; another process is building it; or it cannot fit.
    """
    spec = spec or BuildSpec()
    if out.exists():
        return same_index(out, corpus, spec.content())
    out.parent.mkdir(parents=True, exist_ok=True)
    with workshop(out, wait=wait) as held:
        if held is None:
            return same_index(out, corpus, spec.content())
        try:
            _build(held, corpus, spec, progress, told)
        except BaseException as error:
            held.drop_unless_worth_keeping(error)
            raise
    return out


def planned(corpus: Path, out: Path, spec: BuildSpec) -> Plan:
    """What the build will take. Nothing is written.

    Raises:
        IndexFault: `out`, or an unfinished build of it, is something else.
    """
    if out.exists():
        same_index(out, corpus, spec.content())
        raise IndexFault(f"{out} is there already: nothing is left to build")
    check_index(spec)
    held = Workshop.beside(out)
    job = check_job(held, corpus, spec.content(), spec.shard_rows)
    return plan_of(corpus, held.directory, spec, job.corpus if job else None)


def check_job(held: Workshop, corpus: Path, content: Mapping[str, Any], shard_rows: int | None) -> Job | None:
    """What an earlier run began here. What becomes of the vectors may be asked for otherwise now: see `resumed`.

    Args:
        content: what is asked for now.
        shard_rows: None: those that it was begun with.

    Raises:
        IndexFault: it began something else, whose shards are of no use now.
    """
    found = held.job()
    if found is None:
        return None
    job = Job.of(found, held.directory)
    old: dict[str, Any] = {"corpus": {"sha256": job.corpus.source.sha256}, **job.spec}
    new: dict[str, Any] = {"corpus": {"sha256": sha256_of(corpus)}, **content}
    if shard_rows is not None:
        old["shard_rows"], new["shard_rows"] = job.shard_rows, shard_rows
    made_of = [*OF_SHARDS, *([] if old.get("dtype") in (None, "float32") or new.get("dtype") is None else ["dtype"])]  # float32 can be rounded
    old, new = ({key: told[key] for key in made_of if key in told} for told in (old, new))
    if different := differences(old, new):
        raise IndexFault(
            f"{held.directory} holds an unfinished build of something else: {'; '.join(different)}. "
            f"Build with the same options to go on, or remove {held.directory} ({size(held.bytes)}) to begin anew"
        )
    return job


def resumed(held: Workshop, corpus: Path, content: Mapping[str, Any], shard_rows: int | None, progress: Progress) -> Job | None:
    """`check_job`, and what is asked for now written down. What was made of the vectors for another index is removed, and the change told."""
    job = check_job(held, corpus, content, shard_rows)
    if job is None or not (changed := differences(job.spec, content)):
        return job
    (held.directory / VECTORS).unlink(missing_ok=True)
    shutil.rmtree(held.directory / BM25, ignore_errors=True)
    job = replace(job, spec=dict(content))
    held.keep(job.plain(held.directory))
    marks, shards = len(list(held.build.glob("*.done"))), len(shards_of(held.build, job.corpus.count, job.shard_rows))
    progress(f"goes on with finished shards as another index ({'; '.join(changed)})", marks, shards)
    return job


def same_index(out: Path, corpus: Path, content: Mapping[str, Any]) -> Path:
    """`out`, if it is the index of this corpus that is asked for.

    Raises:
        IndexFault: it is something else.
    """
    manifest = Manifest.read(out)
    wanted = {"corpus": {"sha256": sha256_of(corpus)}, **content}
    if different := differences({"corpus": {"sha256": manifest.documents.source.sha256}, **manifest.spec}, wanted):
        raise IndexFault(f"{out} is an index of something else: {'; '.join(different)}. Remove it, or build into another directory")
    return out


def sha256_of(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(held: Workshop, corpus: Path, spec: BuildSpec, progress: Progress, told: Callable[[Plan], None] | None) -> None:
    if (held.directory / MANIFEST).exists():
        same_index(held.directory, corpus, spec.content())
        settle(held.directory)
        held.finish()
        return
    check_index(spec)
    job = resumed(held, corpus, spec.content(), spec.shard_rows, progress)
    plan = plan_of(corpus, held.directory, spec, job.corpus if job else None) if told else None
    if plan is not None and told is not None:
        told(plan)
        plan.check()
    if job is None:
        record = import_corpus(corpus, held.directory, progress=progress)
        rows = spec.shard_rows or (shard_rows_at(plan.documents_per_s, record.count) if plan and plan.documents_per_s else SHARD_ROWS)
        job = Job(spec=spec.content(), corpus=record, shard_rows=rows)
        held.keep(job.plain(held.directory))
        if plan is not None:
            plan.of_documents(record.count).check()
    check_index(spec, job.corpus.count)
    encoder, shards = _embedded(held, job, spec, progress)
    assemble(held.directory, job.corpus, spec, encoder, shards, progress, content=job.spec)
    settle(held.directory)
    held.finish()


def _embedded(held: Workshop, job: Job, spec: BuildSpec, progress: Progress) -> tuple[dict[str, Any] | None, list[tuple[Path, ShardRecord]]]:
    """The encoder's record and all row shards: those that are not finished are embedded."""
    if spec.encoder is None:
        return None, []
    encoder = _encoder(held, job, spec.encoder, progress)
    shards = shards_of(held.build, job.corpus.count, job.shard_rows)
    records = narrowed(shards, finished(shards, progress), spec.shard_dtype, progress)
    table = held.directory / IDF
    embedding = Embedding(
        documents=job.corpus.documents,
        directory=held.directory,
        record=encoder,
        table=table if table.is_file() else None,
        runtime=spec.runtime,
        dtype=spec.shard_dtype,
    )
    missing = [shard for shard in shards if shard.number not in records]
    done = sum(shard.rows for shard in shards if shard.number in records)
    records |= embed(embedding, missing, spec.devices, progress, done=done, of=job.corpus.count)
    return encoder, [(shard.path, records[shard.number]) for shard in shards]


def _encoder(held: Workshop, job: Job, settings: Any, progress: Progress) -> dict[str, Any]:
    """The encoder's record. The hashed one is fitted to the documents first, unless an earlier run did."""
    if not isinstance(settings, HashedSettings):
        return encoder_record(settings)
    table = held.directory / IDF
    if not table.exists():
        with open_documents(held.directory, job.corpus.documents) as documents:
            encoder = HashedEncoder.fit(settings, Contents(documents), lambda done: progress("documents counted", done, len(documents)))
        write_array(table, encoder.table)
    return {**encoder_record(settings), "passages": job.corpus.count}
