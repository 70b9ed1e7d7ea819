"""A replay buffer served by uvicorn, as a program of its own, so that a test can kill it.

usage: buffer_program.py JOURNAL PORT INCARNATION RUN SETTINGS_JSON
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import uvicorn

from agentrl.buffer.app import create_app
from agentrl.buffer.buffer import BufferSettings, EvalSettings, ReplayBuffer
from agentrl.buffer_api import EvaluationResult
from agentrl.types import Task


class Tasks:
    size = 1000

    def task(self, ordinal: int) -> Task:
        return Task(id=f"t{ordinal}", prompt=f"question {ordinal}?")


def main(journal: str, port: str, incarnation: str, run: str, options: str) -> None:
    chosen = json.loads(options)
    chosen["eval_sets"] = {name: EvalSettings(**one) for name, one in chosen.get("eval_sets", {}).items()}
    buffer = ReplayBuffer(
        Path(journal),
        BufferSettings(**chosen),
        tasks=Tasks(),
        eval_tasks={name: [Task(id=f"h{i}", prompt="?") for i in range(3)] for name in chosen["eval_sets"]},
        incarnation=int(incarnation),
        run=int(run),
        on_evaluation=rows_with_a_trajectory,
    )
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(port)))
        listener.listen(128)
        print("ready", listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(create_app(buffer), log_level="warning", access_log=False)).run(sockets=[listener])


def rows_with_a_trajectory(result: EvaluationResult) -> dict[str, object]:
    return {"set": result.set, "played": sum(not isinstance(outcome, str) for _, outcome in result.rows)}


if __name__ == "__main__":
    main(*sys.argv[1:])
