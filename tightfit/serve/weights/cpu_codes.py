"""What a CPU does with layers in codes: those that it has a product for are held for that, others expanded once.

Expanding a layer whenever it is used takes ten times as long as multiplying by it. So where a quarter of free memory
holds them, layers that are not 4-bit integers become plain ones: the same numbers, in float32.
"""

import torch
from torch import nn

from tightfit.models.decoder import Decoder
from tightfit.models.linear_plus_adapter import LinearPlusAdapter, base_of
from tightfit.models.quantized.linear import QuantizedLinear

FEWEST = 2**20
"""Elements of all such layers from which their time counts."""


def hold_for_cpu(model: Decoder) -> None:
    """Have 4-bit layers multiply few tokens by their codes as they are packed, where this CPU can by all of one input:
    others are joined as they are."""
    for parent in model.modules():
        if isinstance(parent, LinearPlusAdapter):  # whose base is its parent's, like the bases beside it
            continue
        own = [layer for child in parent.children() if isinstance(layer := base_of(child), QuantizedLinear)]
        for inputs in {layer.in_features for layer in own}:
            alike = [layer for layer in own if layer.in_features == inputs]
            if all(layer.can_be_held_for_cpu for layer in alike):
                for layer in alike:
                    layer.hold_for_cpu()


def expand_for_cpu(model: Decoder, room_bytes: int) -> bool:
    """Replace layers in codes that are expanded at every use, if all of them fit; whether that was done."""
    dtype = model.embed.weight.dtype
    found = [
        (parent, name, layer)
        for parent in model.modules()
        if not isinstance(parent, LinearPlusAdapter)
        for name, layer in parent.named_children()
        if isinstance(layer, QuantizedLinear) and _is_expanded(layer)
    ]
    elements = sum(layer.out_features * layer.in_features for _, _, layer in found)
    if elements < FEWEST or elements * dtype.itemsize > room_bytes:
        return False
    for parent, name, layer in found:
        setattr(parent, name, _plain(layer, dtype))
    return True


def _is_expanded(layer: QuantizedLinear) -> bool:
    return layer.packed.device.type == "cpu" and layer.cpu_scales is None and layer.scheme.activations is None


@torch.no_grad()
def _plain(layer: QuantizedLinear, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta", dtype=dtype)
    linear.weight = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
    if layer.bias is not None:
        linear.bias = layer.bias
    return linear
