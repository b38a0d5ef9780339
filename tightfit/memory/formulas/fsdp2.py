"""FSDP2: lifetimes of its buffers, which depend on torch's version.

Up to torch 2.14 local variables of its functions keep a buffer and a gradient alive until the function returns, and
whole gradients of micro-batches (ZeRO-1) are added up a layer at a time. Formulas take one of the `Fsdp2` values below
(overheads.py): the tables were measured with torch 2.11, plans use the installed torch's. Source: the code of
torch/distributed/fsdp/_fully_shard.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Fsdp2(NamedTuple):
    """What a version of FSDP2 frees earlier than torch 2.11's."""

    frees_buffer_before_copy: bool = False
    """The group before's all-gather buffer is freed before a group is copied out of its own, not after."""
    frees_gradients_before_shard: bool = False
    """Whole gradients are freed before the reduced shard is allocated; else the last one is still beside the shard."""
    adds_one_by_one: bool = False
    """A micro-batch's whole gradients are added to the sums one by one as backward makes them, not once all of a
    layer's, or the root's, exist."""


OLDEST = Fsdp2()
NEWEST = Fsdp2(frees_buffer_before_copy=True, frees_gradients_before_shard=True, adds_one_by_one=True)
"""Those of torch 2.11 to 2.14, which hold most, and of torch 2.15 and later."""


def of_torch(release: str) -> Fsdp2:
    """The behaviour of torch `release`, such as `2.13.0+cpu`."""
    major, minor = release.split(".")[:2]
    return NEWEST if (int(major), int(minor)) >= (2, 15) else OLDEST


@cache
def installed() -> Fsdp2:
    """The behaviour of the installed torch; without one, the oldest, whose plans fit with every version."""
    try:
        return of_torch(version("torch"))
    except PackageNotFoundError:
        return OLDEST
