"""The norms of Hugging Face models, through our kernels.

Llama-style RMSNorm multiplies by its weight after rounding to the input's dtype; the kernel rounds once, at the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tightfit.hf.replacement import Method, Replacement
from tightfit.kernels.norm.layer_norm import layer_norm
from tightfit.kernels.norm.rms_norm import rms_norm
from tightfit.kernels.triton_support import Impl


@dataclass(frozen=True)
class RmsNormHandler:
    """A module with a `weight`, of which `weight + offset` is used, and its ε in the attribute `eps`."""

    eps: str = "variance_epsilon"
    offset: float = 0.0
    part: Literal["norm"] = "norm"

    def replacements(self, module: nn.Module, impl: Impl) -> Iterator[Replacement]:
        yield Replacement(module, "forward", _rms_norm(self.eps, self.offset, impl))


@dataclass(frozen=True)
class LayerNormHandler:
    """torch's LayerNorm over the last dimension, with weight and bias."""

    part: Literal["norm"] = "norm"

    def replacements(self, module: nn.Module, impl: Impl) -> Iterator[Replacement]:
        assert isinstance(module, nn.LayerNorm)
        if len(module.normalized_shape) == 1 and module.elementwise_affine and module.bias is not None:
            yield Replacement(module, "forward", _layer_norm(impl))


@cache
def _rms_norm(eps: str, offset: float, impl: Impl) -> Method:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        normed = rms_norm(hidden_states, weight, getattr(self, eps), offset=offset, impl=impl)
        if offset or weight.dtype == hidden_states.dtype:
            return normed
        return normed.to(torch.promote_types(weight.dtype, hidden_states.dtype))  # as `weight * x` would be

    return forward


@cache
def _layer_norm(impl: Impl) -> Method:
    def forward(self: nn.LayerNorm, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps, impl=impl)

    return forward
