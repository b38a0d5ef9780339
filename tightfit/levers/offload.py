"""What goes to the host: which matrices' states, which weights, and whose updates are put off.

States that stay on the GPU (`offload_keep_bytes`) are those whose update is waited for soonest: gradients of the
embedding and of the first layers come last, and the next forward pass begins with them. Late updates (only inside
backward) are those of the last layers, for the opposite reason. Vectors always stay; they are a ten-thousandth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tightfit.jobs.levers import Levers
from tightfit.levers.policy.offload import put_off_bytes, whole_that_fit

LAYERS = "layers."


@dataclass(frozen=True)
class Placement:
    """Where one parameter's belongings are."""

    states_away: bool = False
    weight_away: bool = False
    late: bool = False


STAYS = Placement()


def placements(named: Sequence[tuple[str, Tensor]], levers: Levers, state_bytes: float) -> dict[str, Placement]:
    """By parameter name; `state_bytes` a weight is what its moments take, with its master where there is one."""
    found = {name: STAYS for name, _ in named}
    if levers.offload == "none":
        return found
    matrices = sorted(((name, each) for name, each in named if each.ndim >= 2), key=_in_layers)
    streams_weights = levers.offload == "weights"
    sizes = [each.numel() * (state_bytes + (each.itemsize if streams_weights else 0)) for _, each in matrices]
    for name, _ in matrices[whole_that_fit(sizes, levers.offload_keep_bytes) :]:
        found[name] = Placement(states_away=True, weight_away=streams_weights and name.startswith(LAYERS))
    return found | _late(named, levers, found)


def _in_layers(named: tuple[str, Tensor]) -> bool:
    """Sorts the embedding and the head before the layers."""
    return named[0].startswith(LAYERS)


def _late(named: Sequence[tuple[str, Tensor]], levers: Levers, found: dict[str, Placement]) -> dict[str, Placement]:
    """The last layers' matrices, as many as have gradients of so many bytes."""
    if not levers.update_in_backward:
        return {}
    away = [(name, each) for name, each in reversed(named) if name.startswith(LAYERS) and found[name].states_away]
    count = whole_that_fit((each.nbytes for _, each in away), put_off_bytes(levers.offload_gradient_bytes))
    return {name: replace(found[name], late=True) for name, _ in away[:count]}
