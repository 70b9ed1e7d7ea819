"""What a build will take: documents, bytes on disk and in memory by part, and time, from a short probe of the encoder on these documents.

wiki-18.jsonl.gz: about 21,015,000 documents, 14.2 GB
  documents           14.4 GB on disk    mapped
  vectors             32.3 GB on disk    mapped      float16 blocks of 768
  (mapped: files that are read as they are needed, and given up when others need the memory; in memory: kept there)
building needs 46.9 GB of disk in /data (512.0 GB are free), 3.1 GB of memory (60.1 GB are available)
embedding takes about 3 days 4 h on 1 device: 77 documents/s, measured on 770 documents in 10.0 s
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil

from retriever.amounts import duration, size
from retriever.building.contents import Contents, open_documents
from retriever.building.spec import BuildSpec, encoder_record
from retriever.building.workers import runtime_on
from retriever.corpora.importing import read_documents
from retriever.corpora.source import Source
from retriever.corpus import CorpusRecord
from retriever.encoders.encoder import Encoder
from retriever.encoders.files import ModelFiles
from retriever.encoders.hashed import HashedEncoder, HashedSettings
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import TransformerSettings
from retriever.footprint import PROCESS_BYTES, RUNTIME_BYTES
from retriever.manifest import BLOCKS, IndexFault
from retriever.query import silent
from retriever.searchers.searcher import Memory
from retriever.searchers.shards import DTYPES

__all__ = ["Part", "Plan", "Probe", "Sample", "Taken", "plan_of", "shard_rows_at"]

PROBE_S = 10.0
SHARE_OF_WORK = 0.1  # a probe takes no more of the time that the work takes
FIRST_TEXTS = 32
SAMPLED_BYTES = 32 << 20  # of a corpus: about 45,000 passages, read and parsed in half a second
SHARD_S = 120.0  # of work that a killed build loses, per device
FEWEST_ROWS, MOST_ROWS, MOST_SHARDS = 1024, 262_144, 512  # a shard is a mapped file, and files of a process are limited (1,024 by default)
SPARE = 1.05  # free disk beyond the plan's bytes
ID_BYTES = 32  # of memory per document while ids are sorted
WORDS_OF = 2048  # texts of the sample that BM25's size is estimated from
TEXTS_AT_A_TIME = 4096  # that an encoder is given at once
# Peaks of fresh processes (VmHWM), 240 and 19,200 documents of 1 kB, vectors of 256 and 1,024 numbers, shards of 2,048 to 19,200 rows: within 5 %.
SHARD_COPIES = 2  # of a shard's vectors in memory: as they are made, and as they are written
HASHED_COPIES = 8  # the hashed encoder's words and trigrams, in vectors of the texts that it is given at once
SAMPLE_COPIES = 2  # of the texts that the plan is made from


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the index, when it is served."""

    name: str
    memory: Memory
    what: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A file of others that becomes a part of the index as it is: what the disk holds more by that."""

    bytes: int
    disk_bytes: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """How fast the encoder was."""

    documents: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Some documents of a corpus, and what they let expect of it."""

    texts: Sequence[str]
    documents: int  # of the whole corpus
    exact: bool
    line_bytes: float  # of a document as it is served, on average
    ids_are_rows: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a build takes."""

    corpus: Path
    out: Path
    spec: BuildSpec
    sample: Sample
    probe: Probe | None
    encoder_bytes: int = 0  # of a transformer's weights and what runs it, in each process
    taken: Mapping[str, Taken] = field(default_factory=dict)  # by the name of the part: "documents", "vectors"

    @property
    def documents(self) -> int:
        """How many there are, or about."""
        return self.sample.documents

    @property
    def dim(self) -> int:
        """Of a vector; 0 without an encoder."""
        return self.spec.encoder.dim if self.spec.encoder is not None else 0

    @property
    def documents_per_s(self) -> float | None:
        """By all devices, if each is as fast as the first."""
        return self.probe.documents / self.probe.seconds * len(self.spec.devices) if self.probe else None

    @property
    def seconds(self) -> float | None:
        """Of embedding."""
        return self.documents / self.documents_per_s if self.documents_per_s else None

    @property
    def shard_bytes(self) -> int:
        """Of all row shards: kept, or needed until the index is built."""
        return (
            0
            if self.spec.encoder is None or "vectors" in self.taken
            else self.documents * self.dim * np.dtype(DTYPES[self.spec.shard_dtype]).itemsize
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of the index."""
        lines = round(self.documents * self.sample.line_bytes)
        tables = self.documents * (8 if self.sample.ids_are_rows else 24)
        documents = self.taken.get("documents") or Taken(bytes=lines, disk_bytes=lines, what="")
        memory = Memory(disk_bytes=documents.disk_bytes + tables, mapped_bytes=documents.bytes + tables)
        found = [Part(name="documents", memory=memory, what=documents.what)]
        if vectors := self.taken.get("vectors"):
            memory = Memory(disk_bytes=vectors.disk_bytes, mapped_bytes=vectors.bytes)
            found.append(Part(name="vectors", memory=memory, what=vectors.what))
        elif self.spec.encoder is not None:
            found.append(Part(name="vectors", memory=_vectors(self.spec, self.documents, self.dim), what=_kind(self.spec, self.dim)))
        if self.spec.rescore:
            what = f"{self.spec.shard_dtype}, the best {self.spec.rescore_depth} are scored by them"
            found.append(Part(name="vectors to rescore", memory=Memory(disk_bytes=self.shard_bytes, mapped_bytes=self.shard_bytes), what=what))
        if self.spec.bm25:
            found.append(Part(name="words", memory=_words(self.sample), what="BM25"))
        return tuple(found)

    @property
    def disk_bytes(self) -> int:
        """At the most, while it is built."""
        kept = sum(part.memory.disk_bytes for part in self.parts)
        shards_stay = self.spec.index == BLOCKS or self.spec.rescore
        return kept + (0 if shards_stay else self.shard_bytes) + (_spilled(self.sample) if self.spec.bm25 else 0)

    @property
    def memory_bytes(self) -> int:
        """Resident, at the most, while it is built."""
        rows = 0 if "vectors" in self.taken else self.spec.shard_rows or shard_rows_at(self.documents_per_s or 0.0, self.documents)
        rows = min(rows, self.documents)
        at_once = HASHED_COPIES * min(rows, TEXTS_AT_A_TIME) if isinstance(self.spec.encoder, HashedSettings) else 0
        embedding = len(self.spec.devices) * (self.encoder_bytes + 4 * self.dim * (SHARD_COPIES * rows + at_once))
        embedding += PROCESS_BYTES * (len(self.spec.devices) - 1) + round(SAMPLE_COPIES * len(self.sample.texts) * self.sample.line_bytes)
        ids = 0 if self.sample.ids_are_rows else self.documents * ID_BYTES
        indexing = 0 if "vectors" in self.taken else _indexing(self.spec, self.documents, self.dim)
        return PROCESS_BYTES + max(embedding, ids, indexing)

    def of_documents(self, count: int) -> Plan:
        """The plan with the number that is known by now."""
        return replace(self, sample=replace(self.sample, documents=count, exact=True))

    def check(self) -> None:
        """Is there room for it?

        Raises:
            IndexFault: there is not, with what to do.
        """
        there = _bytes_below(self.out)
        free = shutil.disk_usage(_existing(self.out)).free
        if self.disk_bytes * SPARE - there > free:
            hint = "--index blocks keeps 2 bytes a number and needs no second copy" if self.spec.index != BLOCKS else "SQ8 keeps 1 byte a number"
            raise IndexFault(
                f"{self.out.parent} has {size(free)} free, the build needs {size(self.disk_bytes - there)}: {hint}; or use another --out"
            )
        available = psutil.virtual_memory().available
        if self.memory_bytes > available:
            hint = "Flat, SQ8 and blocks are written as they are made, other kinds are made in memory; fewer --device and --shard-rows help, too"
            raise IndexFault(f"{size(available)} of memory are available, the build needs {size(self.memory_bytes)}: {hint}")

    def render(self) -> str:
        """For people."""
        about = "" if self.sample.exact else "about "
        lines = [f"{self.corpus}: {about}{self.documents:,} documents of {self.sample.line_bytes:,.0f} bytes"]
        lines += [f"  {part.name:<20}{_where(part.memory)}{'  ' + part.what if part.what else ''}" for part in self.parts]
        lines.append("  (mapped: files that are read as they are needed, and given up when others need the memory; in memory: kept there)")
        free, available = shutil.disk_usage(_existing(self.out)).free, psutil.virtual_memory().available
        lines.append(
            f"building needs {size(self.disk_bytes)} of disk below {self.out.parent} ({size(free)} are free) "
            f"and {size(self.memory_bytes)} of memory ({size(available)} are available)"
        )
        if self.probe is not None and self.seconds is not None:
            devices = ", ".join(self.spec.devices)
            lines.append(
                f"embedding takes about {duration(self.seconds)} on {devices}: {self.documents_per_s:,.0f} documents/s, "
                f"measured on {self.probe.documents:,} documents in {self.probe.seconds:.1f} s"
                + (f" on {self.spec.devices[0]}, and taken {len(self.spec.devices)} times" if len(self.spec.devices) > 1 else "")
            )
        return "\n".join(lines)


def plan_of(corpus: Path, directory: Path, spec: BuildSpec, imported: CorpusRecord | None = None, *, probing: bool = True) -> Plan:
    """The plan of a build into `directory`: some documents are read, and the encoder is tried on them.

    Args:
        imported: the corpus, where an earlier run imported it into `directory`.
        probing: try the encoder; nothing is embedded otherwise.

    Raises:
        CorpusError, EncoderFault: what the build would end with.
    """
    sample = _sampled(corpus) if imported is None else _sampled_again(directory, imported)
    probe = None if spec.encoder is None or not probing else _probe(spec, sample)
    return Plan(corpus=corpus, out=directory, spec=spec, sample=sample, probe=probe, encoder_bytes=_encoder_bytes(spec))


def shard_rows_at(documents_per_s: float, count: int) -> int:
    """Documents of a shard: two minutes of work, a power of two, within what is sensible."""
    wanted = max(FEWEST_ROWS, min(MOST_ROWS, documents_per_s * SHARD_S), count / MOST_SHARDS)
    return 1 << (round(wanted) - 1).bit_length()


def _sampled(corpus: Path) -> Sample:
    """The first documents of a file; their number from its bytes, where it holds more."""
    texts, lines, ids_are_rows = [], 0, True
    exact = True
    with Source(corpus) as source:
        for number, (_, _, document) in enumerate(read_documents(source, silent, "read")):
            texts.append(document.contents)
            lines += len(document.json) + 1
            ids_are_rows &= document.id == str(number)
            if lines >= SAMPLED_BYTES:
                exact = False  # even at the file's end: what was read last may hold more rows
                break
        documents = len(texts) if exact else round(len(texts) * source.size / source.done)
    return _sample(texts, documents, exact, lines / len(texts), ids_are_rows)


def _sampled_again(directory: Path, imported: CorpusRecord) -> Sample:
    """Documents from everywhere in a corpus that was imported."""
    with open_documents(directory, imported.documents) as documents:
        step = max(1, len(documents) * 700 // SAMPLED_BYTES)
        texts = Contents(documents)[::step]
        return _sample(texts, len(documents), True, imported.documents.stat().st_size / len(documents), imported.ids == "rows")


def _sample(texts: Sequence[str], documents: int, exact: bool, line_bytes: float, ids_are_rows: bool) -> Sample:
    return Sample(texts=texts, documents=documents, exact=exact, line_bytes=line_bytes, ids_are_rows=ids_are_rows)


def _probe(spec: BuildSpec, sample: Sample) -> Probe:
    """Embed texts from everywhere in the sample, more and more of them, for 10 s or a tenth of what the whole work takes."""
    encoder = _encoder(spec, sample.texts)
    texts = [sample.texts[i] for i in _spread(len(sample.texts))]
    encoder.encode_documents(texts[:1])  # what is made at the first call is no part of the speed
    done, took, some = 0, 0.0, FIRST_TEXTS
    while done < len(texts) and (not done or took < min(PROBE_S, SHARE_OF_WORK * sample.documents * took / done)):
        started = time.perf_counter()
        batch = texts[done : done + some]
        if isinstance(spec.encoder, HashedSettings):
            HashedEncoder.fit(spec.encoder, batch)
        encoder.encode_documents(batch)
        took += time.perf_counter() - started
        done += len(batch)
        rate = done / took
        some = max(FIRST_TEXTS, min(2 * some, round(rate * (PROBE_S - took))))
    return Probe(documents=done, seconds=took)


def _encoder_bytes(spec: BuildSpec) -> int:
    if not isinstance(spec.encoder, TransformerSettings):
        return 0
    runtime = runtime_on(spec.runtime, spec.devices[0]).resolved
    return ModelFiles.locate(spec.encoder.model).weights_bytes() + RUNTIME_BYTES[runtime]


def _encoder(spec: BuildSpec, texts: Sequence[str]) -> Encoder:
    if isinstance(spec.encoder, HashedSettings):
        return HashedEncoder.fit(spec.encoder, texts[:FIRST_TEXTS])  # a table of any size: looking up takes what it takes
    assert spec.encoder is not None
    return open_encoder(encoder_record(spec.encoder), runtime_on(spec.runtime, spec.devices[0]), table=None)


def _spread(count: int) -> list[int]:
    """0 to count - 1 in an order in which every beginning is spread evenly over all: steps of the golden ratio's odd neighbour."""
    step = max(1, round(count * 0.618))
    while step > 1 and math.gcd(step, count) != 1:
        step -= 1
    return [i * step % count for i in range(count)]


def _vectors(spec: BuildSpec, count: int, dim: int) -> Memory:
    from retriever.searchers.sizes import memory_of

    return memory_of(spec.index, count, dim, dtype=spec.shard_dtype)


def _indexing(spec: BuildSpec, count: int, dim: int) -> int:
    """Memory that making the FAISS index takes."""
    from retriever.searchers.sizes import building_bytes

    return 0 if spec.encoder is None or spec.index == BLOCKS else building_bytes(spec.index, count, dim)


def _words(sample: Sample) -> Memory:
    from retriever.searchers.sizes import bm25_memory

    return bm25_memory(sample.documents, sample.texts[:: max(1, len(sample.texts) // WORDS_OF)])


def _spilled(sample: Sample) -> int:
    from retriever.searchers.sizes import bm25_spill

    return bm25_spill(_words(sample))


def _kind(spec: BuildSpec, dim: int) -> str:
    return f"{spec.shard_dtype} blocks of {dim}" if spec.index == BLOCKS else f"FAISS {spec.index} of {dim}"


def _where(memory: Memory) -> str:
    kinds = {"mapped": memory.mapped_bytes, "in memory": memory.resident_bytes, "on devices": memory.device_bytes}
    return f"{size(memory.disk_bytes):>9} on disk, " + ", ".join(f"{size(bytes)} {where}" for where, bytes in kinds.items() if bytes)


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _bytes_below(directory: Path) -> int:
    """Of an earlier run's files: they are on the disk already."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
