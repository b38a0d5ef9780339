"""Host memory is budgeted like the card's: a run that would need more than is free is refused before it starts.

What a run keeps there is known from its levers: optimizer states, master weights, weights and checkpoints. Pinned pages
cannot be swapped, so a host that is short of them does not slow down but kills. Some is left to everything else.
"""

from tightfit.errors import UserError
from tightfit.hardware.host import free_host_bytes
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import host_parts

LEFT_BYTES = 2 * 2**30
"""What the trainer itself (its libraries, batches, the checkpoint being written) and the system are left."""


def usable_host_bytes() -> int | None:
    """What levers may fill of the host's memory."""
    free = free_host_bytes()
    return None if free is None else max(0, free - LEFT_BYTES)


def refuse_host_shortage(
    workload: Workload, layout: Layout, levers: Levers, ranks_here: int = 1, room_bytes: int | None = None
) -> None:
    """A sentence where the `ranks_here` of this node would keep more on the host than `room_bytes`, or than is free."""
    states, checkpoints = (ranks_here * part for part in host_parts(workload, layout, levers))
    room = usable_host_bytes() if room_bytes is None else room_bytes
    if not states + checkpoints or room is None or states + checkpoints <= room:
        return
    raise UserError(
        f"this run would keep {(states + checkpoints) / 2**30:.1f} GiB in host memory, of which {room / 2**30:.1f} GiB "
        f"are free; {_advice(levers, states, checkpoints, room, ranks_here)}"
    )


def _advice(levers: Levers, states: int, checkpoints: int, room: int, ranks_here: int) -> str:
    """The lever to change: the checkpoints where leaving them is enough, else the states."""
    if checkpoints and states <= room:
        return f"set levers.checkpoint_host_bytes to {(room - states) // ranks_here} or less"
    if levers.optimizer_states in ("auto", "fp32"):
        return "set levers.optimizer_states to bf16 or 8bit, or let the GPU keep some with levers.offload_keep_bytes"
    missing = (states + checkpoints - room) // ranks_here + levers.offload_keep_bytes
    return f"let the GPU keep some with levers.offload_keep_bytes={missing}, or set levers.offload to none"
