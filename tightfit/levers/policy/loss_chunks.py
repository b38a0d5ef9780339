"""How many rows of logits the fused loss holds at a time (kernels/loss/logit_chunks.py)."""

from dataclasses import dataclass

from tightfit.jobs.precision import FLOAT32_BYTES

ALIGNMENT = 64
"""Rows of logits start at multiples of 128 bytes (in bf16), whatever the vocabulary: GEMMs on odd strides crawl."""
TILE_ROWS = 256
"""Chunks are whole tiles of the GEMMs; a ragged one costs as much as a whole one."""
MOST_NARROW_CHUNKS = 16
SPLIT_PRODUCT_BYTES = 32 * 2**20
"""A product that is added to a 24-bit sum (kernels/loss/split_sum.py) is computed in blocks of rows of this size."""
PLAIN_DISTILLATION_BUFFERS = 6
"""Wide copies of a chunk of logits that kernels/loss/linear_distillation.py holds at once without its Triton kernel."""


def padded(columns: int) -> int:
    """Elements from one row of logits to the next."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def chunk_rows(total: int, most: int) -> int:
    """Rows per chunk, at most `most`, for the fewest chunks of equal size."""
    if most >= total or most < TILE_ROWS:
        return max(1, min(most, total))
    chunks = -(-total // (most // TILE_ROWS * TILE_ROWS))
    return -(-total // (chunks * TILE_ROWS)) * TILE_ROWS


@dataclass(frozen=True)
class DistillationChunks:
    """Rows of a chunk of the fused distillation loss, and bytes per element of the weight gradient's sum."""

    rows: int
    sum_bytes: int


def distillation_chunks(
    total: int, columns: int, width: int, element_bytes: int, chunk_bytes: int, *, narrow: bool
) -> DistillationChunks:
    """Chunks of `total` rows; `narrow`: student and its weight [columns, width] are bf16 and the kernels run.

    Sums in 24 bits take half the memory of float32 sums that are cast at the end (3 bytes, not 4 + 2), and twice the
    traffic a chunk, so they are for few chunks: 16 of them cost about as much as a quarter of the loss itself.
    """
    row_bytes = distillation_row_bytes(columns, element_bytes, fused=True)
    weight_bytes = columns * width * element_bytes
    rows = max(1, chunk_rows(total, max(chunk_bytes, weight_bytes // 2) // row_bytes))
    if narrow and -(-total // rows) <= MOST_NARROW_CHUNKS:
        return DistillationChunks(rows, sum_bytes=3)
    free_bytes = weight_bytes if element_bytes < FLOAT32_BYTES else 0  # for the 16-bit gradient, not there yet
    rows = chunk_rows(total, (chunk_bytes + free_bytes) // row_bytes)
    return DistillationChunks(max(1, rows), sum_bytes=FLOAT32_BYTES)


def distillation_row_bytes(columns: int, element_bytes: int, *, fused: bool) -> int:
    """Bytes of one row of logits of student and teacher: a buffer each, or float32 copies without the kernel."""
    return (
        2 * padded(columns) * element_bytes if fused else PLAIN_DISTILLATION_BUFFERS * columns * max(element_bytes, 4)
    )
