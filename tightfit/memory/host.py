"""Host memory that a GPU copies to and from: pinned, so that copies run beside kernels, and seen by simulations.

Torch's own pinned allocator rounds every request up to a power of two (a 2.1 GiB tensor takes 4) and keeps what is
freed, so large pieces are mapped here, in whole pages, and registered with CUDA; small ones are torch's. The pages go
back when the tensor dies. A mapping asks for huge pages, without which pinning costs more than the copy it is for; and
it is private: kernels give shared ones huge pages only where an administrator has said so.

What levers keep on the host is made by `host_empty`, what they stage copies in on the GPU is named by `claimed`; both
tell tracers (tracing.py), whose ledgers then have it in the right place under the right name. In a simulation all
tensors are on the CPU, so a copy to the other side must be `buffer.copy_(tensor)`: `tensor.to(device)` makes nothing.
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
"""Up to here torch's own pinned memory, whose pieces come from larger blocks."""


class Watcher(Protocol):
    """Is told of tensors as they are made for a purpose."""

    def __call__(self, tensor: Tensor, component: Component | None, detail: str, *, host: bool) -> None:
        """`tensor` is `component`."""


_watchers: list[Watcher] = []
_mapped_bytes = 0


def host_empty(
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    component: Component | None = None,
    detail: str = "offloaded",
) -> Tensor:
    """Memory on the host for what lives on `device` otherwise; a ledger has it as `component`."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type == "cuda" and size > SMALL_BYTES:
        made = _mapped(size).view(dtype).view(shape)
    else:
        made = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    for tell in _watchers:
        tell(made, component, detail, host=True)
    return made


def claimed(tensor: Tensor, component: Component, detail: str = "") -> Tensor:
    """`tensor`, which ledgers have as `component` from here on."""
    for tell in _watchers:
        tell(tensor, component, detail, host=False)
    return tensor


def pinned_bytes() -> int:
    """Host memory that is pinned by now, torch's own included."""
    stats = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else {}
    return _mapped_bytes + int(stats.get("allocated_bytes.current", 0))


@contextmanager
def watched(tell: Watcher) -> Iterator[None]:
    """Inside the block `tell` hears of everything that is made here."""
    _watchers.append(tell)
    try:
        yield
    finally:
        _watchers.remove(tell)


def _mapped(size: int) -> Tensor:
    """Pinned bytes of exactly this size, in pages of their own."""
    pages = _pages(size)
    made = torch.frombuffer(pages, dtype=torch.uint8).zero_()  # all threads touch the pages, which CUDA does with one
    code = int(torch.cuda.cudart().cudaHostRegister(made.data_ptr(), size, 0))
    if code:
        raise UserError(
            f"CUDA cannot pin {size / 2**30:.2f} GiB of host memory (error {code}); raise levers.offload_keep_bytes or "
            "lower levers.checkpoint_host_bytes"
        )
    _count(size)
    weakref.finalize(made.untyped_storage(), _unpin, pages, made.data_ptr(), size).atexit = False
    return made


def _pages(size: int) -> mmap.mmap:
    """Memory of the process's own that may be made of huge pages; nothing is there before it is touched."""
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
    """Before the pages are unmapped, which they are when nothing holds `pages` any more."""
    torch.cuda.synchronize()  # a copy from or to these pages may still be under way
    torch.cuda.cudart().cudaHostUnregister(address)
    _count(-size)


def _count(size: int) -> None:
    global _mapped_bytes
    _mapped_bytes += size
