"""This machine's GPUs, counted out to the processes that the local launcher starts. Ray does the same for its actors."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from fractions import Fraction

from agentrl.errors import ConfigError

__all__ = ["GPUs", "visible_gpus"]

_ASK_DEADLINE_S = 10.0


class GPUs:
    """Shares of GPUs by process name; a process that starts again gets the same ones.

    Args:
        ids: as CUDA_VISIBLE_DEVICES names them.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self._free = {one: Fraction(1) for one in ids}
        self._taken: dict[str, tuple[str, ...]] = {}

    def take(self, name: str, amount: float) -> tuple[str, ...]:
        """Whole GPUs, or a share of one.

        Raises:
            ConfigError: there are not so many; naming how many there are.
        """
        if name in self._taken or not amount:
            return self._taken.get(name, ())
        share = Fraction(amount).limit_denominator(100)
        wanted, each = (int(share), Fraction(1)) if share >= 1 else (1, share)
        if share > 1 and share.denominator != 1:
            raise ConfigError(f"{name} asks for {amount:g} GPUs: whole ones, or a share of one")
        found = [one for one, left in self._free.items() if left >= each][:wanted]
        if len(found) < wanted:
            raise ConfigError(
                f"{name} asks for {amount:g} GPU, and of this machine's {len(self._free)} not so much is left: lower resources.engine_gpus,"
                " resources.learner_gpus or resources.retriever_gpus, or start fewer engines or ranks"
            )
        for one in found:
            self._free[one] -= each
        self._taken[name] = tuple(found)
        return self._taken[name]


def visible_gpus() -> list[str]:
    """CUDA_VISIBLE_DEVICES, or what the driver lists; none where there is no driver."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [one for one in visible.split(",") if one]
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    listed = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, timeout=_ASK_DEADLINE_S, check=False)
    return [str(index) for index, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]
