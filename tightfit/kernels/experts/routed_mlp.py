"""A routed MLP: every token through its chosen experts, in grouped products, without waiting for the host.

    y[t] = Σ_j w[t, j] · down_e(p),  p = act(gate_e(x)) · up_e(x),  e = chosen[t, j]

Rows (a token and one of its experts) are sorted by expert, so an expert's rows are consecutive. Dropless without a
capacity: every row is computed, whatever the load; how the rows are spread over experts never leaves the device. With a
capacity, rows of an expert beyond it are dropped. The others are packed; the host does not know their number either, so
buffers have the largest size possible, and rows behind the last expert's are neither computed nor read.

Saved for backward: x, the experts' gate and up [rows, F], the routing weights, and where each row came from. Neither
copies of tokens nor experts' results are saved: tokens are gathered again, and a routing weight's gradient needs no
result,

    dw[t, j] = ⟨dy[t], down_e(p)⟩ = ⟨dy[t] · Wdown_e, p⟩,

whose left factor the gradient of p needs anyway. From it one kernel computes dw, and d_gate, d_up and w · p (for the
gradient of the down projection), which it writes over gate, up and the left factor. A kernel with a program per token
adds up the token's results in the order of its experts: no atomics, the same bits every time.

The classic scheme is Switch's and Mixtral's; grouped products are MegaBlocks' (Gale et al. 2022).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tightfit.errors import UserError
from tightfit.kernels.experts.gather_rows import gather_rows
from tightfit.kernels.experts.grouped_matmul import grouped_matmul, grouped_outer
from tightfit.kernels.mlp.glu import activated, factored, glu, glu_eager
from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.recomputation import is_result_wanted, left_out_when_recomputing, placeholder
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton
from tightfit.models.spec import Activation

BLOCK, WARPS = 1024, 4


class Routing(NamedTuple):
    """Where each row comes from and goes to: rows are (token, j) pairs sorted by expert."""

    tokens: Tensor
    """The token that each row is a copy of, [rows]."""
    rows: Tensor
    """The row of each token's j-th expert, [N, k]; −1 where it was dropped."""
    offsets: Tensor
    """The row after the last one of each expert, [E] int32."""
    load: Tensor
    """The number of pairs that chose each expert, dropped ones too, [E] int32."""
    drops: bool = False
    """Whether pairs may have been dropped."""


def route(chosen: Tensor, experts: int, capacity: int | None = None) -> Routing:
    """Sort the pairs of `chosen` [N, k] by expert; pairs of one expert stay in the order of tokens.

    With a `capacity` an expert takes at most that many: first choices before second ones, in the order of tokens.
    """
    narrow = torch.int16 if experts < 2**15 else torch.int32
    pairs = chosen if capacity is None else chosen.T
    ordered, order = pairs.flatten().to(narrow).sort(stable=True)
    each = torch.arange(experts, dtype=narrow, device=order.device)
    offsets = torch.searchsorted(ordered, each, right=True, out_int32=True)
    load = offsets.diff(prepend=offsets.new_zeros(1))
    if capacity is not None:
        return _within(capacity, ordered, order, offsets - load, load, chosen)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Routing(order // chosen.shape[1], rows.view_as(chosen), offsets, load)


def _within(capacity: int, ordered: Tensor, order: Tensor, starts: Tensor, load: Tensor, chosen: Tensor) -> Routing:
    """The routing with the first `capacity` pairs of each expert; `ordered` are the experts of the sorted pairs and
    `order` these pairs' indices before sorting."""
    most = min(len(order), capacity * len(load))
    kept = load.clamp(max=capacity)
    offsets = kept.cumsum(0, dtype=torch.int32)
    expert = ordered.long()
    place = torch.arange(len(order), device=order.device) - starts[expert]
    row = torch.where(place < capacity, (offsets - kept)[expert] + place, -1)
    rows = torch.empty_like(order).scatter_(0, order, row).view(chosen.shape[1], -1).T
    tokens = order.new_zeros(most + 1).scatter_(0, _or_last(row, most), order % len(chosen))[:most]
    return Routing(tokens, rows.contiguous(), offsets, load, drops=True)


def _or_last(rows: Tensor, count: int) -> Tensor:
    """`rows` with `count` for dropped ones: the index of a spare row that is never read."""
    return torch.where(rows < 0, count, rows)


def by_row(weights: Tensor, routing: Routing) -> Tensor:
    """Weights [N, k] of pairs in the order of rows; 0 for rows behind the last expert's."""
    flat, count = weights.flatten(), len(routing.tokens)
    if not routing.drops:
        return torch.zeros_like(flat).index_copy(0, routing.rows.flatten(), flat)
    return flat.new_zeros(count + 1).index_copy(0, _or_last(routing.rows, count).flatten(), flat)[:count]


def routed_mlp(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
    *,
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Σ_j weights[t, j] · expert(x[t]) for x [N, H], weights [N, k] and experts' [E, F, H], [E, F, H], [E, H, F].

    `biases` are those of gate [E, F], up [E, F] and down [E, H].
    """
    _check(x, weights, routing, gate, up, down)
    inner = (None, None) if biases is None else biases[:2]
    made: Tensor = _RoutedMlp.apply(x, weights, routing.drops, *routing[:3], gate, up, down, *inner, activation, impl)
    return made if biases is None else made + _weighted_biases(weights, routing, biases[2])


def _weighted_biases(weights: Tensor, routing: Routing, bias: Tensor) -> Tensor:
    """Σ_j weights[t, j] · bias[e]: a product of [N, E] and [E, H], which holds no row of H per expert of a token."""
    chosen = torch.searchsorted(routing.offsets, routing.rows.to(routing.offsets.dtype), right=True)
    if routing.drops:
        weights = weights.masked_fill(routing.rows < 0, 0)
    by_expert = weights.new_zeros(len(weights), len(bias)).scatter_add(1, chosen, weights)
    return by_expert @ bias


def _experts_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row, [rows]; E, the number of experts, for rows behind the last expert's."""
    return torch.searchsorted(offsets, torch.arange(rows, device=offsets.device, dtype=offsets.dtype), right=True)


def routed_mlp_eager(
    x: Tensor, weights: Tensor, chosen: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: Activation = "silu"
) -> Tensor:
    """The reference: one expert after another, its tokens picked out and added back."""
    made = torch.zeros_like(x)
    for expert in range(len(gate)):
        tokens, j = (chosen == expert).nonzero(as_tuple=True)
        product = glu_eager(x[tokens] @ gate[expert].T, x[tokens] @ up[expert].T, activation)
        made = made.index_add(0, tokens, (product @ down[expert].T) * weights[tokens, j, None])
    return made


def _check(x: Tensor, weights: Tensor, routing: Routing, gate: Tensor, up: Tensor, down: Tensor) -> None:
    fits = gate.ndim == 3 and x.shape[-1] == gate.shape[2] and gate.shape == up.shape == down.mT.shape
    if not fits or weights.shape != routing.rows.shape or len({t.dtype for t in (x, weights, gate, up, down)}) > 1:
        shapes = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, weights, gate, up, down))
        raise UserError(
            f"routed_mlp got {shapes}; give x [N, H], weights [N, k] and experts' [E, F, H], [E, F, H], [E, H, F] of "
            "one dtype"
        )


class _RoutedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        drops: bool,
        tokens: Tensor,
        rows: Tensor,
        offsets: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Any,
        impl: Any,
    ) -> Tensor:
        copies = gather_rows(x, tokens, impl=impl)
        gate, up = (grouped_matmul(copies, w.mT, offsets, impl=impl) for w in (gate_weight, up_weight))
        del copies
        ctx.experts = len(gate_weight)
        if gate_bias is not None and up_bias is not None:
            expert = _experts_of_rows(offsets, len(gate)).clamp(max=len(gate_bias) - 1)
            gate, up = gate.add_(gate_bias[expert]), up.add_(up_bias[expert])
        ctx.save_for_backward(x, weights, tokens, rows, offsets, gate, up, gate_weight, up_weight, down_weight)
        ctx.activation, ctx.impl, ctx.drops = activation, impl, drops
        if not is_result_wanted():
            return placeholder(x, x.shape[-1])
        with left_out_when_recomputing():
            made = grouped_matmul(glu(gate, up, activation, impl=impl), down_weight.mT, offsets, impl=impl)
        return combine(made, None, weights, rows, impl=impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, tokens, rows, offsets, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        impl, wanted = ctx.impl, ctx.needs_input_grad
        dy_rows = gather_rows(dy, tokens, impl=impl)
        d_product = grouped_matmul(dy_rows, down_weight, offsets, impl=impl)
        d_gate, d_up, product, d_weights = _row_gradients(ctx, d_product, gate, up, weights, rows)
        d_down = grouped_outer(dy_rows, product, offsets, impl=impl) if wanted[8] else None
        del dy_rows, product, d_product
        copies = gather_rows(x, tokens, impl=impl) if wanted[6] or wanted[7] else None
        d_gate_weight = grouped_outer(d_gate, copies, offsets, impl=impl) if wanted[6] and copies is not None else None
        d_up_weight = grouped_outer(d_up, copies, offsets, impl=impl) if wanted[7] and copies is not None else None
        del copies
        dx = None
        if wanted[0]:
            parts = (
                grouped_matmul(d_gate, gate_weight, offsets, impl=impl),
                grouped_matmul(d_up, up_weight, offsets, impl=impl),
            )
            dx = combine(*parts, None, rows, impl=impl)
        d_biases = _bias_gradients(ctx, d_gate, d_up, offsets) if wanted[9] else (None, None)
        return dx, d_weights, None, None, None, None, d_gate_weight, d_up_weight, d_down, *d_biases, None, None


def _bias_gradients(ctx: Any, d_gate: Tensor, d_up: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over each expert's rows, as products with [E, rows] of zeros and ones: the same bits every time."""
    expert, experts = _experts_of_rows(offsets, len(d_gate)), ctx.experts
    if ctx.drops:  # rows behind the last expert's are uninitialised, and 0 · NaN is NaN
        d_gate, d_up = (d.masked_fill((expert == experts)[:, None], 0) for d in (d_gate, d_up))
    members = (expert == torch.arange(experts, device=expert.device)[:, None]).to(d_gate.dtype)
    return members @ d_gate, members @ d_up


def _row_gradients(
    ctx: Any, d_product: Tensor, gate: Tensor, up: Tensor, weights: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_gate, d_up and w · p by rows, and dw [N, k]; over gate, up and d_product unless the graph is kept."""
    at = _or_last(rows, len(gate)) if ctx.drops else rows
    blank = weights.new_zeros if ctx.drops else weights.new_empty
    by_row = blank(len(gate) + ctx.drops).index_copy_(0, at.flatten(), weights.flatten())[: len(gate)]
    if not use_triton(ctx.impl, gate):
        d_gate, d_up, product, d_by_row = _row_gradients_eager(d_product, gate, up, by_row, ctx.activation)
    else:
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        d_gate, d_up = (torch.empty_like(gate), torch.empty_like(up)) if kept else (gate, up)
        d_by_row = torch.empty_like(by_row)
        _row_gradients_(d_product, gate, up, by_row, d_gate, d_up, d_by_row, ctx.activation)
        product = d_product
    d_weights = d_by_row[rows.clamp(min=0)].masked_fill(rows < 0, 0) if ctx.drops else d_by_row[rows]
    return d_gate, d_up, product, d_weights


def _row_gradients_eager(
    d_product: Tensor, gate: Tensor, up: Tensor, by_row: Tensor, activation: Activation
) -> tuple[Tensor, ...]:
    """`_row_gradients` in plain torch; float32 until the end, as in the kernel."""
    d_product, by_row = d_product.float(), by_row.float()[:, None]
    with torch.enable_grad():
        leaves = gate.detach().float().requires_grad_(), up.detach().float().requires_grad_()
        product = glu_eager(*leaves, activation)
    d_gate, d_up = torch.autograd.grad(product, leaves, d_product * by_row)
    product = product.detach()
    made = d_gate, d_up, product * by_row, (d_product * product).sum(-1)
    return tuple(each.to(gate.dtype) for each in made)


@triton.jit
def _row_gradients_kernel(  # type: ignore[no-untyped-def]
    d_product_ptr,
    gate_ptr,
    up_ptr,
    weight_ptr,
    d_gate_ptr,
    d_up_ptr,
    d_weight_ptr,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here, at = at < width, row * width + at
        d_product = tl.load(d_product_ptr + at, mask=here, other=0.0).to(tl.float32)
        up, d_factor = factored(tl.load(up_ptr + at, mask=here, other=0.0).to(tl.float32), ACTIVATION)
        value, slope = activated(tl.load(gate_ptr + at, mask=here, other=0.0).to(tl.float32), ACTIVATION)
        d_weight += d_product * value * up
        tl.store(d_gate_ptr + at, (weight * d_product * up * slope).to(d_gate_ptr.dtype.element_ty), mask=here)
        tl.store(d_up_ptr + at, (weight * d_product * value * d_factor).to(d_up_ptr.dtype.element_ty), mask=here)
        tl.store(d_product_ptr + at, (weight * value * up).to(d_product_ptr.dtype.element_ty), mask=here)
    tl.store(d_weight_ptr + row, tl.sum(d_weight, 0).to(d_weight_ptr.dtype.element_ty))


def _launch_row_gradients(
    d_product: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    d_gate: Tensor,
    d_up: Tensor,
    d_weight: Tensor,
    activation: str,
) -> None:
    if not gate.numel():
        return
    block = min(BLOCK, triton.next_power_of_2(gate.shape[1]))
    with on_device_of(gate):
        _row_gradients_kernel[(gate.shape[0],)](
            d_product,
            gate,
            up,
            weight,
            d_gate,
            d_up,
            d_weight,
            gate.shape[1],
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=WARPS,
        )


_row_gradients_ = operator(
    "routed_mlp_row_gradients_(Tensor(a!) d_product, Tensor gate, Tensor up, Tensor weight, Tensor(b!) d_gate, "
    "Tensor(c!) d_up, Tensor(d!) d_weight, str activation) -> ()",
    _launch_row_gradients,
    lambda *arguments: None,
)


def combine(a: Tensor, b: Tensor | None, weights: Tensor | None, rows: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Σ_j w[t, j] · (a + b)[rows[t, j]] for a and b [rows, H]: every token's rows added up; weights of None are 1.

    Rows of −1 are left out.
    """
    if use_triton(impl, a):
        return _combine(a, b, weights, rows)
    at = rows.clamp(min=0)
    picked = a[at].float() if b is None else a[at].float() + b[at]
    picked = picked.masked_fill((rows < 0)[..., None], 0)
    return (picked.sum(1) if weights is None else (picked * weights[..., None]).sum(1)).to(a.dtype)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    weight_ptr,
    rows_ptr,
    out_ptr,
    per_token,
    width,
    HAS_B: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(per_token):
        row = tl.load(rows_ptr + token * per_token + j).to(tl.int64)
        found = at < tl.where(row >= 0, width, 0)
        row = row * width
        value = tl.load(a_ptr + row + at, mask=found, other=0.0).to(tl.float32)
        if HAS_B:
            value += tl.load(b_ptr + row + at, mask=found, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weight_ptr + token * per_token + j).to(tl.float32)
        total += value
    tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=here)


def _run_combine(a: Tensor, b: Tensor | None, weights: Tensor | None, rows: Tensor) -> Tensor:
    count, per_token, width = *rows.shape, a.shape[1]
    out = a.new_empty(count, width)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        with on_device_of(a):
            _combine_kernel[(count, triton.cdiv(width, block))](
                a,
                b,
                None if weights is None else weights.contiguous(),
                rows,
                out,
                per_token,
                width,
                HAS_B=b is not None,
                HAS_WEIGHTS=weights is not None,
                BLOCK=block,
                num_warps=WARPS,
            )
    return out


_combine = operator(
    "combine_rows(Tensor a, Tensor? b, Tensor? weights, Tensor rows) -> Tensor",
    _run_combine,
    lambda a, b, weights, rows: a.new_empty(rows.shape[0], a.shape[1]),
)
