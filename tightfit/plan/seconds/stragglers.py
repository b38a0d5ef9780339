"""Stragglers: cards that synchronise every step wait for the slowest of them.

Cards of one kind differ by a few per cent in the clock they hold under load (chips, cooling, neighbours). If the times
of n cards are normal with relative spread σ, the slowest is expected σ times the largest of n standard normal numbers
above the mean (Blom 1958).
"""

from functools import cache
from statistics import NormalDist

SPREAD = 0.025
"""Relative spread of one card's compute time; from published runs of 8 to 512 cards (benchmarks/published.py)."""


@cache
def straggler_share(ranks: int) -> float:
    """How much longer the slowest of `ranks` cards computes than the average one, as a share."""
    return 0.0 if ranks == 1 else SPREAD * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
