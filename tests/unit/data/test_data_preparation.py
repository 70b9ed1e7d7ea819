"""Public data: the same rows, whatever they come in; never half a file, never somebody else's file written over."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.recipe import TaskSource
from agentrl.data.manifest import DataManifest
from agentrl.data.preparation import Prepared, prepare
from agentrl.data.public_sets import PUBLIC_SETS, public_set
from agentrl.data.sources import load_tasks
from agentrl.errors import DataError

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# Rows as FlashRAG's files hold them.
NQ = [
    {"id": "test_0", "question": "who got the first nobel prize in physics", "golden_answers": ["Wilhelm Conrad Röntgen"], "metadata": {}},
    {"id": "test_1", "question": "when is the next deadpool movie", "golden_answers": ["May 18, 2018", "2018"], "metadata": {"a": [1]}},
]
PASSAGES = [{"id": "0", "contents": '"Aaron"\nAaron is a prophet.'}, {"id": "1", "contents": '"Oslo"\nOslo is a city.'}]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def repository(folder: Path) -> Path:
    """A directory laid out as the repositories are: questions, the corpus as the archive it really is, the index in two pieces."""
    (folder / "nq").mkdir(parents=True)
    (folder / "nq" / "test.jsonl").write_bytes(lines(NQ))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("data00/wiki_dump.jsonl")
        member.size = len(lines(PASSAGES))
        archive.addfile(member, io.BytesIO(lines(PASSAGES)))
    (folder / "wiki-18.jsonl.gz").write_bytes(gzip.compress(packed.getvalue()))
    (folder / "part_aa").write_bytes(b"first ")
    (folder / "part_ab").write_bytes(b"second")
    return folder


def made(name: str, out: Path, **options: Any) -> list[Prepared]:
    return list(prepare(public_set(name), out=out, **options))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_questions_become_tasks_whose_ids_are_unique_over_all_sets(tmp_path: Path):
    [done] = made("nq", tmp_path / "data", splits=["test"], source=repository(tmp_path / "hub"))
    assert done.path == tmp_path / "data" / "nq" / "test.jsonl"
    assert rows_of(done.path)[1] == {
        "id": "nq/test_1", "question": "when is the next deadpool movie", "golden_answers": ["May 18, 2018", "2018"], "data_source": "nq",
    }  # fmt: skip
    tasks = load_tasks([TaskSource(path=str(done.path))], seed=0)
    assert (tasks[0].id, tasks[0].source, tasks[0].answers[0]) == ("nq/test_0", "nq", "Wilhelm Conrad Röntgen")


def test_the_corpus_is_read_out_of_the_archive_it_comes_in(tmp_path: Path):
    [done] = made("wiki18", tmp_path / "data", source=repository(tmp_path / "hub"))
    assert (done.path.name, rows_of(done.path)) == ("corpus.jsonl", PASSAGES)
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_bytes(gzip.compress(lines(PASSAGES)))
    [same] = made("wiki18", tmp_path / "other", source=plain)
    assert same.manifest.sha256 == done.manifest.sha256


def test_an_index_is_its_pieces_one_after_the_other(tmp_path: Path):
    [done] = made("wiki18-e5", tmp_path / "data", source=repository(tmp_path / "hub"))
    assert (done.path.name, done.path.read_bytes(), done.manifest.count) == ("e5_Flat.index", b"first second", 12)


def test_the_manifest_names_source_rows_and_sha256(tmp_path: Path):
    hub = repository(tmp_path / "hub")
    [done] = made("nq", tmp_path / "data", splits=["test"], source=hub, limit=1)
    told = json.loads((tmp_path / "data" / "nq" / "test.jsonl.manifest.json").read_text())
    assert (told["dataset"], told["split"], told["limit"], told["count"]) == ("nq", "test", 1, 1)
    assert told["sha256"] == hashlib.sha256(done.path.read_bytes()).hexdigest()
    assert told["origin"] == {"files": ["test.jsonl"], "sha256": [hashlib.sha256(lines(NQ)).hexdigest()]}
    assert "CC BY-SA" in told["licence"]


def test_what_is_there_is_left_and_what_is_something_else_is_never_written_over(tmp_path: Path):
    hub, data = repository(tmp_path / "hub"), tmp_path / "data"
    made("nq", data, splits=["test"], source=hub)
    [again] = made("nq", data, splits=["test"], source=hub)
    assert not again.made
    [without_a_network] = made("nq", data, splits=["test"])
    assert not without_a_network.made
    with pytest.raises(DataError, match="made with limit None instead of 1"):
        made("nq", data, splits=["test"], source=hub, limit=1)
    (data / "nq" / "test.jsonl").write_text("changed\n")
    with pytest.raises(DataError, match="it was changed"):
        made("nq", data, splits=["test"], source=hub)
    (data / "nq" / "train.jsonl").write_text("mine\n")
    with pytest.raises(DataError, match="it was not made here"):
        made("nq", data, splits=["train"], source=hub)
    assert (data / "nq" / "train.jsonl").read_text() == "mine\n"


def test_a_row_that_is_wrong_is_named_and_leaves_no_file(tmp_path: Path):
    wrong = tmp_path / "test.jsonl"
    wrong.write_bytes(lines([NQ[0], {"id": "test_1", "question": "who", "golden_answers": []}]))
    with pytest.raises(DataError, match=r"test\.jsonl:2: golden_answers must be a list of at least one string"):
        made("nq", tmp_path / "data", splits=["test"], source=wrong)
    assert not (tmp_path / "data" / "nq" / "test.jsonl").exists()


@pytest.mark.parametrize("torn", [b"", b'{"id": "nq/te'], ids=["between lines", "in a line"])
def test_a_file_that_broke_off_is_gone_on_with(tmp_path: Path, torn: bytes):
    hub = repository(tmp_path / "hub")
    [whole] = made("nq", tmp_path / "whole", splits=["test"], source=hub)
    taken = []

    class Interrupted(Exception):
        pass

    def stop(file: str, done: int, of: int | None) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):  # when the file is in its place: the partial is gone, the manifest is there
        made("nq", tmp_path / "data", splits=["test"], source=hub, progress=stop)
    path = tmp_path / "data" / "nq" / "test.jsonl"
    partial = broken_off(path, hub, keep=path.read_bytes().splitlines(keepends=True)[0] + torn)
    [done] = made("nq", tmp_path / "data", splits=["test"], source=hub, progress=lambda file, done, of: taken.append(done))
    assert done.manifest == whole.manifest
    assert (path.read_bytes(), partial.exists()) == (whole.path.read_bytes(), False)


def broken_off(path: Path, hub: Path, *, keep: bytes) -> Path:
    """What an earlier call left: a partial named by what it was made of."""
    from agentrl.data.hub import from_path
    from agentrl.data.manifest import FORMAT
    from agentrl.data.partial import PartialFile

    path.unlink()
    origin = from_path(hub, ("nq/test.jsonl",)).identity
    partial = PartialFile(path, {"dataset": "nq", "split": "test", "origin": origin, "limit": None, "format": FORMAT}, lines=True)
    partial.close()
    partial.path.write_bytes(keep)
    return partial.path


def test_an_index_that_broke_off_is_gone_on_with_at_its_byte(tmp_path: Path):
    from agentrl.data.preparation import _bytes

    hub = repository(tmp_path / "hub")
    pieces = [hub / "part_aa", hub / "part_ab"]
    assert [b"".join(_bytes(pieces, done)) for done in (0, 4, 6, 9, 12)] == [b"first second", b"t second", b"second", b"ond", b""]


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("popqa", {"splits": ["train"]}, "popqa has no split train: it has test"),
        ("wiki18-e5", {"limit": 3}, "wiki18-e5 is an index"),
        ("nq", {"source": Path("x"), "revision": "main"}, "give one of them"),
        ("nq", {"source": Path(__file__)}, "name one --split"),
        ("nq", {"source": Path("nowhere")}, "no such file or directory: nowhere"),
        ("nq", {"source": Path(__file__).parent}, "has no nq/train.jsonl"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str, options: dict[str, Any], told: str):
    with pytest.raises(DataError, match=told):
        made(name, tmp_path, **options)


def test_search_r1s_seven_evaluation_sets_hold_its_51713_questions():
    used = {"nq": "test", "triviaqa": "test", "popqa": "test", "hotpotqa": "dev", "2wiki": "dev", "musique": "dev", "bamboogle": "test"}
    counts = [PUBLIC_SETS[name].files[split].count for name, split in used.items()]
    assert sum(count for count in counts if count is not None) == 51_713
    assert all(split in PUBLIC_SETS[name].used for name, split in used.items())


@pytest.mark.slow
def test_a_download_names_its_commit_and_is_kept_for_when_there_is_no_network(tmp_path: Path):
    files = {"/datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main/nq/test.jsonl": lines(NQ)}
    with hub_server(files) as url:
        ran = agentrl("data", "nq", "--split", "test", "--out", str(tmp_path), HF_ENDPOINT=url, HF_HOME=str(tmp_path / "cache"))
    assert ran.returncode == 0, ran.stderr
    assert f"2 rows, sha256 {hashlib.sha256((tmp_path / 'nq' / 'test.jsonl').read_bytes()).hexdigest()}" in ran.stdout
    assert "caution: 3,610 rows were expected" in ran.stdout
    found = DataManifest.read(tmp_path / "nq" / "test.jsonl")
    assert found.origin == {"repository": "RUC-NLPIR/FlashRAG_datasets", "files": ["nq/test.jsonl"], "revision": COMMIT}
    again = agentrl("data", "nq", "--split", "test", "--out", str(tmp_path / "b"), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    assert again.returncode == 0, again.stderr
    assert DataManifest.read(tmp_path / "b" / "nq" / "test.jsonl") == found


@pytest.mark.slow
def test_without_a_network_the_way_by_hand_is_told(tmp_path: Path):
    ran = agentrl("data", "popqa", "--out", str(tmp_path), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "popqa/test.jsonl cannot be downloaded" in ran.stderr
    assert "https://huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets" in ran.stderr
    assert "--from DIR" in ran.stderr


def agentrl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from agentrl.cli import main; main()"
    settings = {**os.environ, "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, env=settings, timeout=60, check=False)


@contextmanager
def hub_server(files: dict[str, bytes]) -> Iterator[str]:
    """The two requests of the hub that a download makes."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(b"", len(files.get(self.path, b"")))

        def do_GET(self) -> None:
            self._answer(files.get(self.path, b""), len(files.get(self.path, b"")))

        def _answer(self, content: bytes, length: int) -> None:
            self.send_response(200 if self.path in files else 404)
            for name, value in (("Content-Length", str(length)), ("ETag", '"abc"'), ("X-Repo-Commit", COMMIT)):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
