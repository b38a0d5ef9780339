"""Bytes of logits and loss, `plain` (all logits at once) or `fused` (a chunk of rows at a time).

`plain` is linear_cross_entropy_eager: logits, a float32 copy, its log-softmax, and as much again for gradients. `fused`
is kernels/loss/linear_cross_entropy.py: one buffer of logits, and the gradients of the hidden states and of the output
projection, both computed in forward. The projection's is a float32 sum that is cast to the weight's dtype in backward
(a frozen projection has none). Tensor ranks split the vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache

from tightfit.jobs.precision import FLOAT32_BYTES, INT64_BYTES
from tightfit.levers.policy.loss_chunks import chunk_rows, padded
from tightfit.memory.formulas.local_shape import LocalShape

STATISTICS_PER_ROW = 4
"""Float32 numbers per row (token) that the fused loss returns."""


@dataclass(frozen=True, kw_only=True)
class LossCost:
    """Bytes beyond the layers' activations: while the loss is computed, kept until backward, while backward starts."""

    logits: int
    """The part of `forward` that is logits and tensors of their size: float32 copy, log-softmax."""
    forward: int
    kept: int
    backward: int
    evaluated: int
    """While the loss is computed without gradients."""
    wide_weight_gradient: int = 0
    """The float32 sum of the output projection's gradient: part of `forward`, `kept` and `backward`."""
    rounds_in_place: bool = False
    """Whether that gradient is summed in 24 bits, of which 16 are the result: no cast (kernels/loss/split_sum.py)."""


@lru_cache(maxsize=4096)
def loss_cost(shape: LocalShape, *, fused: bool, allowed_bytes: int, sum_bytes: int = FLOAT32_BYTES) -> LossCost:
    """The loss of one micro-batch on the rank that has the head, without the final norm; fused, it sums the output
    projection's gradient in `sum_bytes` per number."""
    return _fused(shape, allowed_bytes, sum_bytes) if fused else _plain(shape)


def _fused(shape: LocalShape, allowed_bytes: int, sum_bytes: int) -> LossCost:
    hidden_bytes = shape.hidden_bytes
    statistics_bytes = shape.tokens * (STATISTICS_PER_ROW + 1) * FLOAT32_BYTES  # and their gradient
    labels_bytes = shape.tokens * 2 * INT64_BYTES  # the labels, and the copy that the kernel reads
    chunk_bytes = logits_chunk_bytes(shape, allowed_bytes, training=True)
    head_weights = shape.columns(shape.spec.vocab_size) * shape.spec.hidden_size
    wide_bytes = sum_bytes * head_weights if shape.adapted is None else 0
    # On a mesh a rank all-gathers the columns of its rows of the output projection.
    gathered_bytes = head_weights * shape.element_bytes if shape.mesh_ranks else 0
    kept_bytes = hidden_bytes + wide_bytes + gathered_bytes
    return LossCost(
        logits=chunk_bytes,
        forward=kept_bytes + chunk_bytes + hidden_bytes + statistics_bytes + labels_bytes,
        kept=kept_bytes,
        backward=kept_bytes,
        evaluated=gathered_bytes + hidden_bytes + logits_chunk_bytes(shape, allowed_bytes, training=False),
        wide_weight_gradient=wide_bytes,
        rounds_in_place=sum_bytes < FLOAT32_BYTES,
    )


def _plain(shape: LocalShape) -> LossCost:
    """Saved: log-softmax, and with a soft cap its tanh. Backward holds two float32 gradients of logits beside them."""
    count, hidden_bytes = shape.tokens * shape.columns(shape.spec.vocab_size), shape.hidden_bytes
    kept_bytes = hidden_bytes + count * FLOAT32_BYTES * (2 if shape.spec.logit_softcap else 1)
    forward_bytes = kept_bytes + count * (shape.element_bytes + FLOAT32_BYTES)
    return LossCost(
        logits=forward_bytes - hidden_bytes,
        forward=forward_bytes,
        kept=kept_bytes,
        backward=kept_bytes + 2 * FLOAT32_BYTES * count,
        evaluated=forward_bytes,
    )


def logits_chunk_bytes(shape: LocalShape, allowed_bytes: int, *, training: bool) -> int:
    """The fused loss's buffer of logits: `allowed_bytes` and, in training, as much as the narrow gradient of the weight
    takes, which is allocated after the buffer is freed."""
    columns, element_bytes = shape.columns(shape.spec.vocab_size), shape.element_bytes
    has_gradient = training and shape.adapted is None and element_bytes < FLOAT32_BYTES
    free_bytes = columns * shape.spec.hidden_size * element_bytes if has_gradient else 0
    row_bytes = padded(columns) * element_bytes
    return min(shape.tokens, chunk_rows(shape.tokens, (allowed_bytes + free_bytes) // row_bytes)) * row_bytes
