"""The linear layers of a decoder layer in the order they are computed, those with one input together.

Methods that move magnitude between activations and weights (AWQ, SmoothQuant) multiply the input channels of a set by s
and divide what makes those channels by s: a norm's weight, or the rows of the layer before. Nothing else changes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tightfit.models.decoder import Layer
from tightfit.models.norm import LayerNorm, RmsNorm
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True)
class LinearSet:
    """Linear layers `names` of one input, and the module `before` whose outputs that input is, channel by channel."""

    names: tuple[str, ...]
    before: str | None


def linear_sets(spec: ModelSpec, layer: int) -> list[LinearSet]:
    """The sets of a layer. Routers stay as they are; stacked experts are not linear layers and come apart."""
    values_are_heads = spec.heads == spec.kv_heads
    made = [
        LinearSet(("attention.q", "attention.k", "attention.v"), "attention_norm"),
        LinearSet(("attention.o",), "attention.v" if values_are_heads else None),
    ]
    if not spec.is_routed(layer):
        inner = ("mlp.gate", "mlp.up") if spec.gated else ("mlp.up",)
        return [*made, LinearSet(inner, "mlp_norm"), LinearSet(("mlp.down",), "mlp.up" if spec.gated else None)]
    if spec.experts is not None and spec.experts.shared_size:
        made += [
            LinearSet(("mlp.shared.gate", "mlp.shared.up"), None),
            LinearSet(("mlp.shared.down",), "mlp.shared.up"),
        ]
    return made


EXPERT_STACKS = ("mlp.experts.gate", "mlp.experts.up", "mlp.experts.down")


def linear(layer: Layer, name: str) -> nn.Linear:
    """The linear layer `name`."""
    found = layer.get_submodule(name)
    assert isinstance(found, nn.Linear), f"{name} is quantized already"
    return found


@torch.no_grad()
def move_scale(layer: Layer, group: LinearSet, scale: Tensor) -> None:
    """Multiply input channels of the set by `scale` and divide what makes them by it."""
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
