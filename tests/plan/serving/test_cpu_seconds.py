"""Serving on a CPU: what was measured of its parts, added up by hand."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.hardware.test_calibration import MEASURED
from tightfit.errors import UserError
from tightfit.hardware.accelerator import Accelerator, PeakRates
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.cpu_rates import CpuRates
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.jobs.served_weights import rounded_weights
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.quantized.scheme import Scheme
from tightfit.plan.serving.cpu_seconds import CpuStepRates
from tightfit.plan.serving.plan import Serving, make_serving
from tightfit.plan.serving.step import Step
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine

RATES = CpuRates(
    products={"fp32": ((1, 0.2), (8, 1.0), (64, 4.0)), "fp16": ((1, 0.1), (64, 4.0)), "int4": ((1, 0.05), (64, 4.0))},
    layer_us=300.0,
    operation_us=10.0,
    step_us=600.0,
    answer_us=50.0,
    logit_ns=5.0,
    element_ns=0.8,
    attention_gflop_s=10.0,
    score_ns=8.0,
    cached_gb_s=3.0,
)
SPEC = preset("smollm2-135m")
FP32: Any = {"layers_as": "fp32", "head_as": "fp32"}
SOFTCAP: Any = {"attention_softcap": 50.0}
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
    times = ("layer_us", "operation_us", "step_us", "answer_us", "logit_ns", "element_ns", "score_ns")
    nothing: dict[str, Any] = dict.fromkeys(times, 0.0)
    free = dict.fromkeys(("fp32", "int4"), ((1, 0.0), (64, 0.0)))
    still = CpuRates(products=free, attention_gflop_s=1e30, cached_gb_s=1e30, **nothing)  # type: ignore[arg-type]
    step = Step(tokens=8, answers=2, pairs=12.5, cache_bytes=1e6)

    def seconds(**rates: Any) -> float:
        changed = CpuStepRates(measured=replace(still, **rates), layers_as="int4", head_as="fp32")
        return changed.step_seconds(SPEC, 0.0, step)

    assert seconds() == pytest.approx(0, abs=1e-15)
    assert seconds(products=free | {"int4": ((1, 0.1), (8, 0.5))}) == pytest.approx(0.5e-9 * LAYERS)
    assert seconds(products=free | {"fp32": ((1, 0.1), (3, 0.5))}) == pytest.approx(0.3e-9 * HEAD)
    assert seconds(step_us=7.0, answer_us=3.0) == pytest.approx(10e-6)
    assert seconds(layer_us=42.0) == pytest.approx(30 * 77e-6)  # operations of a layer with a prompt, not 42
    assert seconds(operation_us=10.0) == pytest.approx(0, abs=1e-15)  # which only layers of other families have
    assert seconds(score_ns=2.0) == pytest.approx(12.5 * 9 * 30 * 2e-9)
    assert seconds(logit_ns=2.0) == pytest.approx(2 * 49_152 * 2e-9)
    assert seconds(element_ns=1.0) == pytest.approx(8 * 30 * (10 * 576 + 2 * 576 + 4 * 192 + 4 * 1536) * 1e-9)
    assert seconds(attention_gflop_s=1.0) == pytest.approx(4 * 12.5 * 576 * 30 * 1e-9)
    assert seconds(cached_gb_s=1.0) == pytest.approx(1e-3)


def test_families_that_are_not_joined_are_told_their_calls() -> None:
    """One token of GPT-2's and of Gemma-3's shape: nothing but operations, of which a plain layer has none apart."""
    one = Step(tokens=1, answers=1, pairs=0, cache_bytes=0)
    for name, operations in (("smollm2-135m", 0), ("gpt2", 12 * 44), ("gemma-3-270m", 18 * 98)):
        slow, fast = (CpuStepRates(measured=replace(RATES, operation_us=us), **FP32) for us in (11.0, 10.0))
        more = slow.step_seconds(preset(name), 0.0, one) - fast.step_seconds(preset(name), 0.0, one)
        assert more == pytest.approx(operations * 1e-6)


def test_soft_caps_and_sinks_pass_over_all_scores() -> None:
    """In prompts; with sinks, single tokens read keys and values of every head of queries as well."""
    prompt = Step(tokens=64, answers=1, pairs=2048, cache_bytes=0)
    rates = CpuStepRates(measured=replace(RATES, operation_us=0.0), **FP32)
    for traits, passes in ((SOFTCAP, 4), ({"sinks": True}, 2)):
        plain = preset("gpt2")
        more = rates.step_seconds(replace(plain, **traits), 0.0, prompt) - rates.step_seconds(plain, 0.0, prompt)
        assert more == pytest.approx(2048 * 12 * 12 * passes * 8e-9, rel=1e-3)
    single = Step(tokens=1, answers=1, pairs=0, cache_bytes=3e6)
    grouped = replace(preset("gpt2"), kv_heads=3)
    scores = 3e6 / (2 * 4 * 3 * 64) * 12
    for more_traits, seconds in (({"sinks": True}, 4e-3 + 2 * scores * 8e-9), (SOFTCAP, 4 * scores * 8e-9)):
        changed = replace(grouped, **more_traits)
        more = rates.step_seconds(changed, 0.0, single) - rates.step_seconds(grouped, 0.0, single)
        assert more == pytest.approx(seconds, rel=1e-3)


def test_experts_are_multiplied_by_the_tokens_that_come_to_them() -> None:
    """Sixteen tokens to 2 of 8: all eight are read, each with four rows."""
    spec = preset("mixtral-8x7b")
    rates = CpuStepRates(measured=RATES, **FP32)
    expert = 3 * spec.hidden_size * spec.experts.mlp_size if spec.experts is not None else 0
    met = 8 * (1 - 0.75**16)
    routed = 32 * met * expert * RATES.product_ns("fp32", 4)
    dense = (spec.params(active=True) - 2 * 32_000 * 4096 - 32 * 2 * expert) * RATES.product_ns("fp32", 16)
    step = Step(tokens=16, answers=1, pairs=0, cache_bytes=0)
    head = 32_000 * 4096 * RATES.product_ns("fp32", 1)
    assert rates.products_seconds(spec, step) == pytest.approx(1e-9 * (routed + dense + head), rel=1e-6)
    assert rates.least_decode_seconds(spec, 0.0, 0.0) == pytest.approx(
        0.2e-9 * (spec.params(active=True) - 32_000 * 4096), rel=1e-6
    )


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


@pytest.mark.parametrize("form", ["fp32", "bf16", "q8_0", "q4_0"])
def test_layers_that_are_not_joined_have_no_copy_in_16_bits(form: str) -> None:
    """GPT-2 and Gemma-3 run through their modules, which multiply by codes of 4 bits or by float32."""
    for name in ("gpt2", "gemma-3-270m"):
        asked = make_serving(name, preset(name), machine(), form, 128, 1)
        rates = asked.rates
        assert isinstance(rates, CpuStepRates)
        assert (rates.layers_as, rates.head_as) == ("int4" if form == "q4_0" else "fp32", "fp32")
        assert "a copy in 16 bits" not in {line.detail for line in asked.ledger.lines}


def test_compressed_weights_are_too() -> None:
    for bits, layers_as in ((4, "int4"), (8, "fp16"), (3, "fp16")):
        packed = replace(serving("bf16"), compressed=rounded_weights(Scheme(bits=bits, group=64), SPEC))
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
        assert found["key/value cache", "keys and values"] == engine.budget.cache_bytes
        assert ("cuda context", "") not in found


def test_a_copy_in_16_bits_is_counted() -> None:
    lines = serving("bf16").ledger.lines
    found = {(line.component, line.detail): line.bytes for line in lines if line.phase == "forward"}
    assert found["weights", "a copy in 16 bits"] == 2 * SPEC.params()


def test_a_cpu_that_was_not_measured_is_a_sentence() -> None:
    with pytest.raises(UserError, match="tightfit calibrate"):
        serving(rates=None)


def test_a_calibration_from_before_a_part_was_measured_asks_for_another() -> None:
    """What else it has is kept."""
    kept = replace(MEASURED, serving=RATES).to_json()
    assert Calibration.from_json(kept).serving == RATES
    del kept["serving"]["operation_us"]
    found = Calibration.from_json(kept)
    assert found == MEASURED
    with pytest.raises(UserError, match="tightfit calibrate"):
        serving(rates=found.serving)


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
