"""How long one step of serving takes on a GPU: a prediction, in five terms that can be checked by eye.

    reading     (weights + keys and values of the step's requests) / rate of reading
    products    2 · (weights of the layers · tokens + head · answers) / rate of products
    attention   4 · pairs of query and key · heads · head size · layers / rate of attention
    traffic     tokens · layers · 2 bytes · (10 hidden + 2 query + 4 key + 4 inner) / rate of reading
    launches    layers · time of a layer's launches

A product reads weights while it multiplies: three fifths of the shorter of reading weights and products are hidden. A
prompt's first token also waits for the host once. Packed weights are read at a smaller share of the rate, multiplied at
a smaller one by more than a few tokens, and by many once they were expanded:

    expanding   (codes + 2 bytes · weights of the layers) / rate of reading

Rates are the measured shares of a card's peaks (hardware/efficiency.py); the constants below were fitted to the rows of
an H200 in benchmarks/results/serve_speed.csv, of which docs/serving.md has all. Other cards are assumed to be alike. A
CPU's time has other parts (cpu_serving_time.py).
"""

import math
from dataclasses import dataclass

from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import ModelSpec
from tightfit.plan.cpu_serving_time import CpuStepRates
from tightfit.plan.serving_step import Step, layer_params, moved_elements

HIDDEN_SHARE = 0.6
LAYER_LAUNCH_S = 22e-6
"""What a layer's kernels take to begin and end, where a step has several tokens."""
LAYER_LAUNCH_ONE_S = 10e-6
"""The same where it has one, for which kernels are fewer and begin while those before them end."""
FIRST_TOKEN_HOST_S = 0.25e-3
ELEMENT_BYTES = 2
FEW_TOKENS = 16
"""Up to which codes are multiplied as fast as they are read: kernels/packed_rows.py."""
SOME_TOKENS = 128
"""Up to which integers are multiplied as they are: kernels/quantized_linear.py."""
SOME_TOKENS_FP8 = 128
"""The same of 8-bit floats: kernels/fp8_rows.py."""
PACKED_PRODUCTS_SHARE = 0.36
"""Of the rate of products, at which codes are multiplied by more than a few tokens."""
MULTIPLIED_BITS = (2, 4, 8)
"""Integers whose codes are multiplied as they are; others are always expanded."""
FEW_TOKENS, MOST_OUTLIER_BITS = 16, 4
"""Up to which, and in how many bits, weights with outliers are read as they are: kernels/spqr_linear.py."""

OUTLIERS_READ_SHARE = 0.16  # one row × 4096 × 14336 in 3 bits takes 46 µs on an H200


@dataclass(frozen=True, kw_only=True)
class PackedProducts:
    """How a step multiplies by packed weights."""

    read_share: float
    """Of the rate of reading, at which codes are read."""
    most_tokens: float
    """Up to which codes are multiplied as they are; weights are expanded for more."""
    product_share: float = PACKED_PRODUCTS_SHARE

    @classmethod
    def of(cls, scheme: Scheme) -> "PackedProducts":
        """By what our engine does with such weights."""
        read_share = 0.78 if scheme.bits <= 4 else 0.93  # 8B in one stream: 552 tokens/s in int4, 411 in fp8
        if scheme.activations is not None:
            return cls(read_share=read_share, most_tokens=math.inf, product_share=1.0)
        if scheme.kind == "fp8":
            return cls(read_share=read_share, most_tokens=SOME_TOKENS_FP8)
        if scheme.outliers and scheme.bits <= MOST_OUTLIER_BITS:
            return cls(read_share=OUTLIERS_READ_SHARE, most_tokens=FEW_TOKENS)
        is_multiplied = scheme.kind == "int" and scheme.bits in MULTIPLIED_BITS and not scheme.outliers
        return cls(read_share=read_share, most_tokens=SOME_TOKENS if is_multiplied else 0)


@dataclass(frozen=True, kw_only=True)
class StepRates:
    """What a device does a second, and what a step waits for besides."""

    bytes_per_second: float
    product_flops: float
    attention_flops: float
    packed: PackedProducts | None = None
    """None where weights are plain."""
    layer_s: float = LAYER_LAUNCH_S
    layer_one_s: float = LAYER_LAUNCH_ONE_S
    first_token_s: float = FIRST_TOKEN_HOST_S
    element_bytes: int = ELEMENT_BYTES

    def step_seconds(self, spec: ModelSpec, weight_bytes: float, step: Step) -> float:
        """Predicted seconds of `step`, which reads `weight_bytes` of weights."""
        reading, products = self._reading_and_products(spec, weight_bytes, step)
        attention = 4 * step.pairs * spec.query_size * spec.layers / self.attention_flops
        traffic = step.tokens * spec.layers * self.element_bytes * moved_elements(spec)
        return (
            reading
            + products
            - HIDDEN_SHARE * min(reading, products)
            + attention
            + (traffic + step.cache_bytes) / self.bytes_per_second
            + spec.layers * (self.layer_one_s if step.tokens == 1 else self.layer_s)
            + self._expanding(spec, weight_bytes, step)
        )

    def _reading_and_products(self, spec: ModelSpec, weight_bytes: float, step: Step) -> tuple[float, float]:
        """Seconds of each, of weights as they are multiplied."""
        packed, head = self.packed, spec.vocabulary_params
        layers_flop, head_flop = 2 * layer_params(spec) * step.tokens, 2 * head * step.answers
        plain = (layers_flop + head_flop) / self.product_flops
        if packed is None:
            return weight_bytes / self.bytes_per_second, plain
        if step.tokens > packed.most_tokens:
            return self.element_bytes * (layer_params(spec) + head) / self.bytes_per_second, plain
        reading = weight_bytes / (self.bytes_per_second * packed.read_share)
        if step.tokens <= FEW_TOKENS:
            return reading, plain
        return reading, (layers_flop / packed.product_share + head_flop) / self.product_flops

    def _expanding(self, spec: ModelSpec, weight_bytes: float, step: Step) -> float:
        """Seconds until packed weights are plain, where a step has many tokens."""
        if self.packed is None or step.tokens <= self.packed.most_tokens:
            return 0.0
        return (weight_bytes + self.element_bytes * layer_params(spec)) / self.bytes_per_second


ServingRates = StepRates | CpuStepRates


def prompt_seconds(spec: ModelSpec, rates: ServingRates, weight_bytes: float, tokens: int) -> float:
    """Predicted seconds from a prompt of `tokens` that is alone to its first token."""
    step = Step(tokens=tokens, answers=1, pairs=tokens**2 / 2, cache_bytes=0)
    return rates.step_seconds(spec, weight_bytes, step) + rates.first_token_s
