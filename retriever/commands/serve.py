"""`retriever serve DIR|CORPUS`, and `retriever serve --backend web`: the HTTP server."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from retriever.commands.options import HASHED, NONE, OF_HASHED, OF_MODELS, add_encoder, add_place, devices_of, encoder_of

if TYPE_CHECKING:
    from retriever.building.spec import BuildSpec
    from retriever.index import Index, Models, Serving
    from retriever.local import Limits
    from retriever.query import Progress

__all__ = ["TOKEN_VARIABLE", "add", "run"]

TOKEN_VARIABLE = "AGENTRL_RETRIEVER_TOKEN"
SHORTEST_TOKEN = 16  # characters: one that could be guessed protects nobody
PROGRESS_EVERY_S = 2.0
MOST_PORT = 65_535
FLAT = "Flat"
GPU_BATCH = 256  # queries: one scan of the vectors costs a GPU about as much for 256 as for 64

# Flags that say what an index is to be: of use only where a corpus file is served.
OF_A_CORPUS = ("cache", "encoder", *OF_MODELS, *OF_HASHED, "index", "bm25")
OF_AN_INDEX = ("mode", "model", "runtime", "precision", "device", "threads", "reranker", "parameters", "no_mmap", "deterministic")
OF_FILES = ("runtime", "precision", "device", "threads", "reranker", "parameters", "no_mmap")
OF_ITS_QUEUE = ("overlap", "max_batch", "max_waiting", "cache_entries")
OF_THE_WEB = ("provider", "per_second", "per_day", "provider_url")


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's options. Those that were not given are None, so that one without effect can be refused."""
    command = subparsers.add_parser(
        "serve",
        help="serve an index, a corpus that is indexed at the start, or a web search service",
        description="Answers Search-R1's POST /retrieve and more (GET /openapi.json says what), by default to this machine only. "
        "SIGHUP or POST /admin/reload opens the index again without losing a request. TLS is a proxy's work.",
    )
    command.add_argument("path", type=Path, nargs="?", metavar="DIR|CORPUS", help="an index, or a corpus file")
    command.add_argument("--backend", choices=("index", "web"), default="index", help="what answers (index)")
    _add_network(command)
    _add_index(command)
    web = command.add_argument_group("with --backend web")
    web.add_argument("--provider", choices=("serpapi", "google"), help="whose search; its key is read from the environment")
    web.add_argument("--per-second", type=float, metavar="N", help="requests to the provider a second, at most (5)")
    web.add_argument("--per-day", type=int, metavar="N", help="requests to the provider in 24 hours, at most (no limit)")
    web.add_argument("--provider-url", metavar="URL", help="used instead of the provider's own")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal.

    Raises:
        ValueError: options do not go together, or the token is none.
        OSError: the address cannot be had, or a file not be read.
        Exception: what opening the index raises.
    """
    from retriever.serve import is_loopback

    token = _token(arguments)
    if not is_loopback(arguments.host) and token is None and not arguments.unsafe_allow_remote:
        raise ValueError(
            f"--host {arguments.host} lets other machines in: give them a token (--token-file FILE, or {TOKEN_VARIABLE} in the environment), "
            "or add --unsafe-allow-remote, and whoever reaches the port is answered"
        )
    with _ended_by_a_signal():
        if arguments.backend == "web":
            _refuse(arguments, ("path", *OF_AN_INDEX, *OF_ITS_QUEUE, *OF_A_CORPUS[1:]), "is an index's, and --backend web has none")
            _serve_web(arguments, token)
        else:
            _refuse(arguments, OF_THE_WEB, "is for --backend web")
            _serve_index(arguments, token)
    return 0


def _serve_index(arguments: argparse.Namespace, token: str | None) -> None:
    from retriever.app import create_app
    from retriever.local import LocalService
    from retriever.metrics import Metrics
    from retriever.serve import serve

    if arguments.path is None:
        raise ValueError("serve what? Give an index's directory or a corpus file")
    if arguments.path.is_dir():
        _refuse(arguments, OF_A_CORPUS, f"is for a corpus that is indexed at the start, and {arguments.path} is an index")
    elif not arguments.path.exists():
        raise FileNotFoundError(2, os.strerror(2), str(arguments.path))
    elif arguments.model is not None:
        raise ValueError(f"--model says where the model of an index lies, and {arguments.path} is a corpus: name the --encoder")
    elif arguments.cache is None and _in_memory(arguments):
        _refuse(arguments, OF_FILES, "is of an index in files, and without --cache that of a corpus is made in memory")
    elif arguments.encoder in (None, HASHED, NONE) and arguments.reranker is None:
        _refuse(arguments, ("runtime", "precision"), f"is of a model, and --encoder is {arguments.encoder or HASHED}")
    serving, metrics = _serving(arguments), Metrics()
    opens = _opens(arguments, serving)
    overlap = serving.devices != ("cpu",) or serving.runtime.threads > 1 if arguments.overlap is None else arguments.overlap
    service = LocalService(opens, limits=_limits(arguments, serving), overlap=overlap, metrics=metrics, report=_Told())
    options = {"topk": arguments.topk, "token": token, "deadline_s": arguments.deadline_s}
    app = create_app(service, reload=service.reload, metrics=metrics, **options)
    serve(app, host=arguments.host, port=arguments.port, end_with_stdin=arguments.end_with_stdin, opened=service.opened, reload=service.reload)


def _serve_web(arguments: argparse.Namespace, token: str | None) -> None:
    from retriever.app import create_app
    from retriever.serve import serve
    from retriever.web.service import open_web_service

    if arguments.provider is None:
        raise ValueError("--backend web needs --provider serpapi or google")
    service = open_web_service(
        arguments.provider,
        cache_dir=arguments.cache,
        per_second=5.0 if arguments.per_second is None else arguments.per_second,
        per_day=arguments.per_day,
        base_url=arguments.provider_url,
    )
    app = create_app(service, topk=arguments.topk, token=token, deadline_s=arguments.deadline_s)
    serve(app, host=arguments.host, port=arguments.port, end_with_stdin=arguments.end_with_stdin)


@contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """Ctrl-C before the server handles it, and while threads end that opened an index, ends the process at once: it has nothing to lose."""
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(0))
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # threads have ended by then, and Python forgets its handlers
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGINT, before)
        raise


class _Opens:
    """Opens the index, as it is on disk now, with the models of the one before."""

    def __init__(self, path: Path, spec: BuildSpec | None, cache: Path | None, serving: Serving) -> None:
        self._path, self._spec, self._cache, self._serving = path, spec, cache, serving
        self._models: Models | None = None

    def __call__(self, progress: Progress) -> Index:
        from retriever.building.load import load

        index = load(self._path, spec=self._spec, cache=self._cache, serving=self._serving, progress=progress, models=self._models)
        self._models = index.models
        return index


def _opens(arguments: argparse.Namespace, serving: Serving) -> _Opens:
    """What opens the index.

    Raises:
        ValueError: it is known now that it cannot be served in this way.
    """
    from retriever.index import manifest_for, modes_of

    if serving.reranker is not None:
        from retriever.encoders.cross_encoder import CrossEncoder

        CrossEncoder.check(serving.reranker)
    if arguments.path.is_dir():
        manifest_for(arguments.path, serving)
        return _Opens(arguments.path, None, None, serving)
    spec, cache = _spec(arguments), arguments.cache
    modes_of(spec.encoder is not None, spec.bm25, serving.mode)
    if arguments.index is not None and spec.encoder is not None:
        from retriever.searchers.sizes import memory_of

        memory_of(spec.index, 1, spec.encoder.dim)  # FAISS knows it
    if cache is None and not _in_memory(arguments):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "indexes"
        print(f"retriever: the index is kept below {cache} (--cache DIR for another place)", file=sys.stderr, flush=True)
    return _Opens(arguments.path, spec, cache, serving)


def _in_memory(arguments: argparse.Namespace) -> bool:
    """Whether a corpus can be indexed without a file."""
    return arguments.encoder in (None, HASHED) and arguments.index in (None, FLAT) and not arguments.bm25


def _serving(arguments: argparse.Namespace) -> Serving:
    from retriever.encoders.settings import Runtime
    from retriever.index import Serving
    from retriever.query import Mode

    devices = devices_of(arguments.device or "cpu")
    given: dict[str, Any] = {"kind": arguments.runtime, "precision": arguments.precision, "threads": arguments.threads}
    return Serving(
        runtime=Runtime(device=devices[0], **{name: value for name, value in given.items() if value is not None}),
        devices=devices,
        mmap=not arguments.no_mmap,
        one_at_a_time=bool(arguments.deterministic),
        model=arguments.model,
        parameters=arguments.parameters,
        reranker=arguments.reranker,
        mode=None if arguments.mode is None else Mode(arguments.mode),
    )


def _limits(arguments: argparse.Namespace, serving: Serving) -> Limits:
    from retriever.local import Limits

    given = {"max_batch": arguments.max_batch, "max_waiting": arguments.max_waiting, "cache_entries": arguments.cache_entries}
    if arguments.max_batch is None and serving.devices != ("cpu",):
        given["max_batch"] = GPU_BATCH
    return Limits(**{name: value for name, value in given.items() if value is not None})


def _spec(arguments: argparse.Namespace) -> BuildSpec:
    """What the index of a corpus is to be."""
    from retriever.building.spec import BuildSpec

    arguments.encoder = arguments.encoder or HASHED
    return BuildSpec(encoder=encoder_of(arguments), index=arguments.index or FLAT, bm25=bool(arguments.bm25))


def _token(arguments: argparse.Namespace) -> str | None:
    token: str
    if arguments.token_file is not None:
        token = arguments.token_file.read_text(encoding="utf-8").strip()
        source = str(arguments.token_file)
    else:
        token, source = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
        if not token:
            return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{source} holds no token: at least {SHORTEST_TOKEN} printable ASCII characters without a space, on one line")
    return token


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            raise ValueError(f"{'an index or corpus' if name == 'path' else '--' + name.replace('_', '-')} {reason}: leave it out")


class _Told:
    """Progress on standard error, now and then."""

    def __init__(self) -> None:
        self._last = ("", 0.0)

    def __call__(self, what: str, done: int, of: int) -> None:
        last, when = self._last
        if what == last and done < of and monotonic() < when + PROGRESS_EVERY_S:
            return
        self._last = (what, monotonic())
        print(f"retriever: {what} {done} of {of}" if of else f"retriever: {what}", file=sys.stderr, flush=True)


def _add_network(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=_port, default=0, help="by default a free one, told by the line `ready http://HOST:PORT`")
    command.add_argument("--token-file", type=Path, metavar="FILE", help=f"requests must bring what is in it as a bearer token (or {TOKEN_VARIABLE})")
    command.add_argument("--unsafe-allow-remote", action="store_true", help="allow a --host that other machines can reach, without a token")
    command.add_argument("--topk", type=_topk, default=3, help="passages where a request does not say (3)")
    command.add_argument("--deadline-s", type=_seconds, default=60.0, help="longest time for a request (60); it may ask for less by X-Deadline-Ms")
    command.add_argument("--max-waiting", type=_positive, metavar="N", help="queries that may wait (4096); then requests are refused with 503")
    command.add_argument("--cache-entries", type=_count, metavar="N", help="answers kept to be given again (32768)")
    command.add_argument("--end-with-stdin", action="store_true", help="end when standard input ends: with the process that started this one")


def _add_index(command: argparse.ArgumentParser) -> None:
    index = command.add_argument_group("of an index")
    index.add_argument("--mode", choices=("dense", "bm25", "hybrid"), help="where a request does not say (dense, if it has vectors)")
    add_place(index)
    index.add_argument("--runtime", choices=("auto", "onnx", "torch"), help="what runs the encoder (onnx on a CPU, torch elsewhere)")
    index.add_argument("--precision", choices=("fp32", "bf16", "fp16", "int8"), help="of the encoder (fp32)")
    index.add_argument("--device", metavar="DEVICE,...", help="cpu (the default), cuda:0, or several for the rows: cuda:0,cuda:1")
    index.add_argument("--threads", type=_positive, help="of the encoder and the search, on a CPU (1)")
    index.add_argument("--reranker", metavar="MODEL", help="a cross-encoder, for requests that ask to rerank")
    index.add_argument("--parameters", metavar="NAME=VALUE,...", help="of the search in a FAISS index, e.g. efSearch=128 or nprobe=64")
    index.add_argument("--no-mmap", action="store_true", default=None, help="read a FAISS index into memory at the start")
    index.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="encode a batch while the one before is searched for (with a GPU, or with several --threads)",
    )
    index.add_argument("--max-batch", type=_positive, metavar="N", help="queries computed together (64; 256 with a GPU)")
    index.add_argument(
        "--deterministic", action="store_true", default=None, help="compute query by query, so that scores do not depend on what else is asked"
    )
    corpus = command.add_argument_group("of a corpus that is indexed at the start")
    corpus.add_argument(
        "--cache", type=Path, metavar="DIR", help="keep its index here, named by content (~/.cache/agentrl/indexes; a hashed Flat one in memory)"
    )
    add_encoder(corpus, default=HASHED)
    command.set_defaults(encoder=None)  # one that was not given
    corpus.add_argument("--index", metavar="FACTORY", help="of the vectors (Flat)")
    corpus.add_argument("--bm25", action="store_true", default=None, help="index the words as well")


def _positive(text: str) -> int:
    return _whole(text, 1)


def _count(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if (port := _whole(text, 0)) > MOST_PORT:
        raise argparse.ArgumentTypeError(f"expected 0 to {MOST_PORT}, got {text!r}")
    return port


def _topk(text: str) -> int:
    from retriever.api import MAX_TOPK

    if not 1 <= (topk := _whole(text, 1)) <= MAX_TOPK:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_TOPK}, got {text!r}")
    return topk


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds
