"""Gradients of flash attention: two kernels that each recompute the scores they need.

With P = softmax(S), O = P V and δ_i = Σ_d O_id ∂O_id:
    ∂V = Pᵀ ∂O,   ∂S_ij = P_ij (∂O_i · V_j − δ_i) · (1 − tanh²),   ∂K = scale ∂Sᵀ Q,   ∂Q = scale ∂S K
flash_attention_dkv.py holds a block of keys and walks over queries; flash_attention_dq.py holds a block of queries and
walks over keys. Seven products instead of the five of a single kernel, whose ∂Q would need atomic additions, in an
order that differs from run to run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.kernels.attention.flash_attention_dkv import key_gradient_kernel
from tightfit.kernels.attention.flash_attention_dq import query_gradient_kernel
from tightfit.kernels.attention.flash_blocks import Blocks, Problem, capability, load_rows, passes
from tightfit.kernels.triton_support import tl, triton

DELTA_ROWS = 64


@dataclass(frozen=True)
class BackwardInputs:
    """The tensors that both kernels read."""

    query: Tensor
    key: Tensor
    value: Tensor
    d_out: Tensor
    logs: Tensor
    deltas: Tensor
    problem: Problem

    def launch(self, kernel: Any, grid: tuple[int, int], outputs: tuple[Tensor, ...], blocks: Blocks) -> None:
        """Run `kernel` to write gradients into `outputs`."""
        read, problem = (self.query, self.key, self.value, self.d_out), self.problem
        (_, heads, queries, _), (kv_heads, keys) = self.query.shape, self.key.shape[1:3]
        kernel[grid](
            *read,
            self.logs,
            self.deltas,
            *problem.starts_and_ends(self.logs),
            *outputs,
            *(stride for x in (*read, *outputs) for stride in x.stride()[:3]),
            heads,
            heads // kv_heads,
            queries,
            keys,
            problem.first_position(queries, keys),
            problem.window,
            problem.scale,
            *problem.factors(),
            **problem.constants(self.query),
            BLOCK_Q=blocks.queries,
            BLOCK_K=blocks.keys,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def attend_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logs: Tensor,
    problem: Problem,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of query, key and value into `outputs`."""
    d_query, d_key, d_value = outputs
    blocks = passes(query.shape[3], query.dtype, capability(query.device))
    inputs = BackwardInputs(query, key, value, d_out, logs, _deltas(out, d_out), problem)
    write_key_gradients(inputs, d_key, d_value, blocks.key_gradients)
    write_query_gradients(inputs, d_query, blocks.query_gradients)


def write_key_gradients(inputs: BackwardInputs, d_key: Tensor, d_value: Tensor, blocks: Blocks) -> None:
    """∂K and ∂V."""
    B, kv_heads, keys, _ = d_key.shape
    inputs.launch(key_gradient_kernel, (B * kv_heads, triton.cdiv(keys, blocks.keys)), (d_key, d_value), blocks)


def write_query_gradients(inputs: BackwardInputs, d_query: Tensor, blocks: Blocks) -> None:
    """∂Q."""
    B, heads, queries, _ = d_query.shape
    inputs.launch(query_gradient_kernel, (B * heads, triton.cdiv(queries, blocks.queries)), (d_query,), blocks)


def _deltas(out: Tensor, d_out: Tensor) -> Tensor:
    B, heads, queries, D = out.shape
    deltas = torch.empty(B, heads, queries, device=out.device, dtype=torch.float32)
    delta_kernel[(B * heads, triton.cdiv(queries, DELTA_ROWS))](
        out,
        d_out,
        deltas,
        *out.stride()[:3],
        *d_out.stride()[:3],
        heads,
        queries,
        D=D,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_Q=DELTA_ROWS,
    )
    return deltas


@triton.jit(do_not_specialize=["heads", "queries"])
def delta_kernel(  # type: ignore[no-untyped-def]
    out,
    d_out,
    deltas,
    o_batch,
    o_head,
    o_row,
    g_batch,
    g_head,
    g_row,
    heads,
    queries,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """δ_i = O_i · ∂O_i."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, columns = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    o = load_rows(out + batch * o_batch + head * o_head, o_row, rows, queries, columns, D, BLOCK_D, True)
    g = load_rows(d_out + batch * g_batch + head * g_head, g_row, rows, queries, columns, D, BLOCK_D, True)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(deltas + (batch * heads + head) * queries + rows, delta, mask=rows < queries)
