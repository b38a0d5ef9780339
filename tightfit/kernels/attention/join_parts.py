"""Sums of rows [B, heads, T, D] in one pass over the memory: gradients added up, or parts of attention joined.

    add    O = O₁ + O₂
    join   O = e^(L₁−L) O₁ + e^(L₂−L) O₂  with  L = log(e^L₁ + e^L₂), per row (partial_attention.py)

Operands and result may each be 16 bits or float32 and lie anywhere: the sum is float32 and rounded once, where it is
written. Torch takes four passes and six launches to join, and casts in loops that are not vectorized. A ring of eight
(parallel/ring.py) joins or adds some forty times a layer, each time beside an attention of a quarter of a millisecond.
"""

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

ROWS = 16
"""Rows per program."""


def add_rows(first: Tensor, second: Tensor, into: Tensor, *, impl: Impl = "auto") -> None:
    """into = first + second, in float32 or wider; `into` may be one of them."""
    if use_triton(impl, into):
        _launch(first, second, into, None)
    else:
        into.copy_(first.to(torch.promote_types(second.dtype, torch.float32)) + second)


def join_(
    out: Tensor, logs: Tensor, more: Tensor, more_logs: Tensor, into: Tensor | None = None, *, impl: Impl = "auto"
) -> None:
    """Join attention to more keys to `out`, written to `into` (unless given, to `out`), and to its `logs` in place.

    Logs are logsumexps, float32 [B, heads, T].
    """
    into = out if into is None else into
    if use_triton(impl, into):
        _launch(out, more, into, (logs, more_logs))
        return
    share = (more_logs - logs).sigmoid()[..., None]  # e^L₂ / (e^L₁ + e^L₂)
    into.copy_(out * (1 - share) + more * share)
    logs.copy_(logs.logaddexp(more_logs))


def _launch(first: Tensor, second: Tensor, into: Tensor, logs: tuple[Tensor, Tensor] | None) -> None:
    B, heads, T, D = into.shape
    first, second = (x if x.stride(3) == 1 else x.contiguous() for x in (first, second))
    first_logs, second_logs = (None, None) if logs is None else logs
    strides = [stride for x in (first, second, into) for stride in x.stride()[:3]]
    log_strides = [0] * 6 if logs is None else [stride for x in logs for stride in x.stride()]
    with on_device_of(into):
        sum_rows_kernel[(triton.cdiv(T, ROWS), heads, B)](
            first,
            second,
            into,
            first_logs,
            second_logs,
            *strides,
            *log_strides,
            T,
            D,
            JOIN=logs is not None,
            ROWS=ROWS,
            WIDTH=triton.next_power_of_2(D),
        )


@triton.jit
def sum_rows_kernel(  # type: ignore[no-untyped-def]
    first,
    second,
    into,
    first_logs,
    second_logs,
    first_b,
    first_h,
    first_t,
    second_b,
    second_h,
    second_t,
    into_b,
    into_h,
    into_t,
    log_b,
    log_h,
    log_t,
    more_b,
    more_h,
    more_t,
    T,
    D,
    JOIN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """ROWS rows of one head; `first_logs` become those of the sum."""
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < T)[:, None] & (column < D)[None, :]
    at_first = first + b * first_b + h * first_h + row[:, None] * first_t + column[None, :]
    at_second = second + b * second_b + h * second_h + row[:, None] * second_t + column[None, :]
    x = tl.load(at_first, mask=inside, other=0).to(tl.float32)
    y = tl.load(at_second, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
    if JOIN:
        at_log = first_logs + b * log_b + h * log_h + row * log_t
        log = tl.load(at_log, mask=row < T, other=0)
        more = tl.load(second_logs + b * more_b + h * more_h + row * more_t, mask=row < T, other=0)
        smaller = tl.exp(-tl.abs(more - log))  # e^L of the smaller part over the larger's
        share = tl.where(more > log, 1.0, smaller) / (1 + smaller)
        x, y = x * (1 - share)[:, None], y * share[:, None]
        total = tl.maximum(log, more) + tl.log(1 + smaller)
        tl.store(at_log, total, mask=row < T)
    at_into = into + b * into_b + h * into_h + row[:, None] * into_t + column[None, :]
    tl.store(at_into, (x + y).to(into.dtype.element_ty), mask=inside)
