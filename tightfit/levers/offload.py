"""Which states and weights are offloaded to the host, and which updates are deferred until after backward.

The states that stay on the GPU (`offload_keep_bytes`) are those whose update is needed soonest: backward produces the
gradients of the embedding and the first layers last, and the next forward pass starts with them. Deferred updates (only
with updates inside backward) are those of the last layers, for the opposite reason. Vectors (norms, biases) always
stay; they are a ten-thousandth of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightfit.jobs.levers import Levers
from tightfit.levers.policy.offload import count_that_fit, deferred_bytes, offloads_states, offloads_weights

LAYERS = "layers."
HOST = torch.device("cpu")
"""Where a model with offloaded states is filled: its float32 weights are never all on the GPU at once."""


@dataclass(frozen=True)
class Placement:
    """Whether one parameter's states and weight are in host memory, and its update is deferred."""

    states_offloaded: bool = False
    weight_offloaded: bool = False
    deferred: bool = False


ON_GPU = Placement()


def fill_device(levers: Levers, device: torch.device) -> torch.device:
    """The device on which a model for `device` is loaded or initialised."""
    return HOST if offloads_states(levers) else device


def placements(named: Sequence[tuple[str, Tensor]], levers: Levers, state_bytes: float) -> dict[str, Placement]:
    """The placement of every parameter, or of this rank's shard of it; `state_bytes` is bytes per weight of moments
    and master. A shard without rows stays where it is."""
    found = {name: ON_GPU for name, _ in named}
    if not offloads_states(levers):
        return found
    with_rows = ((name, each) for name, each in named if each.ndim >= 2 and each.numel())
    matrices = sorted(with_rows, key=_is_in_layers)
    streams_weights = offloads_weights(levers)
    sizes = [each.numel() * (state_bytes + (each.itemsize if streams_weights else 0)) for _, each in matrices]
    for name, _ in matrices[count_that_fit(sizes, levers.offload_keep_bytes) :]:
        with_weight = streams_weights and name.startswith(LAYERS)
        found[name] = Placement(states_offloaded=True, weight_offloaded=with_weight)
    return found | _deferred(named, levers, found)


def _is_in_layers(named: tuple[str, Tensor]) -> bool:
    """Sort key: embedding and head before the layers."""
    return named[0].startswith(LAYERS)


def _deferred(named: Sequence[tuple[str, Tensor]], levers: Levers, found: dict[str, Placement]) -> dict[str, Placement]:
    """The last layers' matrices whose gradients fit in `offload_gradient_bytes` beside those in flight."""
    if not levers.update_in_backward:
        return {}
    away = [(name, each) for name, each in reversed(named) if name.startswith(LAYERS) and found[name].states_offloaded]
    count = count_that_fit((each.nbytes for _, each in away), deferred_bytes(levers.offload_gradient_bytes))
    return {name: replace(found[name], deferred=True) for name, _ in away[:count]}
