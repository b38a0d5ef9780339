"""How long one step of serving takes on a CPU: measured parts (hardware/cpu_rates.py), added up.

    products    weights of the layers · ns per weight at the step's tokens + weights of the head · ns at its answers;
                of experts, those that are routed to · ns at the tokens of each
    elements    tokens · layers · (10 hidden + 2 query + 4 key + 4 inner + 2 per number in further norms) · ns
    attention   pairs of query and key in prefill · heads · layers · (4 head size / rate + passes over scores · ns)
    cache       keys and values read in decode / rate, and passes over their scores if these are operations of their own
    calls       operations of the layers (cpu_operations.py) · µs + the step's own µs + answers · (µs + vocabulary · ns)

An answer is a sequence that samples a token in the step. On a CPU these parts run one after another: nothing overlaps.
torch's attention computes scores, softmax and sums in one pass; soft caps and sinks are further operations over all
scores, and with sinks keys and values are copied for every query head.
"""

from dataclasses import dataclass

from tightfit.hardware.cpu_rates import CpuRates, ReadAs
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving.cpu_operations import PLAIN_SINGLE, runs_joint, step_operations
from tightfit.plan.serving.step import Step, expert_params, experts_met, layer_params, moved_elements

NORM_ELEMENTS = 2
"""A norm reads and writes each number once."""
SOFTCAP_PASSES, SINK_PASSES = 4, 2
"""Passes over all scores besides the softmax, where attention is not one torch operation: 32 and 16 ns a pair beside
the softmax's 7.5 on a Neoverse N1, at heads of 16 to 256."""


@dataclass(frozen=True, kw_only=True)
class CpuStepRates:
    """A CPU's measured rates, and the formats in which products read the layers' and the head's weights."""

    measured: CpuRates
    layers_as: ReadAs
    head_as: ReadAs
    first_token_s: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes of float32 weights that a product of one row reads a second."""
        return 4e9 / self.measured.product_ns("fp32", 1)

    @property
    def product_flop_s(self) -> float:
        """FLOP/s of the layers' products at the best number of rows."""
        return max(2e9 * rows / ns for rows, ns in self.measured.products[self.layers_as])

    def step_seconds(self, spec: ModelSpec, weight_bytes: float, step: Step) -> float:
        """Predicted seconds of `step`; `weight_bytes` is not used, as measured products include reading weights."""
        rates = self.measured
        elements_s = 1e-9 * (step.tokens * spec.layers * _moved_elements(spec)) * rates.element_ns
        attention_s = 1e-9 * step.pairs * spec.heads * spec.layers * self._score_ns(spec)
        cache_s = 1e-9 * step.cache_bytes * self._cached_ns(spec)
        calls_s = 1e-6 * (self._layers_us(spec, step) + rates.step_us + (step.answers - 1) * rates.answer_us)
        logits_s = 1e-9 * step.answers * spec.vocab_size * rates.logit_ns
        return self.products_seconds(spec, step) + elements_s + attention_s + cache_s + calls_s + logits_s

    def _layers_us(self, spec: ModelSpec, step: Step) -> float:
        """Call overhead of all layers."""
        each_us = self.measured.layer_us / PLAIN_SINGLE if runs_joint(spec) else self.measured.operation_us
        return each_us * step_operations(spec, prompts=step.pairs > 0)

    def _score_ns(self, spec: ModelSpec) -> float:
        """Nanoseconds per pair of a query and a key of a head, in prefill."""
        return 4 * spec.head_dim / self.measured.attention_gflop_s + (1 + _passes(spec)) * self.measured.score_ns

    def _cached_ns(self, spec: ModelSpec) -> float:
        """Nanoseconds per byte of float32 keys and values that decoded tokens attend to."""
        reads = 1 + spec.heads // spec.kv_heads if spec.sinks else 1
        scores = spec.heads / (2 * 4 * spec.kv_size)
        return reads / self.measured.cached_gb_s + scores * _passes(spec) * self.measured.score_ns

    def products_seconds(self, spec: ModelSpec, step: Step) -> float:
        """Seconds of the step's products alone."""
        routed_ns, in_experts = 0.0, 0
        if spec.experts is not None:
            layers, met = sum(map(spec.is_routed, range(spec.layers))), experts_met(spec, step.tokens)
            in_experts = layers * spec.experts.per_token * expert_params(spec)
            rows = max(1, round(step.tokens * spec.experts.per_token / met))
            routed_ns = layers * met * expert_params(spec) * self.measured.product_ns(self.layers_as, rows)
        dense_ns = (layer_params(spec) - in_experts) * self.measured.product_ns(self.layers_as, step.tokens)
        head_ns = spec.vocabulary_params * self.measured.product_ns(self.head_as, step.answers)
        return 1e-9 * (dense_ns + routed_ns + head_ns)

    def least_decode_seconds(self, spec: ModelSpec, weight_bytes: float, cache_bytes: float) -> float:
        """Lower bound of the seconds of a decode step: products of one row, which read all weights, and the cache."""
        one_row = Step(tokens=1, answers=1, pairs=0, cache_bytes=0)
        return self.products_seconds(spec, one_row) + cache_bytes / self.bytes_per_second


def _moved_elements(spec: ModelSpec) -> int:
    """Numbers per token that a layer reads and writes outside products and attention."""
    more_norms = (spec.norms_per_layer - 2) * spec.hidden_size + (spec.query_size + spec.kv_size) * spec.qk_norm
    return moved_elements(spec) + NORM_ELEMENTS * more_norms


def _passes(spec: ModelSpec) -> int:
    """Passes over all scores besides the softmax."""
    return SOFTCAP_PASSES * (spec.attention_softcap is not None) + SINK_PASSES * spec.sinks
