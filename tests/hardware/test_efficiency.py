"""The efficiency table is made of stored measurements, each found again here."""

import csv
from collections.abc import Callable
from statistics import mean

import pytest

from tightfit.hardware.catalog import find_accelerator
from tightfit.hardware.efficiency import H200_BF16_TFLOP_S, H200_GB_S, MEASURED, by_head_size
from tightfit.report.documentation import RESULTS

ATTENTION_ROWS = 2 * 2 * 8192**2 * 32  # operations of causal attention per element of a head, B2 T8192 with 32 heads


LAUNCH_COMMITS = ("ecfed60", "c2fd4d8")
PLAIN = {
    "model": "smollm2-135m", "micro_batch": "8", "precision": "bf16", "checkpoint_every": "0", "loss": "fused",
    "accumulation": "1", "ranks": "1", "implementation": "tightfit",
}  # fmt: skip


def measured(name: str, column: str, wanted: Callable[[dict[str, str]], bool]) -> list[float]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if "H200" in row["device"] and wanted(row)]


def attention_ms(which: str, head: int) -> float:
    shape = f"B2 T8192 32/8×{head} causal"
    return min(
        measured(
            "kernel_parts.csv", "ms_p50",
            lambda row: (row["operation"], row["shape"], row["implementation"]) == (which, shape, "cuDNN"),
        )
    )  # fmt: skip


def host_bound_steps() -> list[tuple[tuple[str, str], float]]:
    """Commit and row length of plain steps of SmolLM2-135M, and how long they took; predicting again copies them."""
    with (RESULTS / "memory_truth.csv").open(encoding="utf-8", newline="") as file:
        return [
            ((row["commit"], row["sequence_length"]), float(row["measured_step_ms"]))
            for row in csv.DictReader(file)
            if all(row[name] == value for name, value in PLAIN.items()) and row["sequence_length"] in ("512", "2048")
        ]


def test_peaks_are_the_catalogs() -> None:
    h200 = find_accelerator("H200")
    assert (h200.rates.bf16, h200.bandwidth_gb_s) == (H200_BF16_TFLOP_S, H200_GB_S)


def test_matmul_is_the_three_products_of_the_loss() -> None:
    found = measured("kernel_parts.csv", "ms_p50", lambda row: row["implementation"] == "three GEMMs alone")
    rates = [3 * 2 * 16384 * 4096 * 128256 / ms / 1e9 for ms in found]
    assert any(pytest.approx(rate, rel=0.005) == MEASURED.matmul * H200_BF16_TFLOP_S for rate in rates)


@pytest.mark.parametrize("head", [64, 128])
def test_attention_is_cudnns(head: int) -> None:
    forward = attention_ms("attention forward", head)
    both = attention_ms("attention forward and backward", head)
    work = ATTENTION_ROWS * head
    assert by_head_size(MEASURED.attention_forward, head) * H200_BF16_TFLOP_S == pytest.approx(
        work / forward / 1e9, rel=0.005
    )
    assert by_head_size(MEASURED.attention_backward, head) * H200_BF16_TFLOP_S == pytest.approx(
        2.5 * work / (both - forward) / 1e9, rel=0.005
    )


def test_bandwidth_and_launches_are_in_the_results() -> None:
    assert MEASURED.bandwidth * H200_GB_S in measured("kernels.csv", "copy_gb_s", lambda row: True)
    steps = {where: ms for where, ms in host_bound_steps() if where[0] in LAUNCH_COMMITS}
    assert len(steps) == 4
    assert mean(steps.values()) == pytest.approx(MEASURED.layer_launch_s * 30 * 1e3, abs=0.1)


def test_head_sizes_between_take_the_smaller_ones_share() -> None:
    shares = MEASURED.attention_forward
    assert by_head_size(shares, 96) == by_head_size(shares, 64) == by_head_size(shares, 32)
    assert by_head_size(shares, 256) == by_head_size(shares, 128) > by_head_size(shares, 64)
