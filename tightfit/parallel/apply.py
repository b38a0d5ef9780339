"""Applies splits and levers to a decoder, always in the same order.

`cut`: tensor, expert, context parallelism; `apply`: loss, fp8, tiling, checkpointing, then data or pipeline
parallelism. Tensor parallelism comes first: it cuts weights on the meta device and puts collectives around attention
and MLP, inside everything else; expert parallelism then cuts this tensor rank's experts. Context parallelism changes no
weight: the decoder gets this rank's tokens of every row, and layers another attention. Tiling and checkpointing replace
a layer's forward, and FSDP2 or DDP hook around that, so that recomputation uses the weights all-gathered for backward.
Sharded weights are filled afterwards (each rank its shards); a replicated model must have its values and dtype before.
`train/assembly.py` does both, with the optimizer.
"""

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.collectives.shards import splits_of
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refuse_untrainable
from tightfit.jobs.rules.rule import Run
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.levers.fp8 import use_fp8
from tightfit.levers.loss import choose_loss
from tightfit.levers.policy.offload import offloads_weights
from tightfit.levers.tiling import tile_layers
from tightfit.models.decoder import Decoder
from tightfit.parallel.context import context_parallel
from tightfit.parallel.data import replicate, shard
from tightfit.parallel.expert import expert_sharding, split_experts
from tightfit.parallel.mesh import sharding_axes
from tightfit.parallel.pipeline import pipelined
from tightfit.parallel.pipeline_2bw import two_version_pipeline
from tightfit.parallel.tensor import tensor_parallel
from tightfit.parallel.tensor_mesh import mesh_parallel


def cut(model: Decoder, mesh: DeviceMesh | None, layout: Layout, levers: Levers) -> None:
    """Cut weights, before they have values, to this tensor and expert rank's shards, and rows to this context rank's
    tokens. To be called once, before `apply`."""
    refuse_untrainable(Run(layout=layout, levers=levers, spec=model.spec))
    if mesh is not None and layout.tensor_mesh != "1d" and not splits_of(model):
        mesh_parallel(model, mesh, layout)
    if mesh is not None and layout.tensor > 1 and not splits_of(model):
        tensor_parallel(model, mesh, sequence_parallel=layout.sequence_parallel)
    if mesh is not None and layout.expert > 1 and expert_sharding(model) is None:
        split_experts(model, mesh)
    if mesh is not None:
        context_parallel(model, mesh, layout)


def apply(
    model: Decoder,
    mesh: DeviceMesh | None,
    layout: Layout,
    levers: Levers,
    precision: PrecisionName,
    inside_checkpoints: Callable[[Decoder], None] | None = None,
) -> nn.Module:
    """The module to call for forward and backward: the decoder (FSDP2 shards it in place), DDP or a pipeline around it.

    `inside_checkpoints` wraps the layers' forward before checkpointing does, so that recomputation runs it again.
    """
    choose_loss(model, levers)
    use_fp8(model, levers.matmul, keep_codes=layout.zero == 0 and not offloads_weights(levers))
    tile_layers(model, levers)
    if inside_checkpoints is not None:
        inside_checkpoints(model)
    checkpoint_layers(model, levers, layout)
    if mesh is not None and layout.pipeline > 1:
        make = two_version_pipeline if layout.has_two_versions else pipelined
        return make(model, mesh, layout, precision)
    if mesh is None or layout.gradient_ranks == 1:
        return model
    if layout.zero == 0:
        return replicate(model, sharding_axes(mesh))
    return shard(model, sharding_axes(mesh), layout.zero, precision)
