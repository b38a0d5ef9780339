"""Which layers are recomputed in backward (activation checkpointing), and what they keep of their forward pass.

Four levels, each keeping more than the one before (Korthikanti et al. 2022 call the middle ones selective):

    nothing      the layer's input; the layer is recomputed, except its last product
    attention    and attention's output and logsumexp (float32 per row and head): most seconds per byte at long lengths
    matmuls      and every matrix product that other results depend on; norms, rope and the gate are recomputed
    everything   all that autograd saves; nothing is recomputed

With a budget in bytes the levels are chosen by budget.py.
"""

from collections.abc import Iterable
from typing import Literal

from tightfit.errors import UserError
from tightfit.jobs.rules.checkpointing import missing_layers
from tightfit.models.spec import ModelSpec

KeepLevel = Literal["nothing", "attention", "matmuls", "everything"]
KEEP_LEVELS: tuple[KeepLevel, ...] = ("nothing", "attention", "matmuls", "everything")


def needs_last_product(spec: ModelSpec, layer: int) -> bool:
    """Whether backward needs the result of a layer's last product: for a norm after it, or a shared expert's gate."""
    experts = spec.experts if spec.is_routed(layer) else None
    return spec.sandwich_norms or (experts is not None and experts.shared_size > 0 and experts.shared_gated)


def fixed_levels(
    layers: Iterable[int], *, model_layers: int, every: int, count: int, keep: KeepLevel
) -> tuple[KeepLevel, ...]:
    """The level of each of `layers`: `keep` for every `every`-th one or `count` evenly spread ones, else everything."""
    recomputed = recomputed_layers(model_layers, every=every, count=count)
    return tuple(keep if layer in recomputed else "everything" for layer in layers)


def recomputed_layers(model_layers: int, *, every: int, count: int) -> set[int]:
    """Numbers of the layers, out of `model_layers`, that are recomputed."""
    if sentence := missing_layers(count, model_layers):
        raise UserError(sentence)
    if count:
        return {number * model_layers // count for number in range(count)}
    return set(range(0, model_layers, every)) if every else set()
