"""Host memory is budgeted like the card's: a run that would need more than is free is refused before it starts.

Bytes that a run keeps in host memory (optimizer states, masters, weights, checkpoints) follow from its levers, and
those that saving copies from its layout. All ranks of a node share its memory, so everything is counted per node.
Pinned pages cannot be swapped: a host that runs short does not slow down, it kills processes. LEFT_BYTES stay free.
"""

from tightfit.errors import UserError
from tightfit.hardware.host import free_host_bytes
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.saving import writers_of_node
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import host_parts, peaks

LEFT_BYTES = 2 * 2**30
"""Host memory left to the trainer itself (libraries, batches) and the system."""
GATHERED = Layout(micro_batch=1)
"""The layout for counting a gathered checkpoint: as much as a run on one rank saves."""


def usable_host_bytes() -> int | None:
    """Bytes of host memory that levers may fill; None where unknown."""
    free = free_host_bytes()
    return None if free is None else max(0, free - LEFT_BYTES)


def refuse_host_shortage(
    workload: Workload, layout: Layout, levers: Levers, ranks_here: int = 1, room_bytes: int | None = None
) -> None:
    """Raise a UserError if the `ranks_here` of this node would keep more on the host than `room_bytes`, or than is
    free."""
    states, checkpoints = (ranks_here * part for part in host_parts(workload, layout, levers))
    room = usable_host_bytes() if room_bytes is None else room_bytes
    if not states + checkpoints or room is None or states + checkpoints <= room:
        return
    who = "this run" if ranks_here == 1 else f"the {ranks_here} ranks of this node"
    raise UserError(
        f"{who} would keep {(states + checkpoints) / 2**30:.1f} GiB in host memory, of which {room / 2**30:.1f} GiB "
        f"are free; {_advice(levers, states, checkpoints, room, ranks_here)}"
    )


def refuse_saving_shortage(
    workload: Workload, layout: Layout, levers: Levers, *, sharded: bool, ranks_here: int = 1
) -> None:
    """Raise a UserError if writing a checkpoint would take more host memory of this node than is left."""
    room = usable_host_bytes()
    copies = saving_bytes(workload, layout, levers, sharded=sharded, ranks_here=ranks_here)
    kept = ranks_here * sum(host_parts(workload, layout, levers))
    if room is None or copies + kept <= room:
        return
    fix = "set saving.sharded to true" if layout.ranks > 1 and not sharded else "take narrower levers.optimizer_states"
    beside = f" beside the {kept / 2**30:.1f} GiB that it keeps there" if kept else ""
    raise UserError(
        f"saving this run would take {copies / 2**30:.1f} GiB of host memory on this node{beside}, of which "
        f"{room / 2**30:.1f} GiB are free; {fix}, or set saving.every to 0 and export elsewhere"
    )


def saving_bytes(workload: Workload, layout: Layout, levers: Levers, *, sharded: bool, ranks_here: int) -> int:
    """Bytes that a node's ranks copy to write a checkpoint; if not `sharded`, the whole one, gathered by rank 0."""
    if layout.ranks > 1 and not sharded:
        return peaks(workload, GATHERED, Levers(optimizer_states=levers.optimizer_states)).saved_bytes
    return writers_of_node(layout, ranks_here) * peaks(workload, layout, levers).saved_bytes


def _advice(levers: Levers, states: int, checkpoints: int, room: int, ranks_here: int) -> str:
    """The lever to change: fewer checkpoints on the host if that is enough, else smaller or fewer states."""
    if checkpoints and states <= room:
        return f"set levers.checkpoint_host_bytes to {(room - states) // ranks_here} or less"
    if levers.optimizer_states in ("auto", "fp32"):
        return "set levers.optimizer_states to bf16 or 8bit, or let the GPU keep some with levers.offload_keep_bytes"
    missing = (states + checkpoints - room) // ranks_here + levers.offload_keep_bytes
    return f"let the GPU keep some with levers.offload_keep_bytes={missing}, or set levers.offload to none"
