"""Which of torch's two matrix libraries computes a CPU's products: measured once, as neither is faster everywhere.

Torch sends float32 products of 16 rows and more to oneDNN. On Arm cores without its fast kernels (Neoverse N1) that is
half as fast as OpenBLAS, which torch has as well and takes when oneDNN is off. That switch holds for the whole process,
so it is set for the length of a step only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.hardware.timing import seconds_each

ROWS = 16
ROUNDS = 7
CLEARLY = 0.9
"""The share of oneDNN's time below which the other library is taken."""


@contextmanager
def without_onednn() -> Iterator[None]:
    """Products by torch's other library."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def fastest_products(weight: Tensor) -> Callable[[], Any]:
    """A context in which products with matrices like `weight` are fast."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return nullcontext
    x = torch.zeros(ROWS, weight.shape[1], dtype=weight.dtype)
    with torch.inference_mode():
        usual, other = (_best_seconds(x, weight, context) for context in (nullcontext, without_onednn))
    return without_onednn if other < CLEARLY * usual else nullcontext


def _best_seconds(x: Tensor, weight: Tensor, context: Callable[[], Any]) -> float:
    with context():
        return min(seconds_each(lambda: F.linear(x, weight), ROUNDS))
