"""Assembles decoder, levers, parallelism and optimizer in the order that DDP and FSDP2 need.

Replicas (`zero: 0`) need values and 16-bit weights first: DDP lays out its buckets for the gradients' dtype, and the
float32 masters are the weights before the cast. FSDP2 shards the model on the meta device first, so that no rank ever
holds all of it in float32; then each rank fills its shards, and the optimizer works on those.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.jobs.job import Optimizer, PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.quantize import NOT_QUANTIZED, Quantize
from tightfit.jobs.rules.refusals import refuse_untrainable
from tightfit.jobs.rules.rule import Run
from tightfit.levers.fake_quantize import round_weights
from tightfit.levers.offload import fill_device
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec
from tightfit.parallel.apply import apply, cut
from tightfit.parallel.data import materialise
from tightfit.parallel.expert import expert_parameters
from tightfit.parallel.pipeline import counted_elsewhere, take_stages
from tightfit.parallel.pipeline_2bw import TwoVersionPipeline
from tightfit.parallel.shard_groups import settle_shards
from tightfit.train.buffered_steps import BufferedSteps
from tightfit.train.optimizer.adamw import NO_LEVERS, MasterAdamW
from tightfit.train.precision import COMPUTE_DTYPES, keeps_master_weights

Fill = Callable[[Decoder], None]
"""Loads or initialises the weights of a decoder, or a rank's shards of them."""


def unfilled(
    spec: ModelSpec, layout: Layout, precision: PrecisionName, device: torch.device, levers: Levers = NO_LEVERS
) -> Decoder:
    """A decoder for `assemble` to fill: on the meta device where it will be sharded, else with float32 weights, which
    are in host memory where states are offloaded."""
    if layout.zero == 0 and layout.tensor * layout.pipeline > 1:
        return blank_decoder(spec, "meta", torch.float32)
    if layout.zero == 0:
        return blank_decoder(spec, fill_device(levers, device), torch.float32)
    return blank_decoder(spec, "meta", torch.float32 if keeps_master_weights(precision) else COMPUTE_DTYPES[precision])


def assemble(
    model: Decoder,
    mesh: DeviceMesh | None,
    layout: Layout,
    levers: Levers,
    precision: PrecisionName,
    settings: Optimizer,
    device: torch.device,
    fill: Fill,
    seed: int = 0,
    length: int | None = None,
    quantize: Quantize = NOT_QUANTIZED,
) -> tuple[nn.Module, MasterAdamW]:
    """The module to call for forward and backward, and the optimizer of its parameters (which are those of `model`).

    `seed` seeds stochastic rounding; pipeline stages are balanced for sequences of `length` tokens. With `quantize`
    layers compute with fake-quantized weights, and the optimizer also updates the learned scales.
    """
    refuse_untrainable(Run(layout=layout, levers=levers, precision=precision, spec=model.spec, sequence_length=length))
    dtype, masters, sharded = COMPUTE_DTYPES[precision], keeps_master_weights(precision), layout.zero > 0
    if mesh is not None and layout.pipeline > 1:
        take_stages(model, mesh, layout, length or model.spec.max_positions)
    cut(model, mesh, layout, levers)
    module: nn.Module = apply(model, mesh, layout, levers, precision) if sharded else model
    if next(model.parameters()).is_meta:
        materialise(model, fill_device(levers, device))
        if sharded:
            settle_shards(module)
    fill(model)
    if not sharded and not masters and next(model.parameters()).dtype != dtype:
        model = model.to(dtype)
    optimizer = MasterAdamW(
        model,
        settings,
        compute_dtype=dtype if masters else None,
        levers=levers,
        seed=seed,
        device=device,
        keep_gradient_memory=not sharded and layout.gradient_ranks > 1 and layout.pipeline == 1,
        pipeline_ranks=layout.pipeline,
        counted_elsewhere=counted_elsewhere(model),
        not_replicated=frozenset(expert_parameters(model)),
        module=module,
        extra_parameters=round_weights(model, quantize),
    )
    if not sharded:
        module = apply(model, mesh, layout, levers, precision, optimizer.stream_weights)
    if isinstance(module, TwoVersionPipeline):
        optimizer.buffered = BufferedSteps(module, optimizer)
    return module, optimizer
