"""Serving on one card: what fits, what is at most possible, and what would have to change."""

import csv
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.rows import RESULTS
from tightfit.errors import UserError
from tightfit.hardware.machine import parse_machine
from tightfit.models.presets import preset
from tightfit.models.quantized.held_weights import HeldWeights
from tightfit.models.quantized.scheme import Scheme
from tightfit.plan.serving import Serving, make_serving
from tightfit.plan.serving_step import Step
from tightfit.plan.serving_time import StepRates


def serving(model: str, on: str, form: str, length: int | None = 4096, requests: int = 1) -> Serving:
    return make_serving(model, preset(model), parse_machine(on), form, length, requests)


def test_8b_at_q8_0_serves_on_a_t4_and_at_bf16_does_not() -> None:
    small, large = serving("llama-3.1-8b", "T4", "q8_0"), serving("llama-3.1-8b", "T4", "bf16")
    assert small.fits
    assert small.gpu_peak_bytes > 8.03e9 * 34 / 32
    assert not large.fits
    assert large.changes()[0] == "smaller weights: --quantize q8_0"
    assert any(change.startswith("another card:") for change in large.changes())


def test_more_requests_need_more_and_give_more() -> None:
    one, many = (serving("llama-3.2-1b", "L4", "bf16", 2048, requests) for requests in (1, 64))
    cache = 63 * 2048 * 2 * 2 * 512 * 16  # keys and values, two bytes, eight heads of 64, 16 layers
    assert many.gpu_peak_bytes - one.gpu_peak_bytes > cache
    assert many.tokens_per_second > 10 * one.tokens_per_second


def test_one_stream_is_bound_by_reading_the_weights() -> None:
    """The known figure: an H200 cannot read a 1B model more than about 1 700 times a second."""
    assert serving("llama-3.2-1b", "H200", "bf16", 512).tokens_per_second == pytest.approx(1700, rel=0.05)


@pytest.mark.parametrize(
    ("model", "tokens", "measured_ms"),
    [("llama-3.2-1b", 256, 1.9), ("llama-3.1-8b", 256, 7.6), ("llama-3.1-8b", 4096, 99.7)],
)
def test_a_first_token_takes_its_products(model: str, tokens: int, measured_ms: float) -> None:
    """Beside what our engine takes on an H200 (docs/serving.md): never said to take longer, and of that order."""
    said = 1e3 * serving(model, "H200", "bf16", tokens).first_token_seconds
    assert measured_ms / 3 < said < measured_ms


def test_rounded_inputs_may_be_multiplied_faster() -> None:
    plain = serving("llama-3.1-8b", "H200", "bf16")
    for scheme, times in ((Scheme(kind="fp8", bits=8, group=0, activations="fp8"), 2), (Scheme(bits=4), 1)):
        packed = replace(plain, compressed=HeldWeights(10**9, 0, 0, "packed", scheme))
        assert plain.first_token_seconds / packed.first_token_seconds == pytest.approx(times, rel=0.01)


def test_room_for_so_many_requests_and_no_more() -> None:
    for model, on, form in (("llama-3.2-1b", "L4", "bf16"), ("llama-3.1-8b", "T4", "q4_0")):
        most = serving(model, on, form).most_requests
        assert serving(model, on, form, requests=most).fits
        assert not serving(model, on, form, requests=most + 1).fits
    assert serving("llama-3.1-8b", "T4", "bf16").most_requests == 0


def test_too_long_requests_can_be_shortened() -> None:
    long = serving("llama-3.1-8b", "T4", "q8_0", 131_072)
    assert not long.fits
    change = next(each for each in long.changes() if each.startswith("shorter requests"))
    assert serving("llama-3.1-8b", "T4", "q8_0", int(change.rsplit(" ", 1)[1])).fits


@pytest.mark.parametrize(
    ("form", "length", "requests", "words"),
    [
        ("q3", 4096, 1, ["--quantize", "q3", "q8_0"]),
        ("q8_0", 10**9, 1, ["--context", "131072"]),
        ("q8_0", 0, 1, ["--context", "0"]),
        ("q8_0", 64, 0, ["--batch", "0"]),
    ],
)
def test_nonsense_is_one_sentence(form: str, length: int, requests: int, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        serving("llama-3.1-8b", "T4", form, length, requests)
    for word in words:
        assert word in str(error.value)


BF16, PACKED = "bfloat16", ("int4", "fp8")
WITHIN = 0.15


def newest(model: str, dtype: str) -> dict[str, float]:
    """Values of the newest rows by case."""
    with (RESULTS / "serve_speed.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["dtype"]) == (model, dtype)]
    return {row["case"]: float(row["value"]) for row in rows}


def predicted(model: str, dtype: str) -> dict[str, float]:
    """The cases of benchmarks/serve_speed.py as `plan --serve` tells them."""
    schemes = {"int4": Scheme(bits=4, group=128), "fp8": Scheme(kind="fp8", bits=8, group=0)}

    def at(length: int, requests: int = 1) -> Serving:
        made = serving({"1b": "llama-3.2-1b", "8b": "llama-3.1-8b"}[model], "H200", "bf16", length, requests)
        if dtype == BF16:
            return made
        ends, bits = 2 * made.spec.vocab_size * made.spec.hidden_size, {"int4": 4 + 32 / 128, "fp8": 8}[dtype]
        held = int((made.spec.params() - ends) * bits / 8) + 2 * ends
        return replace(made, compressed=HeldWeights(held, 0, 0, dtype, schemes[dtype]))

    one = at(1)
    short = Step(tokens=64 * 256, answers=64, pairs=64 * 256**2 / 2, cache_bytes=0)
    together = one.rates.step_seconds(one.spec, one._read_bytes, short)
    long = Step(tokens=4 * 4096, answers=4, pairs=4 * 4096**2 / 2, cache_bytes=0)
    return {
        "first_token": 1e3 * at(256).predicted_first_token_seconds,
        "one_stream_decode": at(512).predicted_tokens_per_second,
        "batch": 64 * 256 / (together + 256 * 64 / at(384, 64).predicted_tokens_per_second),
        "prefill": 4 * 4096 / one.rates.step_seconds(one.spec, one._read_bytes, long),
    }


@pytest.mark.parametrize("model", ["1b", "8b"])
def test_predictions_beside_what_was_measured(model: str) -> None:
    """Every bf16 row of an H200 within 15 %."""
    found, told = newest(model, BF16), predicted(model, BF16)
    errors = {case: value / found[case] - 1 for case, value in told.items()}
    assert all(abs(error) < WITHIN for error in errors.values()), errors


@pytest.mark.parametrize("dtype", PACKED)
def test_one_stream_of_packed_weights_beside_what_was_measured(dtype: str) -> None:
    """Prompts and batches of packed weights are slower than said (docs/serving.md): their kernels are their own."""
    found, told = newest("8b", dtype), predicted("8b", dtype)
    assert abs(told["one_stream_decode"] / found["one_stream_decode"] - 1) < WITHIN


def test_every_term_of_a_step_alone() -> None:
    """By hand, for one query of a model whose other terms take no time."""
    spec, never = preset("llama-3.2-1b"), float("inf")
    still = StepRates(
        bytes_per_second=never, product_flops=never, attention_flops=never, layer_s=0.0, first_token_s=0.0
    )
    step = Step(tokens=5, answers=2, pairs=12.5, cache_bytes=1e6)

    def seconds(**rates: Any) -> float:
        return replace(still, **rates).step_seconds(spec, 3e9, step)

    assert seconds() == 0
    moved = 5 * 16 * 2 * (10 * 2048 + 2 * 2048 + 4 * 512 + 4 * 8192)
    assert seconds(bytes_per_second=1e12, weight_share=0.5) == pytest.approx((6e9 + 1e6 + moved) / 1e12)
    head, layers = 128_256 * 2048, spec.params() - 128_256 * 2048
    assert seconds(product_flops=1e12) == pytest.approx(2 * (5 * layers + 2 * head) / 1e12)
    assert seconds(attention_flops=1e12) == pytest.approx(4 * 12.5 * 2048 * 16 / 1e12)
    assert seconds(layer_s=1e-3) == pytest.approx(16e-3)


def test_predictions_are_never_beyond_the_limits() -> None:
    for model, on, form in (
        ("llama-3.2-1b", "T4", "q8_0"),
        ("llama-3.1-8b", "H200", "bf16"),
        ("qwen3-30b-a3b", "H200", "q4_0"),
    ):
        for length, requests in ((64, 1), (4096, 1), (1024, 32)):
            asked = serving(model, on, form, length, requests)
            limit = asked.tokens_per_second * asked.weight_bytes / replace(asked, requests=2)._read_bytes
            assert asked.predicted_tokens_per_second < limit  # which counts an embedding that no step reads
            assert asked.predicted_first_token_seconds > asked.first_token_seconds
