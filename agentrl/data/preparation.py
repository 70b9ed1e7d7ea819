"""Prepare public data for a run: download it, write it as task files, a corpus or an index, with a manifest beside each file.

    prepare(PUBLIC_SETS["nq"], out=Path("data"))

    data/nq/train.jsonl                  {"id": "nq/train_0", "question": ..., "golden_answers": [...], "data_source": "nq"}
    data/nq/train.jsonl.manifest.json    where it came from, rows, sha256
    data/nq/test.jsonl                   ...

A call that broke off is repeated and goes on where it was: the download in the hub's cache, the file in its partial. A file that is there already,
with its manifest, is looked at and left; any other file is never written over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl import __version__
from agentrl.data.hub import Origin, from_hub, from_path
from agentrl.data.manifest import FORMAT, DataManifest
from agentrl.data.partial import PartialFile
from agentrl.data.public_sets import PublicFile, PublicSet
from agentrl.data.readers import Row, read_rows
from agentrl.data.rows import task_of_row
from agentrl.errors import DataError

__all__ = ["Prepared", "Progress", "prepare"]

Progress = Callable[[str, int, int | None], None]  # the file, rows (or bytes) so far, of how many where that is known

_CHUNK_BYTES = 1 << 24
_TOLD_EVERY = 10_000  # rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A file that is there now."""

    path: Path
    manifest: DataManifest
    made: bool  # by this call; False where it was there before
    expected: int | None  # rows that the whole file had when agentrl.data.public_sets was written

    def told(self) -> list[str]:
        """What a person is told of it, in lines."""
        found, origin = self.manifest, self.manifest.origin
        came = f"{origin['repository']} at {origin['revision']}" if "repository" in origin else ", ".join(origin["files"])
        lines = [f"{self.path}: {'' if self.made else 'there already, '}{found.count:,} {self._unit}, sha256 {found.sha256}, from {came}"]
        if self.expected not in (None, found.count):
            lines.append(f"  caution: {self.expected:,} {self._unit} were expected: the source has changed since this version was written")
        return lines

    @property
    def _unit(self) -> str:
        return "bytes" if self.manifest.split == "index" else "rows"


def prepare(
    public: PublicSet,
    *,
    out: Path,
    splits: Sequence[str] = (),
    limit: int | None = None,
    source: Path | None = None,
    revision: str | None = None,
    progress: Progress = lambda file, done, of: None,
) -> Iterator[Prepared]:
    """Write the files of a set below `out/<folder>`, one after the other.

    Args:
        splits: by default those that Search-R1 uses.
        limit: take this many rows from the start of each file.
        source: a file or directory to read instead of the hub.
        revision: of the repository; by default `main`. Without it and without `source`, what is there counts wherever it came from.

    Raises:
        DataError: there is no such split, a row is wrong, the source cannot be had, or another file is in the way.
    """
    _check(public, splits, limit, source, revision)
    for split in dict.fromkeys(splits or public.used):
        file = public.files[split]
        path = out / public.folder / file.written
        if path.exists():
            manifest, made = _there_already(path, public, split, limit, source, revision), False
        else:
            origin = from_path(source, file.parts) if source else from_hub(public.repository, file.parts, revision=revision or "main")
            manifest, made = _write(path, public, split, origin, limit, progress), True
        yield Prepared(path=path, manifest=manifest, made=made, expected=file.count if limit is None and source is None else None)


def _check(public: PublicSet, splits: Sequence[str], limit: int | None, source: Path | None, revision: str | None) -> None:
    unknown = [split for split in splits if split not in public.files]
    if unknown:
        raise DataError(f"{public.name} has no split {', '.join(unknown)}: it has {', '.join(public.files)}")
    if limit is not None and public.kind == "index":
        raise DataError(f"--limit: {public.name} is an index, whose rows belong to all of wiki18's: it has no parts")
    if source is not None and revision is not None:
        raise DataError("--revision names a version on the hub, and --from reads files of this machine: give one of them")
    if source is not None and source.is_file() and len(splits or public.used) * max(len(f.parts) for f in public.files.values()) > 1:
        raise DataError(f"--from {source} is one file, and {public.name} would be read from several: name one --split, or give a directory")


def _there_already(path: Path, public: PublicSet, split: str, limit: int | None, source: Path | None, revision: str | None) -> DataManifest:
    """The manifest of a file that is what would be made.

    Raises:
        DataError: it is something else.
    """
    manifest = DataManifest.read(path)
    wanted: dict[str, Any] = {"dataset": public.name, "split": split, "limit": limit}
    found = {key: getattr(manifest, key) for key in wanted}
    if source is not None:
        wanted["origin"], found["origin"] = from_path(source, public.files[split].parts).identity, manifest.origin
    elif revision is not None:
        wanted["revision"], found["revision"] = revision, manifest.origin.get("revision")
    if different := [f"{key} {found[key]} instead of {wanted[key]}" for key in wanted if found[key] != wanted[key]]:
        raise DataError(f"{path} is in the way: it was made with {', '.join(different)}. Move it, or choose another --out")
    return manifest


def _write(path: Path, public: PublicSet, split: str, origin: Origin, limit: int | None, progress: Progress) -> DataManifest:
    """Write a file, then its manifest, then put the file in its place: a file without a manifest is never ours."""
    file = public.files[split]
    identity = {"dataset": public.name, "split": split, "origin": origin.identity, "limit": limit, "format": FORMAT}
    partial = PartialFile(path, identity, lines=public.kind != "index")
    try:
        pieces = _bytes(origin.paths, partial.count) if public.kind == "index" else _lines(public, origin.paths, partial.count, limit)
        for piece in pieces:
            partial.append(piece)
            if public.kind == "index" or partial.count % _TOLD_EVERY == 0:
                progress(str(path), partial.count, _of(file, limit))
        sha256 = partial.finish()
        if partial.count == 0:
            raise DataError(f"{origin.paths[0]}: no rows")
        manifest = DataManifest(
            dataset=public.name, split=split, origin=origin.identity, limit=limit, count=partial.count, size_bytes=partial.size,
            sha256=sha256, licence=public.licence, agentrl=__version__,
        )  # fmt: skip
        manifest.write(path)
        partial.appear()
    finally:
        partial.close()
    progress(str(path), partial.count, partial.count)
    return manifest


def _of(file: PublicFile, limit: int | None) -> int | None:
    return min((n for n in (file.count, limit) if n is not None), default=None)


def _lines(public: PublicSet, paths: Sequence[Path], done: int, limit: int | None) -> Iterator[bytes]:
    """The rows from number `done` on as lines of our own."""
    convert = _passage if public.kind == "passages" else _question
    rows = (row for path in paths for row in read_rows(str(path)))
    for number, row in enumerate(islice(rows, limit)):
        if number >= done:
            yield json.dumps(convert(row, number, public.name), ensure_ascii=False).encode() + b"\n"


def _question(row: Row, number: int, name: str) -> dict[str, Any]:
    """Of FlashRAG's row, or Search-R1's, which holds the same columns. Ids such as `train_0` are unique within a set only; here over all sets."""
    place, value = row
    columns = {key: value[key] for key in ("id", "question", "golden_answers") if key in value} if isinstance(value, dict) else value
    task = task_of_row(columns, place=place, number=number, source=name, default_source=name)
    if not task.answers:
        raise DataError(f"{place}: a row needs golden_answers; its keys: {', '.join(columns)}")
    own = task.id if task.id.startswith(f"{name}/") else f"{name}/{task.id}"
    return {"id": own, "question": task.prompt, "golden_answers": list(task.answers), "data_source": name}


def _passage(row: Row, number: int, name: str) -> dict[str, Any]:
    """Row i stays row i: an index knows passages by their numbers."""
    place, value = row
    if not isinstance(value, dict) or not isinstance(value.get("contents"), str) or not isinstance(value.get("id"), str | int):
        raise DataError(f"{place}: a passage is an object with an id and the text `contents`")
    return {"id": str(value["id"]), "contents": value["contents"]}


def _bytes(paths: Sequence[Path], done: int) -> Iterator[bytes]:
    """The pieces' bytes, one piece after the other, from byte `done` on."""
    for path in paths:
        with path.open("rb") as file:
            file.seek(min(done, path.stat().st_size))
            done -= file.tell()
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
