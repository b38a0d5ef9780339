"""Latency and throughput of an engine under load: a fixed number of requests at a time, each replaced when it is over.

Beside them stands the bound by memory bandwidth, as in a plan: a step reads all weights (of experts those of one token
at least) and its requests' keys and values once, at the bandwidth measured on this device. And what a plan would
predict (plan/serving/seconds.py, on a CPU plan/serving/cpu_seconds.py) from rates that are measured here first.
"""

import math
import random
import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from tightfit.errors import UserError
from tightfit.hardware.cpu_rates import CpuRates, ReadAs
from tightfit.hardware.timing import seconds_each
from tightfit.kernels.quantized.packed_blocks import is_hopper
from tightfit.memory.formulas.serving import cache_bytes_per_token
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.plan.serving.cpu_seconds import CpuStepRates
from tightfit.plan.serving.seconds import PackedProducts, ServingRates, StepRates
from tightfit.plan.serving.step import Step
from tightfit.serve.cpu_timing import measure_cpu_rates
from tightfit.serve.engine import Engine
from tightfit.serve.forward.runner import Runner
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.weights.half import HalfWeight
from tightfit.serve.weights.int4 import Int4Weight
from tightfit.serve.weights.weight import Weight


@dataclass(frozen=True, kw_only=True)
class LoadRow:
    """Latency and throughput with `at_once` requests at a time: measured, bounded and predicted."""

    at_once: int
    requests: int
    first_token_ms: float
    first_token_ms_p90: float
    between_tokens_ms: float
    between_tokens_ms_p90: float
    tokens_per_second: float
    most_tokens_per_second: float
    """The bound by the bandwidth for reading weights, keys and values."""
    predicted_first_token_ms: float
    predicted_between_tokens_ms: float
    predicted_tokens_per_second: float


READ_BYTES = 2**28
READ_ROUNDS = 5
PRODUCT_SIZE = 8192
EIGHT_BIT_TIMES = 2
"""Products with both factors in 8 bits, beside those of 16 bits."""


def read_bytes_per_second(device: torch.device) -> float:
    """The read bandwidth of `device`: the best of a few sums over more bytes than its caches hold."""
    data = torch.zeros(READ_BYTES // 4, device=device)
    return READ_BYTES / min(seconds_each(lambda: data.sum().item(), READ_ROUNDS))


def product_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on `device`: the best of a few."""
    left = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=dtype)
    return 2 * PRODUCT_SIZE**3 / min(seconds_each(lambda: (left @ left)[0, 0].item(), READ_ROUNDS))


def measured_rates(engine: Engine) -> ServingRates:
    """Bytes and FLOP a second of the engine's device (on a CPU all its rates), measured now."""
    device, dtype = engine.runner.device, engine.model.embed.weight.dtype
    if device.type == "cpu":
        return engine_reads_as(engine, measure_cpu_rates())
    flops = product_flops_per_second(device, dtype)
    layers, head = engine.model.layers.modules(), engine.model.head
    scheme = next((each.scheme for each in layers if isinstance(each, QuantizedLinear)), None)
    rounds_inputs = scheme is not None and scheme.activations is not None
    return StepRates(
        bytes_per_second=read_bytes_per_second(device),
        product_flop_s=flops * EIGHT_BIT_TIMES if rounds_inputs else flops,
        attention_flop_s=flops,
        packed=None if scheme is None else PackedProducts.of(scheme, on_hopper=is_hopper(device)),
        head_bytes=sum(each.nbytes for each in head.buffers()) if isinstance(head, QuantizedLinear) else None,
        element_bytes=dtype.itemsize,
    )


def engine_reads_as(engine: Engine, measured: CpuRates) -> CpuStepRates:
    """The CPU's `measured` rates, with the weight formats that the products of `engine` read."""
    program = engine.runner.program if isinstance(engine.runner, Runner) else None
    if program is None:
        layers, head = (_decoder_form(part) for part in (engine.model.layers, engine.model.head))
        return CpuStepRates(measured=measured, layers_as=layers, head_as=head)
    return CpuStepRates(measured=measured, layers_as=_form(program.layers[0].qkv), head_as=_form(program.head))


def _decoder_form(part: nn.Module) -> ReadAs:
    """The format that products of the decoder's own modules read, in `part` of it."""
    coded = any(isinstance(each, QuantizedLinear) and each.cpu_scales is not None for each in part.modules())
    return "int4" if coded else "fp32"


def _form(weight: Weight) -> ReadAs:
    return "int4" if isinstance(weight, Int4Weight) else "fp16" if isinstance(weight, HalfWeight) else "fp32"


def _read_bytes(engine: Engine) -> float:
    """Bytes of weights that a step reads, of experts those of one token."""
    return engine.budget.read_bytes * engine.model.spec.params(active=True) / engine.model.spec.params()


def _cache_bytes_per_token(engine: Engine) -> int:
    model = engine.model
    return cache_bytes_per_token(model.spec, model.embed.weight.element_size(), engine.config.cache_format)


def predicted_seconds(
    engine: Engine, rates: ServingRates, at_once: int, prompt_tokens: int, answer_tokens: int
) -> tuple[float, float]:
    """Predicted seconds from a request to its first token, and from a token to the next, with `at_once` running.

    Prompts come together: those that fit one step are computed in one, else the median one waits for half of them.
    """
    spec, weights = engine.model.spec, _read_bytes(engine)
    fits_one_step = at_once * prompt_tokens <= engine.config.step_tokens
    together = at_once if fits_one_step else (at_once + 1) // 2
    prompts = Step(
        tokens=together * prompt_tokens, answers=together, pairs=together * prompt_tokens**2 / 2, cache_bytes=0
    )
    cached = at_once * (prompt_tokens + answer_tokens / 2) * _cache_bytes_per_token(engine)
    decoding = Step(tokens=at_once, answers=at_once, pairs=0, cache_bytes=cached)
    first = rates.step_seconds(spec, weights, prompts) + rates.first_token_s
    return first, rates.step_seconds(spec, weights, decoding)


def most_tokens_per_second(engine: Engine, at_once: int, length: float, bytes_per_second: float) -> float:
    """Tokens a second that the read bandwidth allows, with `at_once` answers over `length` positions each."""
    return at_once * bytes_per_second / (_read_bytes(engine) + at_once * length * _cache_bytes_per_token(engine))


@dataclass
class Watched:
    """When the tokens of one request came."""

    began: float
    came: list[float]


def refuse_long(engine: Engine, prompt_tokens: int, answer_tokens: int) -> None:
    """Refuse requests longer than the engine's longest."""
    if prompt_tokens + answer_tokens > engine.max_length:
        raise UserError(
            f"prompts of {prompt_tokens:,} tokens and answers of {answer_tokens:,} are longer than the "
            f"{engine.max_length:,} that the engine holds; ask for less"
        )


def bench_load(
    engine: Engine,
    at_once: int,
    *,
    prompt_tokens: int,
    answer_tokens: int,
    requests: int,
    rates: ServingRates,
    seed: int = 0,
) -> LoadRow:
    """Run `requests` random prompts, `at_once` at a time."""
    refuse_long(engine, prompt_tokens, answer_tokens)
    chance, top = random.Random(seed), engine.model.spec.vocab_size
    watched: dict[str, Watched] = {}
    started = 0
    began = time.perf_counter()
    open_requests: set[str] = set()
    while started < requests or open_requests:
        while started < requests and len(open_requests) < at_once:
            prompt = [chance.randrange(top) for _ in range(prompt_tokens)]
            request = Request(
                id=f"{at_once}-{started}", prompt=prompt, sampling=Sampling(max_tokens=answer_tokens, temperature=0)
            )
            watched[request.id] = Watched(time.perf_counter(), [])
            engine.submit(request)
            open_requests.add(request.id)
            started += 1
        for output in engine.step():
            watched[output.request].came += [time.perf_counter()] * len(output.tokens)
            if output.finish is not None:
                open_requests.remove(output.request)
    seconds, length = time.perf_counter() - began, prompt_tokens + answer_tokens / 2
    most = most_tokens_per_second(engine, at_once, length, rates.bytes_per_second)
    predicted = predicted_seconds(engine, rates, at_once, prompt_tokens, answer_tokens)
    return _row(at_once, list(watched.values()), seconds, most, predicted)


def _row(at_once: int, watched: list[Watched], seconds: float, most: float, predicted: tuple[float, float]) -> LoadRow:
    first = [each.came[0] - each.began for each in watched]
    between = [b - a for each in watched for a, b in zip(each.came, each.came[1:], strict=False)] or [0.0]
    tokens = sum(len(each.came) for each in watched)
    answers = tokens / len(watched)
    return LoadRow(
        at_once=at_once,
        requests=len(watched),
        first_token_ms=1e3 * statistics.median(first),
        first_token_ms_p90=1e3 * _p90(first),
        between_tokens_ms=1e3 * statistics.median(between),
        between_tokens_ms_p90=1e3 * _p90(between),
        tokens_per_second=tokens / seconds,
        most_tokens_per_second=most,
        predicted_first_token_ms=1e3 * predicted[0],
        predicted_between_tokens_ms=1e3 * predicted[1],
        predicted_tokens_per_second=at_once * answers / (predicted[0] + (answers - 1) * predicted[1]),
    )


def _p90(values: list[float]) -> float:
    """The nearest-rank 90th percentile: never below the median."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]
