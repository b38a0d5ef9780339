"""Norms, rope, the gate and the loss: memory-bound kernels, whose time is bytes / copy rate.

The table counts numbers read or written per token in one layer by our fused kernels (H hidden size, Q and K widths of
queries and keys, F columns of the MLP); jobs/engine.py has those of other engines.

| | forward | backward |
|---|---|---|
| norms and residual stream | 9 H: the first norm 2; the second, fused with the residual sum, 4; adding the MLP's result 3 | 16 H: the second norm's gradient added to the stream's 4, the first norm's 3, its sum with the stream's 3, gradients through q, k and v added up 6 |
| norms after blocks (Gemma) | + 4 H | + 6 H |
| rope (with norms of q and k: twice) | 2 (Q + K) | 2 (Q + K) |
| latent attention, whose heads are split, reordered, joined and padded | 35 Q | 50 Q |
| sinks, which rescale attention's output | 3 Q | 5 Q |
| activation with a gate, or without | 3 F, or 2 F | 6 F, or 4 F |
| experts' biases, gathered for every row and added to gate and up | 10 F | 2 F |
"""  # noqa: E501

from typing import NamedTuple

from tightfit.jobs.engine import Passes
from tightfit.jobs.layout import Layout
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.cost_context import CostContext
from tightfit.plan.seconds.passes import PassSeconds
from tightfit.plan.seconds.products import mlp_columns, routed_share

NORM_PASSES = 2, 3
"""Passes of one more norm after a block, forward and backward."""
CAP_PASSES = 12.0
"""A soft cap of the plain loss's logits: four passes over float32 in forward and two in backward, each as much as two
over bf16."""
ROUTED_PASSES = 3, 7
"""Passes over experts' rows: gathered (2) and added up (1); in backward gradients and tokens gathered (4), two input
gradients added up (2), the sum written (1) (kernels/experts/routed_mlp.py)."""
BIASED_PASSES = 10, 2
LATENT_PASSES = 35, 50
"""Torch's own kernels copy parts of heads at a fifth of a plain copy's rate; this is the equivalent number of passes at
that rate (six layers of DeepSeek-V2-Lite under the profiler, 8 192 tokens on an H200: 6.1 ms)."""
SINK_PASSES = 3, 5
LOGIT_PASSES = {"fused": 3.0, "plain": 29.0}
"""Passes over bf16 logits outside the three products: fused from H=4096, V=128256 (82.3 ms, products 77), plain from
whole steps of 135M to 3B (memory_truth.csv: 28 to 34)."""


class TokenNumbers(NamedTuple):
    """Numbers that a layer's kernels read or write per token in one pass."""

    norms: float
    heads: float
    """Of rope, and of latent attention or sinks."""
    gate: float
    experts: float
    """Of rows that are gathered for experts and added up."""


class Elementwise:
    """Seconds of elementwise kernels in one layer, for one micro-batch on one rank; and in the loss."""

    def __init__(self, ctx: CostContext, layout: Layout, tokens: float) -> None:
        """`tokens` before tensor ranks split them: norms only with the residual stream, everything else always."""
        spec, engine = ctx.workload.spec, ctx.workload.engine
        passes = engine.passes if spec.norm == "layer" else engine.eager_norm_passes or engine.passes
        number_s = tokens * ctx.workload.weight_bytes / ctx.rates.bytes_s
        stream_s = number_s / (layout.tensor if layout.splits_stream else 1)
        split_s = number_s / layout.tensor

        forward = _token_numbers(spec, passes, backward=False)
        self.norms_s = stream_s * forward.norms
        self.heads_s = split_s * forward.heads
        self.mlp_s = split_s * (forward.gate + forward.experts)
        backward = _token_numbers(spec, passes, backward=True)
        backward_s = stream_s * backward.norms + split_s * (backward.heads + backward.gate + backward.experts)
        self.passes = PassSeconds(self.norms_s + self.heads_s + self.mlp_s, backward_s)
        """All of these together."""

        logits_s = split_s * spec.vocab_size
        plain_passes = passes.logits or LOGIT_PASSES["plain"]
        plain_passes += CAP_PASSES if spec.logit_softcap else 0.0
        self.fused_loss_s = LOGIT_PASSES["fused"] * logits_s
        self.plain_loss_more_s = (plain_passes - LOGIT_PASSES["fused"]) * logits_s
        """Further seconds of the plain loss."""


def _token_numbers(spec: ModelSpec, passes: Passes, *, backward: bool) -> TokenNumbers:
    """The table above for this family."""
    more_norms = 2 if spec.sandwich_norms else 0
    ropes = 2 if spec.qk_norm else 1
    head_passes = LATENT_PASSES if spec.latent is not None else SINK_PASSES if spec.sinks else (0, 0)
    gate_passes = (passes.gate if spec.gated else passes.activation)[backward]
    gate_passes += BIASED_PASSES[backward] if spec.experts is not None and spec.mlp_bias else 0
    rows_per_token = 0.0 if spec.experts is None else routed_share(spec) * spec.experts.computed_per_token
    return TokenNumbers(
        norms=spec.hidden_size * (passes.stream[backward] + more_norms * NORM_PASSES[backward]),
        heads=passes.rope * (spec.query_size + spec.kv_size) * ropes + head_passes[backward] * spec.query_size,
        gate=gate_passes * mlp_columns(spec),
        experts=ROUTED_PASSES[backward] * (rows_per_token * spec.hidden_size),
    )
