"""Formats of Adam's moments, and the update of one weight in each.

| format | first moment | second moment | bytes a weight beside weights, gradients and masters |
|---|---|---|---|
| fp32 | float32 | float32 | 8 |
| bf16 | bf16 | bf16 | 4 |
| 8bit | 8 bits, a float32 scale per 256 | 8 bits, a scale per 256 | 2 + 8/256 |
| factored | bf16 | a float32 mean per row and per column | 2 + 4 (r + c) / (r c), some 2.002 for 4096 × 4096 |

Vectors (norms, biases) have float32 moments in `8bit` and `factored`: they are a ten-thousandth of a model, and their
few values differ most. All but fp32 lose precision; benchmarks/optimizer_states.py measures what that changes.

`factored` is Adafactor's second moment (Shazeer and Stern 2018), v ≈ row · column / mean(row), with Adam's first moment
in bf16, bias corrections and the job's learning rate, as Zhai et al. 2022 train vision models; Adafactor's own schedule
and update clipping are left out. It needs all rows of a weight, so it is refused under ZeRO.

Weights may be float32 (masters with a 16-bit copy that the model computes with, or the model's own) or bf16, rounded to
nearest or stochastically.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.jobs.state_format import Format
from tightfit.kernels.optimizer.adamw import Numbers, adamw, write
from tightfit.kernels.optimizer.adamw8bit import adamw8bit, zero_moments
from tightfit.levers.policy.updates import FACTORED_CHUNK_ELEMENTS

States = dict[str, Tensor]
Update = Callable[[Tensor, Tensor | None, Tensor, States, Tensor | None, Numbers], None]
"""(weight, 16-bit copy, gradient, states, factor that gradients are multiplied by, numbers) → None, in place."""


Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates a zeroed state, on the GPU or the host."""


class StateKind(NamedTuple):
    """How the moments of one weight are allocated and updated."""

    zeros: Callable[[Tensor, Zeros], States]
    update: Update


def state_kind(form: Format, weight: Tensor) -> StateKind:
    """The moments of `weight` in format `form`."""
    if form == "bf16":
        return BF16
    if form == "fp32" or weight.ndim < 2:
        return FP32
    return EIGHT_BIT if form == "8bit" else FACTORED


def zeros_on_device_of(weight: Tensor) -> Zeros:
    """Zeros on the device of `weight`."""
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=weight.device)


def _plain_zeros(dtype: torch.dtype) -> Callable[[Tensor, Zeros], States]:
    def zeros(weight: Tensor, make: Zeros) -> States:
        return {kind: make(weight.shape, dtype) for kind in ("exp_avg", "exp_avg_sq")}

    return zeros


def _plain_update(
    weight: Tensor, copy: Tensor | None, gradient: Tensor, states: States, factor: Tensor | None, numbers: Numbers
) -> None:
    adamw(weight, copy, gradient, states["exp_avg"], states["exp_avg_sq"], factor, numbers)


EIGHT_BIT_KINDS = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")


def _eight_bit_zeros(weight: Tensor, make: Zeros) -> States:
    return dict(zip(EIGHT_BIT_KINDS, zero_moments(weight, make), strict=True))


def _eight_bit_update(
    weight: Tensor, copy: Tensor | None, gradient: Tensor, states: States, factor: Tensor | None, numbers: Numbers
) -> None:
    m, m_scale, v, v_scale = (states[kind] for kind in EIGHT_BIT_KINDS)
    adamw8bit(weight, copy, gradient, m, m_scale, v, v_scale, factor, numbers)


def _factored_zeros(weight: Tensor, make: Zeros) -> States:
    return {
        "exp_avg": make(weight.shape, torch.bfloat16),
        "exp_avg_sq_row": make(weight.shape[:-1], torch.float32),
        "exp_avg_sq_column": make((*weight.shape[:-2], weight.shape[-1]), torch.float32),
    }


def _factored_update(
    weight: Tensor, copy: Tensor | None, gradient: Tensor, states: States, factor: Tensor | None, numbers: Numbers
) -> None:
    """One matrix; stacked matrices (experts) one after another, as each has its own rows and columns."""
    if weight.ndim == 2:
        _factored_matrix(weight, copy, gradient, states, factor, numbers)
        return
    for index in range(weight.shape[0]):
        own = numbers._replace(first=numbers.first + index * weight[0].numel())
        inner = {kind: state[index] for kind, state in states.items()}
        _factored_update(weight[index], None if copy is None else copy[index], gradient[index], inner, factor, own)


def _factored_matrix(
    weight: Tensor, copy: Tensor | None, gradient: Tensor, states: States, factor: Tensor | None, numbers: Numbers
) -> None:
    m, row, column = (states[kind] for kind in ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_column"))
    for mean, dim in ((row, 1), (column, 0)):
        norms = torch.linalg.vector_norm(gradient, dim=dim, dtype=torch.float32)  # squares nothing in memory
        norms = norms if factor is None else norms * factor
        mean.lerp_(norms.square() / gradient.shape[dim], 1 - numbers.beta2)
    row_share = (row / row.mean().clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
    width = weight.shape[1]
    rows = max(1, FACTORED_CHUNK_ELEMENTS // width)
    for start in range(0, weight.shape[0], rows):
        chunk = slice(start, start + rows)
        _factored_rows(
            weight=weight[chunk],
            copy=None if copy is None else copy[chunk],
            gradient=gradient[chunk],
            m=m[chunk],
            row=row_share[chunk],
            column=column.sqrt(),
            factor=factor,
            numbers=numbers._replace(first=numbers.first + start * width),
        )


def _factored_rows(
    *,
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    row: Tensor,
    column: Tensor,
    factor: Tensor | None,
    numbers: Numbers,
) -> None:
    """AdamW with √v = row · column."""
    rate, root, kept, beta1, _, eps = numbers.scalars
    wide_m = m.float().mul_(beta1)
    wide_m.add_(gradient.float() if factor is None else gradient.float() * factor, alpha=1 - beta1)
    m.copy_(wide_m)
    denominator = torch.outer(row, column).mul_(root).add_(eps)
    write((weight.float() * kept).addcdiv_(wide_m, denominator, value=-rate), weight, copy, numbers)


FP32 = StateKind(zeros=_plain_zeros(torch.float32), update=_plain_update)
BF16 = StateKind(zeros=_plain_zeros(torch.bfloat16), update=_plain_update)
EIGHT_BIT = StateKind(zeros=_eight_bit_zeros, update=_eight_bit_update)
FACTORED = StateKind(zeros=_factored_zeros, update=_factored_update)
