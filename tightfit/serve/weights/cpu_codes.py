"""Quantized layers on a CPU: layers that torch has a packed product for are prepared for it, others dequantized once.

Dequantizing a layer whenever it is used takes ten times as long as multiplying by it. So where a quarter of free memory
holds them, layers that are not 4-bit integers, and experts of any kind, become plain ones: the same numbers in float32.
"""

from collections.abc import Iterator

import torch
from torch import nn

from tightfit.models.decoder import Decoder
from tightfit.models.layers.linear_plus_adapter import LinearPlusAdapter, base_of
from tightfit.models.quantized.experts import QuantizedStack
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.plan.serving.cpu_weights import FEWEST_EXPANDED

Coded = QuantizedLinear | QuantizedStack


def pack_for_cpu(model: Decoder) -> None:
    """Prepare 4-bit layers to multiply few tokens by their packed codes: of layers with one input, which are joined,
    all or none."""
    for parent in _holders(model):
        own = [layer for child in parent.children() if isinstance(layer := base_of(child), QuantizedLinear)]
        for inputs in {layer.in_features for layer in own}:
            alike = [layer for layer in own if layer.in_features == inputs]
            if all(layer.can_be_packed_for_cpu for layer in alike):
                for layer in alike:
                    layer.pack_for_cpu()


def expand_for_cpu(model: Decoder, room_bytes: int) -> bool:
    """Replace layers that are dequantized at every use by plain ones, if all fit `room_bytes`; whether it did."""
    dtype = model.embed.weight.dtype
    found = [
        (parent, name, part)
        for parent in _holders(model)
        for name, part in parent.named_children()
        if isinstance(part, Coded) and all(map(_is_expanded, _layers(part)))
    ]
    elements = sum(each.out_features * each.in_features for _, _, part in found for each in _layers(part))
    if elements < FEWEST_EXPANDED or elements * dtype.itemsize > room_bytes:
        return False
    for parent, name, part in found:
        setattr(parent, name, _plain(part, dtype))
    return True


def _holders(model: Decoder) -> Iterator[nn.Module]:
    """Modules with layers to replace. The base of an adapter's layer counts among the children of what holds that
    layer, and experts are replaced all at once."""
    inside = {id(part) for stack in model.modules() if isinstance(stack, QuantizedStack) for part in stack.modules()}
    for module in model.modules():
        if id(module) not in inside and not isinstance(module, LinearPlusAdapter):
            yield module


def _layers(part: Coded) -> list[QuantizedLinear]:
    return [layer for layer in part.modules() if isinstance(layer, QuantizedLinear)]


def _is_expanded(layer: QuantizedLinear) -> bool:
    return layer.packed.device.type == "cpu" and layer.cpu_scales is None and layer.scheme.activations is None


@torch.no_grad()
def _plain(part: Coded, dtype: torch.dtype) -> nn.Module | nn.Parameter:
    """The same numbers in `dtype`: a layer, or the stacked matrices of experts."""
    weight = nn.Parameter(part.dequantize(dtype), requires_grad=False)
    if isinstance(part, QuantizedStack):
        return weight
    linear = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None, device="meta", dtype=dtype)
    linear.weight = weight
    if part.bias is not None:
        linear.bias = part.bias
    return linear
