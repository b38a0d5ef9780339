"""Levers and splits put on a decoder, in one order: loss, tiling, checkpointing, data parallelism.

Tiling and checkpointing change what a layer's forward is, and data parallelism hooks itself around that forward:
recomputing inside the hooks finds the weights that backward has gathered anyway. Tensor, context and pipeline splits
will come between the two. Weights of a model that is sharded are given values afterwards (each rank fills its rows); a
model that is replicated must have its values and its dtype before. `train/assembly.py` does both, with the optimizer.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.errors import UserError
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.levers.loss import choose_loss
from tightfit.levers.tiling import tile_layers
from tightfit.models.decoder import Decoder
from tightfit.parallel.data import replicate, shard
from tightfit.plan.runnable import not_yet


def apply(
    model: Decoder, mesh: DeviceMesh | None, layout: Layout, levers: Levers, precision: PrecisionName
) -> nn.Module:
    """What to call for forward and backward: the decoder itself, sharded in place or not, or DDP around it."""
    refuse_what_cannot_run(layout, levers)
    choose_loss(model, levers)
    tile_layers(model, levers.tiles)
    checkpoint_layers(model, levers)
    if mesh is None:
        return model
    if layout.zero == 0:
        return replicate(model, mesh["data"])
    return shard(model, mesh["data"], layout.zero, precision)


def refuse_what_cannot_run(layout: Layout, levers: Levers) -> None:
    """A sentence for what can be planned but not yet trained."""
    if sentence := not_yet(layout, levers):
        raise UserError(sentence)
