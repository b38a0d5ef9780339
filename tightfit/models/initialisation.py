"""Random weights to start from.

Every matrix is normal(0, 1/√fan-in), which keeps activations at size one whatever the width; at 2 500 it is GPT-2's
0.02. (At width 128, 600 steps of 256 tokens reached a training loss of 5.02 this way, with embeddings at 0.05, and 5.48
from 0.02.) The two projections of a layer that write into the residual stream are shrunk by √(2 · layers) (GPT-2),
norms are the identity, biases zero.
"""

import torch
from torch import Tensor

from tightfit.collectives.shards import copy_whole, described, is_shard, local, splits_of
from tightfit.models.blank import whole_parameters
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec

INTO_RESIDUAL = ("attention.o.weight", "down.weight", "experts.down")


@torch.no_grad()
def init_weights(model: Decoder, gain: float = 1.0, device: torch.device | None = None) -> None:
    """Draw all weights from torch's global generator; `gain` multiplies every standard deviation.

    The same seed gives the same weights however they are split: a rank draws every parameter whole and keeps its part.
    And wherever they are: `device` is where they are drawn, theirs unless given.
    """
    splits = splits_of(model)
    here = device or next(model.parameters()).device
    for name, held in whole_parameters(model):
        parameter = described(held, splits.get(name))
        there = device or (here if held.is_meta else local(parameter).device)
        if is_shard(parameter) or parameter.device != there:
            whole = torch.empty(parameter.shape, device=there)
            _draw(name, whole, model.spec, gain)
            copy_whole(parameter, whole)
        else:
            _draw(name, parameter, model.spec, gain)


def _draw(name: str, parameter: Tensor, spec: ModelSpec, gain: float) -> None:
    if "norm" in name:
        parameter.fill_(0.0 if name.endswith("bias") or spec.norm == "rms_plus_one" else 1.0)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        shrink = (2 * spec.layers) ** 0.5 if name.endswith(INTO_RESIDUAL) else 1.0
        parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5 / shrink)
