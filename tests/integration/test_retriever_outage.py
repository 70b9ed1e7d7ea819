"""A retriever that is killed under load and started again: nobody's search is lost."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import trio

from retriever.client import RetrieverClient

pytestmark = pytest.mark.soak  # ten seconds, of which the outage is five

CALLERS = 128
OUTAGE_S = 4.0  # and what the server takes to start


@contextmanager
def start(corpus: Path, port: int) -> Iterator[None]:
    """A server, which is killed in the end."""
    command = [sys.executable, "-m", "retriever", "serve", str(corpus), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready")
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("coalesce", [0, 4])
def test_a_server_that_is_killed_and_started_again_costs_no_search(tmp_path: Path, coalesce: int):
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": str(number), "contents": f'"Title {number}"\npassage {number}'} for number in range(20)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    waited_for: set[int] = set()
    all_answered = trio.Event()

    async def ask(client: RetrieverClient, caller: int) -> None:
        for number in count():
            [passages] = await client.retrieve([f"passage {number} {caller}"], topk=3)
            assert len(passages) == 3
            waited_for.discard(caller)
            if not waited_for:
                all_answered.set()

    async def everybody_is_answered() -> None:
        nonlocal all_answered
        all_answered = trio.Event()
        waited_for.update(range(CALLERS))
        with trio.fail_after(10.0):
            await all_answered.wait()

    async def main() -> None:
        async with RetrieverClient(f"http://127.0.0.1:{port}", max_connections=CALLERS, coalesce=coalesce) as client, trio.open_nursery() as nursery:
            with start(corpus, port):
                for caller in range(CALLERS):
                    nursery.start_soon(ask, client, caller)
                await everybody_is_answered()
            await trio.sleep(OUTAGE_S)
            with start(corpus, port):
                await everybody_is_answered()
                nursery.cancel_scope.cancel()

    trio.run(main)
