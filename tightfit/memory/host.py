"""Pinned host memory for offloading, visible to tracers.

Torch's pinned allocator rounds every request up to a power of two (a 2.1 GiB tensor takes 4) and caches freed memory.
So large tensors are mapped here in whole pages and registered with CUDA, and unmapped when the tensor dies; small ones
come from torch. Mappings request huge pages, without which pinning takes longer than the copies it is for, and are
private: Linux gives shared mappings huge pages only where an administrator has enabled that.

Levers allocate on the host with `host_empty` and name their GPU staging buffers with `claimed`; both notify tracers
(tracing.py), whose ledgers then count the tensors in the right place and component. In a simulation all tensors are on
the CPU, so copies between host and GPU must be `buffer.copy_(tensor)`: `tensor.to(device)` would allocate nothing.
"""

import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.memory.ledger import Component

SMALL_BYTES = 2**20
"""Tensors up to this size are in torch's own pinned memory."""


class Watcher(Protocol):
    """Called with each tensor of `host_empty`, `claimed` and `mark_on_host`."""

    def __call__(self, tensor: Tensor, component: Component | None, detail: str, *, host: bool) -> None:
        """Record that `tensor` belongs to `component` (None: unchanged) and, if `host`, is in host memory."""


_watchers: list[Watcher] = []
_mapped_bytes = 0


def host_empty(
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    component: Component | None = None,
    detail: str = "offloaded",
) -> Tensor:
    """An uninitialised tensor in host memory, pinned where `device` is a GPU; ledgers count it as `component`."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type == "cuda" and size > SMALL_BYTES:
        tensor = _mapped(size).view(dtype).view(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    for tell in _watchers:
        tell(tensor, component, detail, host=True)
    return tensor


def claimed(tensor: Tensor, component: Component, detail: str = "") -> Tensor:
    """`tensor`, which ledgers count as `component` from now on."""
    for tell in _watchers:
        tell(tensor, component, detail, host=False)
    return tensor


def mark_on_host(tensor: Tensor) -> Tensor:
    """`tensor`, which ledgers count in host memory: a simulation's tensors are all on the CPU, so it must be told."""
    for tell in _watchers:
        tell(tensor, None, "", host=True)
    return tensor


def pinned_bytes() -> int:
    """Pinned host memory, torch's own included."""
    stats = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else {}
    return _mapped_bytes + int(stats.get("allocated_bytes.current", 0))


@contextmanager
def watched(tell: Watcher) -> Iterator[None]:
    """Inside the block `tell` is called for every tensor of `host_empty`, `claimed` and `mark_on_host`."""
    _watchers.append(tell)
    try:
        yield
    finally:
        _watchers.remove(tell)


def _mapped(size: int) -> Tensor:
    """Pinned bytes of exactly this size, in pages of their own."""
    pages = _pages(size)
    tensor = torch.frombuffer(pages, dtype=torch.uint8).zero_()  # faults pages in with all threads; CUDA would use one
    code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    if code:
        raise UserError(
            f"CUDA cannot pin {size / 2**30:.2f} GiB of host memory (error {code}); raise levers.offload_keep_bytes or "
            "lower levers.checkpoint_host_bytes"
        )
    _count(size)
    weakref.finalize(tensor.untyped_storage(), _unpin, pages, tensor.data_ptr(), size).atexit = False
    return tensor


def _pages(size: int) -> mmap.mmap:
    """A private anonymous mapping with huge pages where possible."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(
            f"the host has no {size / 2**30:.2f} GiB left to offload to ({error.strerror}); raise "
            "levers.offload_keep_bytes or lower levers.checkpoint_host_bytes"
        ) from None
    with suppress(OSError):  # kernels without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _unpin(pages: mmap.mmap, address: int, size: int) -> None:
    """Unregister pages before they are unmapped, which happens with the last reference to `pages`."""
    torch.cuda.synchronize()  # a copy from or to these pages may still be running
    torch.cuda.cudart().cudaHostUnregister(address)
    _count(-size)


def _count(size: int) -> None:
    global _mapped_bytes
    _mapped_bytes += size
