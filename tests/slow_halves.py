"""Matrix products of 16-bit floats on CPUs that have no instructions for them, at the speed of float32.

On aarch64 without bf16 a product of 128 × 256 × 256 takes 0.6 ms in float32 and 134 ms in bf16, which torch computes
element by element: it adds in float32 and rounds once. Here the same is done with float32's kernels: widen, compute,
round. For float16 oneDNN is as slow, and torch's own kernels are not (4 ms): they are left to do it.

Nothing changes on CPUs that have the instructions, nor for other types, nor in programs that tests start afresh.

CPUs also differ in the order in which a product's terms are added, and so in its last bits. With TEST_REVERSED_SUMS in
the environment (`make test-rounding`) products add theirs from the last to the first, on any CPU: a test that passes
both ways does not hang on the last bit of one machine's kernels.
"""

import os
import platform
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
OPERATORS = torch.library.Library("aten", "IMPL")


REVERSED = "TEST_REVERSED_SUMS" in os.environ


def compute_in_float32() -> None:
    """Where it is so, and nowhere else."""
    if not REVERSED and (platform.machine() != "aarch64" or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    torch.backends.mkldnn.set_flags(_enabled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for each kernel that is replaced
        for name in PRODUCTS:
            _replace(name, _rounded)
        _replace(ATTENTION, lambda made: (_rounded(made[0]), *made[1:]))  # the other is a logarithm in float32
        _replace(f"{ATTENTION}_backward", lambda made: tuple(map(_rounded, made)))


def _replace(name: str, rounded: Callable[[Any], Any]) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    OPERATORS.impl(name, partial(_compute, kernel, rounded), "CPU", with_keyset=True)


def _compute(kernel: Any, rounded: Callable[[Any], Any], keys: Any, *given: Any, **named: Any) -> Any:
    if REVERSED and rounded is _rounded:
        given = _reversed(given)
    if given[0].dtype is not torch.bfloat16:
        return kernel.call_boxed(keys, *given, **named)
    wide = {name: _widened(value) for name, value in named.items()}
    return rounded(kernel.call_boxed(keys, *map(_widened, given), **wide))


def _reversed(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The factors of a product, which are the last two tensors, with the dimension that is summed over turned round."""
    *bias, left, right = given
    return (*bias, left.flip(-1), right.flip(-2))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


def _rounded(value: Tensor) -> Tensor:
    return value.bfloat16()
