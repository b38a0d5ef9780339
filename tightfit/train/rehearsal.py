"""Rehearsal: the real training step on fake tensors, traced. What it would allocate is known before anything is.

The decoder, the loss, the optimizer and the wrappers are those that train; only the tensors have no bytes and the
other ranks are not there. See memory/simulation.py for how, and for the limits. The same step can be built on a real
device, which is how predictions are compared with what happens.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.memory.ledger import Ledger
from tightfit.memory.simulation import fake_world, simulated
from tightfit.memory.trace import Trace, ledger_of
from tightfit.memory.tracing import Tracer
from tightfit.models.decoder import Decoder, Implementations
from tightfit.train.optimizer import MOMENTS, MasterAdamW
from tightfit.train.precision import COMPUTE_DTYPES, LossScale
from tightfit.train.step import Batch, OnPhase, train_step

GPU_KERNELS = Implementations(norm="triton", rope="triton", glu="triton", linear_cross_entropy="triton")
CPU = torch.device("cpu")
Step = Callable[[OnPhase], object]
MakeStep = Callable[[Tracer | None], Step]


def rehearse(workload: Workload, layout: Layout, levers: Levers) -> Ledger:
    """The ledger of a training step that is never run, for rank 0 of `layout`."""
    trace = rehearsed(lambda tracer: make_step(workload, layout, levers, CPU, GPU_KERNELS, tracer), layout.ranks)
    return ledger_of(trace.replay().moments.values(), "simulation")


def rehearsed(make: MakeStep, ranks: int = 1) -> Trace:
    """Everything allocated and freed from building the model to the end of one step, on rank 0 of `ranks`."""
    with ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(fake_world(ranks))
        tracer = stack.enter_context(simulated())
        step = make(tracer)
        tracer.begin_step()
        step(tracer.begin)
    return tracer.trace


def make_step(
    workload: Workload,
    layout: Layout,
    levers: Levers,
    device: torch.device,
    impl: Implementations,
    tracer: Tracer | None = None,
) -> Step:
    """A training step on tokens of no meaning; the tracer, if there is one, is told what is what."""
    model, optimizer = _built(workload, layout, levers, device, impl, tracer)
    batches = _batches(workload, layout)
    scale = LossScale.for_precision(workload.precision)
    if tracer is not None:
        introduce(tracer, model, optimizer)
    return partial(train_step, model, optimizer, batches, device, 1e-5, scale)


def _built(
    workload: Workload,
    layout: Layout,
    levers: Levers,
    device: torch.device,
    impl: Implementations,
    tracer: Tracer | None,
) -> tuple[Decoder, MasterAdamW]:
    dtype = COMPUTE_DTYPES[workload.precision]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if workload.has_masters else dtype)
    try:
        with torch.device(device):
            model = Decoder(workload.spec, impl)
    finally:
        torch.set_default_dtype(before)
    if tracer is not None:
        tracer.begin("init")
    optimizer = MasterAdamW(model, Optimizer(), dtype if workload.has_masters else None)
    checkpoint_layers(model, levers.checkpoint_every)
    return model, optimizer


def introduce(tracer: Tracer, model: Decoder, optimizer: MasterAdamW) -> None:
    """Tell the tracer which tensors are weights, masters, states and gradients, and where the loss begins."""
    tracer.name_modules(model)
    tracer.claim(model.parameters(), "weights")
    tracer.claim_gradients(model.parameters())
    for bucket in optimizer.buckets:
        if optimizer.has_masters:
            tracer.claim(bucket.masters, "master weights")
        for master in bucket.masters:
            tracer.claim((bucket.adamw.state[master][moment] for moment in MOMENTS), "optimizer states")
    tracer.loss_follows(model.norm)


def _batches(workload: Workload, layout: Layout) -> list[Batch]:
    """One micro-batch, or two where gradients are accumulated: more would repeat the second."""
    shape = (layout.micro_batch, workload.sequence_length)
    passes = min(2, workload.global_batch // (layout.micro_batch * layout.data))
    made = torch.randint(workload.spec.vocab_size, shape)
    return [{"tokens": made, "labels": made}] * max(1, passes)
