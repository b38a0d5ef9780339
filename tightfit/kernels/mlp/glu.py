"""Gated activations (Shazeer 2020): act(gate) · up in one pass each way, and squared ReLU without a gate.

    y = act(g) · u        dg = dy · u · act'(g)        du = dy · act(g)

Plain torch saves act(g) besides g and u and makes two passes; here only g and u are saved and act is recomputed, which
costs nothing: the 8 passes over the activations, forward and backward, are bound by memory, and the arithmetic
(float32, rounded once) hides behind them.

    silu      g · σ(g)
    gelu      g · Φ(g)
    gelu_tanh g · σ(2v), v = √(2/π) · (g + 0.044715 g³): the same as g/2 · (1 + tanh v) with one exponential
    relu2     max(g, 0)²   (So et al. 2021)

gpt-oss clamps g and u and adds one to u: `swiglu_clamped` is h · σ(1.702 h) · (c + 1), where h = min(g, 7) and c is u
clamped to ±7. A kernel that takes it needs `factored` beside `activated`; others refuse it (`refuse_changed_up`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tightfit.errors import UserError
from tightfit.kernels.operators import as_rows, below_autograd, empty_like, is_dense_in_rows, on_device_of, operator
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton
from tightfit.models.spec import Activation

BLOCK = 2048
WARPS = 8

ALPHA, LIMIT = 1.702, 7.0
"""The constants of `swiglu_clamped`; written as numbers in the kernels."""


def _clamped_silu(gate: Tensor) -> Tensor:
    low = gate.clamp(max=LIMIT)
    return low * torch.sigmoid(ALPHA * low)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "swiglu_clamped": _clamped_silu,
}


def glu(
    gate: Tensor, up: Tensor, activation: Activation = "silu", *, overwrite: bool = False, impl: Impl = "auto"
) -> Tensor:
    """act(gate) · up for two tensors [..., W] of one shape and any strides (such as halves of one projection).

    With `overwrite`, backward writes the gradients over gate and up, unless they are leaves, instead of allocating.
    Nothing else may read them then (projections do not save their outputs); a second backward is refused.
    """
    _check(gate, up, activation)
    if gate.dtype == up.dtype and use_triton(impl, gate):
        return _glu(gate, up, activation, overwrite and _may_be_overwritten(gate, up))
    return glu_eager(gate, up, activation)


def relu2(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """max(x, 0)², keeping only x."""
    return _glu(x, None, "relu2", False) if use_triton(impl, x) else ACTIVATIONS["relu2"](x)


def glu_eager(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """The reference: two operations."""
    if activation == "swiglu_clamped":
        up = up.clamp(-LIMIT, LIMIT) + 1
    return ACTIVATIONS[activation](gate) * up


def refuse_changed_up(activation: str | None, name: str) -> None:
    """Refuse an activation that changes u too: kernels that multiply act(g) by u as it is would lose that."""
    if activation == "swiglu_clamped":
        raise ValueError(f"{name} has no swiglu_clamped, which also clamps up and adds one to it; use glu instead")


def _may_be_overwritten(gate: Tensor, up: Tensor) -> bool:
    return not (gate is up or gate.is_leaf or up.is_leaf or torch.compiler.is_compiling())


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise UserError(f"glu activation is {activation!r}; give one of {', '.join(ACTIVATIONS)}")
    if gate.shape != up.shape:
        raise UserError(f"glu gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; give two of one shape")


@triton.jit
def activated(g, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(g) and act'(g)."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(g)
        value = g * share
        slope = share + value * (1 - share)
    elif ACTIVATION == "gelu_tanh":
        square = g * g
        share = tl.sigmoid(1.5957691216057308 * g * (1 + 0.044715 * square))
        value = g * share
        slope = share + value * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * square)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1 + tl.erf(0.7071067811865476 * g))
        value = g * share
        slope = share + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif ACTIVATION == "swiglu_clamped":
        low = tl.minimum(g, 7.0)
        share = tl.sigmoid(1.702 * low)
        value = low * share
        slope = tl.where(g <= 7.0, share + 1.702 * value * (1 - share), 0.0)
    else:
        slope = 2 * tl.maximum(g, 0.0)
        value = 0.25 * slope * slope
    return value, slope


@triton.jit
def factored(u, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor of act(g), u or what `swiglu_clamped` makes of it, and its derivative by u."""
    if ACTIVATION == "swiglu_clamped":
        factor = tl.minimum(tl.maximum(u, -7.0), 7.0) + 1.0
        slope = tl.where((u >= -7.0) & (u <= 7.0), 1.0, 0.0)
    else:
        factor = u
        slope = tl.full(u.shape, 1.0, tl.float32)
    return factor, slope


@triton.jit
def _place(blocks):  # type: ignore[no-untyped-def]
    """The row of this program, and which of the row's `blocks` blocks it computes."""
    program = tl.program_id(0).to(tl.int64)
    return program // blocks, program % blocks


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    y_ptr,
    width,
    blocks,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = _place(blocks)
    col = block * BLOCK + tl.arange(0, BLOCK)
    here = col < width
    y, _ = activated(tl.load(gate_ptr + row * gate_stride + col, mask=here).to(tl.float32), ACTIVATION)
    if HAS_UP:
        factor, _ = factored(tl.load(up_ptr + row * up_stride + col, mask=here).to(tl.float32), ACTIVATION)
        y *= factor
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    gate_ptr,
    up_ptr,
    d_gate_ptr,
    d_up_ptr,
    width,
    blocks,
    dy_stride,
    gate_stride,
    up_stride,
    d_gate_stride,
    d_up_stride,
    ACTIVATION: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = _place(blocks)
    col = block * BLOCK + tl.arange(0, BLOCK)
    here = col < width
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=here).to(tl.float32)
    value, slope = activated(tl.load(gate_ptr + row * gate_stride + col, mask=here).to(tl.float32), ACTIVATION)
    if HAS_UP:
        up, d_factor = factored(tl.load(up_ptr + row * up_stride + col, mask=here).to(tl.float32), ACTIVATION)
        tl.store(d_up_ptr + row * d_up_stride + col, (dy * value * d_factor).to(d_up_ptr.dtype.element_ty), mask=here)
        slope *= up
    tl.store(d_gate_ptr + row * d_gate_stride + col, (dy * slope).to(d_gate_ptr.dtype.element_ty), mask=here)


def _in_rows(*tensors: Tensor) -> list[Tensor]:
    """Each tensor as [rows, W]: one long row where all are contiguous, so that only the very last block is partial."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


def _forward_fake(gate: Tensor, up: Tensor | None, activation: str, overwrite: bool) -> Tensor:
    return empty_like(gate)


def _forward(gate: Tensor, up: Tensor | None, activation: str, overwrite: bool) -> Tensor:
    y = _forward_fake(gate, up, activation, overwrite)
    if not y.numel():
        return y
    g, u = _in_rows(gate, gate if up is None else up)
    rows, width = g.shape
    blocks = -(-width // BLOCK)
    with on_device_of(g):
        _forward_kernel[(rows * blocks,)](
            g,
            u,
            y,
            width,
            blocks,
            g.stride(0),
            u.stride(0),
            ACTIVATION=activation,
            HAS_UP=up is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return y


def _launch_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, d_gate: Tensor, d_up: Tensor | None, activation: str
) -> None:
    """Write the gradients into d_gate and d_up, which are dense in rows and may be gate and up themselves."""
    if not gate.numel():
        return
    rows_of = _in_rows(dy, gate, d_gate, *(() if up is None or d_up is None else (up, d_up)))
    y, g, dg, u, du = rows_of if len(rows_of) == 5 else (*rows_of, rows_of[1], rows_of[2])
    rows, width = g.shape
    blocks = -(-width // BLOCK)
    with on_device_of(g):
        _backward_kernel[(rows * blocks,)](
            y,
            g,
            u,
            dg,
            du,
            width,
            blocks,
            y.stride(0),
            g.stride(0),
            u.stride(0),
            dg.stride(0),
            du.stride(0),
            ACTIVATION=activation,
            HAS_UP=up is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def _backward_fake(dy: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    return empty_like(gate), gate.new_empty(0) if up is None else empty_like(gate)


def _backward(dy: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    d_gate, d_up = _backward_fake(dy, gate, up, activation)
    _launch_backward(dy, gate, up, d_gate, d_up, activation)
    return d_gate, d_up


def _overwriting_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    _launch_backward(dy, gate, up, gate, up, activation)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str, overwrite: bool) -> Tensor:
        with below_autograd():
            y: Tensor = _glu(gate, up, activation, overwrite)
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.overwrite = activation, overwrite
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if ctx.overwrite and is_dense_in_rows(gate) and is_dense_in_rows(up):
            _glu_backward_(dy, gate, up, ctx.activation)
            torch.autograd.graph.increment_version((gate, up))  # a second backward pass must not find gradients here
            return gate.detach(), up.detach(), None, None
        d_gate, d_up = _glu_backward(dy, gate, up, ctx.activation)
        return d_gate, None if up is None else d_up, None, None


_glu_backward = operator(
    "glu_backward(Tensor dy, Tensor gate, Tensor? up, str activation) -> (Tensor, Tensor)", _backward, _backward_fake
)
_glu_backward_ = operator(
    "glu_backward_(Tensor dy, Tensor(a!) gate, Tensor(b!) up, str activation) -> ()",
    _overwriting_backward,
    lambda dy, gate, up, activation: None,
)
_glu = operator("glu(Tensor gate, Tensor? up, str activation, bool overwrite) -> Tensor", _forward, _forward_fake, _Glu)
