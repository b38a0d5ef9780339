"""How many rows of logits the fused loss holds at a time (kernels/loss/logit_chunks.py)."""

from dataclasses import dataclass

from tightfit.jobs.precision import FLOAT32_BYTES

ALIGNMENT = 64
"""Rows of logits start at multiples of 128 bytes (in bf16), whatever the vocabulary: GEMMs on odd strides crawl."""
TILE_ROWS = 256
"""Chunks are whole tiles of the GEMMs; a ragged one costs as much as a whole one."""
MOST_NARROW_CHUNKS = 16
TAUGHT_ROWS = 256
"""Most rows of a teacher's logits that exist at once. They are done with once they are read, and 256 fill an H200 (two
programs of `pair_row_kernel` a multiprocessor); the fewer they are, the more rows of the student's fit."""
SPLIT_SUM_BYTES = 3
"""Bytes per number of a sum in 24 bits."""
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


@dataclass(frozen=True, kw_only=True)
class DistillationChunks:
    """What the fused distillation loss holds at a time, and bytes per element of the weight gradient's sum."""

    rows: int
    """Rows of a chunk: of the student's logits, which become their gradient."""
    taught_rows: int
    """Rows of the teacher's logits, within a chunk."""
    sum_bytes: int
    taught_bytes: int
    """The memory of the teacher's logits, and after them of a block of the weight's gradient (`product_rows`)."""
    row_bytes: int
    """One row of one model's logits."""

    @property
    def held_bytes(self) -> int:
        """Both models' logits."""
        return self.rows * self.row_bytes + self.taught_bytes


def distillation_chunks(
    total: int, columns: int, width: int, element_bytes: int, chunk_bytes: int, *, narrow: bool
) -> DistillationChunks:
    """Chunks of `total` rows; `narrow`: student and its weight [columns, width] are bf16 and the kernels run.

    Sums in 24 bits take half the memory of float32 sums that are cast at the end (3 bytes, not 4 + 2), and twice the
    traffic a chunk, so they are for few chunks: 16 of them cost about as much as a quarter of the loss itself.
    """
    row_bytes, weight_bytes = padded(columns) * element_bytes, columns * width * element_bytes
    rows, taught_rows = _pair_rows(total, max(chunk_bytes, weight_bytes // 2) // row_bytes)
    if narrow and 0 < total <= MOST_NARROW_CHUNKS * rows:
        product_bytes = product_rows(columns, width) * width * FLOAT32_BYTES
        taught_bytes, sum_bytes = max(taught_rows * row_bytes, product_bytes), SPLIT_SUM_BYTES
    else:
        free_bytes = weight_bytes if element_bytes < FLOAT32_BYTES else 0  # for the 16-bit gradient, not there yet
        rows, taught_rows = _pair_rows(total, (chunk_bytes + free_bytes) // row_bytes)
        taught_bytes, sum_bytes = taught_rows * row_bytes, FLOAT32_BYTES
    return DistillationChunks(
        rows=rows, taught_rows=taught_rows, sum_bytes=sum_bytes, taught_bytes=taught_bytes, row_bytes=row_bytes
    )


def _pair_rows(total: int, most: int) -> tuple[int, int]:
    """Rows of the student's and of the teacher's logits that exist at once, `most` together (one each at least)."""
    taught_rows = max(1, min(total, TAUGHT_ROWS, most // 2))
    rows = max(1, chunk_rows(total, most - taught_rows))
    return rows, min(taught_rows, rows)


def product_rows(columns: int, width: int) -> int:
    """Rows of the gradient of a weight [columns, width] that are added to a 24-bit sum at a time: whole tiles."""
    tiles = max(1, SPLIT_PRODUCT_BYTES // (width * FLOAT32_BYTES) // TILE_ROWS)
    return min(columns, tiles * TILE_ROWS)


def plain_row_bytes(columns: int, element_bytes: int) -> int:
    """Bytes of one row of a chunk without the kernel: float32 copies of both models' logits."""
    return PLAIN_DISTILLATION_BUFFERS * columns * max(element_bytes, FLOAT32_BYTES)
