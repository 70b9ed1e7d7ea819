"""The names of estimators and losses and what each takes, for validation without torch. A test compares them with `agentrl.algorithm`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

__all__ = ["CRITIC_ESTIMATORS", "DISCOUNTING", "ESTIMATORS", "LOSSES", "MEANS_OF_TRAJECTORIES", "checked_method"]

# Estimator -> its options.
ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "gae": (),
    "vtrace": ("rho_bar", "c_bar"),
    "grpo": (),
    "dr_grpo": (),
    "rloo": ("singleton",),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": (),
    "remax": (),
    "opo": (),
    "gpg": (),
    "grpo_passk": (),
    "gdpo": ("parts", "weights"),
    "optimal_token_baseline": ("truncate",),
    "tir_optimal_token_baseline": ("truncate",),
}

# Loss -> what its ratio is for ("ratio": in the two-policy form it is the importance weight; "weights": it has none), then its options.
LOSSES: Mapping[str, tuple[str, ...]] = {
    "ppo": ("ratio", "clip_low", "clip_high", "dual_clip"),
    "gspo": ("ratio", "clip_low", "clip_high"),
    "cispo": ("ratio", "clip_low", "clip_high"),
    "gmpo": ("ratio", "clip_low", "clip_high"),
    "sapo": ("ratio", "tau_positive", "tau_negative"),
    "dppo_tv": ("ratio", "clip_low", "clip_high", "truncate"),
    "dppo_kl": ("ratio", "clip_low", "clip_high", "truncate"),
    "dro": ("ratio", "beta"),
    "clip_cov": ("ratio", "clip_low", "clip_high", "share", "covariance_low", "covariance_high"),
    "kl_cov": ("ratio", "kl_coefficient", "share"),
    "reinforce": ("weights",),
    "gpg": ("weights",),
}

# Losses that are means over trajectories of means over tokens, whatever `aggregation` says.
MEANS_OF_TRAJECTORIES = ("gspo", "gmpo", "sapo")

# Estimators that need a critic's values.
CRITIC_ESTIMATORS = ("gae", "vtrace")

# Estimators that discount what comes later.
DISCOUNTING = (*CRITIC_ESTIMATORS, "reinforce_plus_plus")


def checked_method(kind: str, name: str, options: Iterable[str], known: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ValueError where there is no method of this name, or it does not take one of the options. `module:function` may take any."""
    if ":" in name:
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"unknown {kind} {name!r}{hint}: expected one of {', '.join(known)}, or module:function")
    strange = [option for option in options if option not in known[name]]
    if strange:
        takes = ", ".join(option for option in known[name] if option not in ("ratio", "weights")) or "no options"
        raise ValueError(f"{kind} {name} does not take {', '.join(strange)}; it takes {takes}")
