"""x · Wᵀ with both factors in 8 bits (W8A8): a scale per output, and a dynamic scale per token.

    s_x[m] = max_k |x[m, k]| / L,   q = round(x · (1 / s_x)),   y[m, n] = s_x[m] · S[n] · Σ_k q[m, k] · w[n, k]

Codes are int8 (L = 127) or e4m3 (L = 448). With a static scale, s_x is one number for all tokens, beyond whose range q
saturates.

On CUDA the product is rounded_matmul.py's where card and row length allow it. Else floats are expanded to the
dtype of x and multiplied; integers by torch._int_mm where that takes them, which needs more than 16 rows (fewer are
padded) and K and N in multiples of 8, or as float32, where sums are exact up to 2^24. Not differentiable.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import UserError
from tightfit.kernels.mlp.glu import glu
from tightfit.kernels.operators import as_rows
from tightfit.kernels.quantized.rounded_matmul import LARGEST, TINIEST, WIDEST_ROW, rounded_matmul
from tightfit.kernels.triton_support import Impl, use_triton
from tightfit.models.spec import Activation

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
NEEDED = {torch.int8: (8, 0), torch.float8_e4m3fn: (9, 0)}
"""Compute capability from which Triton multiplies such codes on tensor cores."""
LEAST_ROWS = 17
ALIGNED = 8


def rounded_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    input_scale: Tensor | None = None,
    activation: Activation | Literal[""] = "",
    *,
    overlap: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """x [..., K] times the transpose of `codes` [N, K] with `scale` [N, 1].

    x is rounded by `input_scale` [1] where given, else with a scale per row. With `activation` x is gate beside up
    [..., 2K], and act(g) · u is multiplied.
    """
    width = x.shape[-1] // (2 if activation else 1)
    if codes.dtype not in LARGEST or codes.shape[1] != width or scale.shape != (codes.shape[0], 1):
        shapes = f"{list(x.shape)}, {codes.dtype} {list(codes.shape)} and scales {list(scale.shape)}"
        raise UserError(f"rounded_linear got {shapes}; give x [..., K], int8 or e4m3 codes [N, K] and scales [N, 1]")
    if use_triton(impl, x) and _is_multiplied(x, width, codes.dtype):
        made: Tensor = rounded_matmul(as_rows(x), codes, scale, input_scale, activation, overlap)
        return made.view(*x.shape[:-1], codes.shape[0])
    if activation:
        gate, up = x.chunk(2, dim=-1)
        x = glu(gate, up, activation)
    if codes.dtype != torch.int8:
        weight = (codes.to(torch.float32) * scale.to(torch.float32)).to(x.dtype)
        return F.linear(rounded_values(x, codes.dtype, input_scale), weight)
    rows, row_scale = rounded_rows(x.reshape(-1, x.shape[-1]), codes.dtype, input_scale)
    sums = _products(rows, codes) * row_scale * scale.T.to(torch.float32)
    return sums.to(x.dtype).view(*x.shape[:-1], codes.shape[0])


def rounded_linear_eager(x: Tensor, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None) -> Tensor:
    """The reference: both factors rounded, expanded and multiplied as float32."""
    rows, row_scale = rounded_rows(x.reshape(-1, x.shape[-1]), codes.dtype, input_scale)
    made = F.linear(rows.to(torch.float32) * row_scale, codes.to(torch.float32) * scale.to(torch.float32))
    return made.to(x.dtype).view(*x.shape[:-1], codes.shape[0])


def rounded_rows(x: Tensor, kind: torch.dtype, known_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., K] as codes of `kind` and the float32 scales [..., 1] of its rows, or `known_scale` [1] of all rows."""
    wide, largest = x.to(torch.float32), LARGEST[kind]
    if known_scale is not None:
        scale = known_scale.to(torch.float32)
    else:
        most = wide.new_full((), largest)  # a tensor: by a number CUDA multiplies with its reciprocal, a bit off
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=TINIEST) / most
    ratio = wide * (1 / scale)
    if kind == torch.int8:
        return ratio.round().clamp(-largest - 1, largest).to(kind), scale
    return ratio.clamp(-largest, largest).to(kind), scale


def rounded_values(x: Tensor, kind: torch.dtype, known_scale: Tensor | None = None) -> Tensor:
    """x [..., K] as its codes of `kind` stand for it."""
    codes, scale = rounded_rows(x, kind, known_scale)
    return (codes.to(torch.float32) * scale).to(x.dtype)


def _is_multiplied(x: Tensor, width: int, kind: torch.dtype) -> bool:
    """Whether our kernel takes x: the card has tensor cores for `kind`, and rows are short enough.

    Those of Hopper keep 14 bits of sums of 8-bit floats, which is too few where x has more than 16.
    """
    if x.is_cuda and kind != torch.int8 and x.dtype == torch.float32:
        return False
    return width <= WIDEST_ROW and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= NEEDED[kind])


def _products(rows: Tensor, codes: Tensor) -> Tensor:
    """Σ_k of products of integers, [M, N], as float32."""
    fits = rows.shape[1] % ALIGNED == 0 and codes.shape[0] % ALIGNED == 0
    if not (rows.is_cuda and fits):
        return F.linear(rows.to(torch.float32), codes.to(torch.float32))
    padded = F.pad(rows, (0, 0, 0, max(LEAST_ROWS - len(rows), 0)))
    return torch._int_mm(padded, codes.t())[: len(rows)].to(torch.float32)
