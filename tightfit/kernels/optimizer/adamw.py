"""AdamW in one pass, for moments, gradients and weights of different dtypes (Loshchilov and Hutter 2019).

With g the gradient times `factor` (clipping and unscaling), in float32 whatever dtypes the tensors are stored in:

    m = β₁ m + (1 − β₁) g        v = β₂ v + (1 − β₂) g²
    w = w (1 − lr · decay) − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

Torch's fused AdamW needs all of these in one dtype, which means float32 copies of 16-bit gradients, and has no
stochastic rounding. Here gradients of any dtype are read, and where float32 masters are updated, their 16-bit `copy`
(the weight that the model computes with) is written in the same pass. `factor` is a tensor, so that the host does not
wait for it; where it is NaN, nothing is changed. For a CUDA graph, whose kernel arguments are fixed at capture, the
numbers that change from step to step are in a tensor too (`Numbers.on_device`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.optimizer.stochastic_rounding import rounded, stochastic
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

BLOCK = 1024


class Numbers(NamedTuple):
    """The scalars of one update. With a `key`, weights are rounded stochastically (stochastic_rounding.py)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of this update, from 1, for the bias corrections."""
    key: int | None = None
    first: int = 0
    """Index of the first element in the whole weight, where this is a shard or a chunk of it."""
    on_device: Tensor | None = None
    """The first three of `scalars`, float32, for kernels that a graph replays."""

    @property
    def scalars(self) -> tuple[float, float, float, float, float, float]:
        """lr / (1 − β₁ᵗ), 1 / √(1 − β₂ᵗ), 1 − lr · decay, β₁, β₂, ε."""
        correction1, correction2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        kept = 1 - self.lr * self.weight_decay
        return self.lr / correction1, correction2**-0.5, kept, self.beta1, self.beta2, self.eps

    @property
    def kernel_scalars(self) -> tuple[float, ...]:
        """`scalars` with 1 − β₁ and 1 − β₂, computed in double: in float32, 1 − 0.999 is off by 1 in 77 000."""
        rate, root, kept, beta1, beta2, eps = self.scalars
        return rate, root, kept, beta1, beta2, 1 - beta1, 1 - beta2, eps

    @property
    def signed_key(self) -> int:
        """The key as int32; an int64 argument would compile another kernel."""
        return ((self.key or 0) + 2**31) % 2**32 - 2**31


def adamw(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    factor: Tensor | None,
    numbers: Numbers,
    impl: Impl = "auto",
) -> None:
    """Update `weight`, its moments and its 16-bit `copy` in place."""
    _adamw(weight, copy, gradient, m, v, factor, *numbers, impl)
    bump_version(weight, copy)


def bump_version(*tensors: Tensor | None) -> None:
    """Raise the tensors' versions, which custom operators do not: caches of weights (fp8 codes) check them."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def updated_weight(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, factor: Tensor | None, numbers: Numbers
) -> Tensor:
    """The new weight in float32; `m` and `v`, which must be float32, are updated in place."""
    rate, root, kept, beta1, beta2, eps = numbers.scalars
    if numbers.on_device is not None:
        rate, root, kept = numbers.on_device.unbind()  # type: ignore[assignment]
    wide = gradient.float() if factor is None else gradient.float() * factor
    m.mul_(beta1).add_(wide, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    return weight.float() * kept - rate * m / (v.sqrt() * root + eps)


def write(new: Tensor, weight: Tensor, copy: Tensor | None, numbers: Numbers) -> None:
    """Store the new weight, rounded to nearest or stochastically, and its copy."""
    weight.copy_(new if numbers.key is None else rounded(new, numbers.key, numbers.first))
    if copy is not None:
        copy.copy_(new)


def reference(
    weight: Tensor, copy: Tensor | None, gradient: Tensor, m: Tensor, v: Tensor, factor: Tensor | None, numbers: Numbers
) -> None:
    """The reference, in plain torch."""
    if factor is not None and factor.isnan():
        return
    wide_m, wide_v = m.float(), v.float()  # the tensors themselves where they are float32
    write(updated_weight(weight, gradient, wide_m, wide_v, factor, numbers), weight, copy, numbers)
    m.copy_(wide_m)
    v.copy_(wide_v)


@triton.jit
def step_numbers(numbers_ptr, rate, root, kept):  # type: ignore[no-untyped-def]
    """The numbers that change from step to step: the arguments, or those in device memory where there are any."""
    if numbers_ptr is not None:
        rate, root, kept = tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    return rate, root, kept


@triton.jit
def new_weight(w, g, m, v, rate, root, kept, beta1, beta2, rest1, rest2, eps):  # type: ignore[no-untyped-def]
    """`updated_weight` inside a kernel, in float32: the new w, m and v.

    Multiply-adds are fused explicitly, not where the compiler chooses to, so that every kernel (for any format of the
    moments, in a graph or not) computes the same bits.
    """
    m = tl.fma(beta1, m, rest1 * g)
    v = tl.fma(beta2, v, rest2 * g * g)
    return tl.fma(w, kept, -rate * m / tl.fma(tl.sqrt(v), root, eps)), m, v


@triton.jit(do_not_specialize=["key", "first"])
def adamw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    copy_ptr,
    gradient_ptr,
    m_ptr,
    v_ptr,
    factor_ptr,
    numbers_ptr,
    count,
    rate,
    root,
    kept,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    key,
    first,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    if factor != factor:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    g = tl.load(gradient_ptr + at, mask=here, other=0).to(tl.float32) * factor
    rate, root, kept = step_numbers(numbers_ptr, rate, root, kept)
    w = tl.load(weight_ptr + at, mask=here, other=0).to(tl.float32)
    m = tl.load(m_ptr + at, mask=here, other=0).to(tl.float32)
    v = tl.load(v_ptr + at, mask=here, other=0).to(tl.float32)
    w, m, v = new_weight(w, g, m, v, rate, root, kept, beta1, beta2, rest1, rest2, eps)
    if STOCHASTIC:
        w = stochastic(w, at + first, key)
    tl.store(weight_ptr + at, w.to(weight_ptr.dtype.element_ty), mask=here)
    tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=here)
    tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=here)
    if copy_ptr is not None:
        tl.store(copy_ptr + at, w.to(copy_ptr.dtype.element_ty), mask=here)


def _launch(
    weight: Tensor, copy: Tensor | None, gradient: Tensor, m: Tensor, v: Tensor, factor: Tensor | None, numbers: Numbers
) -> None:
    assert all(x is None or x.is_contiguous() for x in (weight, copy, m, v)), "weights that are not contiguous"
    with on_device_of(weight):
        adamw_kernel[(-(-weight.numel() // BLOCK),)](
            weight,
            copy,
            gradient.contiguous(),
            m,
            v,
            factor,
            numbers.on_device,
            weight.numel(),
            *numbers.kernel_scalars,
            numbers.signed_key,
            numbers.first,
            STOCHASTIC=numbers.key is not None,
            BLOCK=BLOCK,
        )


def _run(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    key: int | None,
    first: int,
    on_device: Tensor | None,
    impl: Impl,
) -> None:
    numbers = Numbers(lr, beta1, beta2, eps, weight_decay, step, key, first, on_device)
    if weight.numel():
        do = _launch if use_triton(impl, weight) else reference
        do(weight, copy, gradient, m, v, factor, numbers)


def _fake(weight: Tensor, *others: object) -> None:
    """Everything is updated in place."""


NUMBERS = (
    "float lr, float beta1, float beta2, float eps, float weight_decay, int step, int? key, int first, "
    "Tensor? on_device, str impl"
)
_adamw = operator(
    "adamw(Tensor(a!) weight, Tensor(b!)? copy, Tensor gradient, Tensor(c!) m, Tensor(d!) v, Tensor? factor, "
    f"{NUMBERS}) -> ()",
    _run,
    _fake,
)
