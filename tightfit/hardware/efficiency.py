"""What share of a data sheet's figures real kernels reach: measured on one H200, applied to every card.

Each number is a measurement divided by the vendor's figure (989.4 TFLOP/s bf16, 4 800 GB/s); benchmarks/results holds
the rows, and a test reads them. Other cards are assumed to reach the same shares of their own peaks: for them these
are estimates until somebody measures. Host figures are one node's (16 cores beside that H200).
"""

from dataclasses import dataclass

H200_BF16_TFLOP_S = 989.4
H200_GB_S = 4800.0


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the vendor's peak, and what the host takes."""

    matmul: float = 671 / H200_BF16_TFLOP_S
    """bf16 products that follow each other as in a step (kernel_parts.csv, "three GEMMs alone": 76.97 ms for 51.6
    TFLOP). One product of 8192³ by itself reaches 809, but the card does not keep that clock."""
    attention_forward: tuple[tuple[int, float], ...] = ((64, 456 / H200_BF16_TFLOP_S), (128, 628 / H200_BF16_TFLOP_S))
    """Causal attention of 2 × 8192 tokens by head size (kernel_parts.csv, cuDNN: 1.206 and 1.750 ms)."""
    attention_backward: tuple[tuple[int, float], ...] = ((64, 418 / H200_BF16_TFLOP_S), (128, 527 / H200_BF16_TFLOP_S))
    """The same, backward alone: 4.492 − 1.206 and 6.965 − 1.750 ms for 2.5 times the forward's work."""
    bandwidth: float = 4136 / H200_GB_S
    """A copy, read and written bytes counted (kernels.csv, copy_gb_s)."""
    layer_launch_s: float = 110.3e-3 / 30
    """Host time to launch one layer's forward and backward: the mean of four steps that the host bounds
    (memory_truth.csv, smollm2-135m 8 × 512 and 8 × 2048 in two runs). Hosts differ: these took 101 to 121 ms."""
    forward_launch_share: float = 1 / 3
    """Of that, forward; backward launches twice as many kernels."""
    host_adam_params_s: float = 4.3e9
    """AdamW on the host, parameters a second of one node (torch's fused CPU kernel, 8 to 16 threads)."""


MEASURED = Efficiency()


def by_head_size(shares: tuple[tuple[int, float], ...], head_dim: int) -> float:
    """The share measured at the nearest head size that is not larger, else the smallest."""
    return next((share for size, share in reversed(shares) if head_dim >= size), shares[0][1])
