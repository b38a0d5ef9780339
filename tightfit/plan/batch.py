"""The global batch: tokens ↔ rows, and rows = micro-batch × accumulation × data ranks."""

import math
from dataclasses import dataclass

from tightfit.counted import counted, counted_tokens
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.workload import Workload

USUAL_TOKENS = (4_000_000, 66_000_000)
"""Tokens per step of large runs; the upper end leaves room for DeepSeek-V3's 1920 × 32 K."""
LARGE_RUN_RANKS = 64
"""Runs on fewer GPUs are fine-tuning or experiments, where small batches are usual too."""
MOST_ROWS = 10**12
"""Beyond this, listing the divisors takes too long."""


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


@dataclass(frozen=True)
class Batch:
    """`rows` of `sequence_length` tokens per optimizer step, `micro` at a time on each of `ranks` data ranks."""

    sequence_length: int
    micro: int
    accumulation: int
    ranks: int

    @property
    def rows(self) -> int:
        """Rows per step."""
        return self.micro * self.accumulation * self.ranks

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.rows * self.sequence_length

    def __str__(self) -> str:
        return (
            f"{counted(self.rows, 'row')} × {self.sequence_length:,} = {counted_tokens(self.tokens)} a step "
            f"= micro-batch {self.micro} × accumulation {self.accumulation} × {counted(self.ranks, 'data rank')}"
        )


def rows_of_tokens(tokens: int, sequence_length: int, gpus: int = 1) -> int:
    """Rows that hold `tokens`; where that is no whole number, the nearest multiple of the GPUs, which splits well.

    With fewer rows than GPUs: the nearest multiple of the largest power of two up to the number of rows.
    """
    if tokens < 1:
        raise UserError(f"--batch-tokens is {tokens}; give at least 1")
    rows, remainder = divmod(tokens, sequence_length)
    if remainder == 0:
        return rows
    unit = gpus if rows >= gpus else 2 ** (max(1, rows).bit_length() - 1)
    return max(unit, round(tokens / sequence_length / unit) * unit)


def splits(rows: int, sequence_length: int, ranks: int) -> list[Batch]:
    """Every micro-batch that divides the rows of a rank, with its accumulation."""
    split_rows(rows, sequence_length, 1, ranks)
    each = rows // ranks
    if each > MOST_ROWS:
        raise UserError(f"a data rank has {each:,} rows; give at most {MOST_ROWS:,}")
    return [Batch(sequence_length, micro, each // micro, ranks) for micro in divisors(each)]


def batch_of(workload: Workload, layout: Layout) -> Batch:
    """The batch of `workload` under `layout`."""
    return split_rows(workload.global_batch, workload.sequence_length, layout.micro_batch, layout.data)


def split_rows(rows: int, sequence_length: int, micro: int, ranks: int) -> Batch:
    """`rows` as micro-batch × accumulation × ranks; an error names the nearest batches that divide."""
    if rows % (micro * ranks):
        below = rows // (micro * ranks) * micro * ranks
        near = " or ".join(str(each) for each in (below, below + micro * ranks) if each)
        raise UserError(
            f"global batch {rows} is not a multiple of micro-batch {micro} × {counted(ranks, 'data rank')}; "
            f"take {near} rows"
        )
    return Batch(sequence_length, micro, rows // (micro * ranks), ranks)


def warning(tokens: int, gpus: int) -> str | None:
    """A sentence if a large run's batch is outside USUAL_TOKENS, else None."""
    low, high = USUAL_TOKENS
    if gpus < LARGE_RUN_RANKS or low <= tokens <= high:
        return None
    side = "less" if tokens < low else "more"
    return (
        f"{counted_tokens(tokens)} a step is {side} than the {low / 1e6:.0f} to {high / 1e6:.0f} M that runs on "
        f"{LARGE_RUN_RANKS} GPUs and more usually take"
    )
