"""A gated MLP with fp8 GEMMs. As in `gated_mlp.py`, gate and up are saved for backward, their product is not.

    y = p · Wdᵀ,  p = act(g) · u,  g = x · Wgᵀ,  u = x · Wuᵀ

The kernels that compute p, and in backward the gradients of g and u (in place), also find the largest magnitudes, so
that quantizing these widest tensors needs no extra pass for their scale. x is quantized once for gate and up.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tightfit.kernels.fp8.fp8_codes import E4M3, E5M2, Operand, Scaling, WeightCodes, quantized
from tightfit.kernels.fp8.fp8_linear import refuse_dtype, weight_gradient
from tightfit.kernels.fp8.fp8_matmul import fp8_matmul
from tightfit.kernels.mlp.glu import activated, glu_eager, refuse_changed_up
from tightfit.kernels.operators import empty_like, on_device_of, operator
from tightfit.kernels.recomputation import is_result_wanted, left_out_when_recomputing, placeholder
from tightfit.kernels.triton_support import tl, triton, use_triton
from tightfit.models.spec import Activation

BLOCK, WARPS = 4096, 8
Codes = tuple[WeightCodes, WeightCodes, WeightCodes]
"""The codes of gate, up and down."""


def fp8_gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: Activation, codes: Codes) -> Tensor:
    """down(act(gate(x)) · up(x)) for x [..., H] and weights [F, H], [F, H], [H, F]."""
    refuse_dtype(x)
    refuse_changed_up(activation, "fp8_gated_mlp")
    return _Fp8GatedMlp.apply(x, gate, up, down, activation, codes, torch.is_grad_enabled())


class _Fp8GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        activation: Any,
        codes: Codes,
        backward: bool,
    ) -> Tensor:
        scaling, rows = codes[0].scaling, x.reshape(-1, x.shape[-1])
        x_codes = quantized(rows, scaling, E4M3, transposed=backward)
        gate, up = (
            _product(x_codes.plain, own.forward(w, backward_follows=backward and x.requires_grad), x.dtype)
            for own, w in zip(codes, (gate_weight, up_weight), strict=False)
        )
        kept = (rows,) if scaling == "row" else x_codes.transposed
        ctx.save_for_backward(gate, up, gate_weight, up_weight, down_weight, *kept)
        ctx.activation, ctx.codes, ctx.shape = activation, codes, x.shape
        if not is_result_wanted():
            return placeholder(x, down_weight.shape[0])
        product, largest = _glu(gate, up, activation)
        p_codes = quantized(product, scaling, E4M3, transposed=False, amax=largest)
        with left_out_when_recomputing():
            y = _product(p_codes.plain, codes[2].forward(down_weight, backward_follows=backward), x.dtype)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, gate_weight, up_weight, down_weight, *kept = ctx.saved_tensors
        codes: Codes = ctx.codes
        scaling = codes[0].scaling
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad[:4]
        rows = dy.reshape(-1, dy.shape[-1])
        dy_codes = quantized(rows, scaling, E5M2, transposed=wants_down)
        product = _product(dy_codes.plain, codes[2].backward(down_weight), dy.dtype)  # dp, until overwritten by p
        d_gate, d_up, largest = _gradients_and_product(product, gate, up, ctx.activation)
        d_down = _down_gradient(scaling, rows, dy_codes.transposed, product, largest[2]) if wants_down else None
        del product, dy_codes
        x = kept[0] if scaling == "row" else Operand(*kept)
        found_x, found = [], []
        for gradient, w, own, wanted, amax in zip(
            (d_gate, d_up), (gate_weight, up_weight), codes, (wants_gate, wants_up), largest, strict=False
        ):
            gradient_codes = quantized(gradient, scaling, E5M2, transposed=wanted, amax=amax)
            found.append(weight_gradient(gradient, gradient_codes.transposed, x) if wanted else None)
            if wants_x:
                found_x.append(_product(gradient_codes.plain, own.backward(w), dy.dtype))
        dx = found_x[0].add_(found_x[1]).view(ctx.shape) if wants_x else None
        return dx, *found, d_down, None, None, None


def _product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    return fp8_matmul(a.codes, b.codes, a.scale, b.scale, dtype)


def _down_gradient(scaling: Scaling, dy: Tensor, dy_turned: Operand, product: Tensor, largest: Tensor) -> Tensor:
    """dyᵀ · p."""
    if scaling == "row":
        return weight_gradient(dy, dy_turned, product)
    return weight_gradient(dy, dy_turned, quantized(product, scaling, E4M3, transposed=True, amax=largest).transposed)


def _gradients_and_product(
    d_product: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, over them unless the graph is kept; leaves the product in d_product."""
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    d_gate, d_up = (torch.empty_like(gate), torch.empty_like(up)) if kept else (gate, up)
    largest = _glu_backward_(d_product, gate, up, d_gate, d_up, activation)
    return d_gate, d_up, largest


def _run(gate: Tensor, up: Tensor, activation: Any) -> tuple[Tensor, Tensor]:
    if use_triton("auto", gate):
        return _launch(gate, up, activation)
    product = glu_eager(gate, up, activation)
    return product, product.abs().amax().float()


def _launch(gate: Tensor, up: Tensor, activation: Any) -> tuple[Tensor, Tensor]:
    product, largest = _fake(gate, up, activation)
    with on_device_of(gate):
        _forward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            gate, up, product, largest.zero_(), gate.numel(), ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS
        )
    return product, largest


def _fake(gate: Tensor, up: Tensor, activation: Any) -> tuple[Tensor, Tensor]:
    return empty_like(gate), gate.new_empty((), dtype=torch.float32)


def _run_backward(d_product: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor, activation: Any) -> Tensor:
    if use_triton("auto", gate):
        return _launch_backward(d_product, gate, up, d_gate, d_up, activation)
    with torch.enable_grad():
        leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
        product = glu_eager(*leaves, activation)
    found = torch.autograd.grad(product, leaves, d_product)
    for place, value in zip((d_gate, d_up, d_product), (*found, product.detach()), strict=True):
        place.copy_(value)
    return torch.stack([x.abs().amax().float() for x in (d_gate, d_up, d_product)])


def _launch_backward(
    d_product: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor, activation: Any
) -> Tensor:
    largest = torch.zeros(3, dtype=torch.float32, device=gate.device)
    with on_device_of(gate):
        _backward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            d_product,
            gate,
            up,
            d_gate,
            d_up,
            largest,
            gate.numel(),
            ACTIVATION=activation,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return largest


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, largest_ptr, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    value, _ = activated(tl.load(gate_ptr + at, mask=here, other=0).to(tl.float32), ACTIVATION)
    value = (value * tl.load(up_ptr + at, mask=here, other=0).to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, value, mask=here)
    tl.atomic_max(largest_ptr, tl.max(tl.abs(value.to(tl.float32)), 0))


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    d_product_ptr,
    gate_ptr,
    up_ptr,
    d_gate_ptr,
    d_up_ptr,
    largest_ptr,
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    dtype = d_product_ptr.dtype.element_ty
    d_product = tl.load(d_product_ptr + at, mask=here, other=0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=here, other=0).to(tl.float32)
    value, slope = activated(tl.load(gate_ptr + at, mask=here, other=0).to(tl.float32), ACTIVATION)
    d_gate = (d_product * up * slope).to(dtype)
    d_up = (d_product * value).to(dtype)
    product = (value * up).to(dtype)
    tl.store(d_gate_ptr + at, d_gate, mask=here)
    tl.store(d_up_ptr + at, d_up, mask=here)
    tl.store(d_product_ptr + at, product, mask=here)
    tl.atomic_max(largest_ptr, tl.max(tl.abs(d_gate.to(tl.float32)), 0))
    tl.atomic_max(largest_ptr + 1, tl.max(tl.abs(d_up.to(tl.float32)), 0))
    tl.atomic_max(largest_ptr + 2, tl.max(tl.abs(product.to(tl.float32)), 0))


_glu = operator("fp8_glu(Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)", _run, _fake)
_glu_backward_ = operator(
    "fp8_glu_backward_(Tensor(a!) d_product, Tensor gate, Tensor up, Tensor(b!) d_gate, Tensor(c!) d_up, "
    "str activation) -> Tensor",
    _run_backward,
    lambda d_product, gate, up, d_gate, d_up, activation: gate.new_empty(3, dtype=torch.float32),
)
