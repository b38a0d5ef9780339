"""What goes to the host, how much of it is on its way at once, and what waits on the GPU meanwhile.

Optimizer states pass through a ring of GPU memory, a piece of a matrix at a time (levers/state_link.py); weights of
layers through two slots (levers/weight_streaming.py); inputs of recomputed layers wait on the host until backward needs
them (levers/checkpoint_store.py).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tightfit.jobs.levers import Levers

PIECE_ELEMENTS = 4 * 2**20
"""Weights whose states are updated at a time: as many rows of a matrix as have so many."""
STATE_SLOTS = 6
"""Pieces in the ring: some on their way in, being updated, on their way out."""
WEIGHT_SLOTS = 2
"""Layers whose streamed weights are on the GPU: the one at work and the next."""
MASTER_SLOTS = 3
"""Pieces of streamed masters on the GPU: arriving, and arrived but not cast yet."""
IN_FLIGHT_BYTES = 512 * 2**20
"""Gradients that may wait for the link before the step does; of a whole model's deferred updates, as many are sent
ahead of need."""
SCALE_BYTES = 4
"""A float32 per row of a checkpoint in fp8."""


def offloads_states(levers: "Levers") -> bool:
    """Whether optimizer states, with masters where there are any, are in host memory."""
    return levers.offload != "none"


def offloads_weights(levers: "Levers") -> bool:
    """Whether layers' weights are there as well, and come to the GPU one layer after another."""
    return levers.offload == "weights"


def whole_that_fit(sizes_bytes: Iterable[float], room_bytes: float) -> int:
    """How many of these, taken in order, fit whole: nothing is taken after the first that does not.

    So are chosen the matrices whose states stay on the GPU (levers.offload_keep_bytes: the vocabulary's first, then the
    first layers', whose updates are waited for soonest) and, from the last layer back, those whose updates are deferred
    until backward is over (`deferred_bytes`).
    """
    count = 0
    for size in sizes_bytes:
        room_bytes -= size
        if room_bytes < 0:
            break
        count += 1
    return count


def bounds_gradients(levers: "Levers") -> bool:
    """Whether gradients are sent as they come, and no more than so many bytes of them wait on the GPU."""
    return offloads_states(levers) and levers.update_in_backward


def deferred_bytes(gradient_bytes: int) -> int:
    """Of levers.offload_gradient_bytes that may wait with updates inside backward, those of updates that are deferred.

    The others are on their way to the link.
    """
    return gradient_bytes - IN_FLIGHT_BYTES


def offloaded_count(recomputed: int, each_bytes: int, host_bytes: int | None) -> int:
    """Of so many layers that are computed again, how many have their input on the host: the first ones.

    They wait longest. The last one's is needed as soon as backward begins, so it stays.
    """
    most = max(0, recomputed - 1)
    return most if host_bytes is None else min(most, host_bytes // max(1, each_bytes))


def stored_bytes(rows: int, width: int, element_bytes: int, form: Literal["exact", "fp8"]) -> int:
    """One layer's input [rows, width] on the host; fp8 has a byte each and a float32 per row."""
    return rows * (width + SCALE_BYTES) if form == "fp8" else rows * width * element_bytes
