"""Which states and weights are offloaded to the host, and which updates are deferred until after backward.

The states that stay on the GPU (`offload_keep_bytes`) are those whose update is needed soonest: backward produces the
gradients of the embedding and the first layers last, and the next forward pass starts with them. Deferred updates (only
with updates inside backward) are those of the last layers, for the opposite reason. Vectors (norms, biases) always
stay; they are a ten-thousandth of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tightfit.jobs.levers import Levers
from tightfit.levers.state_link import IN_FLIGHT_BYTES

LAYERS = "layers."


@dataclass(frozen=True)
class Placement:
    """What of one parameter is in host memory, and whether its update is deferred."""

    states_offloaded: bool = False
    weight_offloaded: bool = False
    deferred: bool = False


ON_GPU = Placement()


def placements(named: Sequence[tuple[str, Tensor]], levers: Levers, state_bytes: float) -> dict[str, Placement]:
    """The placement of every parameter; `state_bytes` is bytes per weight of moments and master."""
    if levers.offload == "none":
        return {name: ON_GPU for name, _ in named}
    found, room = {}, float(levers.offload_keep_bytes)
    for name, parameter in sorted(named, key=_is_in_layers):
        size = parameter.numel() * (state_bytes + (parameter.itemsize if levers.offload == "weights" else 0))
        if parameter.ndim < 2 or size <= room:
            room -= 0 if parameter.ndim < 2 else size
            found[name] = ON_GPU
        else:
            room = 0  # everything after this is needed later, so it is offloaded too
            with_weight = levers.offload == "weights" and name.startswith(LAYERS)
            found[name] = Placement(states_offloaded=True, weight_offloaded=with_weight)
    return found | _deferred(named, levers, found)


def _is_in_layers(named: tuple[str, Tensor]) -> bool:
    """Sort key: embedding and head before the layers."""
    return named[0].startswith(LAYERS)


def _deferred(named: Sequence[tuple[str, Tensor]], levers: Levers, found: dict[str, Placement]) -> dict[str, Placement]:
    """The last layers' matrices whose gradients fit in `offload_gradient_bytes` beside those in flight."""
    if not levers.update_in_backward:
        return {}
    room, deferred = levers.offload_gradient_bytes - IN_FLIGHT_BYTES, {}
    for name, parameter in reversed(named):
        if not name.startswith(LAYERS) or not found[name].states_offloaded:
            continue
        room -= parameter.nbytes
        if room < 0:
            break
        deferred[name] = replace(found[name], deferred=True)
    return deferred
