"""Logits and loss: in full, or a chunk at a time.

`plain` is linear_cross_entropy_eager: logits, a float32 copy, its log-softmax, and as much again for gradients. `fused`
is kernels/linear_cross_entropy.py with its chunks (kernels/logit_chunks.py, whose constants are repeated here because
this file must not import torch; a test compares them): one buffer of logits, the gradient of the hidden states, and
the weight's gradient as a float32 sum which becomes a tensor of the weight's dtype in backward.
Tensor ranks split the vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache

from tightfit.memory.formulas.share import Share, ceil
from tightfit.models.spec import ModelSpec

ALIGNMENT, TILE_ROWS = 64, 256
WIDE = 4
STATISTICS = 4
"""Float32 numbers per row that the fused loss returns."""
INDEX = 8


@dataclass(frozen=True)
class LossCost:
    """Bytes beyond the layers' activations: while the loss is computed, kept until backward, while backward starts."""

    logits: int
    """Of `forward`: the logits themselves, with what is made of them."""
    forward: int
    kept: int
    backward: int
    weight_gradient_copies: int
    """Bytes of the output weight's gradient in float32, of `forward`, `kept` and `backward`."""


def logits_bytes(rows: int, length: int, vocab_size: int, element_bytes: int) -> int:
    """All logits of [rows, length, vocab_size]; the gradient is as large again."""
    return rows * length * vocab_size * element_bytes


def padded(columns: int) -> int:
    """Elements from one row of a chunk's logits to the next."""
    return ceil(columns, ALIGNMENT) * ALIGNMENT


def chunk_rows(total: int, most: int) -> int:
    """Rows per chunk, at most `most`, of as few chunks of one size as that allows."""
    if most >= total or most < TILE_ROWS:
        return max(1, min(most, total))
    chunks = ceil(total, most // TILE_ROWS * TILE_ROWS)
    return ceil(total, chunks * TILE_ROWS) * TILE_ROWS


def chunk_bytes(
    tokens: int, columns: int, hidden_size: int, element_bytes: int, allowed_bytes: int, *, training: bool = True
) -> int:
    """The fused loss's buffer of logits: what is allowed, and what fits where the weight's gradient will be."""
    free = columns * hidden_size * element_bytes if training and element_bytes < WIDE else 0
    most = (allowed_bytes + free) // (padded(columns) * element_bytes)
    return min(chunk_rows(tokens, most), tokens) * padded(columns) * element_bytes


@lru_cache(maxsize=4096)
def loss_cost(spec: ModelSpec, share: Share, *, fused: bool, allowed_bytes: int) -> LossCost:
    """Of one micro-batch on a rank that computes the loss; the final norm is not part of it."""
    columns = ceil(spec.vocab_size, share.tensor)
    return _fused(spec, columns, share, allowed_bytes) if fused else _plain(spec, columns, share)


def _fused(spec: ModelSpec, columns: int, share: Share, allowed_bytes: int) -> LossCost:
    hidden = share.tokens * spec.hidden_size * share.element_bytes
    numbers = (STATISTICS + 1) * WIDE * share.tokens + 2 * INDEX * share.tokens
    buffer = chunk_bytes(share.tokens, columns, spec.hidden_size, share.element_bytes, allowed_bytes)
    wide = WIDE * columns * spec.hidden_size
    return LossCost(
        logits=buffer,
        forward=buffer + 2 * hidden + numbers + wide,
        kept=hidden + wide,
        backward=hidden + wide,
        weight_gradient_copies=wide,
    )


def _plain(spec: ModelSpec, columns: int, share: Share) -> LossCost:
    """Log-softmax is kept, and the capped logits' tanh; backward holds two gradients beside them."""
    count, hidden = share.tokens * columns, share.tokens * spec.hidden_size * share.element_bytes
    kept = count * WIDE * (2 if spec.logit_softcap else 1)
    forward = count * (share.element_bytes + WIDE) + kept
    return LossCost(
        logits=forward, forward=forward + hidden, kept=kept + hidden, backward=kept + 2 * WIDE * count + hidden,
        weight_gradient_copies=0,
    )  # fmt: skip
