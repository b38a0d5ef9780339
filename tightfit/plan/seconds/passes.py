"""Passes: seconds of forward and backward, and what traffic costs that runs beside them.

It costs what compute does not hide, and slows what hides it.
"""

from typing import NamedTuple

CONTENTION = 16 / 132
"""Share of an H100's multiprocessors that NCCL's kernels take (one per channel) from the compute they hide behind."""


class PassSeconds(NamedTuple):
    """Seconds of forward and of backward."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def both_s(self) -> float:
        """Of the two together."""
        return self.forward_s + self.backward_s


def with_contention_s(traffic_s: float, exposed_s: float) -> float:
    """What `traffic_s` costs a step where `exposed_s` of it stands alone: NCCL takes a share of the card meanwhile."""
    return exposed_s + CONTENTION * (traffic_s - exposed_s)


def exposed_s(traffic_s: float, compute_s: float, calls: int) -> float:
    """What `calls` equal collectives cost beside `compute_s`; nothing runs beside the first or the last of them."""
    return with_contention_s(traffic_s, max(traffic_s - compute_s, traffic_s / calls))
