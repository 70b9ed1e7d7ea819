"""Rotary position embeddings: the angles of every position, plain or stretched as Llama 3.1 stretches them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import EngineError

__all__ = ["Rope", "Stretch"]

_DEFAULT_THETA = 10000.0  # transformers' default, for every family this engine runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Llama 3.1's scaling: waves longer than `original_tokens / low` are slowed down by `factor`, shorter than `original_tokens / high` not at
    all, and those between by a share of both."""

    factor: float
    low: float
    high: float
    original_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """How fast each pair of a head's components turns from one position to the next. E head size."""

    theta: float = _DEFAULT_THETA
    stretch: Stretch | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> Rope:
        """From a Hugging Face configuration: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before.

        Raises:
            EngineError: a kind that is not computed here, or parameters of it that are missing.
        """
        section = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = section.get("rope_type", section.get("type", "default"))
        theta = float(section.get("rope_theta", raw.get("rope_theta", _DEFAULT_THETA)))
        if section.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
            raise EngineError(f"{where}: rotary embeddings of a part of each head are not supported by the embedded engine")
        if kind == "default":
            return cls(theta=theta)
        if kind != "llama3":
            raise EngineError(f"{where}: rope type {kind!r} is not supported by the embedded engine, only 'default' and 'llama3'")
        try:
            stretch = Stretch(
                factor=float(section["factor"]),
                low=float(section["low_freq_factor"]),
                high=float(section["high_freq_factor"]),
                original_tokens=float(section.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
            )
        except KeyError as missing:
            raise EngineError(f"{where}: rope type 'llama3' needs {missing}") from missing
        return cls(theta=theta, stretch=stretch)

    def frequencies(self, head_size: int) -> Tensor:
        """Radians per position of each pair of components. fp32 [E / 2]"""
        frequencies = 1.0 / (self.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
        if self.stretch is None:
            return frequencies
        stretch, wavelengths = self.stretch, 2 * math.pi / frequencies
        # 0 at the longest waves, 1 at the shortest
        kept = ((stretch.original_tokens / wavelengths - stretch.low) / (stretch.high - stretch.low)).clamp(0.0, 1.0)
        return (1 - kept) * frequencies / stretch.factor + kept * frequencies

    def tables(self, head_size: int, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every position's angles, component i paired with i + E / 2; the sin of the first half is negated. [positions, E] each"""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self.frequencies(head_size))
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(like), torch.cat([-sin, sin], -1).to(like)
