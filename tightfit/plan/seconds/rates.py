"""Rates: what the card reaches in a run, its peaks in the run's number format times the measured shares."""

from dataclasses import dataclass

from tightfit.errors import UserError
from tightfit.hardware.accelerator import Number
from tightfit.hardware.efficiency import Efficiency, by_head_size
from tightfit.hardware.machine import Machine
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.workload import Workload

NUMBERS: dict[PrecisionName, Number] = {"fp32": "fp32", "bf16": "bf16", "pure-bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one card; hardware/efficiency.py says where each share was measured."""

    product_flop_s: float
    product_fixed_s: float
    """Of each matrix product, to fill and empty the card."""
    head_flop_s: float
    """Of the large products of the output projection."""
    attention_forward_flop_s: float
    attention_backward_flop_s: float
    forward_token_keys: float
    """A token of attention also costs as much as so many keys, half of them seen."""
    backward_token_keys: float
    bytes_s: float
    """Read and written, of kernels that memory bounds."""


def card_rates(workload: Workload, machine: Machine, efficiency: Efficiency) -> Rates:
    """Of `machine`'s cards; a sentence where they lack the number format."""
    card = machine.accelerator
    number = NUMBERS[workload.precision]
    peak_tflop_s = card.rates.of(number)
    if peak_tflop_s is None:
        raise UserError(f"{card.name} has no {number} units; use --precision fp16 or another card")
    peak_flop_s = peak_tflop_s * 1e12
    wide, head_dim = workload.precision == "fp32", workload.spec.head_dim
    shares = efficiency.shares(wide=wide)
    return Rates(
        product_flop_s=peak_flop_s * shares.products,
        product_fixed_s=shares.product_s,
        head_flop_s=peak_flop_s * (shares.products if wide else efficiency.matmul),
        attention_forward_flop_s=peak_flop_s * by_head_size(shares.attention_forward, head_dim),
        attention_backward_flop_s=peak_flop_s * by_head_size(shares.attention_backward, head_dim),
        forward_token_keys=by_head_size(shares.forward_tokens, head_dim),
        backward_token_keys=by_head_size(shares.backward_tokens, head_dim),
        bytes_s=card.bandwidth_gb_s * 1e9 * efficiency.bandwidth,
    )
