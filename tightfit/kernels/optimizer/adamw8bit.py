"""AdamW with both moments in 8 bits: dequantized, updated and quantized again in one pass (Dettmers et al. 2021).

A block is 256 neighbours in a row (fewer at the row's end) with a float32 scale, its largest magnitude:

    m = scale_m · sign · value₇(code)        v = scale_v · value₈(code)        w, m, v as in adamw.py

The update uses the new moments before they are rounded. The second moment's codes are never zero: an m rounded up
beside a v rounded to zero would move its weight by lr · m / ε. `dynamic_map.py` defines the codes. Blocks do not cross
rows, so a rank's rows have the blocks, and the bits, that they would have on one device. Bytes: 2 + 8/256 a weight
where row lengths are multiples of 256.

Moved per weight beside weights and gradients: 4 bytes, against 16 with float32 moments.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.optimizer.adamw import (
    NUMBERS,
    Numbers,
    bump_version,
    new_weight,
    step_numbers,
    updated_weight,
    write,
)
from tightfit.kernels.optimizer.dynamic_map import SIGNED, UNSIGNED, decode, decoded, encode, encoded
from tightfit.kernels.optimizer.stochastic_rounding import stochastic
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

WIDTH = 256
"""Elements that share a scale. Dettmers et al. use 2048; in smaller blocks an outlier costs fewer others precision."""
TILE = 8
"""Blocks a program works on."""
SCHEMA = (
    "adamw8bit(Tensor(a!) weight, Tensor(b!)? copy, Tensor gradient, Tensor(c!) m, Tensor(d!) m_scale, Tensor(e!) v, "
    f"Tensor(f!) v_scale, Tensor? factor, {NUMBERS}) -> ()"
)


def blocks(width: int) -> int:
    """Scales of a row of `width` numbers."""
    return -(-width // WIDTH)


def zero_moments(
    weight: Tensor, make: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both moments of a weight that has had no update: codes and scales of the first, then of the second.

    `make` allocates zeros; by default on the weight's device.
    """
    make = make or (lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=weight.device))
    shape = (*weight.shape[:-1], blocks(weight.shape[-1]))
    m, m_scale = make(weight.shape, torch.int8), make(shape, torch.float32)
    return m, m_scale, make(weight.shape, torch.uint8), make(shape, torch.float32)


def adamw8bit(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    m_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    factor: Tensor | None,
    numbers: Numbers,
    impl: Impl = "auto",
) -> None:
    """Update `weight`, its moments and its 16-bit `copy` in place."""
    _adamw8bit(weight, copy, gradient, m, m_scale, v, v_scale, factor, *numbers, impl)
    bump_version(weight, copy)


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """A moment in float32; int8 codes are signed, uint8 codes are not."""
    each = scale.repeat_interleave(WIDTH, -1)[..., : codes.shape[-1]]
    if codes.dtype == torch.uint8:
        return decode(codes, UNSIGNED) * each
    wide = codes.int()
    return decode(wide.abs(), SIGNED) * wide.sign() * each


def quantize_into(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write the codes and scales of a moment."""
    gap = blocks(x.shape[-1]) * WIDTH - x.shape[-1]
    torch.amax(torch.nn.functional.pad(x.abs(), (0, gap)).unflatten(-1, (-1, WIDTH)), -1, out=scale)
    each = scale.repeat_interleave(WIDTH, -1)[..., : x.shape[-1]]
    share = torch.where(each > 0, x.abs() / each, 0.0)
    if codes.dtype == torch.uint8:
        codes.copy_(encode(share, UNSIGNED).clamp(min=1))
    else:
        codes.copy_(encode(share, SIGNED) * x.sign().int())


def reference(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    m_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    factor: Tensor | None,
    numbers: Numbers,
) -> None:
    """The reference, in plain torch; codes are looked up in a table."""
    if factor is not None and factor.isnan():
        return
    wide_m, wide_v = dequantized(m, m_scale), dequantized(v, v_scale)
    write(updated_weight(weight, gradient, wide_m, wide_v, factor, numbers), weight, copy, numbers)
    quantize_into(wide_m, m, m_scale)
    quantize_into(wide_v, v, v_scale)


@triton.jit(do_not_specialize=["key", "first"])
def adamw8bit_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    copy_ptr,
    gradient_ptr,
    m_ptr,
    m_scale_ptr,
    v_ptr,
    v_scale_ptr,
    factor_ptr,
    numbers_ptr,
    width,
    row_blocks,
    all_blocks,
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
    SIGNED: tl.constexpr,
    UNSIGNED: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    if factor != factor:
        return
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    whole = block < all_blocks
    column = (block % row_blocks) * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = (block // row_blocks) * width + column
    here = whole & (column < width)
    g = tl.load(gradient_ptr + at, mask=here, other=0).to(tl.float32) * factor
    rate, root, kept = step_numbers(numbers_ptr, rate, root, kept)
    w = tl.load(weight_ptr + at, mask=here, other=0).to(tl.float32)
    m_code = tl.load(m_ptr + at, mask=here, other=0).to(tl.int32)
    v_code = tl.load(v_ptr + at, mask=here, other=0).to(tl.int32)
    m = decoded(tl.abs(m_code), SIGNED) * tl.load(m_scale_ptr + block, mask=whole, other=0)
    m = tl.where(m_code < 0, -m, m)
    v = decoded(v_code, UNSIGNED) * tl.load(v_scale_ptr + block, mask=whole, other=0)
    w, m, v = new_weight(w, g, m, v, rate, root, kept, beta1, beta2, rest1, rest2, eps)
    if STOCHASTIC:
        w = stochastic(w, at + first, key)
    tl.store(weight_ptr + at, w.to(weight_ptr.dtype.element_ty), mask=here)
    if copy_ptr is not None:
        tl.store(copy_ptr + at, w.to(copy_ptr.dtype.element_ty), mask=here)
    m_scale = tl.max(tl.abs(m), 1, keep_dims=True)
    v_scale = tl.max(v, 1, keep_dims=True)
    m_code = encoded(tl.abs(m) / tl.where(m_scale > 0, m_scale, 1.0), SIGNED)
    v_code = tl.maximum(encoded(v / tl.where(v_scale > 0, v_scale, 1.0), UNSIGNED), 1)
    tl.store(m_ptr + at, tl.where(m < 0, -m_code, m_code).to(tl.int8), mask=here)
    tl.store(v_ptr + at, v_code.to(tl.uint8), mask=here)
    tl.store(m_scale_ptr + block, m_scale, mask=whole)
    tl.store(v_scale_ptr + block, v_scale, mask=whole)


def _launch(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    m_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    factor: Tensor | None,
    numbers: Numbers,
) -> None:
    assert all(x is None or x.is_contiguous() for x in (weight, copy, m, v)), "weights that are not contiguous"
    width, count = weight.shape[-1], m_scale.numel()
    with on_device_of(weight):
        adamw8bit_kernel[(-(-count // TILE),)](
            weight,
            copy,
            gradient.contiguous(),
            m,
            m_scale,
            v,
            v_scale,
            factor,
            numbers.on_device,
            width,
            blocks(width),
            count,
            *numbers.kernel_scalars,
            numbers.signed_key,
            numbers.first,
            STOCHASTIC=numbers.key is not None,
            SIGNED=SIGNED,
            UNSIGNED=UNSIGNED,
            TILE=TILE,
            WIDTH=WIDTH,
        )


def _run(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    m_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
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
        do(weight, copy, gradient, m, m_scale, v, v_scale, factor, numbers)


def _fake(weight: Tensor, *others: object) -> None:
    """Everything is updated in place."""


_adamw8bit = operator(SCHEMA, _run, _fake)
