"""A decoder with its levers, its split and its optimizer, put together in the order that each way of splitting needs.

Replicas need their values and 16-bit weights first: DDP lays its buckets out for the gradients it will find, and the
float32 masters are what the weights were before. Shards come first themselves, so that no rank ever holds the whole
model in float32: values are then filled in row by row, and the optimizer works on what is there.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.jobs.job import Optimizer, PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refuse_untrainable
from tightfit.jobs.rules.rule import Run
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec
from tightfit.parallel.apply import apply, cut
from tightfit.parallel.data import materialise
from tightfit.parallel.pipeline import take_stages
from tightfit.train.optimizer.adamw import NO_LEVERS, MasterAdamW
from tightfit.train.pipeline_step import counting
from tightfit.train.precision import COMPUTE_DTYPES, keeps_master_weights

Fill = Callable[[Decoder], None]
"""Gives a decoder, or a rank's shards of it, their values."""


def unfilled(
    spec: ModelSpec, layout: Layout, precision: PrecisionName, device: torch.device, levers: Levers = NO_LEVERS
) -> Decoder:
    """A decoder for `assemble` to fill: without memory where it will be sharded, float32 where it is not.

    What will be offloaded is made on the host, where there is room for it.
    """
    if layout.zero == 0 and layout.tensor * layout.pipeline > 1:
        return blank_decoder(spec, "meta", torch.float32)
    if layout.zero == 0:
        return blank_decoder(spec, device if levers.offload == "none" else "cpu", torch.float32)
    return blank_decoder(spec, "meta", torch.float32 if keeps_master_weights(precision) else COMPUTE_DTYPES[precision])


def assemble(
    model: Decoder, mesh: DeviceMesh | None, layout: Layout, levers: Levers, precision: PrecisionName,
    settings: Optimizer, device: torch.device, fill: Fill, seed: int = 0, length: int | None = None,
) -> tuple[nn.Module, MasterAdamW]:  # fmt: skip
    """What to call for forward and backward, and the optimizer of its parameters (which are those of `model`).

    `seed` is that of weights rounded stochastically; a pipeline's stages are cut for rows of `length` tokens.
    """
    refuse_untrainable(Run(layout=layout, levers=levers, precision=precision, spec=model.spec, sequence_length=length))
    dtype, masters = COMPUTE_DTYPES[precision], keeps_master_weights(precision)
    if mesh is not None and layout.pipeline > 1:
        take_stages(model, mesh, layout, length or model.spec.max_positions)
    cut(model, mesh, layout, levers)
    if layout.zero:
        module = apply(model, mesh, layout, levers, precision)
        if next(model.parameters()).is_meta:
            materialise(model, device)
        fill(model)
        return module, counting(MasterAdamW(model, settings, dtype if masters else None, levers, seed), module)
    if next(model.parameters()).is_meta:
        materialise(model, device)
    fill(model)
    if not masters and next(model.parameters()).dtype != dtype:
        model = model.to(dtype)
    optimizer = MasterAdamW(model, settings, dtype if masters else None, levers, seed, device)
    optimizer.gradients_stay = layout.data > 1 and layout.pipeline == 1
    module = apply(model, mesh, layout, levers, precision, optimizer.stream_weights)
    return module, counting(optimizer, module)
