"""Training: the fullest moment of every phase of a step (step.py), on every pipeline rank.

States exist from the start (train/optimizer), so the first step is no exception. At `save` the host holds a copy of
what is written.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.adapter import frozen_bytes
from tightfit.memory.formulas.local_shape import local_shape
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.formulas.pipeline import rank_spans, telling_ranks
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.formulas.stage import stage_params
from tightfit.memory.formulas.states import States
from tightfit.memory.formulas.step import steps
from tightfit.memory.formulas.story import FROZEN, ROUNDING, TEACHER, StepMoment, fullest, lines, state_bytes
from tightfit.memory.ledger import Ledger, Line, Phase

SAVED = ("weights", "master weights", "optimizer states")


class Peaks(NamedTuple):
    """The most that a training step needs: of one card, with allocator slack and CUDA context; per rank of host memory;
    and besides that, per rank, for the copy from which a checkpoint is written."""

    gpu_bytes: int
    host_bytes: int
    saved_bytes: int


def peaks(
    workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT, *, room_bytes: float = math.inf
) -> Peaks:
    """Peaks over pipeline ranks; stops at the first rank that needs more than `room_bytes`."""
    gpu_bytes = host_bytes = saved_bytes = 0
    for number in telling_ranks(workload, layout, levers):
        rank = RankMemory(workload, layout, levers, number, overheads)
        gpu_bytes = max(gpu_bytes, sum(rank.resident) + max(map(sum, chain(*_moments(rank).values()))))
        host_bytes = max(host_bytes, sum(rank.host))
        # A single rank writes offloaded states from where they are; several ranks copy theirs and train on meanwhile.
        copied_bytes = state_bytes(rank.resident) + (state_bytes(rank.host) if layout.ranks > 1 else 0)
        saved_bytes = max(saved_bytes, copied_bytes + rank.resident.older_weights)
        if gpu_bytes > room_bytes:
            break
    return Peaks(engine_overheads(workload, overheads).with_these(gpu_bytes), host_bytes, saved_bytes)


def least_peaks(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> Peaks:
    """A lower bound of `peaks`, quick because it has no activations: states of the first pipeline rank, and gradients
    beside them when the optimizer begins."""
    span = rank_spans(workload.spec, workload.sequence_length, layout)[0]
    states = States(workload, layout, levers, *stage_params(local_shape(workload, layout, levers), span))
    gradient_bytes = states.kept_gradient_bytes if layout.zero else states.element_bytes
    waiting_bytes = 0 if levers.update_in_backward else gradient_bytes * states.owned
    gpu_state_bytes, host_state_bytes = state_bytes(states.resident), state_bytes(states.host)
    allocated_bytes = gpu_state_bytes + waiting_bytes + frozen_bytes(workload)
    return Peaks(
        gpu_bytes=engine_overheads(workload, overheads).with_these(allocated_bytes),
        host_bytes=host_state_bytes,
        saved_bytes=gpu_state_bytes + (host_state_bytes if layout.ranks > 1 else 0),
    )


def host_parts(workload: Workload, layout: Layout, levers: Levers) -> tuple[int, int]:
    """Bytes that one rank keeps on the host: states (with weights), and checkpoints."""
    ranks = telling_ranks(workload, layout, levers)
    host = max((RankMemory(workload, layout, levers, number).host for number in ranks), key=sum)
    return sum(host) - host.checkpoints, host.checkpoints


def training_ledger(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> Ledger:
    """Every phase of a step, on every pipeline rank, line by line."""
    found: list[Line] = []
    overheads = engine_overheads(workload, overheads)
    for number in range(layout.pipeline):
        rank = RankMemory(workload, layout, levers, number, overheads)
        phases: dict[Phase, list[StepMoment]] = {"init": [StepMoment()], **_moments(rank)}
        phases |= {"evaluation": [steps(rank)[0].evaluation()], "save": [StepMoment()]}
        for phase, moments in phases.items():
            allocated = [*lines(rank.resident, phase, number), *lines(fullest(moments), phase, number)]
            found += allocated
            found += overheads.lines(phase, sum(line.bytes for line in allocated), number)
            found += lines(rank.host, phase, number, "host")
        found += _written(rank, number)
    return Ledger("formulas", tuple(found))


def _moments(rank: RankMemory) -> dict[Phase, list[StepMoment]]:
    """The moments of each phase of a step."""
    step, *later = steps(rank)
    loss: dict[Phase, list[StepMoment]] = {"loss": [step.loss()]} if rank.stage.span.has_head else {}
    backward = step.backward()
    for each in later:
        backward += each.backward()
    return {"forward": step.forward(), **loss, "backward": backward, "optimizer": [step.optimizer()]}


def _written(rank: RankMemory, number: int) -> Iterator[Line]:
    """The host's copy of everything saved, wherever it lives: with one rank the file that safetensors builds in memory,
    with several the copy that each rank stages while training goes on (train/checkpoints)."""
    for holder in (rank.resident, rank.host):
        for line in lines(holder, "save", number, "host"):
            if line.component in SAVED and line.detail not in (TEACHER, ROUNDING, FROZEN):
                yield replace(line, detail="to be written", why="copied before it is written")


def engine_overheads(workload: Workload, overheads: Overheads) -> Overheads:
    """`overheads` for the job's engine: other engines have their own slack and fixed buffers."""
    if workload.engine_name == "tightfit":
        return overheads
    memory = workload.engine.memory
    more_bytes = int(memory.fixed_gib * 2**30)
    return replace(overheads, slack_share=memory.slack_share, context_bytes=overheads.context_bytes + more_bytes)
