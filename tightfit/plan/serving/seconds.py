"""How long one step of serving takes on a GPU: a prediction, in five terms that can be checked by eye.

    reading     (weights + keys and values of the step's requests) / rate of reading
    products    2 · (weights of the layers · tokens + head · answers) / rate of products
    attention   4 · pairs of query and key · heads · head size · layers / rate of attention
    traffic     tokens · layers · 2 bytes · (10 hidden + 2 query + 4 key + 4 inner) / rate of reading
    launches    layers · time of a layer's launches

A product reads weights while it multiplies: HIDDEN_SHARE of the shorter of reading and products is hidden. A prompt's
first token also waits for the host once. Kernels for packed weights read them at a smaller share of the rate, and
multiply at a smaller share for more than a few tokens; for many tokens the weights are dequantized first:

    expanding   (codes + 2 bytes · weights of the layers) / rate of reading

Rates are the measured shares of a card's peaks (hardware/efficiency.py); the constants below were fitted to the rows of
an H200 in benchmarks/results/serve_speed.csv, which docs/serving.md lists. Other cards are assumed to be alike. A CPU's
time has other parts (cpu_seconds.py).
"""

import math
from dataclasses import dataclass

from tightfit.models.quantized.scheme import PACKED_BITS, Scheme
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving.cpu_seconds import CpuStepRates
from tightfit.plan.serving.step import Step, layer_params, moved_elements

HIDDEN_SHARE = 0.6
LAYER_LAUNCH_S = 22e-6
"""Seconds per layer of kernels' starts and ends, in a step of several tokens."""
LAYER_LAUNCH_ONE_S = 10e-6
"""The same for one token: fewer kernels, whose starts overlap with the ends of those before."""
FIRST_TOKEN_HOST_S = 0.25e-3
ELEMENT_BYTES = 2
FEW_TOKENS = 16
"""Most tokens for which products with packed weights are as fast as reading them: kernels/quantized/packed_rows.py."""
SOME_TOKENS = 128
"""Most tokens for which kernels read integer codes; for more, weights are dequantized:
kernels/quantized/quantized_linear.py."""
BLOCK_TOKENS, BLOCK_BITS, BLOCK_GROUP = 256, 4, 128
"""The same on Hopper, and for which integers in groups of multiples of how many: kernels/quantized/packed_blocks.py."""
SOME_TOKENS_FP8 = 128
"""The same for fp8 codes: kernels/quantized/fp8_rows.py."""
PACKED_PRODUCTS_SHARE, BLOCK_PRODUCTS_SHARE = 0.36, 0.72
"""Share of the usual rate of products that kernels on packed weights reach for more than FEW_TOKENS; on Hopper."""
ROUNDED_READ_SHARE, ROUNDED_PRODUCTS_SHARE = 0.78, 0.9
"""Shares of reading and of 8-bit products where inputs are rounded too, which takes time:
kernels/quantized/rounded_matmul.py."""
MOST_OUTLIER_TOKENS, MOST_OUTLIER_BITS = 16, 4
"""Most tokens, and most bits, for which kernels read packed weights with outliers: kernels/quantized/spqr_linear.py."""

OUTLIERS_READ_SHARE = 0.16  # one row × 4096 × 14336 in 3 bits takes 46 µs on an H200


@dataclass(frozen=True, kw_only=True)
class PackedProducts:
    """Speed of the kernels on packed weights."""

    read_share: float
    """Share of the usual read bandwidth at which codes are read."""
    most_tokens: float
    """Most tokens for which kernels read packed weights; for more, weights are dequantized first."""
    product_share: float = PACKED_PRODUCTS_SHARE

    @classmethod
    def of(cls, scheme: Scheme, *, on_hopper: bool) -> "PackedProducts":
        """The speeds of our engine's kernels for weights in `scheme`."""
        read_share = 0.78 if scheme.bits <= 4 else 0.93  # 8B in one stream: 549 tokens/s in int4, 411 in fp8
        if scheme.activations is not None:
            return cls(read_share=ROUNDED_READ_SHARE, most_tokens=math.inf, product_share=ROUNDED_PRODUCTS_SHARE)
        if scheme.kind == "fp8":
            return cls(read_share=read_share, most_tokens=SOME_TOKENS_FP8)
        if scheme.outliers and scheme.bits <= MOST_OUTLIER_BITS:
            return cls(read_share=OUTLIERS_READ_SHARE, most_tokens=MOST_OUTLIER_TOKENS)
        in_blocks = scheme.kind == "int" and scheme.bits == BLOCK_BITS and scheme.group % BLOCK_GROUP == 0
        if on_hopper and in_blocks and not scheme.outliers:
            return cls(read_share=read_share, most_tokens=BLOCK_TOKENS, product_share=BLOCK_PRODUCTS_SHARE)
        is_multiplied = scheme.kind == "int" and scheme.bits in PACKED_BITS and not scheme.outliers
        return cls(read_share=read_share, most_tokens=SOME_TOKENS if is_multiplied else 0)


@dataclass(frozen=True, kw_only=True)
class StepRates:
    """Rates of a device, and the fixed seconds of a step's launches."""

    bytes_per_second: float
    product_flop_s: float
    """FLOP a second of products in 16 bits, or in 8 where their inputs are rounded too."""
    attention_flop_s: float
    packed: PackedProducts | None = None
    """None where weights are plain."""
    head_bytes: int | None = None
    """Bytes of the output projection's codes; None where it is plain."""
    layer_s: float = LAYER_LAUNCH_S
    first_token_s: float = FIRST_TOKEN_HOST_S
    element_bytes: int = ELEMENT_BYTES

    def least_decode_seconds(self, spec: ModelSpec, weight_bytes: float, cache_bytes: float) -> float:
        """Lower bound of the seconds of a decode step: reading `weight_bytes` of weights and the cache once."""
        return (weight_bytes + cache_bytes) / self.bytes_per_second

    def step_seconds(self, spec: ModelSpec, weight_bytes: float, step: Step) -> float:
        """Predicted seconds of `step`, which reads `weight_bytes` of weights."""
        reading_s, products_s = self._reading_and_products_s(spec, weight_bytes, step)
        attention_s = 4 * step.pairs * spec.query_size * spec.layers / self.attention_flop_s
        traffic_bytes = step.tokens * spec.layers * self.element_bytes * moved_elements(spec)
        hidden_s = HIDDEN_SHARE * min(reading_s, products_s)
        moving_s = (traffic_bytes + step.cache_bytes) / self.bytes_per_second
        launches_s = spec.layers * (LAYER_LAUNCH_ONE_S if step.tokens == 1 else self.layer_s)
        expanding_s = self._expanding_s(spec, weight_bytes, step)
        return reading_s + products_s - hidden_s + attention_s + moving_s + launches_s + expanding_s

    def _reading_and_products_s(self, spec: ModelSpec, weight_bytes: float, step: Step) -> tuple[float, float]:
        """Seconds of reading weights in the form that products read, and seconds of products."""
        packed, head = self.packed, spec.vocabulary_params
        layers_flop, head_flop = 2.0 * layer_params(spec) * step.tokens, 2.0 * head * step.answers
        plain_s = (layers_flop + head_flop) / self.product_flop_s
        if packed is None:
            return weight_bytes / self.bytes_per_second, plain_s
        if step.tokens > packed.most_tokens:
            head_bytes = self.element_bytes * head if self.head_bytes is None else self.head_bytes
            return (self.element_bytes * layer_params(spec) + head_bytes) / self.bytes_per_second, plain_s
        reading_s = weight_bytes / (self.bytes_per_second * packed.read_share)
        if step.tokens <= FEW_TOKENS:
            return reading_s, plain_s
        head_is_packed = self.head_bytes is not None and step.answers > FEW_TOKENS
        head_flop /= packed.product_share if head_is_packed else 1
        return reading_s, (layers_flop / packed.product_share + head_flop) / self.product_flop_s

    def _expanding_s(self, spec: ModelSpec, weight_bytes: float, step: Step) -> float:
        """Seconds of dequantizing packed weights, in a step of many tokens; else 0."""
        if self.packed is None or step.tokens <= self.packed.most_tokens:
            return 0.0
        return (weight_bytes + self.element_bytes * layer_params(spec)) / self.bytes_per_second


ServingRates = StepRates | CpuStepRates
