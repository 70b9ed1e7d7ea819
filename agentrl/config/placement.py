"""Engines and resources that do not fit together, or would do nothing, without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["refused_placement"]

_OWN_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

Plain = Mapping[str, Any]  # a recipe as a map of sections


def refused_placement(recipe: Plain) -> str | None:
    """What does not fit and what to do about it; None where everything does."""
    return next((refused for check in (_embedded, _gpus, _colocate, _attached, _bind, _retriever) if (refused := check(recipe))), None)


def _embedded(recipe: Plain) -> str | None:
    if recipe["engine"]["kind"] == "embedded" and recipe["engine"]["tensor_parallel"] > 1:
        return "engine.tensor_parallel is for SGLang servers, and engine.kind is embedded: leave it out, or set engine.kind=sglang"
    return None


def _attached(recipe: Plain) -> str | None:
    engine, resources = recipe["engine"], recipe["resources"]
    if not engine["urls"]:
        return None
    if engine["tensor_parallel"] > 1:
        return "engine.tensor_parallel does nothing beside engine.urls: those servers run already. Leave it out"
    if resources["engine_gpus"] or resources["engine_cpus"]:
        return "resources.engine_gpus and engine_cpus do nothing beside engine.urls: those servers run already. Leave them out"
    away = next((url for url in engine["urls"] if urlsplit(url).hostname not in _OWN_HOSTS), None)
    if away is not None and recipe["run"]["bind"] == "loopback" and recipe["weights"]["transport"] == "group":
        return (
            f"engine.urls: {away} is another machine, and with run.bind loopback it cannot join the learner's process group: set run.bind=node (with"
            " run.launcher ray), or weights.transport=disk"
        )
    return None


def _gpus(recipe: Plain) -> str | None:
    engine, gpus = recipe["engine"], recipe["resources"]["engine_gpus"]
    if engine["device"] == "cuda" and engine["tensor_parallel"] > 1 and gpus not in (0, engine["tensor_parallel"]):
        return f"engine.tensor_parallel is {engine['tensor_parallel']}, and resources.engine_gpus {gpus:g}: it needs as many as that"
    return None


def _colocate(recipe: Plain) -> str | None:
    engine, learner, resources = recipe["engine"], recipe["learner"], recipe["resources"]
    if not resources["colocate"]:
        return None
    shares = {resources["engine_gpus"], resources["learner_gpus"]}
    on_gpu = engine["device"] == "cuda"
    needs = None
    if engine["replicas"] != learner["ranks"]:
        needs = f"as many engines as ranks, and engine.replicas is {engine['replicas']}, learner.ranks {learner['ranks']}"
    elif engine["urls"]:
        needs = "engines that the run starts itself: leave engine.urls out"
    elif engine["tensor_parallel"] > 1:
        needs = f"an engine on one GPU, and engine.tensor_parallel is {engine['tensor_parallel']}"
    elif engine["device"] != learner["device"]:
        needs = f"both on one device, and engine.device is {engine['device']}, learner.device {learner['device']}"
    elif not shares <= {0, 0.5 if on_gpu else 0}:
        needs = f"resources.engine_gpus and learner_gpus {'0.5, or 0, which means the same' if on_gpu else '0: nothing is on a GPU'}"
    elif recipe["weights"]["backend"] == "nccl":
        needs = "another backend than nccl, which refuses two processes of one group on one GPU: leave weights.backend out"
    return f"resources.colocate needs {needs}" if needs else None


def _bind(recipe: Plain) -> str | None:
    if recipe["run"]["bind"] == "node" and recipe["run"]["launcher"] == "local":
        return "run.bind node is for runs over several machines, and run.launcher local has one: leave it out, or set run.launcher=ray"
    return None


def _retriever(recipe: Plain) -> str | None:
    resources, retriever = recipe["resources"], recipe["retriever"]
    booked = resources["retriever_gpus"] or resources["retriever_cpus"]
    if booked and (retriever is None or retriever["url"] is not None):
        return "resources.retriever_gpus and retriever_cpus do nothing: this run starts no retriever. Leave them out"
    if retriever is None or retriever["url"] is not None:
        return None
    if retriever["device"] == "cuda" and not resources["retriever_gpus"]:
        return "retriever.device cuda needs GPUs: set resources.retriever_gpus, to a number of them or a share of one"
    if retriever["device"] == "cpu" and resources["retriever_gpus"]:
        return "resources.retriever_gpus do nothing with retriever.device cpu: leave them out, or set retriever.device=cuda"
    return None
