"""Coefficients that follow a measurement."""

from __future__ import annotations

import math

__all__ = ["adapted_coefficient"]

# Ziegler et al. 2019, section 2.2: an error of more than a fifth of the target counts as a fifth.
MAX_RELATIVE_ERROR = 0.2


def adapted_coefficient(coefficient: float, *, kl: float, target: float, horizon: float, samples: float) -> float:
    """The KL coefficient after a batch: coefficient x (1 + clip(kl / target - 1, -0.2, 0.2) x samples / horizon).

    Ziegler et al. 2019, section 2.2, with the gain samples / horizon as verl documents it (`kl_ctrl.type: adaptive`).

    Args:
        kl: measured on the batch, in the unit of `target`. One that is not finite changes nothing.
        horizon: in `samples`; the larger, the slower.
        samples: trajectories of the batch; more than `horizon` count as `horizon`, so that one batch changes the coefficient by a fifth at
            most and never its sign.
    """
    if not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * (1.0 + error * min(samples / horizon, 1.0))
