"""What DeepSpeed and FSDP2 have of levers.offload: which of their settings it turns on, and what that needs."""

from dataclasses import dataclass

from tightfit.jobs.levers import Levers, Offload


@dataclass(frozen=True, kw_only=True)
class HostStates:
    """States that another program keeps in host memory."""

    optimizer: bool = False
    weights: bool = False
    least_zero: int = 0
    """DeepSpeed offloads what its ZeRO stage splits, on one GPU too."""


TRANSLATED: dict[Offload, HostStates] = {
    "none": HostStates(),
    "optimizer": HostStates(optimizer=True, least_zero=2),
    "weights": HostStates(optimizer=True, weights=True, least_zero=3),
}


def host_states(levers: Levers) -> HostStates:
    """What `levers` keep there."""
    return TRANSLATED[levers.offload]
