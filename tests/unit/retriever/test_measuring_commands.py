import argparse
import math
import subprocess
import sys
from pathlib import Path

import pytest

from retriever.commands import bench, evaluate
from retriever.load import Load, LoadError, LoadReport


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    bench.add(commands)
    evaluate.add(commands)
    parsed = parser.parse_args(arguments)
    return {"bench": bench, "evaluate": evaluate}[parsed.command].run(parsed)


@pytest.fixture
def questions(tmp_path: Path) -> str:
    (tmp_path / "questions.jsonl").write_text('{"question": "who"}\n')
    return str(tmp_path / "questions.jsonl")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--gain", "linear"], "--gain is of graded judgements"),
        (["--gain", "linear", "--answers"], "--gain is of graded judgements"),
        (["--answers", "--allow-missing"], "--allow-missing is of ids"),
        (["--limit", "0"], "--limit must be at least 1"),
    ],
)
def test_an_option_without_effect_is_refused(questions: str, flags: list[str], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        run("evaluate", "nowhere", "--questions", questions, *flags)


@pytest.mark.parametrize("flags", [["--modes", "dense,words"], ["--topk", "1,x"], ["--topk", "0"], ["--answers", "--qrels", "f"]])
def test_an_option_that_means_nothing_is_refused_by_the_parser(questions: str, flags: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run("evaluate", "nowhere", "--questions", questions, *flags)
    assert flags[0] in capsys.readouterr().err


def test_a_load_that_is_none_is_refused(questions: str):
    with pytest.raises(LoadError, match="carries one query"):
        run("bench", "http://127.0.0.1:1", "--questions", questions, "--form", "skyrl", "--per-request", "2")
    with pytest.raises(LoadError, match=r"http://127\.0\.0\.1:1 cannot be reached"):
        run("bench", "http://127.0.0.1:1", "--questions", questions)


def test_a_load_that_nobody_answered_is_told_by_its_reasons_and_without_times():
    none = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "max_ms", "bytes_per_answer"), math.nan)
    report = LoadReport(requests=0, queries=0, seconds=1.0, qps=0.0, errors={"422": 9}, reasons={"422": "no reranker"}, client_cores=0.1, **none)
    assert bench._render("http://r", Load(clients=2), report).splitlines() == [
        "http://r: 2 clients, 1 queries a request, top 3, 1.0 s",
        "nothing was answered; errors: 422 9",
        "  422: no reranker",
    ]


def test_help_has_its_percent_signs_once(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run("evaluate", "--help")
    assert "%%" not in capsys.readouterr().out


def test_scripts_beside_the_benchmark_of_the_same_name_import_the_package():
    """A script's own folder comes first, and benchmarks/retriever.py is found there as `retriever`."""
    root = Path(__file__).parents[3]
    code = f"import sys; sys.path.insert(0, {str(root / 'benchmarks')!r}); import retriever.amounts as found; print(found.__file__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(ran.stdout.strip()) == root / "retriever" / "amounts.py"
