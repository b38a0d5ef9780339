"""Pace: how fast steps are once they are steady, what the warm-up before that took, and how near the card's limit.

The first steps compile kernels, allocate and connect; an average over all of a short run would mostly measure those.
Warm-up is the steps before the first one that takes no more than 1.3 times the median.
The model's own operations are counted as plans count them (`plan.mfu`).
"""

from array import array
from dataclasses import dataclass, field
from statistics import median

from tightfit.errors import UserError
from tightfit.hardware.local import local_machine

STEADY_RATIO = 1.3


@dataclass
class Pace:
    """Seconds of every training step, without evaluation and saving; every step has the same number of tokens."""

    tokens_per_step: int = 0
    step_s: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, tokens: int, seconds: float) -> float:
        """Count one step; returns its tokens per second."""
        self.tokens_per_step = tokens
        self.step_s.append(seconds)
        return tokens / seconds

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(self.step_s)

    @property
    def warmup_steps(self) -> int:
        """Slow steps at the beginning."""
        if not self.step_s:
            return 0
        limit = STEADY_RATIO * median(self.step_s)
        return next(count for count, seconds in enumerate(self.step_s) if seconds <= limit)

    @property
    def warmup_seconds(self) -> float:
        """Seconds that the warm-up steps took."""
        return sum(self.step_s[: self.warmup_steps])

    @property
    def tokens_per_second(self) -> float:
        """Mean over the steps after the warm-up."""
        steady = self.step_s[self.warmup_steps :]
        return self.tokens_per_step * len(steady) / sum(steady) if steady else 0.0


def peak_flops(device_name: str, memory_bytes: int, precision: str) -> float | None:
    """The data sheet's dense rate of a card that the catalog knows; None for others and for CPUs."""
    try:
        card = local_machine(0, f"{device_name}, {memory_bytes // 2**20}").accelerator
    except UserError:
        return None
    rate: float | None = getattr(card.rates, precision.removeprefix("pure-"), None)
    return None if not rate else rate * 1e12
