"""Small copies between host and GPU without a copy engine: a kernel reads or writes the host's pinned memory itself.

A GPU has one copy engine for each direction. While optimizer states pass over the link, gigabytes are queued there, and
a batch's tokens or a step's loss would wait behind them: the next forward pass began only when the link was idle again,
and overlapped none of the transfer (1B, 16 384 tokens, optimizer on the host, H200: 0.66 s a step). A kernel waits for
its stream only.
"""

from collections import deque

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.kernels.triton_support import HAS_TRITON, tl, triton

BLOCK = 1024

_being_read: deque[tuple[torch.cuda.Event, Tensor]] = deque()
"""Pinned tensors that kernels may still read, each with the event after which its kernel has."""


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of a host tensor, made on the current stream; the host does not wait."""
    if device.type != "cuda" or values.is_cuda or isinstance(values, FakeTensor):
        return values.to(device, non_blocking=True)
    pinned = values.contiguous().pin_memory()
    if not HAS_TRITON:
        return pinned.to(device, non_blocking=True)
    found = torch.empty(values.shape, dtype=values.dtype, device=device)
    copy_by_kernel(pinned, found)
    _keep_while_read(pinned, device)
    return found


def fetched(values: Tensor) -> Tensor:
    """A copy in pinned memory of a GPU tensor, valid once the current stream has reached this point."""
    found = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    if not HAS_TRITON:
        return found.copy_(values, non_blocking=True)
    copy_by_kernel(values.contiguous(), found)
    return found


def copy_by_kernel(source: Tensor, target: Tensor) -> None:
    """All bytes of `source` to `target`, both contiguous and in memory that the GPU can read and write."""
    if not source.numel():
        return
    words = torch.int32 if source.nbytes % 4 == 0 else torch.uint8
    source, target = (each.view(-1).view(words) for each in (source, target))
    grid = (triton.cdiv(source.numel(), BLOCK),)
    mapped_copy_kernel[grid](source, target, source.numel(), BLOCK=BLOCK)


def _keep_while_read(pinned: Tensor, device: torch.device) -> None:
    """Keep `pinned` until the kernel has read it: torch reuses unreferenced pinned memory, and knows only of its own
    copies that may still read it."""
    while _being_read and _being_read[0][0].query():
        _being_read.popleft()
    _being_read.append((torch.cuda.current_stream(device).record_event(), pinned))


@triton.jit
def mapped_copy_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of words."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
