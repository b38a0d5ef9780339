"""Multi-tensor AdamW: a list of weights in one launch, where weights, gradients and moments have one dtype.

The arithmetic of adamw.py, for the dtypes of torch's fused AdamW. In bf16 torch's moves 2 200 GB/s on an H200, half of
the memory bandwidth (it reads 8 bytes at a time), which takes 51 ms of an 8B model's step.
"""

from collections.abc import Sequence

from torch import Tensor

from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.optimizer.adamw import Numbers, bump_version, new_weight, reference, step_numbers
from tightfit.kernels.tensor_table import (
    CHUNK,
    MOST,
    TRITON_DTYPES,
    address,
    are_alike,
    find_tensor,
    make_table,
    rounding,
)
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

BLOCK = 2048
WARPS = 8


def adamw_list(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    factor: Tensor | None,
    numbers: Numbers,
    impl: Impl = "auto",
) -> None:
    """Update weights and moments in place with gradients times `factor`, unless that is NaN; all by one `numbers`."""
    assert numbers.key is None, "adamw_list has no stochastic rounding"
    _adamw_list(list(weights), list(gradients), list(m), list(v), factor, *numbers[:6], numbers.on_device, impl)
    bump_version(*weights)


@triton.jit
def list_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    tensors,
    factor_ptr,
    numbers_ptr,
    rate,
    root,
    kept,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    which, size, first = find_tensor(table_ptr, tensors, 4, CHUNK, MOST, ROUND)
    weight_ptr = address(table_ptr, tensors, which, 0, DTYPE)
    gradient_ptr = address(table_ptr, tensors, which, 1, DTYPE)
    m_ptr = address(table_ptr, tensors, which, 2, DTYPE)
    v_ptr = address(table_ptr, tensors, which, 3, DTYPE)
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    if factor != factor:
        return
    rate, root, kept = step_numbers(numbers_ptr, rate, root, kept)
    for block in range(0, CHUNK, BLOCK):
        at = first + block + tl.arange(0, BLOCK)
        here = at < size
        g = tl.load(gradient_ptr + at, mask=here, other=0).to(tl.float32) * factor
        w = tl.load(weight_ptr + at, mask=here, other=0).to(tl.float32)
        m = tl.load(m_ptr + at, mask=here, other=0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=here, other=0).to(tl.float32)
        w, m, v = new_weight(w, g, m, v, rate, root, kept, beta1, beta2, rest1, rest2, eps)
        tl.store(weight_ptr + at, w.to(DTYPE), mask=here)
        tl.store(m_ptr + at, m.to(DTYPE), mask=here)
        tl.store(v_ptr + at, v.to(DTYPE), mask=here)


def _launch(lists: tuple[list[Tensor], ...], factor: Tensor | None, numbers: Numbers) -> None:
    for begin in range(0, len(lists[0]), MOST):
        part = [kind[begin : begin + MOST] for kind in lists]
        table, programs = make_table(*part)
        with on_device_of(table):
            list_kernel[(programs,)](
                table,
                len(part[0]),
                factor,
                numbers.on_device,
                *numbers.kernel_scalars,
                DTYPE=TRITON_DTYPES[str(part[0][0].dtype)],
                CHUNK=CHUNK,
                MOST=MOST,
                BLOCK=BLOCK,
                ROUND=rounding(part[0]),
                num_warps=WARPS,
            )


def _run(
    weights: list[Tensor],
    gradients: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    on_device: Tensor | None,
    impl: Impl,
) -> None:
    numbers = Numbers(lr, beta1, beta2, eps, weight_decay, step, on_device=on_device)
    full = [each for each in zip(weights, gradients, m, v, strict=True) if each[0].numel()]
    if not full:
        return
    lists = tuple(list(kind) for kind in zip(*full, strict=True))
    if use_triton(impl, full[0][0]) and are_alike(*lists):
        _launch(lists, factor, numbers)
        return
    for weight, gradient, mean, square in full:
        reference(weight, None, gradient, mean, square, factor, numbers)


def _fake(*arguments: object) -> None:
    """Everything is updated in place."""


_adamw_list = operator(
    "adamw_list(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] m, Tensor(c!)[] v, Tensor? factor, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, int step, Tensor? on_device, "
    "str impl) -> ()",
    _run,
    _fake,
)
