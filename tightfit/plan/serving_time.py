"""How long one step of serving takes on a GPU: a prediction, in five terms that can be checked by eye.

    reading     (weights + keys and values of the step's requests) / rate of reading
    products    2 · (weights of the layers · tokens + head · answers) / rate of products
    attention   4 · pairs of query and key · heads · head size · layers / rate of attention
    traffic     tokens · layers · 2 bytes · (10 hidden + 2 query + 4 key + 4 inner) / rate of reading
    launches    layers · time of a layer's launches

A product reads weights while it multiplies: two fifths of the shorter of reading weights and products are hidden. A
prompt's first token also waits for the host once. Packed weights are read at a smaller share of the rate. Rates are the
measured shares of a card's peaks (hardware/efficiency.py); the three constants below were fitted to the ten bf16 rows
of an H200 in benchmarks/results/serve_speed.csv, whose largest error is then 14 % (docs/serving.md has all). Limits:
prompts and batches of packed weights, whose kernels are slower than this says; other cards are assumed to be alike. A
CPU's time has other parts (cpu_serving_time.py).
"""

from dataclasses import dataclass

from tightfit.models.spec import ModelSpec
from tightfit.plan.cpu_serving_time import CpuStepRates
from tightfit.plan.serving_step import Step, layer_params, moved_elements

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

    def step_seconds(self, spec: ModelSpec, weight_bytes: float, step: Step) -> float:
        """Predicted seconds of `step`, which reads `weight_bytes` of weights."""
        head = spec.vocab_size * spec.hidden_size
        reading = weight_bytes / (self.bytes_per_second * self.weight_share)
        products = 2 * (layer_params(spec) * step.tokens + head * step.answers) / self.product_flops
        attention = 4 * step.pairs * spec.query_size * spec.layers / self.attention_flops
        traffic = step.tokens * spec.layers * self.element_bytes * moved_elements(spec)
        return (
            reading
            + products
            - HIDDEN_SHARE * min(reading, products)
            + attention
            + (traffic + step.cache_bytes) / self.bytes_per_second
            + spec.layers * self.layer_s
        )


ServingRates = StepRates | CpuStepRates


def prompt_seconds(spec: ModelSpec, rates: ServingRates, weight_bytes: float, tokens: int) -> float:
    """Predicted seconds from a prompt of `tokens` that is alone to its first token."""
    step = Step(tokens=tokens, answers=1, pairs=tokens**2 / 2, cache_bytes=0)
    return rates.step_seconds(spec, weight_bytes, step) + rates.first_token_s
