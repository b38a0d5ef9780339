"""Linear cross entropy: all logits at once, torch.compile, Liger, Unsloth, cut cross entropy, ours; its GEMMs alone.

The least work is three matrix products: logits, and the gradients of hidden states and weight. Peak memory counts both
gradients for every peer, and for ours the float32 sum of the weight's, 4 · V · H bytes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.operations.case import Case, Forward, Where, compiled, imported, ready
from benchmarks.peers.unsloth import unsloth_linear_cross_entropy
from tightfit.kernels.loss.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_eager

SHAPES = ((16384, 4096, 128256), (8192, 2048, 128256), (32768, 3072, 262144))
"""Tokens, hidden size and vocabulary of Llama-3-8B, Llama-3.2-1B, and Gemma-3-sized vocabularies at a long context."""


def linear_cross_entropy_cases(where: Where) -> Iterator[Case]:
    """Mean loss, forward and backward, with both gradients."""
    for rows, hidden_size, vocab in SHAPES:
        N, H, V = where.size(rows, 8), where.size(hidden_size, 16), where.size(vocab, 40)
        labels = torch.randint(0, V, (N,), device=where.device)
        eager = partial(_eager, labels)
        yield Case(
            "linear_cross_entropy",
            f"{N}×{H}×{V}",
            partial(_inputs, where, N, H, V),
            {
                "eager": ready(eager),
                "three GEMMs alone": ready(_GemmsAlone.apply),
                "torch.compile": compiled(eager),
                "Liger": partial(_liger, labels),
                "Unsloth": partial(unsloth_linear_cross_entropy, labels),
                "CCE": partial(_cce, labels, "cce"),
                "CCE torch_compile": partial(_cce, labels, "torch_compile"),
                "tightfit": ready(partial(_ours, labels)),
                "tightfit, no bytes of its own": ready(partial(_ours, labels, chunk_bytes=0)),
                "CCE exact": partial(_cce, labels, "cce", filter_eps=None),
            },
            "gemm",
            6.0 * N * H * V,
        )


def _inputs(where: Where, N: int, H: int, V: int) -> tuple[Tensor, ...]:
    return where.randn(N, H), where.randn(V, H, scale=H**-0.5)


def _eager(labels: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return linear_cross_entropy_eager(hidden, weight, labels).mean()


def _ours(labels: Tensor, hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, reduction="mean", **options)


def _liger(labels: Tensor) -> Forward:
    name = "LigerFusedLinearCrossEntropyFunction"
    function = imported("liger_kernel.ops.fused_linear_cross_entropy", name, "liger-kernel")
    return lambda hidden, weight: function.apply(hidden, weight, labels)[0]


def _cce(labels: Tensor, impl: str, **options: Any) -> Forward:
    """Its `filter_eps` is the gradient below which it computes none; None is exact."""
    function = imported("cut_cross_entropy", "linear_cross_entropy", "cut-cross-entropy")
    return lambda hidden, weight: function(hidden, weight, labels, impl=impl, **options)


class _GemmsAlone(torch.autograd.Function):
    """The limit: what any implementation multiplies, and nothing else. Its numbers mean nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        ctx.save_for_backward(logits @ weight, logits.T @ hidden)
        return logits[0, 0].float()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.saved_tensors
