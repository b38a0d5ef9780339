"""What is offloaded to the host, how much of it is in transit at once, and how much waits on the GPU meanwhile.

Optimizer states pass through a ring of GPU memory, a piece of a matrix at a time (levers/state_link.py); weights of
layers through two slots (levers/weight_streaming.py); inputs of recomputed layers wait on the host until backward needs
them (levers/checkpoint_store.py).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tightfit.jobs.levers import Levers

PIECE_ELEMENTS = 4 * 2**20
"""Weights in a piece, whose states are updated together: as many whole rows of a matrix as have at most so many."""
STATE_SLOTS = 6
"""Pieces in the ring of staging buffers: being copied in, updated, or copied out."""
WEIGHT_SLOTS = 2
"""Layers whose streamed weights are on the GPU: the one that runs and the next."""
MASTER_SLOTS = 3
"""Pieces of streamed masters on the GPU: arriving, and arrived but not cast yet."""
IN_FLIGHT_BYTES = 512 * 2**20
"""Bytes of gradients that may wait for the link before the step waits; without updates inside backward, so many bytes
of deferred updates are sent ahead of need."""
SCALE_BYTES = 4
"""A float32 per row of a checkpoint in fp8."""


def offloads_states(levers: "Levers") -> bool:
    """Whether optimizer states, with masters where there are any, are in host memory."""
    return levers.offload != "none"


def offloads_weights(levers: "Levers") -> bool:
    """Whether layers' weights are in host memory as well, and are streamed to the GPU layer by layer."""
    return levers.offload == "weights"


def count_that_fit(sizes_bytes: Iterable[float], room_bytes: float) -> int:
    """How many of the sizes, taken in order, fit; counting stops at the first that does not.

    This chooses the matrices whose states stay on the GPU (levers.offload_keep_bytes: embedding and head first, then
    the first layers, whose updates are needed soonest) and, from the last layer back, those whose updates are deferred
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
    """Whether updates are sent during backward, so that the bytes of gradients waiting on the GPU are bounded."""
    return offloads_states(levers) and levers.update_in_backward


def deferred_bytes(gradient_bytes: int) -> int:
    """Bytes of gradients whose updates are deferred, out of levers.offload_gradient_bytes (updates inside backward).

    The remaining IN_FLIGHT_BYTES are for updates that wait for the link.
    """
    return gradient_bytes - IN_FLIGHT_BYTES


def offloaded_count(recomputed: int, each_bytes: int, host_bytes: int | None) -> int:
    """How many of the `recomputed` layers, counted from the first, have their input on the host.

    The first ones' inputs wait longest. The last one's is needed as soon as backward begins, so it stays on the GPU.
    """
    most = max(0, recomputed - 1)
    return most if host_bytes is None else min(most, host_bytes // max(1, each_bytes))


def stored_bytes(rows: int, width: int, element_bytes: int, form: Literal["exact", "fp8"]) -> int:
    """Bytes of one layer's input [rows, width] on the host; fp8 has a byte per element and a float32 per row."""
    return rows * (width + SCALE_BYTES) if form == "fp8" else rows * width * element_bytes
