"""Norms, rope, the gate and the loss: bound by memory, one pass over the bytes each as in our fused kernels.

Widths are numbers read or written per token, in one layer; ours, and those of other engines (jobs/engine.py).

| | forward | backward |
|---|---|---|
| norms and residual stream | 9 H: the first norm 2, the second adds to the stream and writes it 4, the MLP's result is added 3 | 16 H: gradients of the second norm with the stream's 4, of the first 3, its sum with the stream's 3, those of q, k and v added up 6 |
| norms after blocks (Gemma) | + 4 H | + 6 H |
| rope (with norms of q and k: twice) | 2 (Q + K) | 2 (Q + K) |
| latent attention, whose heads are split, reordered, joined and padded | 35 Q | 50 Q |
| sinks, which rescale what attention gives | 3 Q | 5 Q |
| gate of F columns | 3 F, or 2 F without one | 6 F, or 4 F |
| experts' biases, picked for every row and added to gate and up | 10 F | 2 F |
"""  # noqa: E501

from tightfit.jobs.engine import Engine, Passes
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.products import mlp_columns, routed_share
from tightfit.plan.seconds.rates import Rates

NORM_PASSES = 2, 3
"""Passes of one more norm after a block, forward and backward."""
CAP_PASSES = 12.0
ROUTED_PASSES = 3, 7
"""Over experts' rows: gathered (2) and added up (1); in backward gradients and tokens gathered (4), two input gradients
added up (2), the sum written (kernels/routed_mlp.py)."""
BIASED_PASSES = 10, 2
LATENT_PASSES = 35, 50
"""Copies of parts of heads, by torch's own kernels, which reach a fifth of a plain copy's rate: as many passes at that
rate (six layers of DeepSeek-V2-Lite under the profiler, 8 192 tokens on an H200: 6.1 ms)."""
SINK_PASSES = 3, 5
LOGIT_PASSES = {"fused": 3.0, "plain": 29.0}
"""Passes over bf16 logits outside the three products: fused from H=4096, V=128256 (82.3 ms, products 77), plain from
whole steps of 135M to 3B (memory_truth.csv: 28 to 34)."""


class Elementwise:
    """Seconds in one layer, for one micro-batch on one rank; and of the loss."""

    def __init__(
        self,
        spec: ModelSpec,
        rates: Rates,
        engine: Engine,
        *,
        tokens: float,
        tensor: int,
        sequence_parallel: bool,
        number_bytes: int,
    ) -> None:
        """On `tokens` tokens; tensor ranks split norms where they split the stream, and all else."""
        width_s = tokens * number_bytes / rates.bytes_s
        stream_s = width_s / (tensor if sequence_parallel else 1)
        split_s = width_s / tensor
        passes, hidden, columns = layer_passes(engine, spec), spec.hidden_size, mlp_columns(spec)

        more_norms = 2 if spec.sandwich_norms else 0
        norms, norms_backward = (passes.stream[back] + more_norms * NORM_PASSES[back] for back in (0, 1))
        rope_width = passes.rope * (spec.query_size + spec.kv_size) * (2 if spec.qk_norm else 1)
        heads_width, heads_backward_width = (rope_width + each * spec.query_size for each in _head_passes(spec))
        activation = passes.gate if spec.gated else passes.activation
        biased = BIASED_PASSES if spec.experts is not None and spec.mlp_bias else (0, 0)
        gate_width, gate_backward_width = ((activation[back] + biased[back]) * columns for back in (0, 1))
        routed_width = _routed_rows(spec) * hidden
        self.norms_s = stream_s * (hidden * norms)
        self.rope_s = split_s * heads_width
        self.gate_s = split_s * (gate_width + ROUTED_PASSES[0] * routed_width)
        self.backward_s = stream_s * (hidden * norms_backward) + split_s * (
            heads_backward_width + gate_backward_width + ROUTED_PASSES[1] * routed_width
        )
        """Of all three."""
        logits_s = split_s * spec.vocab_size
        self.fused_loss_s = LOGIT_PASSES["fused"] * logits_s
        self.plain_loss_more_s = (_plain_passes(passes, spec) - LOGIT_PASSES["fused"]) * logits_s
        """What the plain loss takes on top."""

    @property
    def forward_s(self) -> float:
        """Seconds of a layer."""
        return self.norms_s + self.rope_s + self.gate_s


def _head_passes(spec: ModelSpec) -> tuple[int, int]:
    """Over queries beside rope, forward and backward."""
    if spec.latent is not None:
        return LATENT_PASSES
    return SINK_PASSES if spec.sinks else (0, 0)


def _routed_rows(spec: ModelSpec) -> float:
    """Copies of a token that go to experts, averaged over the layers."""
    return 0.0 if spec.experts is None else routed_share(spec) * spec.experts.computed_per_token


def _plain_passes(passes: Passes, spec: ModelSpec) -> float:
    """Over whole logits; a cap goes over float32 ones four times more, and twice in backward."""
    return (passes.logits or LOGIT_PASSES["plain"]) + (CAP_PASSES if spec.logit_softcap else 0.0)


def layer_passes(engine: Engine, spec: ModelSpec) -> Passes:
    """Passes of `engine` over a layer of this family."""
    return engine.passes if spec.norm == "layer" else engine.eager_norm_passes or engine.passes
