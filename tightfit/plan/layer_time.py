"""LayerTime: how long one micro-batch takes in one layer and in the head, split over tensor and context ranks.

Products are linears.py's. Attention's time is that of its pairs of tokens and of its tokens, which count as so many
pairs each (hardware/efficiency.py). Norms, rope and the gate are bound by memory.
"""

from dataclasses import dataclass

from tightfit.errors import UserError
from tightfit.hardware.accelerator import Number
from tightfit.hardware.efficiency import Efficiency, by_head_size
from tightfit.hardware.machine import Machine
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.plan.linears import Linear, Part, linears
from tightfit.plan.work import ATTENTION_BACKWARD, LOGIT_PASSES, attention_pairs, layer_work

NUMBERS: dict[PrecisionName, Number] = {"fp32": "fp32", "bf16": "bf16", "pure-bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Rates:
    """What the card reaches in this run."""

    matmul_flop_s: float
    product_s: float
    head_flop_s: float
    attention_forward_flop_s: float
    attention_backward_flop_s: float
    forward_tokens: float
    backward_tokens: float
    bytes_s: float


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one micro-batch on one rank; products and passes are forward's."""

    projections_s: float
    output_s: float
    inner_s: float
    down_s: float
    norms_s: float
    rope_s: float
    gate_s: float
    attention_forward_s: float
    attention_backward_s: float
    backward_passes_s: float
    tile_copies_s: float
    """What tiles make, copied into whole tensors: queries, keys and values, heads joined, the layer's result."""
    mlp_width: float
    weights_once_s: float
    """What reading all weights once takes."""
    head_forward_s: float
    head_backward_s: float
    plain_loss_s: float
    """What the plain loss takes on top, in passes over its logits."""

    @property
    def matmul_s(self) -> float:
        """The matrix products of forward."""
        return self.projections_s + self.output_s + self.inner_s + self.down_s

    @property
    def passes_s(self) -> float:
        """Of forward, what memory bounds: norms, rope and the gate."""
        return self.norms_s + self.rope_s + self.gate_s

    @property
    def forward_s(self) -> float:
        """One layer."""
        return self.matmul_s + self.attention_forward_s + self.passes_s

    @property
    def backward_s(self) -> float:
        """One layer: two products for each of forward's."""
        return 2 * self.matmul_s + self.attention_backward_s + self.backward_passes_s


def card_rates(workload: Workload, machine: Machine, efficiency: Efficiency) -> Rates:
    """The card's peaks in the run's number format, times the measured shares."""
    card = machine.accelerator
    number = NUMBERS[workload.precision]
    peak = card.rates.of(number)
    if peak is None:
        raise UserError(f"{card.name} has no {number} units; use --precision fp16 or another card")
    wide, head = workload.precision == "fp32", workload.spec.head_dim
    shares = efficiency.shares(wide=wide)
    return Rates(
        matmul_flop_s=peak * 1e12 * shares.products,
        product_s=shares.product_s,
        head_flop_s=peak * 1e12 * (shares.products if wide else efficiency.matmul),
        attention_forward_flop_s=peak * 1e12 * by_head_size(shares.attention_forward, head),
        attention_backward_flop_s=peak * 1e12 * by_head_size(shares.attention_backward, head),
        forward_tokens=by_head_size(shares.forward_tokens, head),
        backward_tokens=by_head_size(shares.backward_tokens, head),
        bytes_s=card.bandwidth_gb_s * 1e9 * efficiency.bandwidth,
    )


def layer_time(
    workload: Workload, rates: Rates, rows: int, tensor: int, context: int, sequence_parallel: bool
) -> LayerTime:
    """One micro-batch of `rows` rows."""
    spec, width = workload.spec, workload.weight_bytes
    work = layer_work(spec)
    tokens = rows * workload.sequence_length / context
    layers = linears(spec, work.mlp_width)

    def products(part: Part) -> float:
        return sum(product_s(rates, each, tokens, tensor, width) for each in layers if each.part == part)

    pairs = rows * attention_pairs(spec, workload.sequence_length) / context
    pair_flops = 4 * spec.query_size / tensor
    forward_flops = pair_flops * (pairs + tokens * rates.forward_tokens / 2)
    backward_flops = ATTENTION_BACKWARD * pair_flops * (pairs + tokens * rates.backward_tokens / 2)
    pass_s = tokens * width / rates.bytes_s
    head_params = spec.vocab_size * spec.hidden_size / tensor
    head = max(2 * head_params * tokens / rates.head_flop_s, head_params * width / rates.bytes_s)
    logits_s = pass_s * spec.vocab_size / tensor
    norms_s = pass_s * work.norm_width / (tensor if sequence_parallel else 1)
    return LayerTime(
        projections_s=products("projections"), output_s=products("output"), inner_s=products("inner"),
        down_s=products("down"), norms_s=norms_s, rope_s=pass_s * work.rope_width / tensor,
        gate_s=pass_s * work.gate_width / tensor, attention_forward_s=forward_flops / rates.attention_forward_flop_s,
        attention_backward_s=backward_flops / rates.attention_backward_flop_s,
        backward_passes_s=norms_s * work.norm_backward_width / work.norm_width
        + pass_s * (work.rope_width + work.gate_backward_width) / tensor,
        tile_copies_s=2 * pass_s * (spec.hidden_size + (2 * spec.query_size + 2 * spec.kv_size) / tensor),
        mlp_width=work.mlp_width / tensor,
        weights_once_s=sum(each.weights(tensor) for each in layers) * width / rates.bytes_s,
        head_forward_s=head, head_backward_s=2 * head + LOGIT_PASSES["fused"] * logits_s,
        plain_loss_s=(LOGIT_PASSES["plain"] - LOGIT_PASSES["fused"]) * logits_s,
    )  # fmt: skip


def product_s(rates: Rates, linear: Linear, tokens: float, tensor: int, width: int) -> float:
    """Of forward (linears.py)."""
    weights = linear.weights(tensor)
    return linear.count * rates.product_s + max(
        linear.flops(tokens, tensor) / rates.matmul_flop_s, weights * width / rates.bytes_s
    )
