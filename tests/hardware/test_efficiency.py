"""The efficiency table is made of stored measurements, each found again here."""

import csv
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from benchmarks.reports.documentation import RESULTS
from tests.hardware.calibration import fitted, rows
from tests.plan.questions import question
from tightfit.hardware.catalog import find_accelerator
from tightfit.hardware.efficiency import (
    H200_BF16_TFLOP_S,
    H200_FP8_TFLOP_S,
    H200_FP32_TFLOP_S,
    H200_GB_S,
    MEASURED,
    NARROW,
    OWN,
    WIDE,
    by_head_size,
)
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.resolve import resolve_spec
from tightfit.plan.seconds.attention import layer_attention
from tightfit.plan.seconds.cost_context import cost_context
from tightfit.plan.seconds.optimizer import moved_bytes
from tightfit.plan.seconds.products import GROUP_DEPTH, GROUP_ROWS

BURST_TFLOP_S = 744

ATTENTION_ROWS = 2 * 2 * 8192**2 * 32  # operations of causal attention per element of a head, B2 T8192 with 32 heads


def measured(name: str, column: str, wanted: Callable[[dict[str, str]], bool]) -> list[float]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if "H200" in row["device"] and wanted(row)]


def attention_ms(which: str, head: int) -> float:
    shape = f"B2 T8192 32/8×{head} causal"
    return min(
        measured(
            "kernel_parts.csv",
            "ms_p50",
            lambda row: (row["operation"], row["shape"], row["implementation"]) == (which, shape, "cuDNN"),
        )
    )


def test_peaks_are_the_catalogs() -> None:
    h200 = find_accelerator("H200")
    assert (h200.rates.bf16, h200.bandwidth_gb_s) == (H200_BF16_TFLOP_S, H200_GB_S)
    assert (h200.rates.fp8, h200.rates.fp32) == (H200_FP8_TFLOP_S, H200_FP32_TFLOP_S)


def test_matmul_is_the_three_products_of_the_loss() -> None:
    found = measured("kernel_parts.csv", "ms_p50", lambda row: row["implementation"] == "three GEMMs alone")
    rates = [3 * 2 * 16384 * 4096 * 128256 / ms / 1e9 for ms in found]
    assert any(pytest.approx(rate, rel=0.005) == MEASURED.matmul * H200_BF16_TFLOP_S for rate in rates)


@pytest.mark.parametrize("head", [64, 128])
def test_attention_is_cudnns(head: int) -> None:
    forward = attention_ms("attention forward", head)
    work = ATTENTION_ROWS * head
    assert by_head_size(MEASURED.attention_forward, head) * H200_BF16_TFLOP_S == pytest.approx(
        work / forward / 1e9, rel=0.005
    )


def test_bandwidth_is_in_the_results() -> None:
    assert MEASURED.bandwidth * H200_GB_S in measured("kernels.csv", "copy_gb_s", lambda row: True)


def test_products_have_a_fixed_part() -> None:
    """Fitted to all of a number format's; in 16 bits the rate is that of the three products of the loss."""
    for dtype, shares in (("bf16", NARROW), ("fp32", WIDE)):
        points = [(row.tflop, 1.0, row.ms) for row in rows("product", dtype)]
        assert len(points) >= 18
        per_tflop, fixed = fitted(points)
        assert fixed * 1e-3 == pytest.approx(shares.product_s, rel=0.01)
        errors = [abs((per_tflop * x + fixed) / t - 1) for x, _, t in points]
        assert mean(errors) < 0.06
    assert 1e3 / per_tflop == pytest.approx(WIDE.products * H200_FP32_TFLOP_S, rel=0.001)
    assert NARROW.products == MEASURED.matmul


def long_attention() -> list[dict[str, str]]:
    """The rows of benchmarks/long_attention.py."""
    with (RESULTS / "long_attention.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_attention_by_length(way: str, head: int) -> None:
    """Seconds of an operation are a + b / tokens; a is one over the rate, b / a the tokens that count besides."""
    found = [row for row in rows("attention", "bf16") if row.case.startswith(way) and row.case.endswith(f"x{head}")]
    points = [(1.0, 1 / int(row.case.split()[1].split("x")[1]), row.ms / row.tflop) for row in found]
    assert len(points) == 4
    a, b = fitted(points)
    share = by_head_size(getattr(NARROW.attention, way), head)
    if head == 64:
        assert 1e3 / a / H200_BF16_TFLOP_S == pytest.approx(share, rel=0.001)
    else:  # bursts are faster than what lasts
        assert share < 1e3 / a / H200_BF16_TFLOP_S < 1.1 * share
    assert b / a == pytest.approx(by_head_size(getattr(NARROW.attention, f"{way}_tokens"), head), rel=0.001)
    assert all((a * x + b * y) / t == pytest.approx(1, abs=0.03) for x, y, t in points)
    wide = next(row for row in rows("attention", "fp32") if row.case == f"{way} 2x2048 16/4x{head}")
    share = by_head_size(getattr(WIDE.attention, way), head)
    assert wide.tflop / wide.ms * 1e3 == pytest.approx(share * H200_FP32_TFLOP_S, rel=0.001)


@pytest.mark.parametrize("length", sorted({int(row["length"]) for row in long_attention()}))
def test_attention_that_lasts(length: int) -> None:
    """For seconds on end, on the mean of the cards that measured it: they differ by five percent."""
    spec = resolve_spec("llama-3.1-8b")
    workload = Workload(spec=replace(spec, max_positions=length), sequence_length=length, global_batch=1)
    said = layer_attention(cost_context(workload, parse_machine("H200")), tokens=length, tensor=1)
    found = [row for row in long_attention() if row["length"] == str(length)]
    assert {row["heads"] for row in found} == {f"{spec.heads}/{spec.kv_heads}x{spec.head_dim}"}
    assert 1e3 * said.forward_s == pytest.approx(mean(float(row["forward_ms"]) for row in found), rel=0.04)
    assert 1e3 * said.backward_s == pytest.approx(mean(float(row["backward_ms"]) for row in found), rel=0.04)


@pytest.mark.parametrize(
    ("case", "share"),
    [("tensor fast", MEASURED.fp8_tensor), ("tensor wide", MEASURED.fp8_tensor_wide), ("row fast", MEASURED.fp8_row)],
)
def test_fp8_products_are_calibrated(case: str, share: float) -> None:
    found = [row for row in rows("product", "fp8") if row.case.startswith(case)]
    seconds = mean(row.ms / row.tflop for row in found)
    assert 1e3 / seconds == pytest.approx(share * H200_FP8_TFLOP_S, rel=0.001)


def test_codes_link_and_host_are_calibrated() -> None:
    codes = rows("codes")
    reached = sum(row.gb for row in codes) / sum(row.ms for row in codes) * 1e3
    assert reached == pytest.approx(MEASURED.codes * MEASURED.bandwidth * H200_GB_S, rel=0.002)
    link = {row.case: row.gb / row.ms for row in rows("link")}
    assert link["both beside products"] / link["in"] == pytest.approx(MEASURED.link_both_ways, rel=0.002)
    (adam,) = rows("host adam")
    assert adam.gb / adam.ms * 1e12 == pytest.approx(MEASURED.host_adam_params_s, rel=0.002)


UPDATES = [
    ("8bit", "8bit beside masters", "bf16", Levers(optimizer_states="8bit")),
    ("factored", "factored beside masters", "bf16", Levers(optimizer_states="factored")),
]


@pytest.mark.parametrize(("name", "case", "precision", "levers"), UPDATES, ids=[row[0] for row in UPDATES])
def test_updates_are_calibrated(name: str, case: str, precision: Any, levers: Levers) -> None:
    """In the bytes the planner counts, without the gradient's norm, which was not among what was timed."""
    (found,) = [row for row in rows("update") if row.case == f"{case} 4096x14336"]
    workload = question("llama-3.1-8b", "H200", 512, 1, precision=precision).workload
    moved = moved_bytes(workload, Layout(), levers) - workload.weight_bytes
    reached = found.gb * moved / found.ms * 1e3 / (MEASURED.bandwidth * H200_GB_S)
    assert reached == pytest.approx(dict(MEASURED.updates)[name], abs=0.002)


def test_the_list_kernel_reaches_a_copys_bandwidth_in_a_step() -> None:
    """Whose bytes need no entry of their own."""
    with (RESULTS / "step_profile.csv").open(encoding="utf-8", newline="") as file:
        rates = [row["rate"] for row in csv.DictReader(file) if row["group"] == "tightfit::adamw_list"]
    assert len(rates) == 2
    copy_gb_s = MEASURED.bandwidth * H200_GB_S
    assert all(float(rate.removesuffix(" GB/s")) == pytest.approx(copy_gb_s, rel=0.01) for rate in rates)
    assert "torch bf16" not in dict(MEASURED.updates)


def own_attention_rows() -> list[dict[str, str]]:
    """Windows and caps of the families' calibration, and heads of 256 without either."""
    with (RESULTS / "calibration.csv").open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["kind"] == "attention" and row["dtype"] == "bf16"]
    return [row for row in found if any(word in row["case"] for word in ("window", "capped", "x256"))]


@pytest.mark.parametrize("row", own_attention_rows(), ids=lambda row: row["case"])
def test_windows_caps_and_wide_heads_take_what_was_measured(row: dict[str, str]) -> None:
    way, shape, heads, *words = row["case"].split()
    head, length = int(heads.split("x")[1]), int(shape.split("x")[1])
    window = int(words[words.index("window") + 1]) if "window" in words else length
    keys = window - window**2 / 2 / length
    kernel = OWN if words else NARROW.attention
    rate, tokens = (by_head_size(getattr(kernel, name), head) for name in (way, f"{way}_tokens"))
    predicted_ms = float(row["tflop"]) * (1 + tokens / 2 / keys) / (rate * H200_BF16_TFLOP_S) * 1e3
    assert predicted_ms == pytest.approx(float(row["ms"]), rel=0.17)


def test_grouped_products_take_what_was_measured() -> None:
    """The mean of the three of each shape, at the rate of plain products in bursts as short (NARROW's docstring)."""
    with (RESULTS / "calibration.csv").open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["kind"] == "grouped product"]
    for experts, rows_each, hidden, inner in ((128, 512, 2048, 768), (64, 1024, 2048, 768), (8, 2048, 4096, 14_336)):
        times = [
            float(row["ms"]) / float(row["tflop"])
            for row in found
            if f" {experts} experts {experts * rows_each}x" in row["case"]
        ]
        assert len(times) == 3
        tiles_share = mean(depth / (depth + GROUP_DEPTH) for depth in (hidden, inner, rows_each))
        share = rows_each / (rows_each + GROUP_ROWS) * tiles_share
        assert 1e3 / mean(times) == pytest.approx(share * BURST_TFLOP_S, rel=0.05)


def test_head_sizes_between_take_the_smaller_ones_share() -> None:
    shares = MEASURED.attention_forward
    assert by_head_size(shares, 96) == by_head_size(shares, 64) == by_head_size(shares, 32)
    assert by_head_size(shares, 256) == by_head_size(shares, 128) > by_head_size(shares, 64)
