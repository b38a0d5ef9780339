"""How many rows of logits the fused loss holds at a time (kernels/logit_chunks.py)."""

ALIGNMENT = 64
"""Rows of logits start at multiples of 128 bytes (in bf16), whatever the vocabulary: GEMMs on odd strides crawl."""
TILE_ROWS = 256
"""Chunks are whole tiles of the GEMMs; a ragged one costs as much as a whole one."""
PLAIN_DISTILLATION_BUFFERS = 6
"""Wide copies of a chunk of logits that kernels/linear_distillation.py holds at once without its Triton kernel."""


def padded(columns: int) -> int:
    """Elements from one row of logits to the next."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def chunk_rows(total: int, most: int) -> int:
    """Rows per chunk, at most `most`, of as few chunks of one size as that allows."""
    if most >= total or most < TILE_ROWS:
        return max(1, min(most, total))
    chunks = -(-total // (most // TILE_ROWS * TILE_ROWS))
    return -(-total // (chunks * TILE_ROWS)) * TILE_ROWS


def distillation_row_bytes(columns: int, element_bytes: int, *, fused: bool) -> int:
    """What one row of logits of student and teacher takes: a buffer each, or wide copies without the kernel."""
    return (
        2 * padded(columns) * element_bytes if fused else PLAIN_DISTILLATION_BUFFERS * columns * max(element_bytes, 4)
    )
