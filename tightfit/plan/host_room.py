"""Host memory is budgeted like the card's: a run that would need more than is free is refused before it starts.

What a run keeps there is known from its levers: optimizer states, master weights, weights and checkpoints; what saving
copies, from its layout. All ranks of a node share it, so everything is counted per node. Pinned pages cannot be
swapped, so a host that is short of them does not slow down but kills. Some is left to everything else.
"""

from tightfit.errors import UserError
from tightfit.hardware.host import free_host_bytes
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.saving import writers_of_node
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import host_parts, peaks

LEFT_BYTES = 2 * 2**30
"""What the trainer itself (its libraries, batches) and the system are left."""
GATHERED = Layout(micro_batch=1)
"""A model gathered is that of one rank."""


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
    who = "this run" if ranks_here == 1 else f"the {ranks_here} ranks of this node"
    raise UserError(
        f"{who} would keep {(states + checkpoints) / 2**30:.1f} GiB in host memory, of which {room / 2**30:.1f} GiB "
        f"are free; {_advice(levers, states, checkpoints, room, ranks_here)}"
    )


def refuse_saving_shortage(
    workload: Workload, layout: Layout, levers: Levers, *, sharded: bool, ranks_here: int = 1
) -> None:
    """A sentence where writing a checkpoint would take more host memory of this node than is left."""
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
    """What copies a node's ranks make to write a checkpoint; where the first one gathers it, the whole on its node."""
    if layout.ranks > 1 and not sharded:
        return peaks(workload, GATHERED, Levers(optimizer_states=levers.optimizer_states)).saved_bytes
    return writers_of_node(layout, ranks_here) * peaks(workload, layout, levers).saved_bytes


def _advice(levers: Levers, states: int, checkpoints: int, room: int, ranks_here: int) -> str:
    """The lever to change: the checkpoints where leaving them is enough, else the states."""
    if checkpoints and states <= room:
        return f"set levers.checkpoint_host_bytes to {(room - states) // ranks_here} or less"
    if levers.optimizer_states in ("auto", "fp32"):
        return "set levers.optimizer_states to bf16 or 8bit, or let the GPU keep some with levers.offload_keep_bytes"
    missing = (states + checkpoints - room) // ranks_here + levers.offload_keep_bytes
    return f"let the GPU keep some with levers.offload_keep_bytes={missing}, or set levers.offload to none"
