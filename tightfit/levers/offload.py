"""What goes to the host: which matrices' states, which weights, and whose updates are put off.

States that stay on the GPU (`offload_keep_bytes`) are those whose update is waited for soonest: gradients of the
embedding and of the first layers come last, and the next forward pass begins with them. Late updates (only inside
backward) are those of the last layers, for the opposite reason. Vectors always stay; they are a ten-thousandth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tightfit.jobs.levers import Levers
from tightfit.levers.state_link import IN_FLIGHT_BYTES

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
    if levers.offload == "none":
        return {name: STAYS for name, _ in named}
    found, room = {}, float(levers.offload_keep_bytes)
    for name, parameter in sorted(named, key=_in_layers):
        size = parameter.numel() * (state_bytes + (parameter.itemsize if levers.offload == "weights" else 0))
        if parameter.ndim < 2 or size <= room:
            room -= 0 if parameter.ndim < 2 else size
            found[name] = STAYS
        else:
            room = 0  # what comes after is waited for later
            away = levers.offload == "weights" and name.startswith(LAYERS)
            found[name] = Placement(states_away=True, weight_away=away)
    return found | _late(named, levers, found)


def _in_layers(named: tuple[str, Tensor]) -> bool:
    """Sorts the embedding and the head before the layers."""
    return named[0].startswith(LAYERS)


def _late(named: Sequence[tuple[str, Tensor]], levers: Levers, found: dict[str, Placement]) -> dict[str, Placement]:
    """The last layers' matrices, as many as have gradients of so many bytes."""
    if not levers.update_in_backward:
        return {}
    room, late = levers.offload_gradient_bytes - IN_FLIGHT_BYTES, {}
    for name, parameter in reversed(named):
        if not name.startswith(LAYERS) or not found[name].states_away:
            continue
        room -= parameter.nbytes
        if room < 0:
            break
        late[name] = Placement(True, found[name].weight_away, late=True)
    return late
