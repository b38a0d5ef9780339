"""Cross entropy of logits that exist: plain steps, torch in the logits' dtype, torch.compile, Liger, Unsloth, ours."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations.case import Case, Forward, Where, compiled, imported
from benchmarks.peers.unsloth import unsloth_cross_entropy
from tightfit.kernels.loss.cross_entropy import cross_entropy, cross_entropy_eager


def cross_entropy_cases(where: Where) -> Iterator[Case]:
    """Three passes over the logits of 8192 tokens and Llama-3's vocabulary: read; read again and write the gradient."""
    rows, vocab = where.size(8192, 8), where.size(128256, 40)
    labels = torch.randint(0, vocab, (rows,), device=where.device)

    def eager(logits: Tensor) -> Tensor:
        return cross_entropy_eager(logits, labels).mean()

    def liger() -> Forward:
        function = imported("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction", "liger-kernel")
        return lambda logits: function.apply(logits.view_as(logits), labels, None)[0]

    yield Case(
        "cross_entropy",
        f"{rows}×{vocab}",
        lambda: (where.randn(rows, vocab, scale=3.0),),
        {
            "eager": lambda: eager,
            "torch": lambda: lambda logits: F.cross_entropy(logits, labels),
            "torch.compile": compiled(eager),
            "Liger": liger,
            "Unsloth": lambda: unsloth_cross_entropy(labels),
            # A view is no leaf, so its memory may be overwritten.
            "tightfit": lambda: lambda logits: cross_entropy(logits.view_as(logits), labels, reduction="mean"),
        },
        "copy",
        3 * rows * vocab * where.dtype.itemsize,
    )
