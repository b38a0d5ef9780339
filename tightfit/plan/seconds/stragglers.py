"""Stragglers: cards that work in step wait for the slowest of them.

Cards of one kind differ by a few per cent in the clock they hold under load (chips, cooling, neighbours). Where all
wait for one another every step, the slowest counts: of n cards whose times are spread by σ, the expected latest is σ
times the largest of n standard normal numbers (Blom 1958). One card waits for nobody.
"""

from functools import cache
from statistics import NormalDist

SPREAD = 0.025
"""Relative spread of one card's compute time; from published runs of 8 to 512 cards (benchmarks/published.py)."""


@cache
def straggler_share(ranks: int) -> float:
    """How much longer the slowest of `ranks` cards computes than the average one, as a share."""
    return 0.0 if ranks == 1 else SPREAD * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
