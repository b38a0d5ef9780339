"""How long one step of serving takes: a prediction, in five terms that can be checked by eye.

    reading     (weights + keys and values of the step's requests) / rate of reading
    products    2 · (weights of the layers · tokens + head · answers) / rate of products
    attention   4 · pairs of query and key · heads · head size · layers / rate of attention
    traffic     tokens · layers · 2 bytes · (10 hidden + 2 query + 4 key + 4 inner) / rate of reading
    launches    layers · time of a layer's launches

A product reads weights while it multiplies: two fifths of the shorter of reading weights and products are hidden. A
prompt's first token also waits for the host once. Packed weights are read at a smaller share of the rate. Rates are the
measured shares of a card's peaks (hardware/efficiency.py); the three constants below were fitted to the ten bf16 rows
of an H200 in benchmarks/results/serve_speed.csv, whose largest error is then 14 % (docs/serving.md has all). Limits:
prompts and batches of packed weights, whose kernels are slower than this says; other cards are assumed to be alike.
"""

from dataclasses import dataclass
from math import ceil

from tightfit.models.spec import ModelSpec

HIDDEN_SHARE = 0.4
LAYER_LAUNCH_S = 16e-6
FIRST_TOKEN_HOST_S = 0.25e-3
ELEMENT_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class StepRates:
    """What a device does a second, and what a step waits for besides."""

    bytes_per_second: float
    product_flops: float
    attention_flops: float
    weight_share: float = 1.0
    """Of the rate of reading, at which weights are read: below one where they are packed."""
    layer_s: float = LAYER_LAUNCH_S
    first_token_s: float = FIRST_TOKEN_HOST_S
    element_bytes: int = ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass: `tokens` in all, of which `answers` are asked for the next one."""

    tokens: int
    answers: int
    pairs: float
    """Of a query and a key that it sees, within prompts of the step."""
    cache_bytes: float
    """Keys and values that are read."""


def step_seconds(spec: ModelSpec, rates: StepRates, weight_bytes: float, step: Step) -> float:
    """Predicted seconds of `step`, which reads `weight_bytes` of weights."""
    head = spec.vocab_size * spec.hidden_size
    layers = spec.params(active=True) - (1 if spec.tied else 2) * head
    reading = weight_bytes / (rates.bytes_per_second * rates.weight_share)
    products = 2 * (layers * step.tokens + head * step.answers) / rates.product_flops
    attention = 4 * step.pairs * spec.query_size * spec.layers / rates.attention_flops
    moved = 10 * spec.hidden_size + 2 * spec.query_size + 4 * spec.kv_size + 4 * spec.mlp_size
    traffic = step.tokens * spec.layers * rates.element_bytes * moved
    return (
        reading
        + products
        - HIDDEN_SHARE * min(reading, products)
        + attention
        + (traffic + step.cache_bytes) / rates.bytes_per_second
        + spec.layers * rates.layer_s
    )


def prompt_seconds(
    spec: ModelSpec, rates: StepRates, weight_bytes: float, tokens: int, step_tokens: int | None = None
) -> float:
    """Predicted seconds from a prompt of `tokens` that is alone to its first token, in pieces of `step_tokens`."""
    pieces = 1 if step_tokens is None else ceil(tokens / step_tokens)
    whole = step_seconds(spec, rates, weight_bytes, Step(tokens=tokens, answers=1, pairs=tokens**2 / 2, cache_bytes=0))
    again = weight_bytes / (rates.bytes_per_second * rates.weight_share) + spec.layers * rates.layer_s
    return whole + (pieces - 1) * again + rates.first_token_s
