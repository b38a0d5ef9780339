"""Frozen linear layers with low-rank adapters (LoRA), plain or compressed.

    y = W x + s · B (A x)        u = A x
    dx = Wᵀ dy + s · Aᵀ Bᵀ dy        dB = s · dy uᵀ        dA = s · (Bᵀ dy) xᵀ

One autograd function for plain and compressed W: it saves x (which q, k and v, or gate and up, share) and u, and no
copy of W. A compressed W is dequantized for its product and again in backward, one matrix at a time, and never has a
gradient. The adapter's product is added in place to W x. Layers without an adapter save nothing: backward does not need
their input. Dropout (on the input of A alone, as in PEFT) saves a mask of one byte an element.

Applied from outside by replacing `forward`; A and B are parameters of the layer, `lora_a` and `lora_b`, beside a weight
that needs no gradient. So tiles, checkpoints, DDP and the optimizer treat them like any parameter.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tightfit.errors import UserError
from tightfit.jobs.adapter import AdapterTraining
from tightfit.kernels.recomputation import is_result_wanted, placeholder
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.linear import QuantizedLinear

A, B = "lora_a", "lora_b"
ADAPTED = "adapted"
"""Attribute of a decoder that describes its adapters to the memory formulas."""
FrozenLayer = nn.Linear | QuantizedLinear
Matrices = dict[str, tuple[Tensor, Tensor]]
"""A and B by the name of their layer."""


@dataclass(frozen=True)
class AdaptedLinear:
    """The forward of a frozen layer, plus its adapter's product if it has one."""

    layer: FrozenLayer
    scale: float
    dropout: float
    ends_layer: bool
    """Whether this is the last product of a decoder layer, which recomputation may skip."""

    def __call__(self, x: Tensor) -> Tensor:
        a, b = (self.layer._parameters.get(name) for name in (A, B))
        drops = a is not None and self.dropout > 0 and torch.is_grad_enabled()
        y: Tensor = _FrozenProduct.apply(x, a, b, self, drops)
        return y

    def product(self, x: Tensor) -> Tensor:
        """W x plus bias, in a new tensor."""
        if self.ends_layer and not is_result_wanted():
            return placeholder(x, self.layer.out_features)
        y: Tensor = cast(Any, type(self.layer)).forward(self.layer, x)
        return y

    def weight(self, dtype: torch.dtype) -> Tensor:
        """W, dequantized to `dtype` if it is compressed."""
        return self.layer.weight if isinstance(self.layer, nn.Linear) else self.layer.expand(dtype)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor | None, b: Tensor | None, linear: AdaptedLinear, drops: bool) -> Tensor:
        ctx.linear = linear
        y = linear.product(x)
        if a is None or b is None:
            return y
        kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - linear.dropout) if drops else None
        low = F.linear(_dropped(x, kept, linear.dropout), a)
        ctx.save_for_backward(x, a, b, low, kept)
        if y.stride()[-1]:  # not a placeholder
            _rows(y).addmm_(_rows(low), b.T, alpha=linear.scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        linear, rows, saved = ctx.linear, _rows(dy), ctx.saved_tensors
        dx = rows @ linear.weight(dy.dtype) if ctx.needs_input_grad[0] else None
        if not saved:
            return None if dx is None else dx.view(*dy.shape[:-1], -1), None, None, None, None
        x, a, b, low, kept = saved
        d_low = (rows @ b).mul_(linear.scale)
        d_a = d_low.T @ _rows(_dropped(x, kept, linear.dropout))
        d_b = (rows.T @ _rows(low)).mul_(linear.scale)
        if dx is not None and kept is None:
            dx.addmm_(d_low, a)
        elif dx is not None:
            dx += _dropped(d_low @ a, _rows(kept), linear.dropout)
        return None if dx is None else dx.view_as(x), d_a, d_b, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _dropped(x: Tensor, kept: Tensor | None, dropout: float) -> Tensor:
    """Dropout: x · kept / (1 − dropout); x itself without a mask."""
    return x if kept is None else (x * kept).mul_(1 / (1 - dropout))


def attach(model: Decoder, settings: AdapterTraining, dtype: torch.dtype) -> None:
    """Freeze `model` and give its layers uninitialised adapters of `dtype`."""
    assert settings.rank is not None
    if not isinstance(model.head, nn.Linear):
        raise UserError("adapter.rank needs the output projection as it is, but the model's is compressed; leave it so")
    model.requires_grad_(False)
    projections = settings.projections(model.spec)
    vars(model)[ADAPTED] = settings.adapted(spec=model.spec)
    for name, layer in frozen_linears(model):
        if name.rpartition(".")[2] in projections:
            like = next(model.parameters())
            for own, shape in ((A, (settings.rank, layer.in_features)), (B, (layer.out_features, settings.rank))):
                layer.register_parameter(own, nn.Parameter(torch.empty(shape, dtype=dtype, device=like.device)))
        ends_layer = name.endswith("mlp.down")
        cast(Any, layer).forward = AdaptedLinear(layer, settings.scale, settings.dropout, ends_layer)


def frozen_linears(model: Decoder) -> Iterator[tuple[str, FrozenLayer]]:
    """The projections of all layers, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, nn.Linear | QuantizedLinear):
            yield name, module


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Initialise A like torch's linear layers, B with zero: new adapters change nothing. The same on every device."""
    generator = torch.Generator().manual_seed(seed)
    for a, b in adapters(model).values():
        bound = 1 / math.sqrt(a.shape[1])  # kaiming_uniform_ with a = √5
        a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
        b.zero_()


def adapters(model: Decoder) -> Matrices:
    """A and B of every adapted layer."""
    found = ((name, layer._parameters.get(A), layer._parameters.get(B)) for name, layer in frozen_linears(model))
    return {name: (a, b) for name, a, b in found if a is not None and b is not None}


@torch.no_grad()
def restore(model: Decoder, saved: Mapping[str, tuple[Tensor, Tensor]], source: str) -> None:
    """Copy saved matrices into the adapters of `model`; anything missing, left over or of another shape is an error."""
    own = adapters(model)
    if odd := sorted(own.keys() ^ saved.keys()):
        raise UserError(f"{source} does not fit this run: an adapter of {odd[0]} is on one side only")
    for name, pair in own.items():
        for matrix, stored in zip(pair, saved[name], strict=True):
            if matrix.shape != stored.shape:
                raise UserError(
                    f"{source}: an adapter of {name} is {list(stored.shape)}, this run's is {list(matrix.shape)}"
                )
            matrix.copy_(stored)
