"""Whether anybody wants an operation's result, or only what it keeps for backward.

A checkpointed layer is computed again for the tensors its gradients need. Its own output is not one of them, so the
last operation of a layer need not finish: `gated_mlp` then leaves out its activation and its down projection, a quarter
of a layer's products. Whoever recomputes says so, in the thread that does (autograd has one per device); whoever is
called at the end of a layer may ask, and answer with memory that has no values.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_here = threading.local()


@contextmanager
def result_unwanted() -> Iterator[None]:
    """Inside the block, the result of the layer that is computed is used by nobody."""
    before = getattr(_here, "unwanted", False)
    _here.unwanted = True
    try:
        yield
    finally:
        _here.unwanted = before


def is_result_wanted() -> bool:
    """Whether the layer that is being computed here is wanted for its result."""
    return not getattr(_here, "unwanted", False)


def placeholder(like: Tensor, width: int) -> Tensor:
    """A tensor [..., width] on the device of `like` that takes no memory and has no values worth reading."""
    return like.new_empty(1).expand(*like.shape[:-1], width)
