"""Lets the last operation of a recomputed layer skip its result.

Recomputation under activation checkpointing needs the tensors saved for backward, not the layer's output. So the last
operation of a layer may skip computing its result: `gated_mlp` then leaves out the activation and the down projection,
a quarter of a layer's FLOPs, and returns a placeholder. The flag is thread-local, as autograd recomputes in a thread
per device.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_thread = threading.local()


@contextmanager
def result_unwanted() -> Iterator[None]:
    """Inside the block, the result of the layer being recomputed is not used."""
    before = getattr(_thread, "unwanted", False)
    _thread.unwanted = True
    try:
        yield
    finally:
        _thread.unwanted = before


@contextmanager
def left_out_when_recomputing() -> Iterator[None]:
    """Mark products that recomputation leaves out, so that selective checkpointing does not save their results."""
    before, _thread.skipped = is_left_out_when_recomputing(), True
    try:
        yield
    finally:
        _thread.skipped = before


def is_left_out_when_recomputing() -> bool:
    """Whether recomputation leaves out the product being computed."""
    return getattr(_thread, "skipped", False)


def is_result_wanted() -> bool:
    """Whether the result of the layer being computed is used."""
    return not getattr(_thread, "unwanted", False)


def placeholder(like: Tensor, width: int, rows: int | None = None) -> Tensor:
    """An uninitialised tensor [..., width], or [rows, width], on the device of `like` that takes no memory."""
    shape = (*like.shape[:-1], width) if rows is None else (rows, width)
    return like.new_empty_strided(shape, (0,) * len(shape))  # no view, of which FSDP2 would warn
