"""Training: the fullest moment of every phase of a step, on every pipeline rank.

- init: what lives as long as the run. States exist from the start (train/optimizer.py), so no first step differs.
- forward, loss, backward, optimizer: told in the files of these names.
- evaluation: a forward that keeps nothing. save: the host holds what the file will.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.backward import backward
from tightfit.memory.formulas.forward import evaluation, forward, loss
from tightfit.memory.formulas.local_shape import local_shape
from tightfit.memory.formulas.optimizer import optimizer
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.formulas.params import Params
from tightfit.memory.formulas.pipeline import pipeline_stage, telling_ranks
from tightfit.memory.formulas.rank import RankMemory, rank_memory
from tightfit.memory.formulas.stage import stage_params
from tightfit.memory.formulas.states import resident_states
from tightfit.memory.formulas.story import ROUNDING, TEACHER, StepMoment, fullest, lines
from tightfit.memory.ledger import Ledger, Line, Phase

SAVED = ("weights", "master weights", "optimizer states")


class Peaks(NamedTuple):
    """The most that a training step needs."""

    gpu_bytes: int
    """Of one card, slack and context included,"""
    host_bytes: int
    """of the host for each rank,"""
    saved_bytes: int
    """and what a rank copies there besides to write a checkpoint."""


def peaks(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> Peaks:
    """Of the fullest pipeline rank."""
    gpu_bytes = host_bytes = saved = 0
    for number in _telling_ranks(workload, layout, levers):
        rank = rank_memory(workload, layout, levers, number, overheads)
        fullest_bytes = max(map(sum, _step(rank)))
        gpu_bytes = max(gpu_bytes, sum(rank.resident) + fullest_bytes)
        host_bytes = max(host_bytes, sum(rank.host))
        # One rank's file is written from host memory as it lies there; several ranks copy all before they go on.
        copied = (rank.resident,) if layout.ranks == 1 else (rank.resident, rank.host)
        saved_states = sum(told.weights + told.masters + told.moments for told in copied)
        saved = max(saved, saved_states + rank.resident.older_weights)
    overheads = engine_overheads(workload, overheads)
    slack_bytes = _slack_bytes(gpu_bytes, overheads)
    return Peaks(gpu_bytes + slack_bytes + overheads.context_bytes, host_bytes, saved)


def least_bytes(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> int:
    """A lower bound of `peaks`' card that takes no look at activations: states, and gradients beside them when the
    optimizer begins, of the first pipeline rank."""
    stage = pipeline_stage(workload.spec, workload.sequence_length, layout.pipeline, layout.stages_per_rank, 0)
    shape = local_shape(workload, layout, levers)
    shares_embedding = workload.spec.tied and layout.pipeline == 1
    in_layers, outside = stage_params(workload.spec, shape, stage, shares_embedding=shares_embedding)
    params = in_layers.plus(Params(outside))
    states = resident_states(workload, layout, levers, params, layer_weights=in_layers.all, widest_layer=0)
    gradient_bytes = states.kept_gradient_bytes if layout.zero else states.element_bytes
    waiting_bytes = 0 if levers.update_in_backward else gradient_bytes * states.owned
    allocated_bytes = states.weights + states.masters + states.moments + waiting_bytes
    overheads = engine_overheads(workload, overheads)
    return allocated_bytes + _slack_bytes(allocated_bytes, overheads) + overheads.context_bytes


def peak(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> tuple[int, int]:
    """Of one card, and of the host for each rank."""
    return peaks(workload, layout, levers, overheads)[:2]


def host_parts(workload: Workload, layout: Layout, levers: Levers) -> tuple[int, int]:
    """Bytes that one rank keeps on the host: states (with weights), and checkpoints."""
    ranks = _telling_ranks(workload, layout, levers)
    held = max((rank_memory(workload, layout, levers, number).host for number in ranks), key=sum)
    return sum(held) - held.checkpoints, held.checkpoints


def _telling_ranks(workload: Workload, layout: Layout, levers: Levers) -> tuple[int, ...]:
    """Pipeline ranks of which one is the fullest."""
    if layout.pipeline == 1:
        return (0,)
    micro_batches = max(1, workload.global_batch // (layout.micro_batch * layout.data))
    every, count = levers.checkpoint_every, levers.num_checkpoints
    return telling_ranks(workload.spec, workload.sequence_length, layout, micro_batches, every=every, count=count)


def training_ledger(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> Ledger:
    """Every phase of a step, on every pipeline rank, line by line."""
    found: list[Line] = []
    overheads = engine_overheads(workload, overheads)
    for number in range(layout.pipeline):
        rank = rank_memory(workload, layout, levers, number, overheads)
        for phase, moment in _phases(rank):
            allocated = [*lines(rank.resident, phase, number), *lines(moment, phase, number)]
            found += allocated
            found += _not_allocated(phase, number, sum(line.bytes for line in allocated), overheads)
            found += lines(rank.host, phase, number, "host")
        found += _written(rank, number)
    return Ledger("formulas", tuple(found))


def _step(rank: RankMemory) -> list[StepMoment]:
    """All moments of a step."""
    with_loss = [loss(rank)] if rank.stage.stage.has_head else []
    return [*forward(rank), *with_loss, *backward(rank), optimizer(rank)]


def _phases(rank: RankMemory) -> Iterator[tuple[Phase, StepMoment]]:
    """Every phase of a run and its fullest moment."""
    yield "init", StepMoment()
    yield "forward", fullest(forward(rank))
    if rank.stage.stage.has_head:
        yield "loss", loss(rank)
    yield "backward", fullest(backward(rank))
    yield "optimizer", optimizer(rank)
    yield "evaluation", evaluation(rank)
    yield "save", StepMoment()


def _written(rank: RankMemory, number: int) -> Iterator[Line]:
    """A copy of all that is saved, on the GPU or on the host: of one rank the file that safetensors puts together in
    memory, of several what each stages while training goes on (train/checkpoints)."""
    for told in (rank.resident, rank.host):
        for line in lines(told, "save", number, "host"):
            if line.component in SAVED and line.detail not in (TEACHER, ROUNDING):
                yield replace(line, detail="to be written", why="copied before it is written")


def _not_allocated(phase: Phase, rank: int, allocated_bytes: int, overheads: Overheads) -> Iterator[Line]:
    slack_bytes = _slack_bytes(allocated_bytes, overheads)
    if slack_bytes:
        why = "a flat share of what is allocated: see overheads.py"
        yield Line(component="allocator slack", phase=phase, bytes=slack_bytes, why=why, rank=rank)
    if overheads.context_bytes:
        why = "driver and kernels: see overheads.py"
        yield Line(component="cuda context", phase=phase, bytes=overheads.context_bytes, why=why, rank=rank)


def engine_overheads(workload: Workload, overheads: Overheads) -> Overheads:
    """What the job's engine has besides tensors; ours as given."""
    if workload.engine_name == "tightfit":
        return overheads
    memory = workload.engine.memory
    more_bytes = int(memory.fixed_gib * 2**30)
    return replace(overheads, slack_share=memory.slack_share, context_bytes=overheads.context_bytes + more_bytes)


def _slack_bytes(allocated_bytes: int, overheads: Overheads) -> int:
    return int(allocated_bytes * overheads.slack_share)
