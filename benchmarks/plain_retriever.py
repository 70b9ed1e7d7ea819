"""The retriever that is commonly written for search agents, to compare with: one handler per request, PyTorch in fp32, FAISS as it comes.

    python benchmarks/plain_retriever.py INDEX_DIR MODEL_DIR

Its shape is that of Search-R1's server (search_r1/search/retrieval_server.py at a14dc3a), SkyRL's and verl's: a synchronous handler in the thread
pool of 40 threads that tokenises, encodes and searches what its own request brings, documents as Python objects, a JSON encoder at the end. It is
kept as fast as that shape allows: no log line or progress bar per request, no 16-bit arithmetic where the CPU has none, one thread of arithmetic.
`encode` is also the exact reference of benchmarks/retriever.py.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import faiss
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModel, AutoTokenizer

MAX_TOKENS = 256  # all-MiniLM-L6-v2's and Search-R1's


class PlainEncoder:
    """Mean-pooled unit vectors, by transformers as its documentation shows it."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModel.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def encode(self, texts: list[str]) -> Any:
        """[N, dim] float32."""
        inputs = self._tokenizer(texts, max_length=MAX_TOKENS, padding=True, truncation=True, return_tensors="pt")
        states = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        vectors = (states * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(vectors, dim=1).numpy()


def main() -> None:
    """Serve on a free port, told by a line `ready URL`."""
    directory, model = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    index = faiss.read_index(str(directory / "vectors.faiss"))
    documents = [json.loads(line) for line in (directory / "documents.jsonl").open(encoding="utf-8")]
    encoder = PlainEncoder(model)

    def found(body: dict[str, Any]) -> list[list[dict[str, Any]]]:
        scores, rows = index.search(encoder.encode(body["queries"]), body["topk"])
        return [
            [{"document": documents[row], "score": float(score)} for row, score in zip(some, theirs, strict=True)]
            for some, theirs in zip(rows, scores, strict=True)
        ]

    async def retrieve(request: Request) -> JSONResponse:
        return JSONResponse({"result": await run_in_threadpool(found, await request.json())})

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        print(f"ready http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        app = Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()
