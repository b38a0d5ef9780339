"""LayerTime: how long one micro-batch takes in one layer and in the head, split over tensor and context ranks."""

from dataclasses import dataclass

from tightfit.errors import UserError
from tightfit.hardware.accelerator import Number
from tightfit.hardware.efficiency import Efficiency, by_head_size
from tightfit.hardware.machine import Machine
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.plan.work import ATTENTION_BACKWARD, LOGIT_PASSES, attention_pairs, layer_work

NUMBERS: dict[PrecisionName, Number] = {"fp32": "fp32", "bf16": "bf16", "pure-bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Rates:
    """What the card reaches in this run."""

    matmul_flop_s: float
    attention_forward_flop_s: float
    attention_backward_flop_s: float
    bytes_s: float


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one micro-batch on one rank."""

    forward_s: float
    backward_s: float
    attention_forward_s: float
    attention_backward_s: float
    mlp_forward_s: float
    matmul_s: float
    """Of forward, the matrix products'."""
    passes_s: float
    """Of forward, what memory bounds: norms, rope and the gate."""
    head_forward_s: float
    head_backward_s: float
    plain_loss_s: float
    """What the plain loss takes on top, in passes over its logits."""


def card_rates(workload: Workload, machine: Machine, efficiency: Efficiency) -> Rates:
    """The card's peaks in the run's number format, times the measured shares."""
    card = machine.accelerator
    number = NUMBERS[workload.precision]
    peak = card.rates.of(number)
    if peak is None:
        raise UserError(f"{card.name} has no {number} units; use --precision fp16 or another card")
    head = workload.spec.head_dim
    return Rates(
        matmul_flop_s=peak * 1e12 * efficiency.matmul,
        attention_forward_flop_s=peak * 1e12 * by_head_size(efficiency.attention_forward, head),
        attention_backward_flop_s=peak * 1e12 * by_head_size(efficiency.attention_backward, head),
        bytes_s=card.bandwidth_gb_s * 1e9 * efficiency.bandwidth,
    )


def layer_time(
    workload: Workload, rates: Rates, rows: int, tensor: int, context: int, sequence_parallel: bool
) -> LayerTime:
    """One micro-batch of `rows` rows; products are bound by operations or by reading their weights."""
    spec, width = workload.spec, workload.weight_bytes
    work = layer_work(spec)
    tokens = rows * workload.sequence_length / context
    params = work.matmul_params / tensor
    matmul = max(2 * params * tokens / rates.matmul_flop_s, params * width / rates.bytes_s)
    attention_flops = 4 * rows * attention_pairs(spec, workload.sequence_length) * spec.query_size / tensor / context
    attention = attention_flops / rates.attention_forward_flop_s
    attention_backward = ATTENTION_BACKWARD * attention_flops / rates.attention_backward_flop_s
    norms = work.norm_width / (tensor if sequence_parallel else 1)
    pass_s = tokens * width / rates.bytes_s
    head_params = spec.vocab_size * spec.hidden_size / tensor
    head = max(2 * head_params * tokens / rates.matmul_flop_s, head_params * width / rates.bytes_s)
    logits_s = pass_s * spec.vocab_size / tensor
    gate_s = pass_s * work.split_forward_width / tensor
    return LayerTime(
        forward_s=matmul + attention + pass_s * norms + gate_s,
        backward_s=2 * matmul + attention_backward + pass_s * (norms + work.split_backward_width / tensor),
        attention_forward_s=attention,
        attention_backward_s=attention_backward,
        mlp_forward_s=matmul * work.mlp_share + gate_s,
        matmul_s=matmul,
        passes_s=pass_s * norms + gate_s,
        head_forward_s=head,
        head_backward_s=2 * head + LOGIT_PASSES["fused"] * logits_s,
        plain_loss_s=(LOGIT_PASSES["plain"] - LOGIT_PASSES["fused"]) * logits_s,
    )
