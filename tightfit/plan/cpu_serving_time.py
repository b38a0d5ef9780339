"""How long one step of serving takes on a CPU: measured parts (hardware/cpu_rates.py), added up.

    products    weights of the layers · ns at the step's tokens + weights of the head · ns at its answers
    elements    tokens · layers · (10 hidden + 2 query + 4 key + 4 inner) · ns
    attention   4 · pairs of query and key · heads · head size · layers / rate
    cache       keys and values of single tokens / rate
    calls       layers · µs + the step's own µs + answers · (µs + vocabulary · ns)

On a CPU these follow one another, so nothing is hidden. Limits: layers that do not run over joint weights
(serve/weights/joint.py) make more calls, and experts have fewer rows a product, than is counted here.
"""

from dataclasses import dataclass

from tightfit.hardware.cpu_rates import CpuRates, ReadAs
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving_step import Step, layer_params, moved_elements


@dataclass(frozen=True, kw_only=True)
class CpuStepRates:
    """A CPU's rates, and what it reads of a model's weights."""

    measured: CpuRates
    layers_as: ReadAs
    head_as: ReadAs
    first_token_s: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Of float32 weights that one row is multiplied by."""
        return 4e9 / self.measured.product_ns("fp32", 1)

    @property
    def product_flops(self) -> float:
        """Of the fastest products with the layers' weights."""
        return max(2e9 * rows / ns for rows, ns in self.measured.products[self.layers_as])

    def step_seconds(self, spec: ModelSpec, weight_bytes: float, step: Step) -> float:
        """Predicted seconds of `step`; the bytes of its weights are in what products take."""
        rates = self.measured
        attention_flop = 4 * step.pairs * spec.query_size * spec.layers
        elements = step.tokens * spec.layers * moved_elements(spec)
        calls_us = spec.layers * rates.layer_us + rates.step_us + (step.answers - 1) * rates.answer_us
        return (
            self.products_seconds(spec, step)
            + 1e-9 * elements * rates.element_ns
            + 1e-9 * attention_flop / rates.attention_gflop_s
            + 1e-9 * step.cache_bytes / rates.cached_gb_s
            + 1e-6 * calls_us
            + 1e-9 * step.answers * spec.vocab_size * rates.logit_ns
        )

    def products_seconds(self, spec: ModelSpec, step: Step) -> float:
        """Of the step's products alone."""
        layers_ns = layer_params(spec) * self.measured.product_ns(self.layers_as, step.tokens)
        head_ns = spec.vocabulary_params * self.measured.product_ns(self.head_as, step.answers)
        return 1e-9 * (layers_ns + head_ns)

    def reading_seconds(self, spec: ModelSpec) -> float:
        """Of weights that are read once: products of one row."""
        return self.products_seconds(spec, Step(tokens=1, answers=1, pairs=0, cache_bytes=0))
