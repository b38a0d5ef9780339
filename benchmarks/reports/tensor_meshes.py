"""Tensor ranks in a line and on 2D, 2.5D and 3D meshes: what a rank sends, holds and waits for, over their number.

Computed, not measured: these are the planner's own formulas, whose messages tests count on CPU processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tightfit.hardware.machine import parse_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import peaks
from tightfit.models.presets import preset
from tightfit.plan.cost import Costs
from tightfit.plan.seconds.tensor import forward_calls, regather_calls
from tightfit.plan.seconds.tensor_mesh import MeshMessages, Message
from tightfit.report.figure import panels, plain

MODEL, ROWS, LENGTH = "llama-3.1-70b", 64, 4096
GB, GIB = 1e9, 2**30
RECOMPUTED = Levers(checkpoint_every=1)
TICKS = (2, 4, 8, 16, 32, 64, 128, 512)
COLORS = {"1d": "#555555", "2d": "#1f5fa8", "2.5d": "#e0a458", "3d": "#3a7d44"}
LAYOUTS = {
    "1d": [Layout(tensor=t, micro_batch=ROWS) for t in (2, 4, 8, 16, 32, 64)],
    "2d": [Layout(tensor=q * q, tensor_mesh="2d", micro_batch=ROWS) for q in (2, 4, 8)],
    "2.5d": [
        Layout(tensor=d * q * q, tensor_mesh="2.5d", tensor_depth=d, micro_batch=ROWS)
        for d, q in ((2, 2), (2, 4), (2, 8))
    ],
    "3d": [Layout(tensor=q**3, tensor_mesh="3d", micro_batch=ROWS) for q in (2, 4, 8)],
}


@dataclass(frozen=True)
class Cost:
    """Of one rank: bytes it sends in a step of one micro-batch, bytes it holds, seconds it waits."""

    ranks: int
    sent_bytes: float
    held_bytes: int
    tensor_s: float


def costs_of(kind: str) -> Iterator[Cost]:
    """For every number of ranks."""
    workload = Workload(spec=preset(MODEL), sequence_length=LENGTH, global_batch=ROWS)
    for layout in LAYOUTS[kind]:
        nodes = -(-layout.ranks // 8)
        machine = parse_machine(f"{nodes}x8xH100-80GB" if nodes > 1 else f"{layout.ranks}xH100-80GB")
        yield Cost(
            layout.ranks,
            _sent_bytes(workload, layout),
            peaks(workload, layout, RECOMPUTED).gpu_bytes,
            Costs(workload, machine).step(layout, Levers()).tensor_s,
        )


def _sent_bytes(workload: Workload, layout: Layout) -> float:
    """Forward and backward of all layers, without recomputation."""
    spec, number_bytes, tokens = workload.spec, workload.weight_bytes, workload.tokens
    if layout.tensor_mesh == "1d":
        one_way = forward_calls(spec.layers, sequence_parallel=True)
        gathers = 2 * sum(one_way) + sum(regather_calls(spec.layers, sequence_parallel=True))  # and scatters
        return number_bytes * gathers * tokens * spec.hidden_size * (layout.tensor - 1) / layout.tensor
    messages = MeshMessages(spec, layout, tokens)
    every = [m for back in (False, True) for m in spec.layers * messages.layer(backward=back)]
    ends = [m for back in (False, True) for m in messages.ends(backward=back)]
    return sum(_message_bytes(message, layout, number_bytes) for message in [*every, *ends])


def _message_bytes(message: Message, layout: Layout, number_bytes: float) -> float:
    """What one rank sends round a ring: all of a broadcast or a sum onto one rank, (q − 1)/q of a gather or a scatter,
    and twice that of an all-reduce."""
    ranks = dict(zip(("depth", "row", "column"), layout.tensor_axes, strict=True))[message.axis]
    share = 1.0 if message.kind in ("broadcast", "reduce") else (ranks - 1) / ranks
    times = 2 if message.kind == "all_reduce" else 1
    return times * share * message.elements * (FLOAT32_BYTES if message.wide else number_bytes)


def draw_tensor_meshes(path: Path) -> None:
    """Three panels over the number of tensor ranks."""
    from matplotlib.ticker import LogLocator, NullLocator

    with panels(path, 1, 3, width=13, height=4.4) as (figure, axes):
        titles = ("sent by a rank, GB a step", "memory of a rank, GiB", "waiting for tensor ranks, s a step")
        for kind in LAYOUTS:
            found = list(costs_of(kind))
            ranks = [each.ranks for each in found]
            values = (
                [each.sent_bytes / GB for each in found],
                [each.held_bytes / GIB for each in found],
                [each.tensor_s for each in found],
            )
            for panel, numbers in zip(axes[0], values, strict=True):
                name = f"{kind}, depth 2" if kind == "2.5d" else kind
                panel.plot(ranks, numbers, marker="o", color=COLORS[kind], label=name)
        for panel, title in zip(axes[0], titles, strict=True):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(TICKS, [str(tick) for tick in TICKS])
            panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            panel.yaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_major_formatter("{x:g}")
            panel.set_xlabel("tensor ranks")
            panel.set_title(title)
            plain(panel)
        axes[0][0].legend(frameon=False)
        figure.suptitle(f"{MODEL}, {ROWS} rows of {LENGTH} tokens on nodes of 8 H100: computed by the planner")
