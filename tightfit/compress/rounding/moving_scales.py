"""A layer's linear modules by name, and folding scales of their input channels into the module before them."""

import torch
from torch import Tensor, nn

from tightfit.compress.linear_sets import LinearSet
from tightfit.models.decoder import Layer
from tightfit.models.layers.norm import LayerNorm, RmsNorm


def linear(layer: Layer, name: str) -> nn.Linear:
    """The linear layer `name`."""
    found = layer.get_submodule(name)
    assert isinstance(found, nn.Linear), f"{name} is quantized already"
    return found


@torch.no_grad()
def move_scale(layer: Layer, group: LinearSet, scale: Tensor) -> None:
    """Multiply the set's weights by `scale` per input channel, and divide the outputs of the module before by it."""
    assert group.before is not None
    for name in group.names:
        linear(layer, name).weight.mul_(scale)
    before = layer.get_submodule(group.before)
    if isinstance(before, RmsNorm):
        before.weight.add_(before.offset).div_(scale).sub_(before.offset)
        return
    assert isinstance(before, LayerNorm | nn.Linear)
    before.weight.div_(scale if isinstance(before, LayerNorm) else scale[:, None])
    if before.bias is not None:
        before.bias.div_(scale)
