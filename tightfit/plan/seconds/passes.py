"""Passes: seconds of forward and backward, and the cost of collectives that overlap with them.

A collective costs the seconds that compute does not hide, and slows the compute that hides the others.
"""

from typing import NamedTuple

CONTENTION = 16 / 132
"""Share of an H100's multiprocessors that NCCL's kernels occupy (one per channel) while they overlap with compute."""


class PassSeconds(NamedTuple):
    """Seconds of forward and of backward."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def both_s(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s

    def plus(self, other: "PassSeconds", times: float = 1) -> "PassSeconds":
        """The sum of these and `times` the others, pass by pass."""
        return PassSeconds(self.forward_s + times * other.forward_s, self.backward_s + times * other.backward_s)


def with_contention_s(traffic_s: float, exposed_s: float) -> float:
    """Cost of `traffic_s` of which `exposed_s` are not hidden: these, and the slowdown of compute during the others."""
    return exposed_s + CONTENTION * (traffic_s - exposed_s)


def exposed_s(traffic_s: float, compute_s: float, calls: int) -> float:
    """Cost of `calls` equal collectives beside `compute_s`; at least one call is exposed: the first in forward, which
    compute needs, or the last in backward, which follows it."""
    return with_contention_s(traffic_s, max(traffic_s - compute_s, traffic_s / calls))
