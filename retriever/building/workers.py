"""Embed shards on several devices: one process each, which takes the next shard whenever it is done with one.

A lone "cpu" needs no process of its own. Whatever ends a worker ends the build, whose finished shards stay; a worker whose build was killed
ends with its next documents.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from retriever.building.contents import open_documents
from retriever.building.shards import Shard, ShardRecord, embed_shard
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import Runtime
from retriever.manifest import IndexFault
from retriever.query import Progress
from retriever.searchers.shards import VectorType

__all__ = ["Embedding", "embed", "runtime_on"]

END_S = 10.0  # a worker that was told to end does so between two batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """How shards are embedded: the same in every process."""

    documents: Path  # the file of lines
    directory: Path  # of its offsets and ids
    record: Mapping[str, Any]  # the encoder's
    table: Path | None  # of the hashed encoder
    runtime: Runtime
    dtype: VectorType


def embed(embedding: Embedding, shards: Sequence[Shard], devices: Sequence[str], progress: Progress, *, done: int, of: int) -> dict[int, ShardRecord]:
    """Embed all of these shards; their marks, by number.

    Args:
        done: documents of shards that an earlier run embedded.
        of: all documents.

    Raises:
        IndexFault: a worker ended before its work did, or the encoder failed.
    """
    if len(devices) == 1:
        return _embed_here(embedding, shards, devices[0], progress, done, of)
    return _embed_apart(embedding, shards, devices, progress, done, of)


def runtime_on(runtime: Runtime, device: str) -> Runtime:
    """The runtime on another device. The threads are those of a CPU."""
    return replace(runtime, device=device, threads=runtime.threads if device == "cpu" else 1)


def _embed_here(embedding: Embedding, shards: Sequence[Shard], device: str, progress: Progress, done: int, of: int) -> dict[int, ShardRecord]:
    records: dict[int, ShardRecord] = {}
    if not shards:
        return records
    encoder = open_encoder(embedding.record, runtime_on(embedding.runtime, device), table=embedding.table)
    with open_documents(embedding.directory, embedding.documents) as documents:
        for shard in shards:
            before = done

            def tell(some: int, before: int = before, rows: int = shard.rows) -> None:
                if some < rows:  # the last are told once they are marked
                    progress("documents embedded", before + some, of)

            records[shard.number] = embed_shard(encoder, documents, shard, embedding.dtype, tell)
            done += shard.rows
            progress("documents embedded", done, of)
    return records


def _embed_apart(
    embedding: Embedding, shards: Sequence[Shard], devices: Sequence[str], progress: Progress, done: int, of: int
) -> dict[int, ShardRecord]:
    records: dict[int, ShardRecord] = {}
    rest, working = iter(shards), dict[Connection, int]()  # documents done of the shard that each works at
    with _workers(embedding, devices[: len(shards)]) as connections:
        for connection in connections:
            connection.send(next(rest))
            working[connection] = 0
        while working:
            for connection in _ready(working):
                told = _told(connection)
                if isinstance(told, int):
                    working[connection] = told
                else:
                    number, record = told
                    records[number], done = record, done + record.rows
                    del working[connection]
                    if (shard := next(rest, None)) is not None:
                        connection.send(shard)
                        working[connection] = 0
                progress("documents embedded", done + sum(working.values()), of)
    return records


@contextmanager
def _workers(embedding: Embedding, devices: Sequence[str]) -> Iterator[list[Connection]]:
    """A process per device. It ends when its connection does."""
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        for device in devices:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, embedding, device), name=f"embedding on {device}")
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()


def _ready(connections: Iterable[Connection]) -> list[Connection]:
    """Those that have something to tell, or ended."""
    return [connection for connection in wait(list(connections)) if isinstance(connection, Connection)]


def _told(connection: Connection) -> Any:
    try:
        kind, value = connection.recv()
    except (EOFError, ConnectionError) as error:
        raise IndexFault("a process that embeds ended before its work did: its own message is above; the finished shards stay") from error
    if kind == "failed":
        raise IndexFault(value)
    return value


def _work(connection: Connection, embedding: Embedding, device: str) -> None:
    """Consumes shards, produces how far it is and their marks. Ends with its connection."""
    parent = os.getppid()

    def tell(done: int) -> None:
        if os.getppid() != parent:  # it was killed: nobody wants the rest
            os._exit(1)
        connection.send(("embedded", done))

    try:
        encoder = open_encoder(embedding.record, runtime_on(embedding.runtime, device), table=embedding.table)
        with open_documents(embedding.directory, embedding.documents) as documents:
            while True:
                shard = connection.recv()
                record = embed_shard(encoder, documents, shard, embedding.dtype, tell)
                connection.send(("done", (shard.number, record)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the build ended
    except (IndexFault, ValueError, OSError, RuntimeError) as error:  # RuntimeError: PyTorch's, of memory or a device that is not there
        with suppress(BrokenPipeError):
            connection.send(("failed", f"embedding on {device}: {error}"))
