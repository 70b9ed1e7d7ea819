import io
import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from retriever.__main__ import main
from retriever.amounts import duration, size
from retriever.commands.progress import Lines


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "contents": f"word{i} of text"}) + "\n" for i in range(5)))
    return path


def test_an_index_is_built_described_and_verified(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "index"
    assert main(["build", str(corpus), "--out", str(out), "--encoder", "hashed", "--dim", "64", "--bm25"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"{out}: built; to be served it needs ")
    assert f"{corpus}: 5 documents of 38 bytes" in told.err, "the plan comes before"
    assert main(["info", str(out)]) == 0
    described = capsys.readouterr().out
    assert "5 of corpus.jsonl" in described
    assert "FAISS Flat of 64, by ip" in described
    assert "of memory are available" in described
    assert main(["info", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dense"]["factory"] == "Flat"
    assert main(["verify", str(out)]) == 0
    assert "5 documents begin where they should" in capsys.readouterr().out


def test_a_plan_is_printed_and_nothing_is_written(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["build", str(corpus), "--out", str(tmp_path / "index"), "--encoder", "hashed", "--dim", "64", "--index", "blocks"]
    assert main([*arguments, "--plan"]) == 0
    assert "float16 blocks of 64" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["build", "CORPUS", "--out", "OUT", "--encoder", "hashed", "--pooling", "cls"], "--pooling would change nothing with --encoder hashed"),
        (["build", "CORPUS", "--out", "OUT", "--encoder", "none"], "add --bm25"),
        (["build", "CORPUS", "--out", "OUT", "--encoder", "none", "--bm25", "--dim", "3"], "--dim would change nothing with --encoder none"),
        (["build", "CORPUS", "--out", "OUT", "--encoder", "none", "--bm25", "--index", "SQ8"], "--index is of vectors"),
        (["build", "CORPUS", "--out", "OUT", "--encoder", "./no/such/model"], "no directory ./no/such/model"),
        (["build", "CORPUS", "--out", "OUT", "--encoder", "hashed", "--index", "nonsense"], "FAISS makes no index 'nonsense'"),
        (["build", "CORPUS.gone", "--out", "OUT", "--encoder", "hashed"], "No such file"),
        (["serve", "CORPUS", "--device", "cuda:0"], "--device is of an index in files, and without --cache"),
        (["serve", "CORPUS", "--reranker", "org/r"], "--reranker is of an index in files"),
        (["serve", "CORPUS", "--cache", "OUT", "--precision", "bf16"], "--precision is of a model, and --encoder is hashed"),
        (["serve", "CORPUS", "--mode", "bm25"], "cannot be searched by bm25"),
        (["serve", "CORPUS", "--bm25", "--index", "nonsense"], "FAISS makes no index 'nonsense'"),
        (["serve", "CORPUS", "--bm25", "--reranker", "./no/such/model"], "no directory ./no/such/model"),
        (["serve", "CORPUS", "--port", "BUSY"], "cannot be listened on: something else listens there: give another --port, or --port 0"),
        (["serve", "CORPUS", "--host", "no.such.host.invalid", "--unsafe-allow-remote"], "no.such.host.invalid does not resolve"),
        (["info", "OUT"], "is no index"),
        (["verify", "OUT"], "is no index"),
        (["import", "--faiss", "CORPUS", "--corpus", "CORPUS", "--out", "OUT", "--encoder", "hashed"], "--encoder that made the vectors"),
    ],
)
def test_mistakes_are_told_and_end_with_2(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        names = {"CORPUS": str(corpus), "OUT": str(tmp_path / "index"), "BUSY": str(busy.getsockname()[1])}
        assert main([re.sub("CORPUS|OUT|BUSY", lambda name: names[name[0]], text) for text in arguments]) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert "listening on" not in told
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_a_port_that_is_none_is_refused_by_the_parser(port: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["serve", "CORPUS", "--port", port])
    assert "argument --port: expected" in capsys.readouterr().err


def test_a_corpus_of_words_is_kept_below_the_users_cache(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert main(["serve", str(corpus), "--bm25", "--port", str(busy.getsockname()[1])]) == 2
    assert f"the index is kept below {tmp_path}/agentrl/indexes (--cache DIR" in capsys.readouterr().err


def test_ctrl_c_is_told_in_a_line(capsys: pytest.CaptureFixture[str]):
    class Stopped(list[str]):
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(Stopped()) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "retriever: stopped\n"


def test_more_threads_than_cores_are_told_of(corpus: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", str(corpus), "--threads", "4096"]) == 2
    assert "--threads 4096 are more than the" in capsys.readouterr().err


def test_lines_tell_the_end_of_a_work_its_speed_and_now_and_then_how_far_it_is():
    stream = io.StringIO()
    clock = iter([0.0, 4.0, 12.0, 13.0, 40.0, 40.0])
    tell = Lines(stream, lambda: next(clock))
    for done in (1000, 2000, 4000, 4250, 11000, 11000):
        tell("documents embedded", done, 11000)
    assert stream.getvalue().splitlines() == [
        "documents embedded: 4,000 of 11,000, 250/s, 28 s left",
        "documents embedded: 11,000 of 11,000, 250/s, in 40 s",
    ], "the thousand that an earlier run did says nothing about the speed"


@pytest.mark.parametrize(("bytes", "told"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (32_279_537_664, "32.3 GB"), (2.5e12, "2.5 TB")])
def test_sizes_are_told_in_powers_of_a_thousand(bytes: float, told: str):
    assert size(bytes) == told


@pytest.mark.parametrize(("seconds", "told"), [(0, "0 s"), (90, "90 s"), (2700, "45 min"), (19_200, "5 h 20 min"), (273_600, "3 days 4 h")])
def test_durations_are_told_in_two_units(seconds: float, told: str):
    assert duration(seconds) == told
