"""The global batch: tokens ↔ rows, and rows = micro-batch × accumulation × data ranks."""

from dataclasses import dataclass

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.workload import Workload

USUAL_TOKENS = (4_000_000, 66_000_000)
"""What large runs take per step; the upper end leaves room for DeepSeek-V3's 1920 × 32 K."""
LARGE_RUN_RANKS = 64
"""Fewer GPUs than this are fine-tuning or learning, where small batches are usual too."""


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
            f"{self.rows:,} rows × {self.sequence_length:,} = {self.tokens / 1e6:.3g} M tokens a step "
            f"= micro-batch {self.micro} × accumulation {self.accumulation} × {self.ranks} data ranks"
        )


def rows_of_tokens(tokens: int, sequence_length: int) -> int:
    """Whole rows nearest to `tokens`, at least one."""
    if tokens < 1:
        raise UserError(f"--batch-tokens is {tokens}; give at least 1")
    return max(1, round(tokens / sequence_length))


def batch_of(workload: Workload, layout: Layout) -> Batch:
    """How `layout` works through the batch of `workload`."""
    return split_rows(workload.global_batch, workload.sequence_length, layout.micro_batch, layout.data)


def split_rows(rows: int, sequence_length: int, micro: int, ranks: int) -> Batch:
    """`rows` as micro-batch × accumulation × ranks; an error names the nearest batches that divide."""
    if rows % (micro * ranks):
        below = rows // (micro * ranks) * micro * ranks
        near = " or ".join(str(each) for each in (below, below + micro * ranks) if each)
        raise UserError(
            f"global batch {rows} is not a multiple of micro-batch {micro} × {ranks} data ranks; take {near} rows"
        )
    return Batch(sequence_length, micro, rows // (micro * ranks), ranks)


def warning(tokens: int, gpus: int) -> str | None:
    """One sentence where a large run's batch is outside of what such runs take."""
    low, high = USUAL_TOKENS
    if gpus < LARGE_RUN_RANKS or low <= tokens <= high:
        return None
    side = "less" if tokens < low else "more"
    return (
        f"{tokens / 1e6:.3g} M tokens a step is {side} than the {low / 1e6:.0f} to {high / 1e6:.0f} M that runs on "
        f"{LARGE_RUN_RANKS} GPUs and more usually take"
    )
