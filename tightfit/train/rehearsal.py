"""Rehearsal: the real training step on fake tensors, traced. What it would allocate is known before anything is.

The decoder, the loss, the optimizer and the wrappers are those that train; only the tensors have no bytes and the
other ranks are not there. See memory/simulation.py for how, and for the limits.
"""

from contextlib import ExitStack

import torch

from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.memory.ledger import Ledger
from tightfit.memory.simulation import dtype_of_construction, fake_world, simulated
from tightfit.memory.trace import Trace, ledger_of
from tightfit.memory.tracing import Tracer
from tightfit.models.decoder import Decoder, Implementations
from tightfit.train.optimizer import MOMENTS, MasterAdamW
from tightfit.train.precision import COMPUTE_DTYPES, LossScale
from tightfit.train.step import Batch, train_step

GPU_KERNELS = Implementations(norm="triton", rope="triton", glu="triton", linear_cross_entropy="triton")
CPU = torch.device("cpu")


def rehearse(workload: Workload, layout: Layout, levers: Levers) -> Ledger:
    """The ledger of a training step that is never run."""
    return ledger_of(rehearsed_trace(workload, layout, levers).replay(), "simulation")


def rehearsed_trace(workload: Workload, layout: Layout, levers: Levers) -> Trace:
    """Everything allocated and freed from building the model to the end of one step, on rank 0 of `layout`."""
    with ExitStack() as stack:
        if layout.ranks > 1:
            stack.enter_context(fake_world(layout.ranks))
        tracer = stack.enter_context(simulated())
        model, optimizer = _built(workload, layout, levers, tracer)
        tracer.name_modules(model)
        tracer.claim_gradients(model.parameters())
        model.norm.register_forward_hook(lambda *_: tracer.begin("loss") if tracer.phase == "forward" else None)
        batches = [_batch(workload, layout, tracer)] * (
            1 if workload.global_batch <= layout.micro_batch * layout.data else 2
        )
        tracer.begin_step()
        scale = LossScale.for_precision(workload.precision)
        train_step(model, optimizer, batches, CPU, 1e-4, scale, tracer.begin)
    return tracer.trace


def _built(workload: Workload, layout: Layout, levers: Levers, tracer: Tracer) -> tuple[Decoder, MasterAdamW]:
    dtype = COMPUTE_DTYPES[workload.precision]
    with dtype_of_construction(torch.float32 if workload.has_masters else dtype):
        model = Decoder(workload.spec, GPU_KERNELS)
    tracer.begin("init")
    optimizer = MasterAdamW(model, Optimizer(), dtype if workload.has_masters else None)
    checkpoint_layers(model, levers.checkpoint_every)
    tracer.claim(model.parameters(), "weights")
    for bucket in optimizer.buckets:
        if optimizer.has_masters:
            tracer.claim(bucket.masters, "master weights")
        for master in bucket.masters:
            tracer.claim((bucket.adamw.state[master][moment] for moment in MOMENTS), "optimizer states")
    return model, optimizer


def _batch(workload: Workload, layout: Layout, tracer: Tracer) -> Batch:
    shape = (layout.micro_batch, workload.sequence_length)
    batch = {name: torch.zeros(shape, dtype=torch.long) for name in ("tokens", "labels")}
    tracer.claim(batch.values(), "inputs")
    return batch
