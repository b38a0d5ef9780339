"""FSDP2: how long it holds what, which depends on torch's version.

Up to torch 2.14 variables of its functions keep a buffer and a gradient until the function ends, and whole gradients of
micro-batches (ZeRO-1) are added up a layer at a time. The formulas are asked with one of these (overheads.py): tables
were measured with torch 2.11, plans are of the torch that is installed. Read in torch/distributed/fsdp/_fully_shard.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Fsdp2(NamedTuple):
    """What is let go of sooner than torch 2.11 does."""

    frees_buffer_before_copy: bool = False
    """The all-gather buffer of the group before: before a group is copied out of its own, and not after."""
    frees_gradients_before_shard: bool = False
    """Whole gradients: before the shard that they are reduced to is made. Else the last one stays beside it."""
    adds_one_by_one: bool = False
    """A micro-batch's whole gradients: added to the sums one by one as backward makes them, and not when all of a
    layer's, or the root's, are there."""


OLDEST = Fsdp2()
"""Of torch 2.11 to 2.14, which holds most."""
NEWEST = Fsdp2(frees_buffer_before_copy=True, frees_gradients_before_shard=True, adds_one_by_one=True)
"""Of torch 2.15."""


def of_torch(release: str) -> Fsdp2:
    """Of a version of torch, such as `2.13.0+cpu`."""
    major, minor = release.split(".")[:2]
    return NEWEST if (int(major), int(minor)) >= (2, 15) else OLDEST


@cache
def installed() -> Fsdp2:
    """Of the torch that is installed; where none is, what fits with every one."""
    try:
        return of_torch(version("torch"))
    except PackageNotFoundError:
        return OLDEST
