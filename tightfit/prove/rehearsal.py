"""Rehearsal: the real training step, traced on fake tensors, gives the ledger before anything is allocated.

Decoder, loss, optimizer and parallelism are those of training; only the tensors and the other ranks are fake. See
memory/simulation.py for how, and for the limits. The same step can be built on a real device, which is how predictions
are compared with measurements.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.quantize import NOT_QUANTIZED
from tightfit.jobs.workload import Workload
from tightfit.levers.adapter import attach
from tightfit.levers.policy.offload import offloads_states
from tightfit.levers.policy.segments import uses_expandable_segments
from tightfit.memory.allocator import CachingAllocator
from tightfit.memory.extrapolation import depths, extrapolated
from tightfit.memory.formulas.gradients import has_buckets
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.growing_allocator import GrowingAllocator
from tightfit.memory.ledger import Ledger, Line
from tightfit.memory.simulation import fake_world, first_chunk_only, simulated
from tightfit.memory.trace import Replay, Trace, ledger_of_replay
from tightfit.memory.tracing import Tracer
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.quantized.holding import hold_in_codes
from tightfit.models.spec import ModelSpec
from tightfit.parallel.apply import cut
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.pipeline import take_stages
from tightfit.parallel.ranks import Ranks
from tightfit.train.assembly import Fill, assemble
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import COMPUTE_DTYPES, LossScale
from tightfit.train.step import Batch, OnPhase, StepResult, ignore, train_step
from tightfit.train.step_graph import StepGraph, step_graph

DIRECT_LAYERS = 48
"""Models of up to this many layers are traced whole, in seconds; reserved memory is then replayed exactly."""
GPU_KERNELS = Implementations(norm="triton", rope="triton", glu="triton", linear_cross_entropy="triton")
CPU = torch.device("cpu")
LR = 1e-5


@dataclass
class Program:
    """A training step, ready to run."""

    module: nn.Module
    decoder: Decoder
    optimizer: MasterAdamW
    batches: list[Batch]
    device: torch.device
    scale: LossScale
    ranks: Ranks
    graph: StepGraph | None = None

    def step(self, on_phase: OnPhase = ignore) -> StepResult:
        """Run one training step."""
        return train_step(
            self.module,
            self.optimizer,
            self.batches,
            self.device,
            LR,
            self.scale,
            on_phase,
            ranks=self.ranks,
            graph=self.graph,
        )

    def step_in_flow(self, on_phase: OnPhase = ignore) -> None:
        """Run one step without a flush: part of its backward is left to the next step if the schedule allows it."""
        if self.optimizer.buffered is None:
            self.step(on_phase)
        else:
            self.optimizer.buffered.take(self.batches, self.device, LR, on_phase, self.ranks)


Step = Callable[[OnPhase], object]
MakeStep = Callable[[DeviceMesh | None, Tracer], Step]


def rehearse(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> Ledger:
    """The ledger of a training step, with the first rank of each pipeline stage that may have the highest peak."""
    lines: list[Line] = []
    for stage in stages_to_trace(layout):
        ledger = rehearse_stage(workload, layout, levers, overheads, stage)
        lines += [replace(line, rank=stage) for line in ledger.lines]
    return Ledger("simulation", tuple(lines))


def rehearse_stage(
    workload: Workload,
    layout: Layout,
    levers: Levers,
    overheads: Overheads = DEFAULT,
    stage: int = 0,
    *,
    captured: bool = False,
) -> Ledger:
    """The ledger of the first rank of pipeline stage `stage` alone, as rank 0; `captured`: steps are CUDA graphs."""
    replay = _replay(workload, layout, levers, overheads, stage, captured=captured)
    return ledger_of_replay(replay, "simulation", context_bytes=overheads.context_bytes)


def stages_to_trace(layout: Layout) -> list[int]:
    """The first two stages, which have most micro-batches in flight, and the last, which has the loss."""
    return sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})


def _replay(
    workload: Workload,
    layout: Layout,
    levers: Levers,
    overheads: Overheads,
    stage: int = 0,
    *,
    captured: bool = False,
) -> Replay:
    """The replay of the whole model or stage where tracing is quick, else extrapolated from two shallow models."""

    def replay(trace: Trace) -> Replay:
        allocator = GrowingAllocator() if uses_expandable_segments(layout) else CachingAllocator()
        return trace.replay(allocator, captured=captured, update_captured=levers.update_in_backward)

    layers, period = workload.spec.layers, max(1, levers.checkpoint_every)
    few, more = depths(layers, period)
    direct = layout.pipeline > 1 or layers <= DIRECT_LAYERS or more >= layers
    if direct or _differs_by_layer(workload.spec, levers):
        return replay(trace_training_step(workload, layout, levers, overheads, stage))
    shallow, deeper = (
        replay(trace_training_step(_of_depth(workload, depth), layout, levers, overheads)) for depth in (few, more)
    )
    periods = (layers - more) // period
    return Replay(
        [],
        [],
        [],
        extrapolated(shallow.occurrences, deeper.occurrences, periods),
        extrapolated(shallow.host_occurrences, deeper.host_occurrences, periods),
    )


def _differs_by_layer(spec: ModelSpec, levers: Levers) -> bool:
    """Whether some lever or spec treats layers differently, so that depth cannot be extrapolated."""
    single = levers.checkpoint_budget_bytes is not None or levers.checkpoint_host_bytes or levers.offload_keep_bytes
    return bool(single or levers.num_checkpoints) or (spec.experts is not None and bool(spec.experts.dense_layers))


def _of_depth(workload: Workload, layers: int) -> Workload:
    windowed = tuple(layer for layer in workload.spec.window_layers if layer < layers)
    return replace(workload, spec=replace(workload.spec, layers=layers, window_layers=windowed))


def trace_training_step(
    workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT, stage: int = 0
) -> Trace:
    """The trace of one training step on the first rank of pipeline stage `stage`."""

    def make(mesh: DeviceMesh | None, tracer: Tracer) -> Step:
        program = build(workload, layout, levers, CPU, _gpu_kernels(workload), mesh, tracer)
        claim_tensors(tracer, program.decoder, program.optimizer, period=max(1, levers.checkpoint_every))
        return program.step_in_flow

    carries_over = offloads_states(levers) and not has_buckets(layout)  # DDP's gradients stay in its buckets
    carries_over = carries_over or layout.has_two_versions
    return trace_step(make, layout, overheads, carries_over=carries_over, stage=stage)


def _gpu_kernels(workload: Workload) -> Implementations:
    """The implementations that the decoder would choose on a GPU (the rule in kernels/attention/attention.py)."""
    spec = workload.spec
    plain = spec.attention_softcap is None and not spec.window_layers
    fused = workload.precision != "fp32" or spec.heads == spec.kv_heads
    return GPU_KERNELS if plain and fused else replace(GPU_KERNELS, attention="triton")


def trace_step(
    make: MakeStep,
    layout: Layout,
    overheads: Overheads = DEFAULT,
    *,
    warm_up: bool = False,
    carries_over: bool = False,
    stage: int = 0,
) -> Trace:
    """The trace from building the model to the end of one step, on the first rank of a stage.

    `warm_up` runs a step before, for optimizers that allocate their states in the first one. `carries_over` runs two,
    where a step leaves tensors that the next one frees.
    """
    with ExitStack() as stack:
        mesh = None
        if layout.ranks > 1:
            stack.enter_context(fake_world(layout.ranks, stage * (layout.ranks // layout.pipeline)))
            mesh = make_mesh(layout, "cpu")
        tracer = stack.enter_context(simulated())
        with first_chunk_only():
            step = make(mesh, tracer)
        tracer.product_workspace_bytes = overheads.workspace_bytes // 2
        if warm_up or carries_over:
            step(lambda phase: tracer.begin("first step"))
        if carries_over:
            tracer.begin_step()
            step(tracer.begin)
        tracer.begin_step()
        step(tracer.begin)
    return tracer.trace


def build(
    workload: Workload,
    layout: Layout,
    levers: Levers,
    device: torch.device,
    impl: Implementations,
    mesh: DeviceMesh | None = None,
    tracer: Tracer | None = None,
    fill: Fill = lambda decoder: None,
) -> Program:
    """A training step on random tokens, on a real device or on fake tensors."""
    decoder = _unfilled(workload, layout, levers, device, impl, tracer)
    if workload.adapted is not None:
        with nullcontext() if tracer is None else tracer.pause():  # training loads it in its held format
            _adapt(decoder, workload, device, impl)
    if tracer is not None:
        if layout.zero or offloads_states(levers):
            with tracer.pause():  # in training this model is on the meta device, or on the host
                if mesh is not None and layout.pipeline > 1:
                    take_stages(decoder, mesh, layout, workload.sequence_length)
                cut(decoder, mesh, layout, levers)
        tracer.begin("init")
    module, optimizer = assemble(
        decoder,
        mesh,
        layout,
        levers,
        workload.precision,
        Optimizer(),
        device,
        fill,
        length=workload.sequence_length,
        quantize=NOT_QUANTIZED if workload.rounding is None else workload.rounding.settings,
    )
    scale = LossScale.for_precision(workload.precision)
    graph = step_graph(module, optimizer, device, workload, layout, levers)
    return Program(module, decoder, optimizer, _batches(workload, layout), device, scale, Ranks.of(mesh), graph)


def _adapt(decoder: Decoder, workload: Workload, device: torch.device, impl: Implementations) -> None:
    """Freeze a decoder, quantize it where the workload's base model is, and attach adapters."""
    adapted = workload.adapted
    assert adapted is not None
    if adapted.base.scheme is not None:
        hold_in_codes(decoder, adapted.base.scheme, device, impl.glu)
    dtype = torch.float32 if workload.has_masters else COMPUTE_DTYPES[workload.precision]
    attach(decoder, adapted.settings, dtype)


def _unfilled(
    workload: Workload,
    layout: Layout,
    levers: Levers,
    device: torch.device,
    impl: Implementations,
    tracer: Tracer | None,
) -> Decoder:
    """A decoder built in its final dtype, as fake tensors cannot be converted with `.to(dtype)`.

    A decoder to be sharded is built on the meta device; with fake tensors, while the tracer is paused. One to be
    offloaded is built on the host.
    """
    faking, offloaded = isinstance(torch.empty(0), FakeTensor), offloads_states(levers)
    has_masters = workload.has_masters and workload.adapted is None  # a frozen model has none
    shared = layout.zero > 0 or layout.tensor * layout.pipeline > 1
    if offloaded and not faking and not shared:
        dtype = torch.float32 if has_masters else COMPUTE_DTYPES[workload.precision]
        return blank_decoder(workload.spec, "cpu", dtype, impl)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if has_masters else COMPUTE_DTYPES[workload.precision])
    try:
        with torch.device("meta" if shared and not faking else device):
            if tracer is not None and (shared or offloaded or workload.adapted is not None):
                with tracer.pause():
                    return Decoder(workload.spec, impl)
            return Decoder(workload.spec, impl)
    finally:
        torch.set_default_dtype(before)


def claim_tensors(tracer: Tracer, model: Decoder, optimizer: MasterAdamW, period: int = 1) -> None:
    """Tell the tracer which tensors are weights, masters, states and gradients, and where the loss begins.

    Backward is divided into sections of `period` layers.
    """
    tracer.name_modules(model)
    tracer.claim((*model.parameters(), *model.buffers()), "weights")
    if optimizer.buffered is not None:
        tracer.claim(optimizer.buffered.model.versions.older, "weights")
    tracer.claim_gradients(model.parameters())
    for bucket in optimizer.buckets:
        if optimizer.has_masters:
            tracer.claim(bucket.masters, "master weights")
        for index in range(len(bucket.masters)):
            tracer.claim(bucket.updater.states(index).values(), "optimizer states")
    if model.norm is not None:  # only the last stage of a pipeline has one
        tracer.loss_follows(model.norm)
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        if index % period == period - 1 or index == last:
            tracer.cut_backward(layer)


def _batches(workload: Workload, layout: Layout) -> list[Batch]:
    """One micro-batch, or two with gradient accumulation: more would repeat the second.

    In a pipeline: all micro-batches under gpipe, two per pipeline rank under other schedules.
    """
    shape = (layout.micro_batch, workload.sequence_length)
    most = {1: 2}.get(layout.pipeline, 2 * layout.pipeline)
    passes = workload.global_batch // (layout.micro_batch * layout.data)
    passes = passes if layout.pipeline > 1 and layout.schedule == "gpipe" else min(most, passes)
    tokens = torch.randint(workload.spec.vocab_size, shape)
    return [{"tokens": tokens, "labels": tokens}] * max(1, passes)
