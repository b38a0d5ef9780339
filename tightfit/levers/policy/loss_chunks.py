"""How many rows of logits the fused loss holds at a time (kernels/logit_chunks.py)."""

ALIGNMENT = 64
"""Rows of logits start at multiples of 128 bytes (in bf16), whatever the vocabulary: GEMMs on odd strides crawl."""
TILE_ROWS = 256
"""Chunks are whole tiles of the GEMMs; a ragged one costs as much as a whole one."""
DISTILLATION_BUFFERS = 6
"""Wide copies of a chunk of logits that kernels/linear_distillation.py holds at once: of two models, with gradients."""


def padded(columns: int) -> int:
    """Elements from one row of logits to the next."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def chunk_rows(total: int, most: int) -> int:
    """Rows per chunk, at most `most`, of as few chunks of one size as that allows."""
    if most >= total or most < TILE_ROWS:
        return max(1, min(most, total))
    chunks = -(-total // (most // TILE_ROWS * TILE_ROWS))
    return -(-total // (chunks * TILE_ROWS)) * TILE_ROWS
