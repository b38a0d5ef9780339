"""Norms, rope, the gate and the loss: bound by memory, one pass over the bytes each as in our fused kernels.

Widths are numbers read or written per token, in one layer.

| | forward | backward |
|---|---|---|
| norms and residual stream | 9 H: the first norm 2, the second adds to the stream and writes it 4, the MLP's result is added 3 | 16 H: gradients of the second norm with the stream's 4, of the first 3, its sum with the stream's 3, those of q, k and v added up 6 |
| norms after blocks (Gemma) | + 4 H | + 6 H |
| rope (with norms of q and k: twice) | 2 (Q + K) | 2 (Q + K) |
| gate of F columns | 3 F, or 2 F without one | 6 F, or 4 F |
"""  # noqa: E501

from dataclasses import dataclass

from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.products import mlp_columns
from tightfit.plan.seconds.rates import Rates

LOGIT_PASSES = {"fused": 3.0, "plain": 21.0}
"""Passes over bf16 logits outside the three products; from H=4096, V=128256: fused 82.3 ms, plain 99.3, products 77."""


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """Seconds in one layer, for one micro-batch on one rank; and of the loss."""

    norms_s: float
    rope_s: float
    gate_s: float
    backward_s: float
    fused_loss_s: float
    plain_loss_more_s: float
    """What the plain loss takes on top."""

    @property
    def forward_s(self) -> float:
        """Of a layer."""
        return self.norms_s + self.rope_s + self.gate_s


def layer_elementwise(
    spec: ModelSpec, rates: Rates, *, tokens: float, tensor: int, sequence_parallel: bool, number_bytes: int
) -> Elementwise:
    """Of `tokens` tokens; tensor ranks split norms where they split the stream, and all else."""
    norm_width = spec.hidden_size * (9 + 4 * spec.sandwich_norms)
    norm_backward_width = spec.hidden_size * (16 + 6 * spec.sandwich_norms)
    rope_width = 2 * (spec.query_size + spec.kv_size) * (2 if spec.qk_norm else 1)
    inner = 2 if spec.gated else 1
    gate_width = (inner + 1) * mlp_columns(spec)
    gate_backward_width = 2 * gate_width
    width_s = tokens * number_bytes / rates.bytes_s
    stream_s = width_s / (tensor if sequence_parallel else 1)
    split_s = width_s / tensor
    logits_s = split_s * spec.vocab_size
    return Elementwise(
        norms_s=stream_s * norm_width,
        rope_s=split_s * rope_width,
        gate_s=split_s * gate_width,
        backward_s=stream_s * norm_backward_width + split_s * (rope_width + gate_backward_width),
        fused_loss_s=LOGIT_PASSES["fused"] * logits_s,
        plain_loss_more_s=(LOGIT_PASSES["plain"] - LOGIT_PASSES["fused"]) * logits_s,
    )
