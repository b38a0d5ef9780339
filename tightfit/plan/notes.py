"""Notes: what a user should know about a plan besides its numbers, one sentence each."""

from collections.abc import Iterator
from dataclasses import replace

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.hardware.sustained import product_share
from tightfit.jobs.layout import Layout
from tightfit.jobs.rules.refusals import refused_workload
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.local_shape import ceil
from tightfit.memory.formulas.overheads import INSTALLED
from tightfit.memory.formulas.training import peaks
from tightfit.plan.batch import warning
from tightfit.plan.cost import Costs
from tightfit.plan.describe import describe_mesh
from tightfit.plan.mfu import peak_flop_s
from tightfit.plan.plan import Plan
from tightfit.plan.search.layouts import LARGEST_MICRO_BATCH
from tightfit.plan.search.search import COMFORT

MEASURED_CARD = "H200"
SAVING_TOLD_BYTES = 32 * 2**30
"""A checkpoint that takes more than this of a node's host memory is worth a note."""
FEWEST_MESH_RANKS = 4


def notes_on(plan: Plan, positions: int | None) -> Iterator[str]:
    """All notes on `plan`; `positions` are those of the model as published, None where unknown."""
    yield from _on_the_batch(plan, positions)
    yield from _on_memory(plan)
    if plan.layout.has_two_versions:
        yield (
            "under schedule 2bw gradients are of weights one update old; the pipeline waits where it saves and "
            "evaluates"
        )
    yield from filter(None, (mesh_note(plan), one_gpu_note(plan)))
    yield from _on_the_card(plan.machine, plan.workload)


def _on_the_batch(plan: Plan, positions: int | None) -> Iterator[str]:
    """Notes on the batch, the length of its rows, the engine, and the network between nodes."""
    workload, machine = plan.workload, plan.machine
    if sentence := warning(workload.tokens, machine.ranks):
        yield sentence
    if workload.engine_name != "tightfit":
        yield f"memory and time are those of {workload.engine.is_for}, not of `tightfit train`"
    if positions is not None and workload.sequence_length > positions:
        yield (
            f"rows have {workload.sequence_length:,} tokens, but the model has {positions:,} positions; "
            "extend them before training (rope_scaling in its config.json, or a longer position embedding)"
        )
    if workload.global_batch % machine.ranks:
        yield (
            f"a global batch of {counted(workload.global_batch, 'row')} is not a multiple of {machine.ranks} GPUs, so "
            f"not all of them can be data ranks; {ceil(workload.global_batch, machine.ranks) * machine.ranks} rows are"
        )
    if machine.nodes > 1 and machine.inter.name not in machine.text:
        yield (
            f"nodes are connected by {machine.inter.name}; name another link after the machine, such as "
            f"{machine.text.partition(':')[0]}:{'ndr' if machine.inter.name != 'ndr' else 'hdr'}"
        )


def _on_memory(plan: Plan) -> Iterator[str]:
    """Notes on host memory, and on a card with little room left."""
    room_bytes = plan.machine.accelerator.memory_bytes
    if plan.training_host_bytes > 2**30 and plan.machine.host_bytes is None:
        used = plan.training_host_bytes / 2**30
        yield f"this uses {used:.0f} GiB of host memory a node while it trains; --host-memory says how much there is"
    if plan.saving_bytes > SAVING_TOLD_BYTES:
        yield f"saving copies {plan.saving_bytes / 2**30:.0f} GiB to host memory on a node"
    if plan.fits and plan.gpu_peak_bytes > COMFORT * room_bytes:
        yield (
            f"tight: {plan.gpu_peak_bytes / room_bytes:.0%} of the card, and nothing that leaves more room was found; "
            "--confirm counts more exactly"
        )


def _on_the_card(machine: Machine, workload: Workload) -> Iterator[str]:
    """Notes on the source of the card's rates, and on what was never tested: other vendors' cards, several GPUs."""
    card, calibration = machine.accelerator, machine.calibration
    if calibration is not None:
        yield f"times use what `tightfit calibrate` measured on this machine on {calibration.date}"
    elif card.family != MEASURED_CARD:
        share = product_share(card, peak_flop_s(workload.precision, machine) / machine.ranks / 1e12)
        yield (
            f"times assume that products reach {share:.0%} of the card's peak (docs/hardware.md); `tightfit calibrate` "
            "measures it where you have one"
        )
    if workload.engine_name != "tightfit":
        return
    if card.vendor != "NVIDIA":
        yield f"nobody has run tightfit on {card.vendor} cards: kernels are tested on NVIDIA's and on CPUs"
    if machine.ranks > 1 and (calibration is None or calibration.collectives is None):
        yield (
            "splits were tested on CPU processes and on one GPU, never on several; check yours with `tightfit doctor` "
            "first"
        )


def mesh_note(plan: Plan) -> str | None:
    """Seconds of tensor ranks' collectives per step, against those of the best other mesh; None without another."""
    if plan.layout.tensor < FEWEST_MESH_RANKS or plan.workload.engine_name != "tightfit":
        return None
    costs = Costs(plan.workload, plan.machine)

    def waits_s(layout: Layout) -> float:
        return costs.step(layout, plan.levers).tensor_s

    others = sorted(_other_meshes(plan), key=waits_s)
    if not others:
        return None
    own_s, best_s = waits_s(plan.layout), waits_s(others[0])
    own, best = describe_mesh(plan.layout), describe_mesh(others[0])
    verb = "would wait" if best_s < own_s else "would not wait less:"
    return f"{plan.layout.tensor} tensor ranks wait {own_s:.2f} s a step {own}; {best} they {verb} {best_s:.2f} s"


def _other_meshes(plan: Plan) -> Iterator[Layout]:
    """The plan's layout with its tensor ranks in a line or on other meshes, if the rules allow it and the card has
    room."""
    for kind in ("1d", "2d", "2.5d", "3d"):
        for depth in range(2, plan.layout.tensor + 1) if kind == "2.5d" else (1,):
            layout = plan.layout.model_copy(update={"tensor_mesh": kind, "tensor_depth": depth})
            is_refused = refused_workload(plan.workload, layout, plan.levers) is not None
            if layout != plan.layout and not is_refused and _fits(plan, layout):
                yield layout


def _fits(plan: Plan, layout: Layout) -> bool:
    return peaks(plan.workload, layout, plan.levers, INSTALLED).gpu_bytes <= plan.machine.accelerator.memory_bytes


def one_gpu_note(plan: Plan) -> str | None:
    """A note if one GPU with CUDA graphs would be faster than the plan's several, whose hosts launch kernels one by
    one; else None."""
    if plan.layout.ranks == 1 or plan.workload.engine_name != "tightfit":
        return None
    one = replace(plan.machine, nodes=1, per_node=1)
    costs = Costs(plan.workload, one)
    sizes = [rows for rows in range(1, LARGEST_MICRO_BATCH + 1) if plan.workload.global_batch % rows == 0]
    taken = [_captured_s(plan, costs, Layout(micro_batch=rows)) for rows in sizes]
    alone_s = min((seconds for seconds in taken if seconds is not None), default=None)
    if alone_s is None or alone_s >= plan.step_seconds:
        return None
    return (
        f"one GPU alone would take {1e3 * alone_s:.0f} ms a step, with all its kernels in a CUDA graph; "
        f"{plan.layout.ranks} take {1e3 * plan.step_seconds:.0f} ms, as their hosts launch kernels one by one"
    )


def _captured_s(plan: Plan, costs: Costs, layout: Layout) -> float | None:
    """Seconds of the plan's step on one card as a CUDA graph; None if it cannot be captured or does not fit."""
    try:
        captured = costs.layout_cost(layout).is_captured(plan.levers)
        fits = _fits(plan, layout)
    except UserError:  # a budget of activations that is too small for one card
        return None
    return costs.step(layout, plan.levers).step_s if captured and fits else None
