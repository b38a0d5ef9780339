"""A plain model's linear layers rounded and held packed as it is loaded (QLoRA's base, Dettmers et al. 2023)."""

import torch
from torch import nn

from tightfit.kernels.triton_support import Impl
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme


@torch.no_grad()
def hold_in_codes(model: Decoder, scheme: Scheme, device: str | torch.device, impl: Impl = "auto") -> None:
    """Round the linear layers of a plain model and hold them packed on `device`, one after another."""
    for name, layer in list(model.named_modules()):
        if name.startswith("layers.") and isinstance(layer, nn.Linear):
            scheme.check(layer.out_features, layer.in_features, name)
            weight = layer.weight.to(device).float()
            bias = None if layer.bias is None else layer.bias.detach().to(device)
            holder, _, own = name.rpartition(".")
            coded = fit_grid(weight, scheme).code(weight)
            setattr(model.get_submodule(holder), own, QuantizedLinear(coded, bias, impl))


@torch.no_grad()
def move_plain(model: Decoder, device: str | torch.device, dtype: torch.dtype) -> None:
    """Move parameters, which are not coded, to `device` in `dtype`; scales, which are buffers, keep their dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
