"""Causal attention with grouped heads: PyTorch's fused backends, FlexAttention, ours, and what "auto" takes of them.

The least work is 3.5 times the forward's two products over half the T × T scores.
"""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from benchmarks.operations.case import Case, Where, ready
from tightfit.kernels.attention.attention import AttentionImpl, AttentionMask, attention

TOKENS = 32768
HEADS, KV_HEADS = 32, 8
LENGTHS = (2048, 8192, 32768)
PEERS: dict[str, AttentionImpl] = {
    "cuDNN": "cudnn",
    "FlashAttention": "flash",
    "memory efficient": "efficient",
    "FlexAttention": "flex",
    "tightfit Triton": "triton",
    "tightfit": "auto",
}


def attention_cases(where: Where) -> Iterator[Case]:
    """Heads of 64 and 128 channels at three lengths, the batch such that tokens stay the same."""
    for head_dim in (64, 128):
        for length in LENGTHS:
            yield _case(where, head_dim, length)
    yield _case(where, 128, 8192, window=1024)


def _case(where: Where, head_dim: int, length: int, window: int | None = None) -> Case:
    T, D = where.size(length, 40), where.size(head_dim, 8)
    B, heads, kv_heads = where.size(TOKENS // length, 1), where.size(HEADS, 4), where.size(KV_HEADS, 2)
    mask = AttentionMask(T, T, where.device)

    def run(impl: AttentionImpl, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in (query, key, value))
        return attention(q, k, v, mask, scale=D**-0.5, window=window, impl=impl).transpose(1, 2)

    fitting = PEERS if window is None else {k: v for k, v in PEERS.items() if v in ("flex", "triton", "auto")}
    peers = {"eager" if where.tiny else "SDPA": partial(run, "eager" if where.tiny else "sdpa")}
    peers |= {name: partial(run, impl) for name, impl in fitting.items()}
    seen = T * T / 2 if window is None else T * window - window * window / 2
    return Case(
        "attention",
        f"B{B} T{T} {heads}/{kv_heads}×{D}" + (f" window {window}" if window else ""),
        lambda: tuple(where.randn(B, T, n * D) for n in (heads, kv_heads, kv_heads)),
        {name: ready(call) for name, call in peers.items()},
        "gemm",
        3.5 * 4 * B * heads * D * seen,
    )
