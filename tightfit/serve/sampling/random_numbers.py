"""Uniform random numbers that depend on a request's seed, the answer's number, the position and the purpose alone.

No generator is shared and nothing has to be drawn in order, so the same request gives the same answer whatever else is
in the batch, after a preemption too, and the host knows a step's numbers before the tokens before it are known.
The mixing function is SplitMix64's (Steele, Lea and Flood 2014).
"""

from typing import Literal

Purpose = Literal["choose", "draft", "accept", "resample"]
PURPOSES: dict[Purpose, int] = {"choose": 1, "draft": 2, "accept": 3, "resample": 4}
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int, position: int, purpose: Purpose = "choose") -> float:
    """A number in [0, 1), one of 2⁵³: exact in float64."""
    state = seed
    for part in (index, position, PURPOSES[purpose]):
        state = _mixed((state + GOLDEN * (part + 1)) & MASK)
    return (state >> 11) / 2**53


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
