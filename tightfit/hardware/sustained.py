"""Share of its peak that a card sustains in matrix products and attention, in 16 bits, by generation and power limit.

A card whose tensor units could draw more than its power limit lowers its clock. Near that limit dynamic power grows
with about the square of the clock, so cards of one generation are told apart by their watts per TFLOP/s of peak:

    share = share of the reference card × √(watts per TFLOP/s ÷ the reference's), at most LIMIT

| generation | reference | share | from |
|---|---|---|---|
| hopper | H200, 700 W, 989 TFLOP/s | 0.678 | measured (efficiency.py) |
| ampere | A100 SXM, 400 W, 312 | 0.77 | published runs of 2 048 tokens and fewer (benchmarks/published.py) |
| ada | L40S, 350 W, 362 | 0.72 | public GEMM figures of 250 to 260 TFLOP/s |
| volta, turing | V100 SXM, 300 W, 125; Quadro RTX 6000, 295 W, 130 | 0.76, 0.7 | public GEMM figures |
| blackwell | B200, 1 000 W, 2 250 | 0.7 | public GEMM figures of 1 500 to 1 600 TFLOP/s |
| cdna2, cdna3 | MI250X die, 280 W, 191; MI300X, 750 W, 1 307 | 0.6, 0.5 | public GEMM figures |

Attention reaches less, by kernel: cuDNN's on Hopper is measured; FlashAttention-2 was written for Ampere and leaves
half of Hopper unused (measured on the H200: kernels.csv); the Triton kernel of 2023 comes from published runs.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from tightfit.hardware.accelerator import Accelerator

Generation = Literal["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "apple"]
LIMIT = 0.9
"""Largest share of the peak, reached where power is no limit, as on GeForce cards, whose tensor rate is halved."""


@dataclass(frozen=True)
class Reference:
    """A card whose sustained rate is known."""

    share: float
    watts: float
    peak_tflop_s: float

    @property
    def watts_per_tflop_s(self) -> float:
        """Power limit per TFLOP/s of peak."""
        return self.watts / self.peak_tflop_s


REFERENCES: dict[Generation, Reference] = {
    "pascal": Reference(0.8, 300, 21.2),
    "volta": Reference(0.76, 300, 125),
    "turing": Reference(0.70, 295, 130.5),
    "ampere": Reference(0.77, 400, 312),
    "ada": Reference(0.72, 350, 362),
    "hopper": Reference(671 / 989.4, 700, 989.4),
    "blackwell": Reference(0.70, 1000, 2250),
    "cdna2": Reference(0.60, 280, 191.5),
    "cdna3": Reference(0.50, 750, 1307.4),
    "apple": Reference(0.8, 90, 13.6),
}
FAMILIES: tuple[tuple[str, Generation], ...] = (
    (r"P100", "pascal"),
    (r"(V100|TITANV|QuadroGV100)", "volta"),
    (r"(RTX\d+(SFF)?Ada|RTX40|L4|L20)", "ada"),
    (r"(T4|RTX20|TITANRTX|QuadroRTX)", "turing"),
    (r"(RTX50|RTXPRO|B\d|GB\d)", "blackwell"),
    (r"(H\d|GH\d)", "hopper"),
    (r"(MI2)", "cdna2"),
    (r"(MI3)", "cdna3"),
    (r"M\d", "apple"),
)


def generation_of(card: Accelerator) -> Generation:
    """The card's generation, by its name; unknown names count as Ampere, the most common."""
    return next((generation for pattern, generation in FAMILIES if re.match(pattern, card.family)), "ampere")


def power_factor(card: Accelerator, peak_tflop_s: float) -> float:
    """Factor on the share of the card's generation: √(watts per TFLOP/s ÷ the reference's); 1 if power is unknown."""
    if card.power_w is None:
        return 1.0
    reference = REFERENCES[generation_of(card)]
    return math.sqrt(card.power_w / peak_tflop_s / reference.watts_per_tflop_s)


def product_share(card: Accelerator, peak_tflop_s: float) -> float:
    """Share of the peak that 16-bit matrix products sustain one after another."""
    return min(LIMIT, REFERENCES[generation_of(card)].share * power_factor(card, peak_tflop_s))


ATTENTION: dict[str, dict[Generation, tuple[float, float]]] = {
    "flash2": {"hopper": (0.36, 0.32), "blackwell": (0.18, 0.16)},
    "flash-triton": {"ampere": (0.40, 0.34), "hopper": (0.20, 0.17), "blackwell": (0.10, 0.09)},
}
"""Shares of the peak at long rows and heads of 128, forward and backward, by kernel; elsewhere DEFAULT_ATTENTION."""
DEFAULT_ATTENTION = 0.60, 0.52
"""FlashAttention-2 on the cards it was written for."""
NARROW_HEADS = {"flash-triton": 0.75}
"""A kernel's rate with heads of 64 relative to heads of 128; 0.89 for other kernels (kernels.csv)."""
WIDE_HEAD = 128


def attention_shares(card: Accelerator, kernel: str, peak_tflop_s: float, head_dim: int) -> tuple[float, float]:
    """Shares of the peak of an attention kernel on this card, forward and backward."""
    generation = generation_of(card)
    forward, backward = ATTENTION.get(kernel, {}).get(generation, DEFAULT_ATTENTION)
    factor = min(power_factor(card, peak_tflop_s), LIMIT / REFERENCES[generation].share)
    factor *= 1.0 if head_dim >= WIDE_HEAD else NARROW_HEADS.get(kernel, 0.89)
    return min(LIMIT, forward * factor), min(LIMIT, backward * factor)
