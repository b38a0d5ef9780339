"""MFU: the share of the machine's peak that goes into the model's own FLOPs (Chowdhery et al. 2022, PaLM).

Per token six FLOPs for each weight that multiplies it, and twelve for each key it attends to and channel of the query.
Recomputation does not count, nor do gradients of frozen weights, which are not computed: four FLOPs per frozen weight.
The peak is the data sheet's in the run's number format. Plans and finished runs use the same count.
"""

from tightfit.hardware.machine import Machine
from tightfit.jobs.precision import PrecisionName
from tightfit.models.spec import ModelSpec
from tightfit.plan.seconds.attention import attention_pairs
from tightfit.plan.seconds.rates import card_peak_flop_s


def token_flops(spec: ModelSpec, sequence_length: int, *, frozen: bool = False) -> float:
    """FLOPs of one token, forward and backward, through the experts it is routed to; `frozen`: weights without
    gradients."""
    tied_head = spec.vocabulary_params if spec.tied else 0  # else the embedding multiplies nothing
    weights = spec.params(active=True) - spec.embedding_params + tied_head
    pairs = spec.layers * attention_pairs(spec, sequence_length) / sequence_length
    return (4.0 if frozen else 6.0) * weights + 12.0 * spec.query_size * pairs


def peak_flop_s(precision: PrecisionName, machine: Machine) -> float:
    """Peak FLOP/s of all cards together."""
    return machine.ranks * card_peak_flop_s(precision, machine)
