"""Levers and splits put on a decoder, in one order: tensor split, loss, fp8, tiling, checkpointing, data parallelism.

Tiling and checkpointing change what a layer's forward is, and data parallelism hooks itself around that forward:
recomputing inside the hooks finds the weights that backward has gathered anyway. Tensor parallelism cuts weights before
they have memory (`cut`) and puts its collectives around a layer's blocks, inside all others. Weights of a model that is
sharded are given values afterwards (each rank fills its rows); a model that is replicated must have its values and its
dtype before. `train/assembly.py` does both, with the optimizer.
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
from tightfit.levers.tiling import tile_layers
from tightfit.models.decoder import Decoder
from tightfit.parallel.data import replicate, shard
from tightfit.parallel.mesh import sharding_axes
from tightfit.parallel.pipeline import pipelined
from tightfit.parallel.tensor import tensor_parallel


def cut(model: Decoder, mesh: DeviceMesh | None, layout: Layout, levers: Levers) -> None:
    """Leave of the weights what this rank has of each, before they have values. Comes before `apply`, and once."""
    refuse_untrainable(Run(layout=layout, levers=levers, spec=model.spec))
    if mesh is not None and layout.tensor > 1 and not splits_of(model):
        tensor_parallel(model, mesh, sequence_parallel=layout.sequence_parallel)


def apply(
    model: Decoder, mesh: DeviceMesh | None, layout: Layout, levers: Levers, precision: PrecisionName,
    inside_checkpoints: Callable[[Decoder], None] | None = None,
) -> nn.Module:  # fmt: skip
    """What to call for forward and backward: the decoder itself, sharded in place or not, or DDP around it.

    `inside_checkpoints` changes layers' forward once more before they are checkpointed: what it adds is done again
    when they are computed again.
    """
    choose_loss(model, levers)
    use_fp8(model, levers.matmul, keep_codes=layout.zero == 0 and levers.offload != "weights")
    tile_layers(model, levers.tiles)
    if inside_checkpoints is not None:
        inside_checkpoints(model)
    checkpoint_layers(model, levers, layout)
    if mesh is not None and layout.pipeline > 1:
        return pipelined(model, mesh, layout, precision)
    if mesh is None or mesh["data"].size() == 1:
        return model
    if layout.zero == 0:
        return replicate(model, mesh["data"])
    return shard(model, sharding_axes(mesh), layout.zero, precision)
