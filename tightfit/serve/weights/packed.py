"""PackedWeight: a matrix of integer codes as a serving step multiplies by it, and several of them as one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tightfit.kernels.glu import glu
from tightfit.kernels.packed_rows import by_group
from tightfit.kernels.packed_vector import takes_vector
from tightfit.kernels.packing import has_strips
from tightfit.kernels.quantized_linear import quantized_linear
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import Activation


class PackedWeight(NamedTuple):
    """What kernels/quantized_linear.py takes."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int

    @property
    def inputs(self) -> int:
        """Columns of the matrix."""
        return self.words.shape[1] * 32 // self.bits

    def takes_vector(self, dtype: torch.dtype) -> bool:
        """Whether kernels/packed_vector.py multiplies one token by it."""
        return self.words.is_cuda and takes_vector(self.words, self.bits, self.group, dtype)

    def product(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, *, overlap: bool = False
    ) -> Tensor:
        """x · Wᵀ + b, and `residual` on top."""
        made = quantized_linear(
            x, self.words, self.scale, self.zero, self.bits, self.group, residual=residual, overlap=overlap
        )
        return made if bias is None else made + bias

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation, *, overlap: bool = False) -> Tensor:
        """act(g) · u where the weight is gate over up."""
        if bias is not None:
            gate, up = self.product(x, bias, overlap=overlap).chunk(2, dim=-1)
            return glu(gate, up, activation)
        return quantized_linear(
            x, self.words, self.scale, self.zero, self.bits, self.group, activation=activation, overlap=overlap
        )


def can_pack(linears: Sequence[nn.Module]) -> bool:
    """Whether layers of one input are coded alike, as integers in order: one above the other they are one such."""
    first = linears[0]
    return all(
        isinstance(linear, QuantizedLinear)
        and linear.is_packed
        and (has_strips(linear.out_features) or len(linears) == 1)
        and linear.scheme == first.scheme
        and linear.scale is not None
        and linear.scale.dtype == first.scale.dtype
        and (linear.zero is None) == (first.zero is None)
        and (linear.zero is None or linear.zero.dtype == first.zero.dtype)
        for linear in linears
    )


def join_packed(linears: Sequence[QuantizedLinear]) -> PackedWeight:
    """One above the other; the layers' own buffers become views of it, so that nothing is held twice."""
    first = linears[0]
    joint = {name: _join_buffers(linears, name) for name in ("packed", "scale", "zero")}
    assert joint["packed"] is not None
    assert joint["scale"] is not None
    return PackedWeight(
        words=joint["packed"],
        scale=joint["scale"],
        zero=joint["zero"],
        bits=first.scheme.bits,
        group=max(first.scheme.group, 0),
    )


def _join_buffers(linears: Sequence[QuantizedLinear], name: str) -> Tensor | None:
    parts = [getattr(linear, name) for linear in linears]
    if parts[0] is None:
        return None
    joint = torch.cat(parts) if len(parts) > 1 else parts[0]
    if name != "packed":
        joint = by_group(joint)
    for linear, part in zip(linears, joint.split([len(part) for part in parts]), strict=True):
        setattr(linear, name, part)
    return joint
