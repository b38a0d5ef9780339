"""Programmatic dependent launch: a kernel that begins while the one before it on the stream is still ending.

A kernel launched with `launch_pdl=True` may start as soon as every program of the one before has called `launch_next`
(or ended). It may read that kernel's results, or overwrite its inputs, only after `wait_for_previous`, which returns
when that kernel is done and its writes are visible. What does not depend on it (weights) can be loaded before. Hopper
and later; elsewhere, and in the interpreter, both functions do nothing and are not compiled.
"""

from functools import lru_cache

import torch

from tightfit.kernels.triton_support import HAS_TRITON, is_interpreted, tl, triton

if HAS_TRITON and not is_interpreted():
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:

    @triton.jit
    def gdc_wait():  # type: ignore[no-untyped-def]
        """Nothing to wait for."""

    @triton.jit
    def gdc_launch_dependents():  # type: ignore[no-untyped-def]
        """Nothing to launch."""


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the previous kernel on the stream is done."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def launch_next(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel on the stream begin."""
    if OVERLAP:
        gdc_launch_dependents()


def pdl(overlap: bool) -> dict[str, bool]:
    """The launch option of a kernel that may begin early."""
    return {"launch_pdl": True} if overlap else {}


@lru_cache
def can_overlap(device: torch.device) -> bool:
    """Whether the card has programmatic dependent launch: NVIDIA's, from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
