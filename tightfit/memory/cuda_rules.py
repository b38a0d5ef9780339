"""Workspaces of CUDA kernels that a trace on fake tensors cannot see, and attention as a GPU runs it.

Our own operators declare their workspaces (kernels/operators.py). Of torch's operations, those that sort hold a second
copy of keys and values. Attention on fake CPU tensors would run another kernel than on a GPU, so it is replaced by an
operation that saves the tensors that fused CUDA kernels save (query, key, value, output and logsumexp).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.operators import SCRATCH, operator

aten = torch.ops.aten
INDEX_BYTES = 8


def _embedding_scratch(grad: Any, indices: Any, *others: Any) -> int:
    """Sorted indices and their positions, and the sort's buffers of the same size."""
    return 4 * INDEX_BYTES * int(indices.numel())


def _sort_scratch(x: Any, *others: Any, **options: Any) -> int:
    return int(x.numel()) * (x.element_size() + INDEX_BYTES)


TORCH_SCRATCH: dict[Any, Callable[..., int]] = {
    aten.embedding_dense_backward.default: _embedding_scratch,
    aten.sort.stable: _sort_scratch,
}


PRODUCTS = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::addmm_",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_mm",
        "tightfit::fp8_matmul",
    )
)
"""Operations that call cuBLAS, which allocates a workspace at the first call in each thread."""


_rules: dict[int, tuple[Any, Callable[..., int] | None]] = {}
"""Cache by the operation's id, as hashing an OpOverload is slow Python; it also keeps the operation alive."""


def cuda_scratch(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Workspace bytes of `operation` on a GPU."""
    if (known := _rules.get(id(operation))) is None:
        known = _rules[id(operation)] = operation, SCRATCH.get(operation) or TORCH_SCRATCH.get(operation)
    _, rule = known
    return 0 if rule is None else rule(*arguments, **options)


def _attention_gradients(d_out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_fused_attention_backward = operator(
    "simulated_attention_backward(Tensor d_out, Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)",
    _attention_gradients,
    _attention_gradients,
)


def _attention_scratch(d_query: Tensor, d_key: Tensor) -> int:
    """Workspace of cuDNN's and FlashAttention's backward: dQ in float32, dK and dV for every query head, row sums."""
    grouped = d_query.shape[1] != d_key.shape[1]
    return d_query.numel() * (4 + 2 * d_query.element_size() * grouped) + 4 * d_query[..., 0].numel()


_attention_workspace = operator(
    "simulated_attention_workspace(Tensor d_query, Tensor d_key) -> ()",
    lambda d_query, d_key: None,
    lambda d_query, d_key: None,
    scratch_bytes=_attention_scratch,
)
"""A separate operation, because cuDNN allocates it after its results, and reserved memory depends on the order."""


def _attention_outputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


_fused_attention = operator(
    "simulated_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)",
    _attention_outputs,
    _attention_outputs,
)
"""A single operation, as on a GPU: selective checkpointing chooses by operation (levers/checkpoint_keep.py)."""


class _FusedAttention(torch.autograd.Function):
    """Saves what torch's fused kernels save; for fake tensors only, as it computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, logs = _fused_attention(query, key, value)
        ctx.save_for_backward(query, key, value, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        d_query, d_key, d_value = _fused_attention_backward(gradients[0], query, key, value)
        _attention_workspace(d_query, d_key)
        return d_query, d_key, d_value


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside the block plain causal attention is one fused operation, as on a GPU."""
    original = F.scaled_dot_product_attention

    def fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is not None:
            return original(query, key, value, attn_mask, **options)
        return _FusedAttention.apply(query, key, value)

    F.scaled_dot_product_attention = fused  # type: ignore[assignment]  # a function mode would not reach recomputation
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
