"""levers.offload in DeepSpeed's and FSDP2's terms: which states they offload, and the ZeRO stage which that needs."""

from dataclasses import dataclass

from tightfit.jobs.levers import Levers, Offload


@dataclass(frozen=True, kw_only=True)
class HostStates:
    """States that another program keeps in host memory."""

    optimizer: bool = False
    weights: bool = False
    least_zero: int = 0
    """The ZeRO stage that DeepSpeed needs for it, even on one GPU: it offloads only what its stage shards."""


TRANSLATED: dict[Offload, HostStates] = {
    "none": HostStates(),
    "optimizer": HostStates(optimizer=True, least_zero=2),
    "weights": HostStates(optimizer=True, weights=True, least_zero=3),
}


def host_states(levers: Levers) -> HostStates:
    """The states that `levers` keep in host memory."""
    return TRANSLATED[levers.offload]
