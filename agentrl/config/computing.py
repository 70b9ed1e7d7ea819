"""How the learner computes, and what of it does not go together or would do nothing without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.config.attentions import PACKED_ATTENTIONS
from agentrl.config.profile import ProfileRecipe

__all__ = ["refused_computing"]

Plain = Mapping[str, Any]  # a recipe as a map of sections


def refused_computing(recipe: Plain) -> str | None:
    """What does not fit and what to do about it; None where everything does."""
    return next((refused for check in (_replicas, _on_cpu, _half, _profile, _profiled_roles) if (refused := check(recipe))), None)


def _replicas(recipe: Plain) -> str | None:
    ranks, replicate = recipe["learner"]["ranks"], recipe["learner"]["replicate"]
    if ranks % replicate:
        return f"learner.ranks ({ranks}) must be a multiple of learner.replicate ({replicate})"
    return None


def _on_cpu(recipe: Plain) -> str | None:
    learner, attention = recipe["learner"], recipe["model"]["attention"]
    if learner["device"] != "cpu":
        return None
    if learner["cpu_offload"]:
        return "learner.cpu_offload does nothing with learner.device cpu, where everything is in the host's memory: leave it out"
    if attention in PACKED_ATTENTIONS:
        return f"model.attention {attention} runs on a GPU only, and learner.device is cpu: set model.attention=sdpa"
    return None


def _half(recipe: Plain) -> str | None:
    model = recipe["model"]
    if model["attention"] in PACKED_ATTENTIONS and model["dtype"] != "bfloat16":
        return f"model.attention {model['attention']} computes in half precision only: set model.dtype=bfloat16, or model.attention=sdpa"
    return None


def _profile(recipe: Plain) -> str | None:
    profile, learner = recipe["profile"], recipe["learner"]
    if profile is None:
        return None
    first, steps = profile["steps"][0], recipe["run"]["steps"]
    if steps is not None and first >= steps:
        return f"profile.steps begins at {first}, and the run has the steps 0 to {steps - 1}"
    if strangers := [rank for rank in profile["ranks"] if rank >= learner["ranks"]]:
        return f"profile.ranks {strangers} are not among the learner's, 0 to {learner['ranks'] - 1}"
    if profile["tool"] != "torch" and learner["device"] != "cuda":
        return f"profile.tool {profile['tool']} looks at a GPU, and learner.device is {learner['device']}: set profile.tool=torch"
    return None


def _profiled_roles(recipe: Plain) -> str | None:
    profile = recipe["profile"]
    if profile is None:
        return None
    if "learner" not in profile["roles"] and profile["ranks"] != [0]:
        return "profile.ranks are the learner's, and profile.roles leaves the learner out"
    if "engine" in profile["roles"] and profile["tool"] != "torch":
        return f"profile.tool {profile['tool']} is for the learner: engines write torch traces. Set profile.tool=torch, or profile.roles=[learner]"
    if "engine" not in profile["roles"] and profile["engine_passes"] != ProfileRecipe.model_fields["engine_passes"].default:
        return "profile.engine_passes is about engines, and profile.roles leaves them out"
    return None
