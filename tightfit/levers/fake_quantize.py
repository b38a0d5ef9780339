"""Fake quantization (quantization-aware training): linear layers compute with quantized weights ŵ, and train w.

    ŵ = S · (clamp(round(w / S) + Z) − Z)        ∂L/∂w = ∂L/∂ŵ where w is in range        (straight-through)
    ∂ŵ/∂S = round(w / S) − w / S in range, else the end of the range                        (LSQ, Esser et al. 2019)

`minmax` scales are those of the current weights, so nothing saturates. Learned scales begin at the range of least
squared error and are kept as logarithms: Adam then changes all of them by the same share of their size. They belong to
training alone: the model's files and names stay as they are, and the optimizer saves them. One bit: S · sign(w), S the
mean |w| (Rastegari et al. 2016) or learned. Scales are rounded to float16 as in files, so the model that is evaluated
is the model that is written.

Applied from outside by replacing `forward`. ŵ exists from forward until the layer's backward is done. Under ZeRO every
rank quantizes the weights it has all-gathered; learned scales are replicated, and their gradients all-reduced.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.jobs.quantize import Quantize
from tightfit.kernels.quantized.rounded_linear import rounded_values
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.ranges import Grid, fit_grid, in_groups
from tightfit.models.quantized.rounding import SMALLEST_SCALE, StoredScales, rounded
from tightfit.models.quantized.scheme import Scheme

SCALE_PREFIX = "quantizer."
"""Prefix of the names of learned scales; no parameter of a model has it."""


def trained_scheme(settings: Quantize) -> Scheme:
    """The scheme in which the trained weights will be written."""
    assert settings.bits is not None
    if settings.bits == 1:
        return Scheme(kind="binary", bits=1, group=settings.group)
    symmetric = settings.scales == "learned" or settings.bits == 8
    return Scheme(bits=settings.bits, group=settings.group, symmetric=symmetric)


class _Round(torch.autograd.Function):
    """ŵ of a matrix, given scales and zero points [outputs, groups]; saves the weight itself, not a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
        ctx.save_for_backward(weight, scale, zero)
        ctx.scheme = scheme
        blocks = in_groups(weight.float(), scheme)
        coded = rounded(blocks, scale[..., None], None if zero is None else zero[..., None], scheme)
        return coded.view(weight.shape).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            return gradient, None, None, None
        weight, scale, zero = ctx.saved_tensors
        scheme, wide = ctx.scheme, scale[..., None]
        blocks, own = in_groups(weight.float(), scheme), in_groups(gradient.float(), scheme)
        code = rounded(blocks, wide, None if zero is None else zero[..., None], scheme) / wide
        if scheme.kind == "binary":
            return gradient, (own * code).sum(-1), None, None
        ratio = blocks / wide
        inside = (ratio >= -scheme.middle) & (ratio <= scheme.levels - 1 - scheme.middle)
        of_scale = (own * (code - ratio * inside)).sum(-1)
        return (own * inside).view(weight.shape).to(gradient.dtype), of_scale, None, None


@dataclass(frozen=True)
class RoundedLinear:
    """A linear layer's forward with fake-quantized weights; `log_scale` where scales are learned."""

    linear: nn.Linear
    scheme: Scheme
    log_scale: nn.Parameter | None
    outputs: str

    def __call__(self, x: Tensor) -> Tensor:
        grid = self.grid()
        weight = _Round.apply(self.linear.weight, grid.scale, grid.zero, self.scheme)
        y = F.linear(x, weight.to(x.dtype), self.linear.bias)
        if self.outputs == "plain":
            return y
        return y + (rounded_values(y, torch.int8) - y).detach()

    def grid(self) -> Grid:
        """The current scales and zero points."""
        if self.log_scale is None:
            return fit_grid(self.linear.weight.detach().float(), self.scheme)
        # LSQ's factor keeps the gradients of scales, each a sum over a group, as large as those of weights
        factor = (self.scheme.group * max(self.scheme.levels // 2 - 1, 1)) ** -0.5
        log_scale = self.log_scale * factor + (self.log_scale * (1 - factor)).detach()
        scale = log_scale.exp().clamp(min=SMALLEST_SCALE)
        stored = scale + (scale.to(torch.float16).float() - scale).detach()
        return Grid(self.scheme, StoredScales(stored, {}), None)

    @torch.no_grad()
    def coded(self) -> CodedWeight:
        """The current weight as codes."""
        return self.grid().code(self.linear.weight.detach().float())


def round_weights(model: Decoder, settings: Quantize) -> dict[str, nn.Parameter]:
    """Make the layers of a decoder, whose weights are filled, compute with ŵ; returns the learned scales by name."""
    if settings.bits is None:
        return {}
    scheme, learned = trained_scheme(settings), dict[str, nn.Parameter]()
    for name, linear in whole_linears(model):
        log_scale = None
        if settings.scales == "learned":
            scale = fit_grid(linear.weight.detach().float(), scheme, "mse").scale
            log_scale = nn.Parameter(scale.clamp(min=SMALLEST_SCALE).log())
            learned[f"{SCALE_PREFIX}{name}"] = log_scale
        cast(Any, linear).forward = RoundedLinear(linear, scheme, log_scale, settings.outputs)
    return learned


def whole_linears(model: Decoder) -> Iterator[tuple[str, nn.Linear]]:
    """Yield every linear layer of attention and MLPs, its weight unsharded: under ZeRO one decoder layer at a time."""
    for index, layer in model.layers._modules.items():
        sharded = cast(Any, layer) if hasattr(layer, "unshard") else None
        if sharded is not None:
            sharded.unshard()
        for own, module in cast(Layer, layer).named_modules():
            if isinstance(module, nn.Linear):
                yield f"layers.{index}.{own}", module
        if sharded is not None:
            sharded.reshard()


def coded_weights(model: Decoder) -> dict[str, CodedWeight]:
    """The codes of every fake-quantized weight, by the weight's name; all ZeRO ranks call this together."""
    found: dict[str, CodedWeight] = {}
    for name, linear in whole_linears(model):
        if isinstance(forward := vars(linear).get("forward"), RoundedLinear):
            found[f"{name}.weight"] = forward.coded()
    return found
