"""A machine's own rates: kept whole, found again, and what its plans count with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.questions import question
from tightfit.errors import UserError
from tightfit.hardware.calibration import CPU, Calibration, calibration_path, read_calibrations, write_calibration
from tightfit.hardware.collective_rates import OPERATIONS, CollectivePoint, CollectiveRates
from tightfit.hardware.local import local_machine
from tightfit.hardware.machine import Machine, machine_of_json, parse_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.plan.answer import Question, answer
from tightfit.plan.cost import Costs
from tightfit.report.plan import print_answer

LISTING = "NVIDIA GeForce RTX 4090, 24564"
MEASURED = Calibration(
    device="NVIDIA GeForce RTX 4090",
    date="2026-11-16",
    products_tflop_s={"fp32": 60.0, "fp16": 150.0, "bf16": 150.0, "fp8": 280.0},
    product_us=5.0,
    attention_tflop_s={"bf16": (120.0, 100.0)},
    copy_gb_s=920.0,
    link_gb_s=25.0,
    link_both_ways=0.9,
    host_adam_params_s=2e9,
    layer_launch_ms=2.0,
)


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def workload_time(machine: Machine, levers: Levers | None = None) -> float:
    workload = question("llama-3.2-1b", "RTX4090", 4096, 2).workload
    return Costs(workload, machine).step(Layout(micro_batch=2), levers or Levers()).step_s


def test_entries_are_kept_beside_each_other(config: Path) -> None:
    assert read_calibrations() == {}
    other = replace(MEASURED, device="NVIDIA L4")
    path = write_calibration(MEASURED)
    assert path == calibration_path() == config / "tightfit" / "calibration.json"
    write_calibration(other)
    write_calibration(replace(other, copy_gb_s=1.0))
    found = read_calibrations()
    assert found[MEASURED.device] == MEASURED
    assert found["NVIDIA L4"].copy_gb_s == 1.0


def test_other_cards_are_not_counted_with_rates_of_this_one() -> None:
    """Advice of a machine whose own card is far slower than its data sheet says."""
    slow = replace(MEASURED, products_tflop_s=dict.fromkeys(MEASURED.products_tflop_s, 1.0), copy_gb_s=10.0)
    asked = question("llama-3.1-8b", "RTX4090", 2048, 1, "levers.offload=none")
    here = replace(asked, machine=replace(asked.machine, calibration=slow))
    offered, expected = (
        [change for change in answer(each).changes if change.what == "another card"] for each in (here, asked)
    )
    assert offered == expected != []


def test_a_cpu_is_no_card_to_have_more_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """And cards that would do in its place are planned with a host of their own."""
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    write_calibration(replace(MEASURED, device=CPU))
    asked = question("llama-3.1-8b", "V100-16GB", 2048, 1, precision="fp32")
    offered = {change.what: change for change in answer(replace(asked, machine=local_machine("16GB"))).changes}
    assert set(offered) == {"another card"}
    assert offered["another card"].to == "1xV100-16GB"
    assert offered["another card"].step_s == pytest.approx(answer(asked).plan.step_seconds, rel=0.05)


def test_the_local_machine_counts_with_its_own_rates() -> None:
    named = local_machine(listing=LISTING)
    assert named.calibration is None
    write_calibration(MEASURED)
    own = local_machine(listing=LISTING)
    assert own.calibration == MEASURED
    write_calibration(replace(MEASURED, products_tflop_s={"bf16": 75.0}))
    slower = local_machine(listing=LISTING)
    assert workload_time(slower) > 1.3 * workload_time(own)
    assert local_machine(listing="NVIDIA L4, 23034").calibration is None


def test_rates_are_those_that_were_measured() -> None:
    machine = replace(parse_machine("RTX4090"), calibration=MEASURED)
    costs = Costs(question("llama-3.2-1b", "RTX4090", 4096, 2).workload, machine)
    assert costs.ctx.rates.product_flop_s == pytest.approx(150e12)
    assert costs.ctx.rates.attention.forward_flop_s == pytest.approx(120e12)
    assert costs.ctx.rates.bytes_s == pytest.approx(920e9)
    assert machine.host_copy_bytes_s == pytest.approx(25e9)


def test_a_plan_carries_them_and_says_so() -> None:
    asked = question("llama-3.2-1b", "RTX4090", 2048, 4)
    machine = replace(asked.machine, calibration=MEASURED)
    found = answer(Question(model=asked.model, workload=asked.workload, machine=machine))
    assert any("tightfit calibrate" in note and "2026-11-16" in note for note in found.notes)
    again = machine_of_json(json.loads(json.dumps(found.plan.machine.to_json())))
    assert again.calibration == MEASURED


def test_a_machine_without_a_gpu_is_its_cpu_once_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tightfit.hardware.local._has_gpu", lambda: False)
    rates = {"products_tflop_s": {"fp32": 0.1}, "attention_tflop_s": {"fp32": (0.05, 0.05)}}
    write_calibration(replace(MEASURED, device=CPU, copy_gb_s=20.0, layer_launch_ms=0.0, **rates))  # type: ignore[arg-type]
    machine = local_machine(host_memory=16 * 10**9)
    assert machine.accelerator.memory_bytes == 16 * 10**9
    spec = question("nano-llama", "RTX4090", 256, 8).workload
    found = answer(Question(model="nano-llama", workload=replace(spec, precision="fp32"), machine=machine))
    assert found.plan.fits
    assert found.plan.levers.offload == "none"
    # 6 × 0.75 million weights × 2048 tokens at 0.1 TFLOP/s take 0.09 s.
    assert 0.05 < found.plan.step_seconds < 0.5
    assert not {line.component for line in found.plan.ledger.lines} & {"cuda context", "workspace"}
    assert found.plan.gpu_peak_bytes == found.plan.ledger.peak_bytes()
    print_answer(found, as_json=False, extra={}, lines=[])
    told = capsys.readouterr().out
    assert "the CPU, micro-batch" in told
    assert "GPU" not in told


def test_measuring_again_keeps_the_exchanges_that_the_doctor_measured() -> None:
    points = [
        CollectivePoint(operation=operation, payload_bytes=payload, us=us)
        for operation in OPERATIONS
        for payload, us in ((1024, 10.0), (2**20, 90.0))
    ]
    exchanges = CollectiveRates(ranks=2, backend="nccl", points=tuple(points))
    write_calibration(replace(MEASURED, collectives=exchanges))
    write_calibration(replace(MEASURED, copy_gb_s=1.0))
    assert read_calibrations()[MEASURED.device] == replace(MEASURED, copy_gb_s=1.0, collectives=exchanges)


@pytest.mark.parametrize(
    "change",
    [
        {"copy_gb_s": "fast"},
        {"copy_gb_s": 0},
        {"link_gb_s": float("nan")},
        {"host_adam_params_s": float("inf")},
        {"products_tflop_s": 3},
        {"products_tflop_s": {"bf16": None}},
        {"attention_tflop_s": {"bf16": ["x", 1]}},
        {"product_us": -1},
        {"collectives": {"ranks": 2, "backend": "nccl", "points": []}},
        {"collectives": {"ranks": 0, "backend": "nccl", "points": []}},
        {"surprise": 1},
    ],
)
def test_an_entry_that_cannot_be_true_is_a_sentence(change: dict[str, Any]) -> None:
    path = write_calibration(MEASURED)
    data = json.loads(path.read_text())
    data["devices"][MEASURED.device] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"is not a calibration .*remove it.*tightfit calibrate"):
        read_calibrations()


def test_a_broken_file_is_a_sentence(config: Path) -> None:
    path = calibration_path()
    path.parent.mkdir()
    path.write_text('{"format": 1, "devices": {"x": {}}}', encoding="utf-8")
    with pytest.raises(UserError, match=r"is not a calibration .*tightfit calibrate"):
        read_calibrations()
