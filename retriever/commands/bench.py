"""`retriever bench URL --questions FILE`: how many queries a second a server answers, and how long each takes."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retriever.load import Load, LoadReport

__all__ = ["add", "run"]

TOKEN = "AGENTRL_RETRIEVER_TOKEN"
SATURATED = 0.9  # of one core, which is all that an event loop can use


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's options."""
    command = subparsers.add_parser(
        "bench",
        help="load a server, ours or another with the same API",
        description="Closed-loop load: each client sends its next request when the last is answered. Run it on another core than the server's.",
    )
    command.add_argument("url", metavar="URL", help="of the server; /retrieve is added where there is no path")
    command.add_argument("--questions", type=Path, required=True, metavar="FILE.jsonl", help="rows with `question` or `query`")
    command.add_argument("--clients", type=int, default=64, help="requests under way at any time (64)")
    command.add_argument("--per-request", type=int, default=1, help="queries in a request (1); Search-R1's trainer sends all of a turn in one")
    command.add_argument("--repeat", type=int, default=1, help="send each query so often, one after the other, as groups of episodes do (1)")
    command.add_argument("--unique", action="store_true", help="add a number to each query, so that caches only help with --repeat")
    command.add_argument("--seconds", type=float, default=10.0)
    command.add_argument("--warmup", type=float, default=2.0, metavar="SECONDS", help="before the clock starts (2)")
    command.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="after which a request is an error (60)")
    command.add_argument("--topk", type=int, default=3)
    command.add_argument("--form", choices=("search-r1", "skyrl"), default="search-r1", help='"queries": [...], or SkyRL\'s "query": "..."')
    command.add_argument("--msgpack", action="store_true", help="ask and be answered in msgpack")
    command.add_argument("--no-scores", action="store_true", help="return_scores: false")
    command.add_argument("--mode", choices=("dense", "bm25", "hybrid"), help="this server's; others do not know it")
    command.add_argument("--rerank", action="store_true", help="this server's; others do not know it")
    command.add_argument("--token-file", type=Path, metavar="FILE", help=f"holds the bearer token; or set {TOKEN}")
    command.add_argument("--pid", type=int, help="of the server on this machine: its CPU time per query is told as well")
    command.add_argument("--seed", type=int, default=0, help="of the questions' order (0)")
    command.add_argument("--json", action="store_true", help="print a record instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print. Returns 1 where nothing at all was answered.

    Raises:
        ValueError: the questions or options cannot be used, or no server listens there.
    """
    from retriever.load import measure
    from retriever.questions import read_questions

    asked = _load(arguments)
    report = measure(arguments.url, [question.text for question in read_questions(arguments.questions)], asked, pid=arguments.pid)
    print(json.dumps(_record(arguments.url, report)) if arguments.json else _render(arguments.url, asked, report))
    return 0 if report.requests else 1


def _load(arguments: argparse.Namespace) -> Load:
    from retriever.load import Load

    token = arguments.token_file.read_text(encoding="utf-8").strip() if arguments.token_file else os.environ.get(TOKEN)
    options: dict[str, Any] = {"mode": arguments.mode} if arguments.mode else {}
    return Load(
        clients=arguments.clients,
        per_request=arguments.per_request,
        topk=arguments.topk,
        repeat=arguments.repeat,
        unique=arguments.unique,
        seconds=arguments.seconds,
        warmup_s=arguments.warmup,
        timeout_s=arguments.timeout,
        form=arguments.form,
        msgpack=arguments.msgpack,
        return_scores=not arguments.no_scores,
        seed=arguments.seed,
        token=token or None,
        options=options | ({"rerank": True} if arguments.rerank else {}),
    )


def _record(url: str, report: LoadReport) -> dict[str, Any]:
    plain = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in asdict(report).items()}
    return {"url": url, **plain}


def _render(url: str, asked: Load, report: LoadReport) -> str:
    lines = [
        f"{url}: {asked.clients} clients, {asked.per_request} queries a request, top {asked.topk}, {report.seconds:.1f} s",
    ]
    errors = "errors: " + (", ".join(f"{kind} {number}" for kind, number in sorted(report.errors.items())) or "none")
    if report.requests:
        times = f"p50 {report.p50_ms:.1f} ms   p90 {report.p90_ms:.1f}   p99 {report.p99_ms:.1f}   max {report.max_ms:.1f}"
        lines += [f"{report.qps:.1f} queries/s   {times}", f"{report.requests} requests answered, {report.bytes_per_answer:.0f} bytes each; {errors}"]
    else:
        lines.append(f"nothing was answered; {errors}")
    lines += [f"  {kind}: {reason}" for kind, reason in sorted(report.reasons.items())]
    if report.server_cpu_ms_per_query is not None:
        lines.append(f"server: {report.server_cpu_ms_per_query:.3f} ms of CPU a query, {report.server_cores:.2f} cores")
    if report.client_cores > SATURATED:
        lines.append(f"this generator used {report.client_cores:.2f} of a core: it may be what was measured. Start several, or ask fewer queries")
    return "\n".join(lines)
