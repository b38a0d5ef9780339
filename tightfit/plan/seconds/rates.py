"""Rates that a card sustains in a run: its peaks in the run's number format times the measured shares."""

from dataclasses import dataclass

from tightfit.errors import UserError
from tightfit.hardware.accelerator import Number
from tightfit.hardware.efficiency import AttentionShares, Efficiency, by_head_size
from tightfit.hardware.machine import Machine
from tightfit.hardware.sustained import REFERENCES, attention_shares, generation_of, power_factor, product_share
from tightfit.jobs.precision import PrecisionName
from tightfit.jobs.workload import Workload

ALIGNED, UNALIGNED_SHARE = 8, 0.25
"""With a vocabulary that is no multiple of 8 (GPT-2's 50 257) Hopper's fast (TMA) copies cannot be used: products reach
a quarter of the rate (family_truth.csv, gpt2)."""
NUMBERS: dict[PrecisionName, Number] = {"fp32": "fp32", "bf16": "bf16", "pure-bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """Rates of one attention kernel: FLOP/s over pairs of tokens, and a fixed cost per token."""

    forward_flop_s: float
    backward_flop_s: float
    forward_token_keys: float
    """The fixed cost of a token in forward, as a number of further keys, of which causality leaves half."""
    backward_token_keys: float
    """The same in backward."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Sustained rates of one card; hardware/efficiency.py says where each share was measured."""

    product_flop_s: float
    product_fixed_s: float
    """Fixed seconds of each matrix product: ramp-up and drain of the card."""
    head_flop_s: float
    """Rate of the large products of the output projection."""
    attention: AttentionRates
    """The engine's flash kernel; not used by one without."""
    own_attention: AttentionRates
    """Our own kernel, for layers with windows or soft caps; as `attention` where there are no such layers."""
    bytes_s: float
    """Bytes a second, read and written, of memory-bound kernels."""


def card_peak_flop_s(precision: PrecisionName, machine: Machine) -> float:
    """The data sheet's peak in the number format of `precision`; a UserError where the card lacks it."""
    card, number = machine.accelerator, NUMBERS[precision]
    peak_tflop_s = card.rates.of(number)
    if peak_tflop_s is None:
        others = " or ".join(name for name in ("bf16", "fp16", "fp32") if card.rates.of(NUMBERS[name]))
        raise UserError(f"{card.name} has no {number} units; use --precision {others} or another card")
    return peak_tflop_s * 1e12


def card_rates(workload: Workload, machine: Machine, efficiency: Efficiency) -> Rates:
    """Rates of `machine`'s cards for `workload`."""
    card, wide = machine.accelerator, workload.precision == "fp32"
    peak_flop_s = card_peak_flop_s(workload.precision, machine)
    shares = efficiency.shares(wide=wide)
    attention = _attention(workload, machine, shares.attention)
    as_measured = wide or machine.calibration is not None
    sustained = 1.0 if as_measured else product_share(card, peak_flop_s / 1e12) / REFERENCES["hopper"].share
    # Hopper's and Blackwell's fast copies need aligned rows; other engines pad the vocabulary.
    copies_fast = generation_of(card) in ("hopper", "blackwell") and not wide and workload.engine_name == "tightfit"
    is_unaligned = copies_fast and workload.spec.vocab_size % ALIGNED
    head_flop_s = peak_flop_s * (shares.products if wide else efficiency.matmul) * sustained
    return Rates(
        product_flop_s=peak_flop_s * shares.products * sustained,
        product_fixed_s=shares.product_s,
        head_flop_s=head_flop_s * UNALIGNED_SHARE if is_unaligned else head_flop_s,
        attention=attention,
        own_attention=_own_attention(workload, efficiency, attention),
        bytes_s=card.bandwidth_gb_s * 1e9 * efficiency.bandwidth,
    )


def _attention(workload: Workload, machine: Machine, measured: AttentionShares) -> AttentionRates:
    """Rates of the engine's usual attention kernel on this card."""
    head_dim, peak_flop_s = workload.spec.head_dim, card_peak_flop_s(workload.precision, machine)
    card, kernel = machine.accelerator, workload.engine.attention
    forward_share, backward_share = measured.shares(head_dim)
    is_measured = workload.precision == "fp32" or (machine.calibration is not None and kernel == "cudnn")
    if not is_measured and kernel == "cudnn" and generation_of(card) == "hopper":
        factor = power_factor(card, peak_flop_s / 1e12)
        forward_share, backward_share = forward_share * factor, backward_share * factor
    elif not is_measured:
        forward_share, backward_share = attention_shares(card, kernel, peak_flop_s / 1e12, head_dim)
    return AttentionRates(
        forward_flop_s=peak_flop_s * forward_share,
        backward_flop_s=peak_flop_s * backward_share,
        forward_token_keys=by_head_size(measured.forward_tokens, head_dim),
        backward_token_keys=by_head_size(measured.backward_tokens, head_dim),
    )


def _own_attention(workload: Workload, efficiency: Efficiency, usual: AttentionRates) -> AttentionRates:
    """Our Triton kernel's rates: this card's usual kernel's times the ratio of the two measured on the H200; `usual`
    where no layer has a window or a soft cap, which need it."""
    spec, own = workload.spec, efficiency.own
    windowed = bool(spec.window_layers) and (spec.window or 0) < workload.sequence_length
    is_16_bit_cudnn = workload.engine.attention == "cudnn" and workload.precision != "fp32"
    if not (is_16_bit_cudnn and (windowed or spec.attention_softcap is not None)):
        return usual
    own_shares, cudnn_shares = own.shares(spec.head_dim), efficiency.narrow.attention.shares(spec.head_dim)
    forward_ratio, backward_ratio = (ours / theirs for ours, theirs in zip(own_shares, cudnn_shares, strict=True))
    return AttentionRates(
        forward_flop_s=usual.forward_flop_s * min(1.0, forward_ratio),
        backward_flop_s=usual.backward_flop_s * min(1.0, backward_ratio),
        forward_token_keys=by_head_size(own.forward_tokens, spec.head_dim),
        backward_token_keys=by_head_size(own.backward_tokens, spec.head_dim),
    )
