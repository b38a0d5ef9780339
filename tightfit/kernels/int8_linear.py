"""x · Wᵀ with both factors in 8-bit integers: a dynamic scale per token and a scale per output.

    s_x[m] = max_k |x[m, k]| / 127,   q = round(x · (1 / s_x)),   y[m, n] = s_x[m] · S[n] · Σ_k q[m, k] · w[n, k]

With a static scale, s_x is one number for all tokens, beyond whose range q saturates at −128 and 127.

On CUDA the product is kernels/int8_matmul.py's where card and row length allow it, else torch._int_mm's, which needs
more than 16 rows (fewer are padded) and K and N in multiples of 8. Elsewhere the integers are multiplied as float32,
which is exact up to 2^24: the same numbers. Not differentiable.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.int8_matmul import LARGEST, NEEDED, TINIEST, WIDEST_ROW, int8_matmul
from tightfit.kernels.operators import as_rows
from tightfit.kernels.triton_support import Impl, use_triton

LEAST_ROWS = 17
ALIGNED = 8


def int8_linear(
    x: Tensor, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None, *, impl: Impl = "auto"
) -> Tensor:
    """x [..., K] times the transpose of int8 `codes` [N, K] with `scale` [N, 1].

    x is quantized by `input_scale` [1] where given, else with a scale per row.
    """
    if codes.dtype != torch.int8 or codes.shape[1] != x.shape[-1] or scale.shape != (codes.shape[0], 1):
        shapes = f"{list(x.shape)}, {codes.dtype} {list(codes.shape)} and scales {list(scale.shape)}"
        raise UserError(f"int8_linear got {shapes}; give x [..., K], int8 codes [N, K] and scales [N, 1]")
    if use_triton(impl, x) and _is_multiplied(x):
        made: Tensor = int8_matmul(as_rows(x), codes, scale, input_scale)
        return made.view(*x.shape[:-1], codes.shape[0])
    rows, row_scale = rounded_rows(x.reshape(-1, x.shape[-1]), input_scale)
    sums = _products(rows, codes) * row_scale * scale.T.to(torch.float32)
    return sums.to(x.dtype).view(*x.shape[:-1], codes.shape[0])


def int8_linear_eager(x: Tensor, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None) -> Tensor:
    """The reference: both factors rounded, expanded and multiplied as float32."""
    rows, row_scale = rounded_rows(x.reshape(-1, x.shape[-1]), input_scale)
    made = F.linear(rows.to(torch.float32) * row_scale, codes.to(torch.float32) * scale.to(torch.float32))
    return made.to(x.dtype).view(*x.shape[:-1], codes.shape[0])


def rounded_rows(x: Tensor, known_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] as int8 codes and the float32 scales [M, 1] of its rows, or `known_scale` [1] of all rows."""
    wide = x.to(torch.float32)
    if known_scale is not None:
        scale = known_scale.to(torch.float32)
        return (wide * (1 / scale)).round().clamp(-LARGEST - 1, LARGEST).to(torch.int8), scale
    largest = wide.new_full((), LARGEST)  # a tensor: by a number CUDA multiplies with its reciprocal, a bit off
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=TINIEST) / largest
    return (wide * (1 / scale)).round().to(torch.int8), scale


def _is_multiplied(x: Tensor) -> bool:
    """Whether our kernel takes x: the card has int8 tensor cores, and rows are short enough."""
    return x.shape[-1] <= WIDEST_ROW and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= NEEDED)


def _products(rows: Tensor, codes: Tensor) -> Tensor:
    """Σ_k of products of integers, [M, N], as float32."""
    fits = rows.shape[1] % ALIGNED == 0 and codes.shape[0] % ALIGNED == 0
    if not (rows.is_cuda and fits):
        return F.linear(rows.to(torch.float32), codes.to(torch.float32))
    padded = F.pad(rows, (0, 0, 0, max(LEAST_ROWS - len(rows), 0)))
    return torch._int_mm(padded, codes.t())[: len(rows)].to(torch.float32)
