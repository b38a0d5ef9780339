"""Registers a kernel as a torch operator: schema, implementation, fake implementation, gradient.

Tracing, simulation on fake tensors and torch.compile see operators; a bare kernel is invisible to all three. They are
registered through the low-level `torch.library.Library`, as the wrappers of `custom_op` and `register_autograd` cost
more than the launch itself: 292 µs for forward and backward of an empty operator on a slow core, 176 µs this way, 126
µs for an autograd.Function that is no operator. A training step makes hundreds of these calls.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
INTERPRETED_MULTIPROCESSORS = 3
"""The number pretended under Triton's interpreter: so few that programs in small tests loop more than once."""
INTERPRETED_SHARED_BYTES = 2**17

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Inside `with below_autograd():` operators skip the autograd key and run their implementation."""


SCRATCH: dict[Any, Callable[..., int]] = {}
"""Bytes that an operator allocates only while it runs, as a function of its arguments; tracing cannot see them."""


def operator(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: type[torch.autograd.Function] | None = None,
    scratch_bytes: Callable[..., int] | None = None,
) -> Any:
    """Register `tightfit::schema`; returns the callable operator.

    `gradient` is an autograd.Function over the operator's own arguments; its forward calls the operator again inside
    `below_autograd()`. Without one the operator is not differentiable. `scratch_bytes` is entered in SCRATCH.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tightfit::{name}", fake, lib=LIBRARY)
    call = getattr(torch.ops.tightfit, name).default
    if scratch_bytes is not None:
        SCRATCH[call] = scratch_bytes
    if gradient is not None:
        LIBRARY.impl(name, _with_gradient(call, gradient), "Autograd")
    return call


def _with_gradient(call: Any, gradient: Any) -> Callable[..., Any]:
    def differentiable(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return gradient.apply(*arguments)
        with below_autograd():
            return call(*arguments)

    return differentiable


def on_device_of(tensor: Tensor) -> Any:
    """A context that makes the device of `tensor` current, for launches."""
    return torch.cuda.device_of(tensor)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have; what is pretended under Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETED_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@cache
def finish_counters(device: torch.device) -> Tensor:
    """Counters of programs that have finished their part of an output tile (split-K); the last to finish sets its
    counter back to zero. Successive launches on one stream share them."""
    return torch.zeros(1 << 14, device=device, dtype=torch.int32)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A new contiguous tensor in the shape of x; a third of the call overhead of `new_empty`."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def as_rows(x: Tensor) -> Tensor:
    """x [..., W] as [rows, W] with W contiguous; a view unless the strides of x allow none."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def is_dense_in_rows(x: Tensor) -> bool:
    """Whether `as_rows` gives a writable view: no two elements share memory."""
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:  # its rows are not evenly spaced
        return False
    return rows.stride(1) == 1 and (len(rows) == 1 or rows.stride(0) >= rows.shape[1])
