"""Serving on a CPU: what was measured of its parts, added up by hand."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.hardware.test_calibration import MEASURED
from tightfit.errors import UserError
from tightfit.hardware.accelerator import Accelerator, PeakRates
from tightfit.hardware.cpu_rates import CpuRates
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.quantized.held_weights import HeldWeights
from tightfit.models.quantized.scheme import Scheme
from tightfit.plan.cpu_serving_time import CpuStepRates
from tightfit.plan.serving import Serving, make_serving
from tightfit.plan.serving_step import Step
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine

RATES = CpuRates(
    products={"fp32": ((1, 0.2), (8, 1.0), (64, 4.0)), "fp16": ((1, 0.1), (64, 4.0)), "int4": ((1, 0.05), (64, 4.0))},
    layer_us=300.0,
    step_us=600.0,
    answer_us=50.0,
    logit_ns=5.0,
    element_ns=0.8,
    attention_gflop_s=10.0,
    cached_gb_s=3.0,
)
SPEC = preset("smollm2-135m")
HEAD = 49_152 * 576
LAYERS = SPEC.params() - HEAD


def machine(rates: CpuRates | None = RATES) -> Machine:
    """A CPU of which that was measured."""
    card = Accelerator(
        family="CPU",
        memory_gb=16,
        form="cpu",
        bandwidth_gb_s=30.0,
        rates=PeakRates(fp32=0.04),
        host_link="unified",
        peer_link="unified",
        source="here",
    )
    return replace(parse_machine("T4"), accelerator=card, calibration=replace(MEASURED, serving=rates))


def serving(form: str = "fp32", length: int = 128, requests: int = 1, rates: CpuRates | None = RATES) -> Serving:
    return make_serving("smollm2-135m", SPEC, machine(rates), form, length, requests)


@pytest.mark.parametrize(("rows", "ns"), [(1, 0.2), (8, 1.0), (4, 0.2 + 0.8 * 3 / 7), (64, 4.0), (256, 16.0)])
def test_products_between_and_beyond_what_was_measured(rows: int, ns: float) -> None:
    assert RATES.product_ns("fp32", rows) == pytest.approx(ns)


def test_every_part_of_a_step_alone() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("layer_us", "step_us", "answer_us", "logit_ns", "element_ns"), 0.0)
    free = dict.fromkeys(("fp32", "int4"), ((1, 0.0), (64, 0.0)))
    still = CpuRates(products=free, attention_gflop_s=1e30, cached_gb_s=1e30, **nothing)  # type: ignore[arg-type]
    step = Step(tokens=8, answers=2, pairs=12.5, cache_bytes=1e6)

    def seconds(**rates: Any) -> float:
        changed = CpuStepRates(measured=replace(still, **rates), layers_as="int4", head_as="fp32")
        return changed.step_seconds(SPEC, 0.0, step)

    assert seconds() == pytest.approx(0, abs=1e-15)
    assert seconds(products=free | {"int4": ((1, 0.1), (8, 0.5))}) == pytest.approx(0.5e-9 * LAYERS)
    assert seconds(products=free | {"fp32": ((1, 0.1), (3, 0.5))}) == pytest.approx(0.3e-9 * HEAD)
    assert seconds(layer_us=100.0, step_us=7.0, answer_us=3.0) == pytest.approx(3010e-6)
    assert seconds(logit_ns=2.0) == pytest.approx(2 * 49_152 * 2e-9)
    assert seconds(element_ns=1.0) == pytest.approx(8 * 30 * (10 * 576 + 2 * 576 + 4 * 192 + 4 * 1536) * 1e-9)
    assert seconds(attention_gflop_s=1.0) == pytest.approx(4 * 12.5 * 576 * 30 * 1e-9)
    assert seconds(cached_gb_s=1.0) == pytest.approx(1e-3)


def test_a_plan_counts_with_them() -> None:
    """One stream: every weight once, 30 layers' calls, and keys and values of 128 positions in float32."""
    cache = 128 * 30 * 2 * 192 * 4
    elements = 30 * (10 * 576 + 2 * 576 + 4 * 192 + 4 * 1536)
    by_hand = 0.2e-9 * SPEC.params() + 9.6e-3 + 5e-9 * 49_152 + 0.8e-9 * elements + cache / 3e9
    assert serving().predicted_tokens_per_second == pytest.approx(1 / by_hand)
    assert serving(requests=8).predicted_tokens_per_second < 8 / (1.0e-9 * SPEC.params())


@pytest.mark.parametrize(
    ("form", "layers_as", "head_as"),
    [("fp32", "fp32", "fp32"), ("bf16", "fp16", "fp16"), ("q8_0", "fp16", "fp16"), ("q4_0", "int4", "fp16")],
)
def test_weights_are_read_as_an_engine_reads_them(form: str, layers_as: str, head_as: str) -> None:
    """docs/serving.md: 4-bit codes as they are, others in 16 bits; as float32 where the CPU has neither."""
    rates = serving(form).rates
    assert isinstance(rates, CpuStepRates)
    assert (rates.layers_as, rates.head_as) == (layers_as, head_as)
    bare = serving(form, rates=replace(RATES, products={"fp32": RATES.products["fp32"]})).rates
    assert isinstance(bare, CpuStepRates)
    assert (bare.layers_as, bare.head_as) == ("fp32", "fp32")


def test_compressed_weights_are_too() -> None:
    for bits, layers_as in ((4, "int4"), (8, "fp16"), (3, "fp16")):
        packed = replace(serving("bf16"), compressed=HeldWeights(10**8, 0, 0, "packed", Scheme(bits=bits)))
        rates = packed.rates
        assert isinstance(rates, CpuStepRates)
        assert rates.layers_as == layers_as


def test_predictions_are_never_beyond_the_limits() -> None:
    for form in ("fp32", "bf16", "q4_0"):
        for length, requests in ((64, 1), (1024, 1), (1024, 16)):
            asked = serving(form, length, requests)
            assert asked.predicted_tokens_per_second < asked.tokens_per_second
            assert asked.predicted_first_token_seconds > asked.first_token_seconds


def test_a_cpus_memory_is_what_an_engine_holds_there() -> None:
    """Float32 of weights, keys and values, and no CUDA context."""
    model = Decoder(preset("tiny-llama"))
    init_weights(model)
    engine = Engine(model, None, EngineConfig(max_sequences=1, max_length=64))
    bare = machine(replace(RATES, products={"fp32": RATES.products["fp32"]}))
    for form in ("fp32", "bf16", "q4_0"):
        lines = make_serving("tiny-llama", model.spec, bare, form, 64, 1).ledger.lines
        found = {(line.component, line.detail): line.bytes for line in lines if line.phase == "forward"}
        assert found["weights", "fp32"] == engine.budget.weight_bytes
        assert found["activations", "keys and values"] == engine.budget.cache_bytes
        assert ("cuda context", "") not in found


def test_a_copy_in_16_bits_is_counted() -> None:
    lines = serving("bf16").ledger.lines
    found = {(line.component, line.detail): line.bytes for line in lines if line.phase == "forward"}
    assert found["weights", "a copy in 16 bits"] == 2 * SPEC.params()


def test_a_cpu_that_was_not_measured_is_a_sentence() -> None:
    with pytest.raises(UserError, match="tightfit calibrate"):
        serving(rates=None)


@pytest.mark.parametrize(
    "change",
    [
        {"products": {}},
        {"products": {"int4": [[1, 0.1]]}},
        {"products": {"fp32": []}},
        {"products": {"fp32": [[8, 0.1], [1, 0.2]]}},
        {"products": {"fp32": [[1, "fast"]]}},
        {"element_ns": 0},
        {"layer_us": -1.0},
        {"cached_gb_s": float("nan")},
    ],
)
def test_rates_that_cannot_be_true_are_refused(change: dict[str, Any]) -> None:
    assert CpuRates.from_json(asdict(RATES)) == RATES
    with pytest.raises((ValueError, TypeError)):
        CpuRates.from_json(asdict(RATES) | change)
