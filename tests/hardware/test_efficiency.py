"""The efficiency table is made of stored measurements, each found again here."""

import csv
from collections.abc import Callable

import pytest

from tightfit.hardware.catalog import find_accelerator
from tightfit.hardware.efficiency import H200_BF16_TFLOP_S, H200_GB_S, MEASURED, by_head_size
from tightfit.report.documentation import RESULTS

ATTENTION_ROWS = 2 * 2 * 8192**2 * 32  # operations of causal attention per element of a head, B2 T8192 with 32 heads


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
    steps = measured(
        "train_step.csv", "step_ms_p50", lambda row: (row["case"], row["implementation"]) == ("h200-135m", "tightfit")
    )
    assert round(MEASURED.layer_launch_s * 30 * 1e3, 1) in steps


def test_head_sizes_between_take_the_smaller_ones_share() -> None:
    shares = MEASURED.attention_forward
    assert by_head_size(shares, 96) == by_head_size(shares, 64) == by_head_size(shares, 32)
    assert by_head_size(shares, 256) == by_head_size(shares, 128) > by_head_size(shares, 64)
