"""Work: what one token costs in one layer and in the output head, before anything is split.

Matrix products cost 2 operations per weight and token forward and twice that backward. Causal attention costs
4 × (pairs of positions) × query width forward, 2.5 times that backward (flash attention computes the scores again).
Norms, rope and the gate are bound by memory: bytes read and written, one pass each as in tightfit's fused kernels.
"""

from dataclasses import dataclass
from functools import cache

from tightfit.models.spec import ModelSpec

ATTENTION_BACKWARD = 2.5
LOGIT_PASSES = {"fused": 3.0, "plain": 21.0}
"""Passes over bf16 logits outside the three products; from H=4096, V=128256: fused 82.3 ms, plain 99.3, products 77."""

NORM_PASSES = 2 + 4 + 3
"""Over hidden states: the first norm reads and writes, the second adds to the residual stream first and writes that
too, and the MLP's result is added."""
NORM_BACKWARD_PASSES = 4 + 3 + 3 + 6
"""The second norm's gradient with the stream's, the first's, its sum with the stream's, and the gradients that queries,
keys and values have of their input, added up."""


@dataclass(frozen=True)
class LayerWork:
    """Averages over the layers of a model. Widths are in elements per token."""

    matmul_params: float
    """Weights that multiply each token."""
    mlp_width: float
    """MLP columns that a token passes through."""
    norm_width: float
    """Read or written by norms and the residual stream, forward."""
    norm_backward_width: float
    rope_width: float
    gate_width: float
    gate_backward_width: float
    routed_share: float
    """Share of layers that route to experts."""


@cache
def layer_work(spec: ModelSpec) -> LayerWork:
    """The average layer of `spec`."""
    routed = sum(spec.is_routed(i) for i in range(spec.layers)) / spec.layers
    width = _mlp_width(spec, routed)
    inner = 2 if spec.gated else 1
    attention = spec.hidden_size * (2 * spec.query_size + 2 * spec.kv_size)
    mlp = (inner + 1) * spec.hidden_size * width
    rope = 2 * (spec.query_size + spec.kv_size) * (2 if spec.qk_norm else 1)
    return LayerWork(
        matmul_params=attention + mlp,
        mlp_width=width,
        norm_width=spec.hidden_size * (NORM_PASSES + 4 * spec.sandwich_norms),
        norm_backward_width=spec.hidden_size * (NORM_BACKWARD_PASSES + 6 * spec.sandwich_norms),
        rope_width=rope,
        gate_width=(inner + 1) * width,
        gate_backward_width=(2 * inner + 2) * width,
        routed_share=routed,
    )


def _mlp_width(spec: ModelSpec, routed: float) -> float:
    """MLP columns that one token passes through, averaged over the layers."""
    if spec.experts is None:
        return spec.mlp_size
    active = spec.experts.per_token * spec.experts.mlp_size + spec.experts.shared_size
    return routed * active + (1 - routed) * spec.mlp_size


@cache
def attention_pairs(spec: ModelSpec, sequence_length: int) -> float:
    """Pairs (query, key) of one row in the average layer: T²/2, or less where layers look through a window."""
    full = sequence_length**2 / 2
    window = min(spec.window or sequence_length, sequence_length)
    windowed = window * sequence_length - window**2 / 2
    share = len(spec.window_layers) / spec.layers
    return share * windowed + (1 - share) * full


@cache
def sharded_params(spec: ModelSpec) -> tuple[int, int, int]:
    """Parameters of (one average layer without experts, its experts, embedding with head and last norm)."""
    experts = 0
    if spec.experts is not None:
        each = spec.mlp_params(spec.experts.mlp_size) * spec.experts.count
        experts = each * sum(spec.is_routed(i) for i in range(spec.layers))
    layers = sum(spec.layer_params(i) for i in range(spec.layers)) - experts
    ends = spec.embedding_params + spec.head_params + spec.norm_params
    return layers // spec.layers, experts // spec.layers, ends
