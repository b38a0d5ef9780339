"""Quantized layers on a CPU: layers that torch has a packed product for are prepared for it, others dequantized once.

Dequantizing a layer whenever it is used takes ten times as long as multiplying by it. So where a quarter of free memory
holds them, layers that are not 4-bit integers become plain ones: the same numbers, in float32.
"""

import torch
from torch import nn

from tightfit.models.decoder import Decoder
from tightfit.models.layers.linear_plus_adapter import LinearPlusAdapter, base_of
from tightfit.models.quantized.linear import QuantizedLinear

FEWEST = 2**20
"""Elements in all such layers from which on dequantizing them once is worth it."""


def pack_for_cpu(model: Decoder) -> None:
    """Prepare 4-bit layers to multiply few tokens by their packed codes: of layers with one input, which are joined,
    all or none."""
    for parent in model.modules():
        if isinstance(parent, LinearPlusAdapter):  # its base counts among its parent's children
            continue
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
