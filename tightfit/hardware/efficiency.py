"""Efficiencies: what share of the data sheet's peaks real kernels reach, measured on one H200, applied to every card.

Each number is a measurement divided by the vendor's figure (989.4 TFLOP/s bf16, 1978.9 fp8, 66.9 fp32, 4 800 GB/s); the
rows are in benchmarks/results, and a test reads them. Most come from benchmarks/calibrate.py (calibration.csv), which
runs no training step: step times in the truth tables are predicted, not fitted. Other cards are assumed to reach the
same shares of their own peaks, which is an estimate. Host figures are of one node (16 cores beside that H200); kernel
launch times of that host are in launches.py.
"""

from dataclasses import dataclass

H200_BF16_TFLOP_S = 989.4
H200_FP8_TFLOP_S = 1978.9
H200_FP32_TFLOP_S = 66.9
H200_GB_S = 4800.0
ByHead = tuple[tuple[int, float], ...]
"""Head size and value, ascending."""


@dataclass(frozen=True, kw_only=True)
class AttentionShares:
    """Rates of one attention kernel, by head size."""

    forward: ByHead
    backward: ByHead
    """Shares of the peak rate at long sequences, where only pairs of tokens count."""
    forward_tokens: ByHead
    backward_tokens: ByHead
    """Fixed cost of a token, as further keys of which it sees half: diagonal blocks, row sums, dQ in float32."""

    def shares(self, head_dim: int) -> tuple[float, float]:
        """Shares of the peak rate, forward and backward."""
        return by_head_size(self.forward, head_dim), by_head_size(self.backward, head_dim)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the peak rate of one number format that kernels reach."""

    products: float
    """A layer's GEMMs: seconds = `product_s` + FLOPs / rate."""
    product_s: float
    """Fixed seconds per GEMM, fitted to all GEMMs of calibration.csv."""
    attention: AttentionShares


NARROW = Shares(
    products=671 / H200_BF16_TFLOP_S,
    product_s=3.47e-6,
    attention=AttentionShares(
        forward=(
            (64, 473.9 / H200_BF16_TFLOP_S),
            (128, 605 / H200_BF16_TFLOP_S),
            (192, 595 / H200_BF16_TFLOP_S),
            (256, 709 / H200_BF16_TFLOP_S),
        ),
        backward=(
            (64, 445.4 / H200_BF16_TFLOP_S),
            (128, 545 / H200_BF16_TFLOP_S),
            (192, 360 / H200_BF16_TFLOP_S),
            (256, 483 / H200_BF16_TFLOP_S),
        ),
        forward_tokens=((64, 484.0), (128, 398.9), (256, 971.0)),
        backward_tokens=((64, 1066.8), (128, 1107.3), (256, 1434.0)),
    ),
)
"""cuBLAS and cuDNN in 16 bits; lengths of 512 to 32 768 tokens; heads of 192 inside a step of DeepSeek-V2-Lite. The
GEMMs of calibration.csv, in bursts of 15 ms, reach 744; in a step they follow one another and the card lowers its
clock, so the rate is that of `matmul` below. Heads of 128 likewise: 635 and 596 in bursts; used are the rates of
long_attention.csv, sustained for seconds at the power limit."""
WIDE = Shares(
    products=51.69 / H200_FP32_TFLOP_S,
    product_s=20.9e-6,
    attention=AttentionShares(
        forward=((64, 10.16 / H200_FP32_TFLOP_S), (128, 6.216 / H200_FP32_TFLOP_S)),
        backward=((64, 6.679 / H200_FP32_TFLOP_S), (128, 6.56 / H200_FP32_TFLOP_S)),
        forward_tokens=((64, 0.0),),
        backward_tokens=((64, 0.0),),
    ),
)
"""Float32 without TF32: cuBLAS, and our attention at 2048 tokens, whose exact products use no tensor cores."""
OWN = AttentionShares(
    forward=((64, 447 / H200_BF16_TFLOP_S), (128, 502 / H200_BF16_TFLOP_S), (256, 435 / H200_BF16_TFLOP_S)),
    backward=((64, 267 / H200_BF16_TFLOP_S), (128, 360 / H200_BF16_TFLOP_S), (256, 150 / H200_BF16_TFLOP_S)),
    forward_tokens=((64, 800.0), (128, 800.0), (256, 650.0)),
    backward_tokens=((64, 670.0), (128, 670.0), (256, 250.0)),
)
"""Our Triton attention kernel, for windows and soft caps. Heads of 128 from windows of 1024 and 4096 in 8192 tokens, of
256 from capped rows and windows (calibration.csv, "attention" with "window" or "capped"); of 64 from flash_blocks.csv
and kernels.csv."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the vendor's peaks, and host rates."""

    narrow: Shares = NARROW
    wide: Shares = WIDE
    matmul: float = 671 / H200_BF16_TFLOP_S
    """Large bf16 GEMMs one after another (kernel_parts.csv, "three GEMMs alone": 76.97 ms for 51.6 TFLOP), as in the
    loss. A single GEMM of 8192³ reaches 809, but the card does not sustain that clock."""
    attention_forward: ByHead = ((64, 456 / H200_BF16_TFLOP_S), (128, 628 / H200_BF16_TFLOP_S))
    """Causal attention of 2 × 8192 tokens by head size (kernel_parts.csv, cuDNN: 1.206 and 1.750 ms)."""
    own: AttentionShares = OWN
    bandwidth: float = 4136 / H200_GB_S
    """A copy on the card, bytes read plus bytes written (kernels.csv, copy_gb_s)."""
    fp8_tensor: float = 1348.6 / H200_FP8_TFLOP_S
    """fp8 GEMMs with a scale per tensor and fast accumulation (calibration.csv, "tensor fast")."""
    fp8_tensor_wide: float = 1279.8 / H200_FP8_TFLOP_S
    """With float32 accumulation, as for weight gradients ("tensor wide")."""
    fp8_row: float = 1447.6 / H200_FP8_TFLOP_S
    """With a scale per row ("row fast")."""
    codes: float = 0.902
    """Share of copy bandwidth that fp8 quantization reaches, in bytes of kernels/fp8/fp8_quantize.py (all "codes")."""
    updates: tuple[tuple[str, float], ...] = (
        ("torch fp32", 0.9),
        ("inside backward", 0.9),
        ("8bit", 0.411),
        ("factored", 0.799),
    )
    """Share of copy bandwidth that updates reach, by implementation, in bytes of plan/seconds/optimizer.py ("update");
    1 for others: the list kernel reaches 4 157 to 4 164 GB/s inside a step (step_profile.csv). With masters, casts of
    gradients and weights come with it: 0.9 together, from the truth tables. Inside backward every weight has a norm and
    an update of its own: 0.88 in steps of a 1B model, 1.0 where experts' weights are large."""
    link_both_ways: float = 47.39 / 55.32
    """Bandwidth of each of two simultaneous copies, as a share of one alone, during GEMMs ("link")."""
    host_adam_params_s: float = 4.313e9
    """Parameters a second of AdamW on one node's host (torch's fused CPU kernel; "host adam")."""

    def shares(self, *, wide: bool) -> Shares:
        """The shares of float32 (`wide`), or of 16 bits."""
        return self.wide if wide else self.narrow


MEASURED = Efficiency()


def by_head_size(values: ByHead, head_dim: int) -> float:
    """The value of the largest measured head size up to `head_dim`, else of the smallest."""
    return next((value for size, value in reversed(values) if head_dim >= size), values[0][1])
