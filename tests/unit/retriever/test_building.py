import argparse
import errno
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retriever.building.adopt import _taken
from retriever.building.build import build, planned
from retriever.building.plan import Plan, shard_rows_at
from retriever.building.shards import finished, shards_of
from retriever.building.spec import BuildSpec, differences
from retriever.building.verify import verify
from retriever.building.workshop import workshop
from retriever.commands.options import runtime_of
from retriever.corpus import adopt_corpus
from retriever.encoders.hashed import HashedSettings
from retriever.encoders.settings import Runtime
from retriever.index import Index
from retriever.manifest import IndexFault, Manifest
from retriever.query import silent

SMALL = HashedSettings(dim=32)
KEPT = BuildSpec(encoder=SMALL, index="SQ8", rescore=True, shard_rows=4)
DOCUMENTS = 10


class Stop(Exception):
    """What ends a build in a test."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "contents": f"document number{i} of word{i % 3}"}) + "\n" for i in range(DOCUMENTS)))
    return path


class Heard:
    """What progress told, and where a build ends for a test."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.told: list[tuple[str, int, int]] = []
        self._stop_at = stop_at

    def __call__(self, what: str, done: int, of: int) -> None:
        self.told.append((what, done, of))
        if (what, done) == self._stop_at:
            raise Stop

    def of(self, what: str) -> list[int]:
        return sorted({done for told, done, _ in self.told if told == what})


def stopped(corpus: Path, out: Path, spec: BuildSpec, at: tuple[str, int]) -> Path:
    """The directory of a build that ended there."""
    with pytest.raises(Stop):
        build(corpus, out, spec, Heard(at))
    return out.parent / f".{out.name}.building"


def test_a_build_that_goes_on_embeds_no_finished_shard_again(corpus: Path, tmp_path: Path):
    out = tmp_path / "index"
    unfinished = stopped(corpus, out, KEPT, ("documents embedded", 8))
    before = [(unfinished / "build" / name).stat() for name in ("00000.npy", "00001.npy")]
    assert not out.exists()
    heard = Heard()
    build(corpus, out, KEPT, heard)
    assert heard.of("documents embedded") == [10], "two of ten were left"
    after = [(out / "rescore" / name).stat() for name in ("00000.npy", "00001.npy")]
    assert [(some.st_ino, some.st_mtime_ns) for some in before] == [(some.st_ino, some.st_mtime_ns) for some in after]
    assert not unfinished.exists()
    assert sorted(path.name for path in out.iterdir()) == ["documents.jsonl", "idf.npy", "manifest.json", "offsets.npy", "rescore", "vectors.faiss"]
    whole = build(corpus, tmp_path / "whole", KEPT)
    assert Manifest.read(whole).identity == Manifest.read(out).identity


@pytest.mark.parametrize("place", ["indexed", "bytes hashed"])
def test_a_build_that_ended_after_its_embedding_embeds_nothing_again(corpus: Path, tmp_path: Path, place: str):
    out, spec = tmp_path / "index", BuildSpec(encoder=SMALL, shard_rows=4, index="SQ8", rescore=True)
    heard = Heard()
    build(corpus, tmp_path / "other", spec, heard)
    stopped(corpus, out, spec, (place, heard.of(place)[0]))
    again = Heard()
    build(corpus, out, spec, again)
    assert again.of("documents embedded") == []
    assert verify(out)[-1].startswith("10 of 10 vectors")


def test_a_build_that_ended_between_manifest_and_name_has_only_its_name_to_get(corpus: Path, tmp_path: Path):
    out, unfinished, heard = tmp_path / "index", tmp_path / ".index.building", Heard()
    build(corpus, out, KEPT).rename(unfinished)
    (unfinished / "build").mkdir()
    (unfinished / "rescore" / "00002.npy").rename(unfinished / "build" / "00002.npy")
    with pytest.raises(IndexFault, match=r"encoder\.dim 32, now 64"):
        build(corpus, out, BuildSpec(encoder=HashedSettings(dim=64), index="SQ8", rescore=True))
    build(corpus, out, KEPT, heard)
    assert heard.told == []
    assert not unfinished.exists()
    assert len(verify(out)) == 3


def test_a_shard_that_is_not_whole_is_embedded_again(corpus: Path, tmp_path: Path):
    out = tmp_path / "index"
    unfinished = stopped(corpus, out, KEPT, ("documents embedded", 8))
    shard = unfinished / "build" / "00000.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    heard = Heard()
    build(corpus, out, KEPT, heard)
    assert heard.of("documents embedded") == [8, 10], "4 of 10 are there, then 4 and 2"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"encoder": HashedSettings(dim=64)}, "encoder.dim 32, now 64"),
        ({"shard_rows": 5}, "shard_rows 4, now 5"),
        ({"dtype": "bfloat16"}, "dtype 'float16', now 'bfloat16'"),
        ({"index": "Flat", "rescore": False}, "dtype 'float16', now 'float32'"),
    ],
)
def test_going_on_with_another_build_is_refused_and_the_difference_named(corpus: Path, tmp_path: Path, change: dict, difference: str):
    unfinished = stopped(corpus, tmp_path / "index", KEPT, ("documents embedded", 4))
    with pytest.raises(IndexFault, match=f"unfinished build of something else: {difference}") as refused:
        build(corpus, tmp_path / "index", replace(KEPT, **change))
    assert str(unfinished) in str(refused.value)
    assert "with the same options to go on, or remove" in str(refused.value)


def test_a_disk_without_room_is_told_with_the_file_and_what_is_kept(corpus: Path, tmp_path: Path):
    def full(what: str, done: int, of: int) -> None:
        if (what, done) == ("documents embedded", 8):
            raise OSError(errno.ENOSPC, "No space left on device", "/index/00002.npy")

    with pytest.raises(IndexFault, match=r"/index/00002\.npy: No space left on device\. Make room: finished shards are kept"):
        build(corpus, tmp_path / "index", KEPT, full)


@pytest.mark.parametrize(
    ("begun", "at", "asked"),
    [
        pytest.param({"index": "Flat"}, ("documents embedded", 8), {"index": "blocks", "bm25": True}, marks=pytest.mark.slow),  # imports torch
        ({"index": "Flat"}, ("documents embedded", 8), {"index": "SQ8", "rescore": True, "dtype": "bfloat16"}),
        ({"index": "SQ8", "bm25": True}, ("bytes hashed", 0), {"index": "SQ4", "rescore": True}),
    ],
)
def test_another_index_is_made_of_the_shards_that_are_finished(corpus: Path, tmp_path: Path, begun: dict, at: tuple, asked: dict):
    # all embeddings were lost with a wrong --index
    first, now = (BuildSpec(encoder=SMALL, shard_rows=4, **some) for some in (begun, asked))
    if at[1] == 0:
        build(corpus, tmp_path / "other", first, heard := Heard())
        at = (at[0], heard.of(at[0])[0])
    stopped(corpus, tmp_path / "index", first, at)
    heard = Heard()
    out = build(corpus, tmp_path / "index", now, heard)
    assert heard.of("documents embedded") in ([], [10]), "what was left of ten"
    assert any(what.startswith("goes on with finished shards as another index") for what, _, _ in heard.told)
    assert Manifest.read(out).identity == Manifest.read(build(corpus, tmp_path / "whole", now)).identity
    assert len(verify(out)) >= 3


@pytest.mark.parametrize("index", ["no such thing", "PQ5", "IVF11,Flat"])
def test_an_index_that_cannot_be_is_refused_before_anything_is_embedded(corpus: Path, tmp_path: Path, index: str):
    heard = Heard()
    with pytest.raises(IndexFault, match=f"--index {index}"):
        build(corpus, tmp_path / "index", BuildSpec(encoder=SMALL, index=index), heard)
    assert heard.of("documents embedded") == []


def test_going_on_with_another_corpus_is_refused(corpus: Path, tmp_path: Path):
    stopped(corpus, tmp_path / "index", KEPT, ("documents embedded", 4))
    with corpus.open("a") as file:
        file.write('{"id": "x", "contents": "more"}')
    with pytest.raises(IndexFault, match=r"something else: corpus\.sha256"):
        build(corpus, tmp_path / "index", KEPT)


def test_what_does_not_change_the_bytes_may_change_when_a_build_goes_on(corpus: Path, tmp_path: Path):
    stopped(corpus, tmp_path / "index", KEPT, ("documents embedded", 4))
    again = replace(KEPT, shard_rows=None, runtime=Runtime(threads=2))
    assert len(Index.open(build(corpus, tmp_path / "index", again))) == DOCUMENTS


def test_building_again_reopens_the_same_and_refuses_another(corpus: Path, tmp_path: Path):
    out = build(corpus, tmp_path / "index", KEPT)
    before = (out / "manifest.json").stat().st_mtime_ns
    assert build(corpus, out, KEPT) == out
    assert (out / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(IndexFault, match=r"index is an index of something else: encoder\.dim 32, now 64"):
        build(corpus, out, replace(KEPT, encoder=HashedSettings(dim=64)))
    with corpus.open("a") as file:
        file.write('{"id": "x", "contents": "more"}')
    with pytest.raises(IndexFault, match=r"something else: corpus\.sha256"):
        build(corpus, out, KEPT)


def test_two_builds_of_one_directory_at_once_are_refused(corpus: Path, tmp_path: Path):
    with workshop(tmp_path / "index") as held:
        assert held is not None
        with pytest.raises(IndexFault, match="being built by another process"):
            build(corpus, tmp_path / "index", KEPT)
        held.drop()
    assert build(corpus, tmp_path / "index", KEPT).is_dir(), "the lock of a build that ended is no one's"


def test_a_build_goes_on_where_its_directory_was_moved_to(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # the documents were looked for at the path that the first command had named
    monkeypatch.chdir(tmp_path)
    unfinished = stopped(corpus, Path("index"), KEPT, ("documents embedded", 8))
    (tmp_path / "larger disk").mkdir()
    unfinished.rename(tmp_path / "larger disk" / unfinished.name)
    heard = Heard()
    build(corpus, tmp_path / "larger disk" / "index", KEPT, heard)
    assert heard.of("documents embedded") == [10], "two of ten were left"


def test_the_documents_of_a_build_that_somebody_stops_are_kept(corpus: Path, tmp_path: Path):
    # the command said so, and had thrown them away: minutes of work for Wikipedia
    def stop(what: str, done: int, of: int) -> None:
        if what == "documents counted":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "index", KEPT, stop)
    heard = Heard()
    build(corpus, tmp_path / "index", KEPT, heard)
    assert heard.of("imported") == []


@pytest.mark.parametrize("link", [True, False])
def test_a_corpus_is_taken_again_after_a_run_that_was_killed_behind_it(corpus: Path, tmp_path: Path, link: bool):
    # the index named the file elsewhere, and kept a link to it that it did not use
    directory = tmp_path / "building"
    directory.mkdir()
    for linked_before in (True, link):
        assert _taken(adopt_corpus(corpus, directory), directory, linked_before, silent).documents == directory / "documents.jsonl"
    assert (directory / "documents.jsonl").samefile(corpus) == link
    before = corpus.read_text()
    assert (directory / "documents.jsonl").read_text() == before != ""


def test_the_memory_of_a_plan_is_that_of_the_process_and_of_what_it_holds(corpus: Path, tmp_path: Path):
    # 300 MiB of a process, which takes 72 MB, and what had grown while the encoder was tried: another number every time
    plan = planned(corpus, tmp_path / "index", replace(KEPT, shard_rows=4))
    texts = 2 * corpus.stat().st_size
    assert plan.memory_bytes == pytest.approx(72_000_000 + 4 * 32 * (2 * 4 + 8 * 4) + texts, abs=100)


def test_many_may_wait_for_a_build_that_ends(tmp_path: Path):
    # one removed the directory while another was about to lock a file in it: FileNotFoundError
    def waited(_: int) -> int:
        for _ in range(40):
            with workshop(tmp_path, wait=True) as held:
                assert held is None
        return 40

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(waited, range(4))) == [40] * 4


def test_half_precision_is_for_a_gpu_that_embeds_and_threads_still_make_the_index():
    # fp16 was refused as if it were a CPU's
    arguments = argparse.Namespace(runtime="auto", precision="fp16", threads=8)
    assert runtime_of(arguments, "cuda:0").info == {"runtime": "torch", "precision": "fp16", "device": "cuda:0", "threads": 1}
    with pytest.raises(ValueError, match="fp16 is for GPUs"):
        runtime_of(arguments)
    with pytest.raises(ValueError, match="--threads must be at least 1"):
        BuildSpec(threads=0)


def test_shards_cover_all_rows_once(tmp_path: Path):
    assert [(shard.start, shard.stop) for shard in shards_of(tmp_path, 10, 4)] == [(0, 4), (4, 8), (8, 10)]
    assert [shard.path.name for shard in shards_of(tmp_path, 10, 4)] == ["00000.npy", "00001.npy", "00002.npy"]
    assert finished(shards_of(tmp_path, 10, 4)) == {}


def test_shards_are_two_minutes_of_work_and_not_too_many():
    assert shard_rows_at(100, 1_000_000) == 16_384, "12,000 up to a power of two"
    assert shard_rows_at(1, 1000) == 1024
    assert shard_rows_at(1e6, 1_000_000) == 262_144
    assert shard_rows_at(1, 21_015_324) == 65_536, "not more than 512 files"


def test_differences_name_what_was_and_what_is_asked_for():
    assert differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": None}) == ["a.c 2, now 5", "d 3, now None"]


def test_an_encoder_that_makes_no_number_of_a_document_is_refused_and_the_document_named(corpus: Path, tmp_path: Path):
    from retriever.building.shards import embed_shard
    from retriever.documents import DocumentStore

    class Broken:
        dim = 2

        def encode_documents(self, texts: list[str], progress: object = None) -> np.ndarray:
            return np.array([[0.0, np.nan if "number7" in text else 1.0] for text in texts], np.float32)

    built = build(corpus, tmp_path / "index", KEPT)
    with DocumentStore.open(built / "documents.jsonl", built / "offsets.npy", None) as documents:
        [_, second, _] = shards_of(tmp_path, DOCUMENTS, 4)
        with pytest.raises(IndexFault, match="NaN or infinity of document 7"):
            embed_shard(Broken(), documents, second, "float16", lambda done: None)  # type: ignore[arg-type]
    assert not second.path.exists()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"encoder": None}, "add --bm25"),
        ({"encoder": None, "bm25": True, "dtype": "float16"}, "there is no encoder"),
        ({"index": "blocks", "rescore": True}, "--rescore would change nothing"),
        ({"rescore": True}, "--rescore would change nothing"),
        ({"index": "blocks", "dtype": "float32"}, "blocks are float16 or bfloat16"),
        ({"dtype": "int4"}, "--dtype is one of"),
        ({"index": "OPQ8,IVF64,PQ8x4fs"}, "cannot decode"),
        ({"shard_rows": 0}, "--shard-rows must be at least 1"),
        ({"devices": ()}, "names no device"),
        ({"devices": ("cuda:0",)}, "the hashed encoder computes on CPUs"),
        ({"runtime": Runtime(precision="bf16")}, "the hashed encoder has none"),
    ],
)
def test_what_would_have_no_effect_is_refused(wrong: dict, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        BuildSpec(**wrong)


@pytest.mark.parametrize(
    ("index", "dtype"), [("Flat", "float32"), ("HNSW32,Flat", "float32"), ("IVF256,Flat", "float32"), ("SQ8", "float16"), ("blocks", "float16")]
)
def test_vectors_are_kept_exactly_where_the_index_keeps_them_exactly(index: str, dtype: str):
    assert BuildSpec(index=index).shard_dtype == dtype


def test_an_index_that_does_not_hold_what_was_embedded_is_not_built(corpus: Path, tmp_path: Path):
    with pytest.raises(IndexFault, match="--index no such thing"):
        build(corpus, tmp_path / "index", BuildSpec(encoder=SMALL, index="no such thing"))


def test_verify_finds_a_byte_a_line_and_a_vector(corpus: Path, tmp_path: Path):
    out = build(corpus, tmp_path / "index", KEPT)
    assert verify(out) == [
        "7 files have the bytes that the manifest says",
        "10 documents begin where they should, and are found by their ids",
        "10 of 10 vectors are what the encoder makes of their documents (cosine at least 1.0000)",
    ]
    (out / "rescore" / "00001.npy").write_bytes((out / "rescore" / "00000.npy").read_bytes())
    with pytest.raises(IndexFault, match=r"00001\.npy is not the file that was built"):
        verify(out)


KILLED = """
import sys
from pathlib import Path
from retriever.building.build import build
from retriever.building.spec import BuildSpec
from retriever.encoders.hashed import HashedSettings

def tell(what, done, of):
    print(what, done, flush=True)

spec = BuildSpec(encoder=HashedSettings(dim=32), index="blocks", shard_rows=2000, devices=("cpu",) * int(sys.argv[3]))
if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]), spec, tell)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_build_killed_by_the_system_goes_on_without_embedding_finished_shards_again(tmp_path: Path, processes: int):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "index"
    with corpus.open("w") as file:
        file.writelines(json.dumps({"id": str(i), "contents": f"document number{i} of word{i % 300} " * 10}) + "\n" for i in range(20_000))
    command = [sys.executable, "-c", KILLED, str(corpus), str(out), str(processes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as building:
        assert building.stdout is not None
        for line in building.stdout:
            if line.startswith("documents embedded") and int(line.split()[-1]) >= 7000:
                building.kill()
                break
    unfinished = tmp_path / ".index.building" / "build"
    marks = {path.stem: (unfinished / f"{path.stem}.npy").stat() for path in unfinished.glob("*.done")}
    assert 2 <= len(marks) < 10
    heard = Heard()
    spec = BuildSpec(encoder=HashedSettings(dim=32), index="blocks", shard_rows=2000)
    build(corpus, out, spec, heard)
    assert heard.of("documents embedded")[0] > 2000 * len(marks), "it begins behind what is there"
    for name, before in marks.items():
        after = (out / "vectors" / f"{name}.npy").stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(verify(out)) == 3


@pytest.mark.slow
def test_several_processes_make_the_same_bytes_as_one(tmp_path: Path):
    corpus = tmp_path / "corpus.jsonl"
    with corpus.open("w") as file:
        file.writelines(json.dumps({"id": f"d{i}", "contents": f"document number{i} of word{i % 300}"}) + "\n" for i in range(2000))
    spec = {"encoder": SMALL, "index": "blocks", "shard_rows": 300}
    heard = Heard()
    several = build(corpus, tmp_path / "several", BuildSpec(**spec, devices=("cpu", "cpu")), heard)
    assert Manifest.read(several).identity == Manifest.read(build(corpus, tmp_path / "one", BuildSpec(**spec))).identity
    assert heard.of("documents embedded")[-1] == 2000


def test_a_plan_is_told_before_anything_is_written(corpus: Path, tmp_path: Path):
    plans: list[Plan] = []

    def refuse(plan: Plan) -> None:
        plans.append(plan)
        raise Stop

    with pytest.raises(Stop):
        build(corpus, tmp_path / "out" / "index", KEPT, told=refuse)
    assert list((tmp_path / "out").iterdir()) == []
    [plan] = plans
    assert (plan.documents, plan.dim, plan.sample.exact) == (DOCUMENTS, 32, True)
    assert plan.shard_bytes == DOCUMENTS * 32 * 2
    assert plan.seconds is not None
    assert plan.seconds < 1


def test_a_plan_of_nothing_new_says_so(corpus: Path, tmp_path: Path):
    build(corpus, tmp_path / "index", KEPT)
    with pytest.raises(IndexFault, match="there already"):
        planned(corpus, tmp_path / "index", KEPT)


OPENED = """
import sys, time
from pathlib import Path
from retriever.index import Index
from retriever.query import Query
started = time.perf_counter()
index = Index.open(Path(sys.argv[1]))
opened = time.perf_counter() - started
[[hit]] = index.search([Query(text="number777777", topk=1)])
print(opened, len(index), index.memory().mapped_bytes)
"""


@pytest.mark.soak
def test_a_million_vectors_of_384_open_in_less_than_two_seconds_and_are_mapped(tmp_path: Path):
    corpus = tmp_path / "corpus.jsonl"
    with corpus.open("w") as file:
        file.writelines(json.dumps({"id": f"doc{i}", "contents": f"number{i} word{i % 997}"}) + "\n" for i in range(1_000_000))
    out = build(corpus, tmp_path / "index", BuildSpec(encoder=HashedSettings(dim=384)))
    command = [sys.executable, "-c", OPENED, str(out)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]).stdout.split()
    assert float(told[0]) < 2, "seconds"
    assert (int(told[1]), int(told[2]) >= 1_000_000 * 384 * 4) == (1_000_000, True)
