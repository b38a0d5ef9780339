"""MFU: the share of the machine's peak that goes into the model's own operations (Chowdhery et al. 2022, PaLM).

Six operations for each weight that multiplies a token, and twelve for each pair of positions and number of the query's
width; recomputation does not count, nor do gradients of frozen weights, which are not made (four operations are left).
The peak is the data sheet's in the run's number format. Plans and finished runs are told by the same count.
"""

from tightfit.hardware.machine import Machine
from tightfit.jobs.precision import PrecisionName
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.attention import attention_pairs
from tightfit.plan.seconds.rates import card_peak_flop_s


def token_flops(spec: ModelSpec, sequence_length: int, *, frozen: bool = False) -> float:
    """Forward and backward of one token; of experts, those it is routed to. Of `frozen` weights, without gradients."""
    tied_head = spec.vocabulary_params if spec.tied else 0  # else the embedding multiplies nothing
    weights = spec.params(active=True) - spec.embedding_params + tied_head
    pairs = spec.layers * attention_pairs(spec, sequence_length) / sequence_length
    return (4.0 if frozen else 6.0) * weights + 12.0 * spec.query_size * pairs


def peak_flop_s(precision: PrecisionName, machine: Machine) -> float:
    """Of all cards together."""
    return machine.ranks * card_peak_flop_s(precision, machine)
