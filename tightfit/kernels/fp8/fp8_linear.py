"""A linear layer with fp8 GEMMs; `fp8_codes.py` defines formats and scales.

The result and all gradients are in x's dtype. Saved for backward is xᵀ in fp8, half of what a plain layer saves, or x
itself with scales per row, where dW is an ordinary GEMM. Hopper's fast accumulation (`fast`) is used for y and dx; dW,
a sum over all tokens, is accumulated in float32. Limits: sizes in multiples of 16; bf16 on GPUs. Lossy: see
benchmarks/fp8_convergence.py for what that costs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tightfit.errors import UserError
from tightfit.kernels.fp8.fp8_codes import E5M2, Operand, SharedInput, WeightCodes, quantized
from tightfit.kernels.fp8.fp8_matmul import fp8_matmul


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, codes: WeightCodes, shared: SharedInput) -> Tensor:
    """x Wᵀ + bias for x [..., K] and weight [N, K]."""
    refuse_dtype(x)
    return _Fp8Linear.apply(x, weight, bias, codes, shared, torch.is_grad_enabled())


def refuse_dtype(x: Tensor) -> None:
    """Refuse activations that are not bf16 on GPUs: fp8 GEMMs write bf16."""
    if x.is_cuda and x.dtype != torch.bfloat16:
        raise UserError(
            f"levers.matmul asks for fp8, which computes in bf16, but activations are {x.dtype}; set precision to bf16 "
            "or pure-bf16, or levers.matmul to native"
        )


def weight_gradient(dy: Tensor, dy_turned: Operand, x: Tensor | Operand) -> Tensor:
    """dyᵀ · x: an fp8 GEMM of transposed codes, or an ordinary one where x is not quantized."""
    if isinstance(x, Tensor):
        return dy.t() @ x
    return fp8_matmul(dy_turned.codes, x.codes, dy_turned.scale, x.scale, dy.dtype, fast=False)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: WeightCodes,
        shared: SharedInput,
        backward: bool,
    ) -> Tensor:
        x_codes = shared.codes(x, transposed=backward and weight.requires_grad)
        own = codes.forward(weight, backward_follows=backward and x.requires_grad)
        y = fp8_matmul(x_codes.plain.codes, own.codes, x_codes.plain.scale, own.scale, x.dtype)
        ctx.codes, ctx.shape = codes, x.shape
        ctx.save_for_backward(weight, *((x,) if codes.scaling == "row" else x_codes.transposed))
        y = y.view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        weight, *kept = ctx.saved_tensors
        codes: WeightCodes = ctx.codes
        rows = dy.reshape(-1, dy.shape[-1])
        dy_codes = quantized(rows, codes.scaling, E5M2, transposed=wants_weight)
        dx = d_weight = None
        if wants_x:
            own = codes.backward(weight)
            dx = fp8_matmul(dy_codes.plain.codes, own.codes, dy_codes.plain.scale, own.scale, dy.dtype).view(ctx.shape)
        if wants_weight:
            x = kept[0].reshape(-1, kept[0].shape[-1]) if codes.scaling == "row" else Operand(*kept)
            d_weight = weight_gradient(rows, dy_codes.transposed, x)
        return dx, d_weight, rows.sum(0) if wants_bias else None, None, None, None
