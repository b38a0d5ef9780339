"""Serving on one card: what fits, what is at most possible, and what would have to change."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from benchmarks.reports.serving import PREDICTED, measured_on_gpu, predicted_on_gpu
from benchmarks.rows import RESULTS
from tightfit.errors import UserError
from tightfit.hardware.machine import parse_machine
from tightfit.models.presets import preset
from tightfit.models.quantized.held_weights import CodedHead, HeldWeights
from tightfit.models.quantized.scheme import Scheme
from tightfit.plan.serving.plan import Serving, make_serving
from tightfit.plan.serving.seconds import (
    BLOCK_BITS,
    BLOCK_GROUP,
    BLOCK_TOKENS,
    FEW_TOKENS,
    SOME_TOKENS,
    SOME_TOKENS_FP8,
    PackedProducts,
    StepRates,
)
from tightfit.plan.serving.step import Step


def serving(model: str, on: str, form: str, length: int | None = 4096, requests: int = 1) -> Serving:
    return make_serving(model, preset(model), parse_machine(on), form, length, requests)


def test_8b_at_q8_0_serves_on_a_t4_and_at_bf16_does_not() -> None:
    small, large = serving("llama-3.1-8b", "T4", "q8_0"), serving("llama-3.1-8b", "T4", "bf16")
    assert small.fits
    assert small.gpu_peak_bytes > 8.03e9 * 34 / 32
    assert not large.fits
    assert large.changes()[0] == "smaller weights: --quantize q8_0"
    assert any(change.startswith("another card:") for change in large.changes())


def test_what_would_fit_is_of_the_same_vendor_and_says_how_many_requests() -> None:
    wide = serving("llama-3.1-8b", "T4", "q8_0", requests=64)
    assert not wide.fits
    most = wide.most_requests
    assert f"fewer requests at a time: --batch {most}" in wide.changes()
    assert serving("llama-3.1-8b", "T4", "q8_0", requests=most).fits
    assert not serving("llama-3.1-8b", "T4", "q8_0", requests=most + 1).fits
    assert serving("llama-2-7b", "RTX3060", "bf16").changes()[-1] == "another card: RTXA4500-20GB"


def test_more_requests_need_more_and_give_more() -> None:
    one, many = (serving("llama-3.2-1b", "L4", "bf16", 2048, requests) for requests in (1, 64))
    cache = 63 * 2048 * 2 * 2 * 512 * 16  # keys and values, two bytes, eight heads of 64, 16 layers
    assert many.gpu_peak_bytes - one.gpu_peak_bytes > cache
    assert many.tokens_per_second > 10 * one.tokens_per_second


def test_one_stream_is_bound_by_reading_the_weights() -> None:
    """The known figure: an H200 cannot read a 1B model more than about 1 700 times a second."""
    assert serving("llama-3.2-1b", "H200", "bf16", 512).tokens_per_second == pytest.approx(1700, rel=0.05)


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b", "gemma-2-9b"])
@pytest.mark.parametrize("form", ["bf16", "fp32", "q8_0", "q4_0"])
def test_no_prediction_is_ahead_of_its_bound(model: str, form: str) -> None:
    """With tied tables and others, on small cards and large ones, for few requests and many."""
    for card in ("T4", "L4", "A100-40GB", "H200"):
        for requests in (1, 4, 64):
            asked = serving(model, card, form, 1024, requests)
            assert asked.predicted_tokens_per_second <= asked.tokens_per_second
            assert asked.predicted_first_token_seconds >= asked.first_token_seconds


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


def test_attention_is_as_fast_with_rounded_inputs_as_without() -> None:
    plain, packed = (serving("llama-3.1-8b", "H200", form).rates for form in ("bf16", "w8a8"))
    assert isinstance(plain, StepRates)
    assert isinstance(packed, StepRates)
    assert packed.product_flop_s > 1.9 * plain.product_flop_s
    assert packed.attention_flop_s == plain.attention_flop_s


def test_a_coded_projection_is_read_as_codes() -> None:
    """Every token reads as many bytes less as it has, and a prompt too, for which layers alone are expanded."""
    spec, layers, coded = preset("llama-3.1-8b"), 3_600_000_000, Scheme(bits=8, group=0)
    numbers, scheme = spec.vocabulary_params, Scheme(bits=4, group=128)
    head = CodedHead(coded, coded.held_bytes(spec.vocab_size, spec.hidden_size))
    wide = HeldWeights(layers, 2 * (2 * numbers), 0, "int4", scheme)
    narrow = replace(wide, coded_bytes=layers + head.bytes, plain_bytes=2 * numbers, head=head)
    asked = serving("llama-3.1-8b", "H200", "bf16")
    before, after = (replace(asked, compressed=each) for each in (wide, narrow))
    saved = 2 * numbers - head.bytes
    assert head.bytes == numbers + 4 * spec.vocab_size
    assert before.read_bytes - after.read_bytes == saved
    rate = before.rates.bytes_per_second
    assert before.token_seconds - after.token_seconds == pytest.approx(saved / rate)
    assert 1 / before.predicted_tokens_per_second > 1 / after.predicted_tokens_per_second + saved / rate / 2
    assert before.predicted_first_token_seconds > after.predicted_first_token_seconds
    for requests, expanded in ((128, []), (129, [2 * numbers])):  # as many rows of logits as a step may have
        lines = replace(after, requests=requests).ledger.lines
        assert [line.bytes for line in lines if line.detail == "an expanded matrix"] == expanded


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


@pytest.mark.parametrize(
    ("form", "bytes_per_weight", "rows"), [("int4", 0.5 + 3 / 128, 0), ("int8", 1 + 3 / 128, 0), ("fp8", 1, 4)]
)
def test_formats_of_compress_by_name(form: str, bytes_per_weight: float, rows: int) -> None:
    """A 16-bit scale and a byte of zero point for 128 weights, or a float32 scale a row; by hand, for 8B's layers."""
    layer = {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}
    weights = 32 * sum(count * outputs * inputs for (outputs, inputs), count in layer.items())
    scales = 32 * rows * sum(count * outputs for (outputs, _), count in layer.items())
    plain = 2 * (2 * 128_256 * 4096 + (2 * 32 + 1) * 4096)
    asked = serving("llama-3.1-8b", "H200", form)
    assert asked.weight_bytes == weights * bytes_per_weight + scales + plain
    assert asked.weights_name == form
    assert asked.fits
    assert asked.predicted_tokens_per_second > 1.3 * serving("llama-3.1-8b", "H200", "bf16").predicted_tokens_per_second


def test_formats_of_compress_are_for_dense_models() -> None:
    with pytest.raises(UserError, match="--quantize is int4, which is counted for dense models only"):
        serving("mixtral-8x7b", "H200", "int4")


WITHIN = 0.15


@pytest.mark.parametrize(("model", "weights"), PREDICTED)
def test_predictions_beside_what_was_measured(model: str, weights: str) -> None:
    """Every row of an H200 within 15 %: first token, one stream, batches, prompts."""
    measured, told = measured_on_gpu(RESULTS, model, weights), predicted_on_gpu(model, weights)
    errors = {case: value / measured[case] - 1 for case, value in told.items() if case in measured}
    assert len(errors) >= 3
    assert all(abs(error) < WITHIN for error in errors.values()), errors


def test_packed_weights_are_multiplied_as_the_kernels_do() -> None:
    """By numbers of tokens that the planner, which does without torch, has written down again."""
    from tightfit.kernels.quantized import fp8_rows, packed_blocks, packed_rows, quantized_linear

    assert (FEW_TOKENS, SOME_TOKENS, SOME_TOKENS_FP8) == (
        packed_rows.MOST_ROWS,
        quantized_linear.SOME_ROWS,
        fp8_rows.MOST_ROWS,
    )
    assert (BLOCK_TOKENS, BLOCK_BITS, BLOCK_GROUP) == (packed_blocks.MOST_ROWS, packed_blocks.BITS, packed_blocks.TILE)
    rounded, four = Scheme(kind="fp8", bits=8, group=0, activations="fp8"), Scheme(bits=4, group=128)
    most = {
        on_hopper: [
            PackedProducts.of(scheme, on_hopper=on_hopper).most_tokens for scheme in (Scheme(bits=3), four, rounded)
        ]
        for on_hopper in (True, False)
    }
    assert most == {True: [0, BLOCK_TOKENS, inf], False: [0, SOME_TOKENS, inf]}


def test_every_term_of_a_step_alone() -> None:
    """By hand, for one query of a model whose other terms take no time."""
    spec, never = preset("llama-3.2-1b"), float("inf")
    still = StepRates(
        bytes_per_second=never, product_flop_s=never, attention_flop_s=never, layer_s=0.0, first_token_s=0.0
    )
    step = Step(tokens=5, answers=2, pairs=12.5, cache_bytes=1e6)

    def seconds(**rates: Any) -> float:
        return replace(still, **rates).step_seconds(spec, 3e9, step)

    assert seconds() == 0
    moved = 5 * 16 * 2 * (10 * 2048 + 2 * 2048 + 4 * 512 + 4 * 8192)
    assert seconds(bytes_per_second=1e12) == pytest.approx((3e9 + 1e6 + moved) / 1e12)
    head, layers = 128_256 * 2048, spec.params() - 128_256 * 2048
    assert seconds(product_flop_s=1e12) == pytest.approx(2 * (5 * layers + 2 * head) / 1e12)
    slow = PackedProducts(read_share=0.5, most_tokens=5, product_share=0.1)
    assert seconds(bytes_per_second=1e12, packed=slow) == pytest.approx((6e9 + 1e6 + moved) / 1e12)
    assert seconds(product_flop_s=1e12, packed=slow) == pytest.approx(2 * (5 * layers + 2 * head) / 1e12)  # few tokens
    expanded = replace(slow, most_tokens=4)
    read_bytes = 3e9 + 2 * layers + 2 * (layers + head)  # codes, 16 bits written, and read again
    assert seconds(bytes_per_second=1e12, packed=expanded) == pytest.approx((read_bytes + 1e6 + moved) / 1e12)
    assert seconds(product_flop_s=1e12, packed=expanded) == pytest.approx(2 * (5 * layers + 2 * head) / 1e12)
    some = replace(step, tokens=20)
    taken = replace(still, product_flop_s=1e12, packed=replace(slow, most_tokens=20)).step_seconds(spec, 3e9, some)
    assert taken == pytest.approx(2 * (20 * layers / 0.1 + 2 * head) / 1e12)
    assert seconds(attention_flop_s=1e12) == pytest.approx(4 * 12.5 * 2048 * 16 / 1e12)
    assert seconds(layer_s=1e-3) == pytest.approx(16e-3)


def test_predictions_are_never_beyond_the_limits() -> None:
    for model, on, form in (
        ("llama-3.2-1b", "T4", "q8_0"),
        ("llama-3.1-8b", "H200", "bf16"),
        ("qwen3-30b-a3b", "H200", "q4_0"),
    ):
        for length, requests in ((64, 1), (4096, 1), (1024, 32)):
            asked = serving(model, on, form, length, requests)
            limit = asked.tokens_per_second * asked.weight_bytes / replace(asked, requests=2).read_bytes
            assert asked.predicted_tokens_per_second < limit  # which counts an embedding that no step reads
            assert asked.predicted_first_token_seconds > asked.first_token_seconds
