"""Counter-based randomness: every random number is a pure function of names, never of time, order or place.

A run's seed and a sample's names give the sample's seed; with the turn, the seed of a generation request; with the position in the turn,
the one uniform number that chooses the token. So a token does not depend on the attempt, the slot, the engine or the arrival.
The mixing function is SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

from agentrl.types import Purpose

__all__ = ["counter_uniform", "mix", "sample_seed", "turn_seed"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_EVAL = 0x6576616C  # evaluation draws other numbers than training of the same ordinal


def sample_seed(run_seed: int, purpose: Purpose, ordinal: int, k: int) -> int:
    """The 63-bit seed of one sample."""
    return mix(run_seed, _EVAL if purpose is Purpose.EVAL else 0, ordinal, k)


def turn_seed(seed: int, turn: int) -> int:
    """The 63-bit seed of one turn's generation request (`sampling_seed`)."""
    return mix(seed, turn)


def counter_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: the one that chooses the token at `position` of a turn."""
    return (_splitmix((seed + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def mix(*parts: int) -> int:
    """A 63-bit number that depends on every part and their order."""
    state = 0
    for part in parts:
        state = _splitmix((state + _GOLDEN + (part & _MASK)) & _MASK)
    return state >> 1


def _splitmix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
